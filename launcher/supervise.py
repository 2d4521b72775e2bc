"""One launch of a run: start everything in order, watch until the trainer ranks are done, then stop everything.

Nothing sleeps: the loop waits for the end of a process, a signal, or the next thing that is due.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from areal_dta.config import Config
from areal_dta.metrics import MetricRecord
from launcher.local import Death, ProcessTable
from launcher.plan import OPTIONAL_ROLES, ProcessSpec
from launcher.progress import Progress
from launcher.rundir import RunDir, RunState, write_json
from launcher.store import MetricsStore

__all__ = ["SECOND_SIGNAL", "LaunchFailed", "StopSignal", "Stopped", "Supervisor"]

TICK_S = 0.25
HEALTH_TIMEOUT_S = 2.0
FAILURE_STOP_S = 10.0  # per wave, so that a dead trainer stops a run well within a minute
STABLE_S = 900.0  # a process that ran this long has its restarts forgiven
SECOND_SIGNAL = "stopped by a second signal, without grace"
BEFORE_ROUTER, ROUTER, WORKERS = ("server", "batcher", "trainer"), ("router",), ("worker", *OPTIONAL_ROLES)


class LaunchFailed(RuntimeError):
    """The launch cannot go on; the message is the cause."""


class Stopped(RuntimeError):
    """A person or another program asked the launch to stop."""


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP as a flag and a readable descriptor; a second signal raises KeyboardInterrupt.

    After `disarm` further signals do nothing: for the last writes, which are short.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._armed = True
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignal]:
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        os.write(self._write_fd, b"!")

    def disarm(self) -> None:
        self._armed = False

    def check(self) -> None:
        if self.name is not None:
            raise Stopped(f"stopped by {self.name}")


class Supervisor:
    """Runs the processes of one launch to their end."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        state: RunState,
        table: ProcessTable,
        store: MetricsStore,
        progress: Progress,
        stop_signal: StopSignal,
        before_stop: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self.state = state
        self._table = table
        self._store = store
        self._progress = progress
        self._signal = stop_signal
        self._before_stop = before_stop  # while the services still answer
        self._wake_fd: int | None = stop_signal.fd

    def run_to_end(self, specs: list[ProcessSpec]) -> None:
        """Start, watch, stop; raises LaunchFailed with the cause, or Stopped. Nothing is left running in any case."""
        grace_s = self._config.runtime.stop_timeout_s
        try:
            self._start_all(specs)
            self._watch(trainers=[s.name for s in specs if s.role == "trainer"])
        except LaunchFailed:
            grace_s = min(grace_s, FAILURE_STOP_S)
            raise
        except KeyboardInterrupt:
            grace_s = 0.0
            raise Stopped(SECOND_SIGNAL) from None
        finally:
            try:
                if self._before_stop is not None and grace_s > 0:
                    self._before_stop()
            except KeyboardInterrupt:
                grace_s = 0.0
            finally:
                self._stop_all(grace_s)

    def _start_all(self, specs: list[ProcessSpec]) -> None:
        for roles, waits_for in ((BEFORE_ROUTER, ("server",)), (ROUTER, ("router",)), (WORKERS, ())):
            for spec in specs:
                if spec.role in roles:
                    self._start(spec)
            for spec in specs:
                if spec.role in waits_for:
                    self._wait_healthy(spec)

    def _start(self, spec: ProcessSpec) -> None:
        try:
            process = self._table.start(spec)
        except OSError as error:
            raise LaunchFailed(f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}") from error
        self._event("process/start", process=spec.name, pid=process.popen.pid)
        self._save_processes()

    def _wait_healthy(self, spec: ProcessSpec) -> None:
        """Until the process answers its health URL; LaunchFailed after ``runtime.start_timeout_s``."""
        self._phase(f"waiting for {spec.name}")
        limit_s = self._config.runtime.start_timeout_s
        deadline = time.monotonic() + limit_s
        while not is_healthy(spec.health or "", self._config.runtime.api_key):
            self._tick()
            if time.monotonic() > deadline:
                raise LaunchFailed(
                    f"{spec.name} did not answer {spec.health} within runtime.start_timeout_s={limit_s:g} s; "
                    f"see {self._run.log_file(spec.name)}"
                )

    def _watch(self, trainers: list[str]) -> None:
        """Until every trainer rank has exited with code 0."""
        self._phase("waiting for the trainer")
        step_limit_s = self._config.runtime.step_timeout_s
        while any(self._table.processes[name].status == "running" for name in trainers):
            self._tick()
            quiet_s = time.monotonic() - self._progress.last_activity
            if quiet_s > step_limit_s:
                raise LaunchFailed(
                    f"no progress for runtime.step_timeout_s={step_limit_s:g} s while {self._progress.phase}; "
                    f"the last record was {self._progress.last_record}"
                )
        self._tick()

    def _tick(self) -> None:
        """Wait a moment for something to happen and deal with it."""
        deaths = self._table.wait(TICK_S, self._wake_fd)
        self._signal.check()
        if self._store.failure is not None:
            raise LaunchFailed(self._store.failure)
        for death in deaths:  # all of them, before the first raises
            self._event("process/exit", death.how, process=death.name, code=death.returncode)
        for death in deaths:
            self._on_death(death)
        for process in self._table.restart_due():
            self._event("process/restart", process=process.spec.name, pid=process.popen.pid, restarts=process.restarts)
            self._save_processes()
        self._progress.take(self._store.drain())
        if self._progress.step != self.state.step:
            self.state = self._run.write_state(replace(self.state, step=self._progress.step))

    def _on_death(self, death: Death) -> None:
        process = self._table.processes[death.name]
        try:
            if not process.spec.restartable:
                if death.returncode != 0:
                    raise LaunchFailed(str(death))
                return
            if process.spec.role == "worker" and death.returncode == 0:
                return  # it was told that training is over
            limit = self._config.runtime.restart_limit
            if death.uptime_s > STABLE_S:
                process.restarts = 0
            if process.restarts >= limit and process.spec.role in OPTIONAL_ROLES:
                self._event("process/given_up", death.how, process=death.name)
                self._progress.say(f"{death}; it was restarted {limit} times already, the run goes on without it")
                return
            if process.restarts >= limit:
                raise LaunchFailed(f"{death}; it was restarted runtime.restart_limit={limit} times already")
            delay_s = self._table.schedule_restart(death.name)
            self._progress.say(f"{death.name} {death.how}; restart {process.restarts + 1}/{limit} in {delay_s:g} s")
        finally:
            self._save_processes()

    def _stop_all(self, grace_s: float) -> None:
        """Two waves: those who use the services first, then the services."""
        self._wake_fd = None
        try:
            for roles in (("worker", "trainer", "drafter"), None):
                for name in self._table.stop(roles, grace_s, self._on_stopped):
                    self._progress.say(f"{name} did not stop within {grace_s:g} s and was killed")
        except KeyboardInterrupt:  # a second signal while waiting: no more grace
            self._table.stop(None, 0.0, self._on_stopped)
        self._save_processes()

    def _on_stopped(self, death: Death) -> None:
        """``stopped`` tells an end on purpose from a death, whatever the exit code."""
        said = f"was stopped and {death.how}"
        self._event("process/exit", said, process=death.name, code=death.returncode, stopped=True)

    def _phase(self, name: str) -> None:
        self._progress.set_phase(name)
        self._event("run/phase", name)

    def _event(self, name: str, message: str = "", **labels: Any) -> None:
        self._store.append(MetricRecord(time.time(), "launcher", "event", name, None, None, labels, message or None))

    def _save_processes(self) -> None:
        write_json(self._run.processes_file, self._table.describe())


def is_healthy(url: str, api_key: str | None = None) -> bool:
    """Whether the URL answers 200 now."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=HEALTH_TIMEOUT_S) as answer:
            return answer.status == 200
    except OSError:  # refused, reset, timed out, or an HTTP error status
        return False


def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    """Whether the process behind a descriptor ends within the time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))

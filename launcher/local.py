"""Processes on this machine: started in own groups, watched without sleeping, restarted with a bound, never orphaned.

The kernel kills a child when the launcher dies (PR_SET_PDEATHSIG, which follows the *thread* that starts it: start
processes from the main thread only), and a whole process group is killed when its first process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.plan import ProcessSpec

__all__ = ["Death", "Process", "ProcessTable", "die_with_parent", "kill_group", "tail_of"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
TAIL_BYTES = 16_384


def die_with_parent() -> None:
    """For `preexec_fn`: be killed when the starting thread ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Death:
    """How a process ended. ``returncode`` as `subprocess` gives it (negative: killed by that signal)."""

    name: str
    returncode: int
    last_lines: tuple[str, ...]
    uptime_s: float = 0.0

    @property
    def how(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        number = -self.returncode
        known = {s.value: s.name for s in signal.Signals}
        return f"was killed by signal {number} ({known.get(number, 'unknown')})"

    def __str__(self) -> str:
        said = " | ".join(self.last_lines[-3:])
        return f"{self.name} {self.how}" + (f"; last log lines: {said}" if said else "; its log is empty")


@dataclass
class Process:
    """A started process and its history. ``status``: running, restarting, ended."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    pidfd: int
    started_at: float
    restarts: int = 0
    status: str = "running"
    restart_at: float | None = None
    history: list[str] = field(default_factory=list)


class ProcessTable:
    """All processes of one launch. Not thread-safe: one thread starts, waits and stops."""

    def __init__(
        self,
        log_file: Callable[[str], Path],
        env: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        cwd: Path | None = None,
    ) -> None:
        self._log_file = log_file
        self._env = {**os.environ, **env}
        self._clock = clock
        self._cwd = cwd
        self.processes: dict[str, Process] = {}

    def start(self, spec: ProcessSpec, restarts: int = 0) -> Process:
        """Start a process; its stdout and stderr are appended to its log."""
        log_path = self._log_file(spec.name)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            popen = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._env, **spec.env},
                cwd=self._cwd,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        process = Process(spec, popen, os.pidfd_open(popen.pid), self._clock(), restarts)
        self.processes[spec.name] = process
        return process

    def wait(self, timeout_s: float, wake_fd: int | None = None) -> list[Death]:
        """Block until a process ends, `wake_fd` is readable or the time is up; returns what ended, killed first."""
        fds = {p.pidfd: p for p in self.processes.values() if p.status == "running"}
        poller = select.poll()
        for fd in [*fds, *([] if wake_fd is None else [wake_fd])]:
            poller.register(fd, select.POLLIN)
        ended = [fds[fd] for fd, _ in poller.poll(max(0.0, timeout_s) * 1000) if fd in fds]
        # Those killed by a signal are likelier causes than those that raised because a peer was gone.
        deaths = [self._reap(process) for process in ended]
        return sorted(deaths, key=lambda d: (d.returncode >= 0, d.returncode == 0))

    def _reap(self, process: Process) -> Death:
        kill_group(process.popen.pid)  # what the process itself started; before the wait, which frees the id
        returncode = process.popen.wait()
        os.close(process.pidfd)
        process.status = "ended"
        log = self._log_file(process.spec.name)
        death = Death(process.spec.name, returncode, tail_of(log), self._clock() - process.started_at)
        process.history.append(death.how)
        return death

    def schedule_restart(self, name: str) -> float:
        """Plan a restart after a back-off; returns the seconds until then. `restart_due` does it."""
        process = self.processes[name]
        delay_s = BACKOFF_S[min(process.restarts, len(BACKOFF_S) - 1)]
        process.status, process.restart_at = "restarting", self._clock() + delay_s
        return delay_s

    def restart_due(self) -> list[Process]:
        """Start again every process whose back-off is over."""
        due = [p for p in self.processes.values() if p.status == "restarting" and self._clock() >= (p.restart_at or 0)]
        fresh = []
        for old in due:
            new = self.start(old.spec, old.restarts + 1)
            new.history = old.history
            fresh.append(new)
        return fresh

    def running(self, roles: Sequence[str] | None = None) -> list[Process]:
        return [p for p in self.processes.values() if p.status == "running" and (roles is None or p.spec.role in roles)]

    def stop(
        self, roles: Sequence[str] | None, timeout_s: float, on_end: Callable[[Death], None] = lambda death: None
    ) -> list[str]:
        """SIGTERM to the processes of these roles (None: all), SIGKILL after `timeout_s`; returns whom it killed.

        `on_end` is told of each process as it ends.
        """
        for process in self.processes.values():
            if process.status == "restarting" and (roles is None or process.spec.role in roles):
                process.status = "ended"
        for process in self.running(roles):
            kill_group(process.popen.pid, signal.SIGTERM)
        self._wait_for_end(roles, timeout_s, on_end)
        stubborn = self.running(roles)
        for process in stubborn:
            kill_group(process.popen.pid)
        self._wait_for_end(roles, 10.0, on_end)
        return [p.spec.name for p in stubborn]

    def _wait_for_end(self, roles: Sequence[str] | None, timeout_s: float, on_end: Callable[[Death], None]) -> None:
        deadline = self._clock() + timeout_s
        while self.running(roles) and self._clock() < deadline:
            for death in self.wait(deadline - self._clock()):
                on_end(death)

    def describe(self) -> dict[str, Any]:
        """For `processes.json`: pid, status, restarts and past ends by name."""
        return {
            name: {
                "pid": p.popen.pid,
                "role": p.spec.role,
                "status": p.status,
                "restarts": p.restarts,
                "history": list(p.history),
            }
            for name, p in self.processes.items()
        }


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a whole process group; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def tail_of(path: Path, lines: int = 8) -> tuple[str, ...]:
    """The last non-empty lines of a log."""
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return tuple(line.strip() for line in text.splitlines() if line.strip())[-lines:]

"""Leases become episodes of AReaL's WorkflowExecutor, and episodes become trajectories at the batcher.

Two event loops: the one of `Worker` talks to the batcher (leases, heartbeats, deliveries); AReaL's, in the executor's
thread, runs the episodes. An episode that blocks its loop therefore never delays a heartbeat. Results are delivered in
the order in which episodes end. A lease counts against the capacity until its trajectory is acknowledged, so a batcher
that answers ``busy`` slows the worker.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from areal.api import RolloutWorkflow

from areal_dta import metrics
from areal_dta.channel import RpcTimeout
from areal_dta.records import Lease, unpack
from areal_dta.rollout.worker_engine import RouterEngine
from areal_dta.rollout.worker_episode import Episode, Outcome, episode_data
from areal_dta.rollout.worker_link import BatcherLink, Rpc
from areal_dta.rollout.worker_setup import WorkerSettings

__all__ = ["Worker", "WorkerError"]

log = logging.getLogger(__name__)

_FINISH_S = 3.0  # at a stop: for deliveries under way, and again for handing leases back
_POLL_S = 0.02  # how soon AReaL's runner notices a new episode while others run; its default is 0.05


class WorkerError(RuntimeError):
    """The worker cannot go on; the launcher restarts it."""


@dataclass(frozen=True)
class _Running:
    """A lease in hand. ``outcome_known``: its episode has ended and is being delivered or rejected."""

    lease: Lease
    episode: Episode
    task_id: int
    outcome_known: bool = False
    unknown_beats: int = 0


class Worker:
    """Runs leases until the batcher drains (`run` returns) or `stop` is called. One event loop owns all state."""

    def __init__(
        self,
        settings: WorkerSettings,
        rpc: Rpc,
        engine: RouterEngine,
        workflow: RolloutWorkflow,
        publisher: metrics.Publisher,
    ) -> None:
        self.settings, self._engine, self._workflow, self._metrics = settings, engine, workflow, publisher
        self._link = BatcherLink(rpc, settings.name, settings.batcher_timeout_s)
        self._running: dict[str, _Running] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self._slot_free = asyncio.Event()
        self._stop = asyncio.Event()
        self._num_lease_requests = 0
        self._closing = False
        self._drainer: threading.Thread | None = None
        self._drainer_stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()

    def stop(self) -> None:
        """End soon: episodes are cancelled and their leases handed back."""
        self._stop.set()

    async def run(self) -> None:
        """Work until drained or stopped. RpcTimeout when the batcher is gone, WorkerError when the executor fails."""
        hello = await self._link.call("hello", {"name": self.settings.name, "role": "worker", "pid": os.getpid()})
        self._engine.set_version(int(hello.body["version"]))
        self._engine.workflow_executor.runner.poll_wait_time = _POLL_S
        self._drainer = threading.Thread(target=self._drain_executor, name="drain-executor", daemon=True)
        self._drainer.start()
        leasing = asyncio.create_task(self._lease_loop(), name="leases")
        others = [asyncio.create_task(self._heartbeat_loop()), asyncio.create_task(self._watch_loop())]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await self._first([leasing, stopped, *others])
            if not self._stop.is_set():
                log.info("batcher is draining: waiting for %d episodes", len(self._running))
                done = asyncio.create_task(self._until_idle(self.settings.stop_timeout_s / 2))
                await self._first([done, stopped, *others])
                done.cancel()
        finally:
            for task in (leasing, stopped, *others):
                task.cancel()
            await asyncio.gather(leasing, stopped, *others, return_exceptions=True)
            await self._hand_back()
            self._drainer_stop.set()

    async def _first(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait for the first of ``tasks`` (or a failure elsewhere) and raise what it raised."""
        done, _ = await asyncio.wait([*tasks, self._failure], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    # -- leases ------------------------------------------------------------------------------------------------------

    async def _lease_loop(self) -> None:
        """Keep all slots busy; returns when the batcher says it is draining."""
        while True:
            free = self.settings.capacity - len(self._running)
            if free <= 0:
                self._slot_free.clear()
                await self._slot_free.wait()  # bounded: every episode has a time-out, every call to the batcher too
                continue
            self._num_lease_requests += 1
            name = f"{os.getpid()}.{self._num_lease_requests}"  # sent again under this name, it gets the same leases
            wait_s = self.settings.lease_wait_s
            body = {"worker": self.settings.name, "capacity": free, "wait_s": wait_s, "request": name}
            reply = await self._link.call("lease", body)
            for plain in reply.body["leases"]:
                self._start(unpack(Lease, plain))
            if reply.body["draining"]:
                return

    def _start(self, lease: Lease) -> None:
        if lease.lease_id in self._running:
            return
        self._engine.set_version(max(lease.version, self._engine.get_version()))
        settings = self.settings
        episode = Episode(
            self._workflow,
            lease,
            lambda outcome: self._from_executor(self._on_outcome, outcome),
            timeout_s=settings.episode_timeout_s,
            limits=settings.limits,
            worker=settings.name,
        )
        task_id = self._engine.submit(episode_data(lease), workflow=episode, is_eval=lease.eval_tag is not None)
        self._running[lease.lease_id] = _Running(lease, episode, task_id)

    async def _heartbeat_loop(self) -> None:
        while True:
            lengths = [running.episode.num_row_tokens for running in self._running.values()]
            body = {"worker": self.settings.name, "lease_ids": list(self._running), "num_tokens": lengths}
            reply = await self._link.call("heartbeat", body)
            unknown = set(reply.body.get("unknown") or ())
            for lease_id, running in list(self._running.items()):
                beats = running.unknown_beats + 1 if lease_id in unknown else 0
                self._running[lease_id] = replace(running, unknown_beats=beats)
                # A restarted batcher may need a beat to recognise its leases; twice unknown means given to someone
                # else.
                if beats >= 2 and not running.outcome_known:
                    log.warning("lease %s was given to someone else; its episode is cancelled", lease_id)
                    running.episode.cancel("the batcher gave the lease to another worker")
            await asyncio.sleep(self.settings.heartbeat_s)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _from_executor(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # our loop is closed: the lease was handed back before
            self._loop.call_soon_threadsafe(callback, *args)

    def _on_outcome(self, outcome: Outcome) -> None:
        running = self._running.get(outcome.lease.lease_id)
        if running is None or self._closing:
            return
        self._running[outcome.lease.lease_id] = replace(running, outcome_known=True)
        task = asyncio.create_task(self._settle(outcome), name=f"settle {outcome.lease.lease_id}")
        self._deliveries.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._deliveries.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _settle(self, outcome: Outcome) -> None:
        """Deliver or reject one outcome, then free its slot."""
        lease = outcome.lease
        num_tokens = self._running[lease.lease_id].episode.num_row_tokens
        self._publish(outcome)
        if outcome.trajectory is None:
            await self._link.reject(lease, outcome.cause or "raised", outcome.detail, num_tokens)
        else:
            status = await self._link.deliver(lease, outcome.trajectory)
            if status != "accepted":
                self._metrics.emit("rollout/undelivered", 1, status=status)
        self._running.pop(lease.lease_id, None)
        self._slot_free.set()

    def _publish(self, outcome: Outcome) -> None:
        if outcome.trajectory is None:
            self._metrics.emit("rollout/failed", 1, cause=outcome.cause)
            return
        labels = {"eval": outcome.lease.eval_tag is not None}
        self._metrics.emit("rollout/reward", outcome.trajectory.reward, **labels)
        self._metrics.emit("rollout/episode_s", outcome.duration_s, **labels)
        self._metrics.emit("rollout/turns", outcome.num_turns, **labels)
        self._metrics.emit("rollout/tokens", outcome.num_tokens, **labels)

    # -- the executor's side -----------------------------------------------------------------------------------------

    def _drain_executor(self) -> None:
        """Take results out of AReaL's executor so that it keeps none; they were reported by `Episode` already."""
        while not self._drainer_stop.is_set():
            try:
                self._engine.wait(1, timeout=0.5, raise_timeout=False)
            except RuntimeError as error:  # one of the executor's threads died
                if not self._drainer_stop.is_set():
                    self._from_executor(self._fail, WorkerError(f"AReaL's executor failed: {error.__cause__ or error}"))
                return

    async def _watch_loop(self) -> None:
        """Notice episodes that outlive their time-out (their code blocks the loop); publish what workflows recorded."""
        limit_s = self.settings.episode_timeout_s + self.settings.stuck_grace_s
        next_stats = 0.0
        while True:
            now = time.monotonic()
            for running in self._running.values():
                age_s = now - (running.episode.started_s or running.episode.submitted_s)
                if not running.outcome_known and age_s > limit_s:
                    raise WorkerError(
                        f"episode {running.lease.lease_id} is {age_s:.0f} s old, past its time-out of "
                        f"{self.settings.episode_timeout_s:g} s: its code blocks the event loop; use await or a thread"
                    )
            if now >= next_stats:  # also empties AReaL's tracker, which grows with every episode otherwise
                next_stats = now + self.settings.stats_interval_s
                for name, value in self._engine.export_stats().items():
                    self._metrics.emit(f"workflow/{name}", value)
            await asyncio.sleep(1.0)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _until_idle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            self._slot_free.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._slot_free.wait(), max(0.01, deadline - time.monotonic()))

    async def _hand_back(self) -> None:
        """Let deliveries finish briefly, then cancel what runs and tell the batcher, which re-issues at once."""
        self._closing = True
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=_FINISH_S)
        for task in list(self._deliveries):
            task.cancel()
        left = list(self._running.values())
        for running in left:
            running.episode.cancel("the worker stops")
        gone = self._failure.done() and isinstance(self._failure.exception(), RpcTimeout)
        if left and not gone:
            lengths = {running.lease.lease_id: running.episode.num_row_tokens for running in left}
            await self._link.hand_back(lengths, _FINISH_S)
        self._running.clear()

"""The batcher as a process: its RPC handlers, the log, timers and metrics around `BatcherCore`.

Every handler changes the core first, then waits until the log holds the change, then answers. So an answer is never
about something a crash could undo, and all of it survives ``kill -9``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_dta.batcher.core import KEPT_BATCHES, BatcherCore, Refusal, Waiting
from areal_dta.batcher.dispatch import Batch
from areal_dta.batcher.ledger import Event, without_arrays
from areal_dta.batcher.spool import GroupCommit, Spool
from areal_dta.channel import Reply, Request, RpcFailure, RpcServer
from areal_dta.metrics import Publisher
from areal_dta.records import RecordError, Shard, Trajectory, pack, unpack, write_trace

__all__ = ["BatcherService", "ServiceSettings"]

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0  # the longest a request is held, whatever its sender asks for
KINDS = (
    "hello",
    "lease",
    "trajectory",
    "reject",
    "heartbeat",
    "shard",
    "published",
    "commit",
    "eval_start",
    "eval_result",
    "status",
    "finish",
)
T = TypeVar("T")
Answer = tuple[dict[str, Any], Mapping[str, Any]]  # body, arrays


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Places and intervals of one batcher process. `trace_dir` None: no traces."""

    address: str
    spool_dir: Path
    epoch: int
    resume_step: int | None = None
    trace_dir: Path | None = None
    domain: str = ""
    report_interval_s: float = 1.0
    tick_s: float = 0.25
    segment_bytes: int = 64 << 20


class BatcherService:
    """Owns the core, the spool and the socket. `start`, then `run` until `stop` is called or the log cannot be
    written.
    """

    def __init__(self, core: BatcherCore, settings: ServiceSettings, publisher: Publisher) -> None:
        self.core, self.settings = core, settings
        self._publisher = publisher
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hellos: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()
        self._log: GroupCommit | None = None
        self.server = RpcServer(settings.address, {kind: self._handler(kind) for kind in KINDS})

    async def start(self) -> None:
        """Replay the spool, begin the launch, serve. Raises SpoolError, LedgerError, OSError (port taken)."""
        self._spool = Spool(self.settings.spool_dir, self.settings.segment_bytes)
        num_events = 0
        for event in self._spool.replay():
            self.core.replay(event)
            num_events += 1
        if num_events:
            log.info("replayed %d events: %s", num_events, self.core.status())
            self._publisher.event("batcher/replay", events=num_events, torn_bytes=self._spool.truncated_bytes)
        self.core.begin(self.settings.epoch, self.settings.resume_step)
        self._log = GroupCommit(self._spool)
        await self._settle()
        self._trace_again()
        await self.server.start()
        log.info("listening on %s", self.server.address)

    def stop(self) -> None:
        self._stopping.set()
        self._notify()

    async def run(self) -> None:
        """Serve until `stop`; raises the OSError that made the log unwritable."""
        reported_s = time.monotonic()
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), self.settings.tick_s)
            except TimeoutError:
                self.core.desk.tick()
                await self._settle()
            if time.monotonic() - reported_s >= self.settings.report_interval_s:
                reported_s = time.monotonic()
                self._report_levels(None)
        await self.server.stop()
        await asyncio.gather(*self._background)
        if self._log is not None:
            await self._settle()
            await self._log.close()

    # -- plumbing

    def _handler(self, kind: str) -> Callable[[Request], Awaitable[Reply]]:
        method = getattr(self, f"_{kind}")

        async def handle(request: Request) -> Reply:
            try:
                body, arrays = await method(request)
            except Refusal as refusal:
                await self._settle()
                raise RpcFailure(refusal.code, str(refusal)) from refusal
            await self._settle()
            return Reply(body, arrays)

        return handle

    async def _settle(self) -> None:
        """Log what happened, wake the waiting requests, return when it is durable."""
        events = self.core.take_events()
        if self._log is None:
            raise RuntimeError("the service was not started")
        for event in events:
            self._log.append(event)
        if events:
            self._notify()
        try:
            await self._log.durable()
        except OSError:
            self._stopping.set()
            raise

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, request: Request, attempt: Callable[[], T | None]) -> T | None:
        """Repeat `attempt` at every change until it gives something or the request's ``wait_s`` is over."""
        wait_s = float(request.body["wait_s"]) if isinstance(request.body.get("wait_s"), int | float) else 0.0
        deadline_s = time.monotonic() + min(wait_s, MAX_WAIT_S)
        while True:
            changed = self._changed
            result = attempt()
            left_s = deadline_s - time.monotonic()
            if result is not None or left_s <= 0 or self._stopping.is_set():
                return result
            if self.core.has_events:
                await self._settle()
                continue
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                return attempt()

    # -- handlers: Request -> (body, arrays)

    async def _hello(self, request: Request) -> Answer:
        name = _get(request, "name", str)
        self._hellos[name] += 1
        self._notify()
        self.core.desk.hello(name, _get(request, "role", str), _get(request, "pid", int))
        return {"epoch": self.core.ledger.epoch, "version": self.core.ledger.version}, {}

    async def _lease(self, request: Request) -> Answer:
        worker, capacity = _get(request, "worker", str), _get(request, "capacity", int)
        generation = self._hellos[worker]

        def attempt() -> list[Any] | None:
            if self.core.ledger.finished or self._hellos[worker] != generation:  # the asker was replaced: grant nothing
                return []
            return self.core.desk.lease(worker, capacity) or None

        leases = await self._until(request, attempt) or []
        return {"leases": [pack(lease)[0] for lease in leases], "draining": self.core.ledger.finished}, {}

    async def _trajectory(self, request: Request) -> Answer:
        try:
            traj = unpack(Trajectory, request.body, request.arrays)
        except RecordError as error:
            log.warning("trajectory from %s rejected: %s", request.client, error)
            if isinstance(given := request.body.get("lease_id"), str):
                self.core.desk.reject(given, error.cause)
            return {"status": "rejected", "cause": error.cause}, {}
        verdict = self.core.trajectory(traj)
        return {"status": verdict.status, "cause": verdict.cause}, {}

    async def _reject(self, request: Request) -> Answer:
        given, cause = _get(request, "lease_id", str), _get(request, "cause", str)
        detail = str(request.body.get("detail", ""))[:500]
        log.info("%s gives up %s (%s): %s", request.client, given, cause, detail)
        self.core.desk.reject(given, cause, detail)
        return {}, {}

    async def _heartbeat(self, request: Request) -> Answer:
        return {"unknown": self.core.desk.heartbeat(_get(request, "worker", str), _get(request, "lease_ids", list))}, {}

    async def _shard(self, request: Request) -> Answer:
        rank, world_size, step = (_get(request, name, int) for name in ("rank", "world_size", "step"))
        why = Waiting(0, 0, "")

        def attempt() -> Shard | None:
            nonlocal why
            result = self._ask_core(rank, world_size, step)
            if isinstance(result, Shard):
                return result
            why = result
            return None

        shard = await self._until(request, attempt)
        if shard is None:
            return {"status": "wait", "have": why.have, "need": why.need, "why": why.why}, {}
        plain, arrays = pack(shard)
        return {"status": "ready", **plain}, arrays

    def _ask_core(self, rank: int, world_size: int, step: int) -> Shard | Waiting:
        if self.core.ready(step):
            with self._publisher.span("time/assemble", step=step):
                result = self.core.shard(rank, world_size, step)
        else:  # usually to be told why; dropping stale groups on the way can complete a batch after all
            result = self.core.shard(rank, world_size, step)
        for batch in self.core.take_batches():
            self._report_batch(batch)
        return result

    async def _published(self, request: Request) -> Answer:
        self.core.published(_get(request, "number", int), _get(request, "epoch", int))
        return {}, {}

    async def _commit(self, request: Request) -> Answer:
        self.core.commit(_get(request, "step", int), str(request.body.get("checkpoint", "")))
        await self._settle()
        self._later(asyncio.to_thread(self._strip))
        return {}, {}

    async def _eval_start(self, request: Request) -> Answer:
        return {"total": self.core.eval_start(_get(request, "tag", str), _get(request, "number", int))}, {}

    async def _eval_result(self, request: Request) -> Answer:
        tag = _get(request, "tag", str)

        def attempt() -> dict[str, Any] | None:
            result = self.core.eval_result(tag)
            return result if result["finished"] else None

        finished = await self._until(request, attempt)
        return finished or self.core.eval_result(tag), {}

    async def _status(self, request: Request) -> Answer:
        return {**self.core.status(), "torn_bytes": self._spool.truncated_bytes}, {}

    async def _finish(self, request: Request) -> Answer:
        self.core.finish()
        return {}, {}

    # -- side jobs

    def _later(self, job: Awaitable[None]) -> None:
        task = asyncio.ensure_future(job)
        self._background.add(task)
        task.add_done_callback(self._finish_job)

    def _finish_job(self, task: asyncio.Future[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a side job failed: %s", error)

    def _strip(self) -> None:
        def reduce(event: Event) -> Event | None:
            if event.kind != "traj" or not event.arrays:
                return None
            key = (event.body["group_id"], event.body["sample"])
            return None if self.core.ledger.needs_arrays(key) else without_arrays(event)

        saved = self._spool.strip(reduce)
        if saved:
            log.info("let go %d bytes of trajectories that a checkpoint covers", saved)

    def _report_batch(self, batch: Batch) -> None:
        s, emit = batch.stats, self._publisher.emit
        values = {
            "batch/reward_mean": s.reward_mean,
            "batch/episodes": s.episodes,
            "batch/rows": s.rows,
            "batch/tokens": s.tokens,
            "batch/tree_tokens": s.tree_tokens,
            "batch/tree_ratio": s.tree_ratio,
            "batch/staleness_max": s.staleness_max,
            "batch/staleness_mean": s.staleness_mean,
            "batch/mixed_version_share": s.mixed_version_share,
        }
        for name, value in values.items():
            emit(name, value, step=s.step)
        for rank, cost in enumerate(s.rank_costs):
            emit("batch/rank_cost", cost, step=s.step, rank=rank)
        self._report_levels(s.step)
        self._trace(batch)

    def _trace(self, batch: Batch) -> None:
        """Write the batch's trace in the background."""
        if self.settings.trace_dir is None:
            return
        step, path = batch.stats.step, self.settings.trace_dir / f"batch_{batch.stats.step:06d}.npz"
        self._later(asyncio.to_thread(write_trace, path, list(batch.trajectories), self.settings.domain, step))

    def _trace_again(self) -> None:
        """Traces that a kill cut short: those of the batches that can still be asked for."""
        ledger = self.core.ledger
        for step in range(max(ledger.committed_step + 1, ledger.next_step - KEPT_BATCHES), ledger.next_step):
            if self.settings.trace_dir and not (self.settings.trace_dir / f"batch_{step:06d}.npz").exists():
                self._trace(self.core.batch(step))

    def _report_levels(self, step: int | None) -> None:
        ledger, emit = self.core.ledger, self._publisher.emit
        emit("batch/acknowledged", len(ledger.acknowledged), step=step)
        emit("batch/in_flight", self.core.desk.in_flight(), step=step)
        emit("batch/ready", self.core.num_ready, step=step)
        for cause, count in ledger.rejected.items():
            emit("batch/rejected", count, step=step, cause=cause)
        for cause, count in Counter(ledger.dropped.values()).items():
            emit("batch/dropped", count, step=step, cause=cause)


def _get(request: Request, name: str, kind: type[T]) -> T:
    """A field of the request's body; raises Refusal when it is missing or of another type."""
    value = request.body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        text = f"{request.kind!r} needs {name!r} as {kind.__name__}, got {value!r:.80}"
        raise Refusal("bad_request", text)
    return value

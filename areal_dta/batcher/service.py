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

from areal_dta.batcher.assembler import SMALL_TOKENS, Assembler, AssemblyError, Order
from areal_dta.batcher.core import KEPT_BATCHES, BatcherCore, Refusal, Waiting
from areal_dta.batcher.costs import soon
from areal_dta.batcher.dispatch import Assembly
from areal_dta.batcher.housekeeping import Room, compact, tick
from areal_dta.batcher.report import report_batch, report_levels
from areal_dta.batcher.requests import field, length, lengths
from areal_dta.batcher.settings import SettingsError
from areal_dta.batcher.spool import Spool
from areal_dta.batcher.spool_commit import GroupCommit
from areal_dta.channel import Reply, Request, RpcFailure, RpcServer
from areal_dta.metrics import Publisher
from areal_dta.records import RecordError, Shard, Trajectory, pack, unpack
from areal_dta.tree.cost import CostModel

__all__ = ["BatcherService", "ServiceSettings"]

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0  # the longest a request is held, whatever its sender asks for
KINDS = (
    "hello", "lease", "trajectory", "reject", "heartbeat", "shard", "published", "commit", "eval_start", "eval_result",
    "status", "finish",
)  # fmt: skip
NEVER_WAIT = ("status", "heartbeat")  # these answers promise nothing, so they come also while the disk is full
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
    spool_bytes: int = 64 << 30  # trajectories wait when the log is larger
    buffer_bytes: int = 256 << 20  # trajectories wait when more than this is on its way to the disk
    wake_s: float = 0.005  # changes within this time wake the waiting requests once
    small_tokens: int = SMALL_TOKENS
    measured_cost: Callable[[], CostModel] | None = None  # asked at every batch: the trainer measures when it starts


class BatcherService:
    """Owns core, spool and socket. `start`, then `run` until `stop` is called or the log cannot be written."""

    def __init__(self, core: BatcherCore, settings: ServiceSettings, publisher: Publisher) -> None:
        self.core, self.settings = core, settings
        self._publisher = publisher
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hellos: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()
        self._log: GroupCommit | None = None
        self._waking = False
        self._assembler = Assembler(settings.small_tokens)
        self._files = asyncio.Lock()  # who reads places of the log, or moves them
        self._assembling: dict[int, Assembly] = {}
        self._failed_assembly: dict[int, str] = {}
        self.server = RpcServer(settings.address, {kind: self._handler(kind) for kind in KINDS})

    async def start(self) -> None:
        """Replay the spool, begin the launch, serve. Raises SpoolError, LedgerError, OSError (port taken)."""
        self._spool = Spool(self.settings.spool_dir, self.settings.segment_bytes)
        num_events = 0
        for stored in self._spool.replay():
            self.core.replay(stored.event, stored.place)
            num_events += 1
        if num_events:
            log.info("replayed %d events: %s", num_events, self.core.status())
            self._publisher.event("batcher/replay", events=num_events, torn_bytes=self._spool.truncated_bytes)
        self.core.begin(self.settings.epoch, self.settings.resume_step)
        self._log = GroupCommit(self._spool, self.core.ledger.stored)
        limits = (self.settings.spool_bytes, self.settings.buffer_bytes, self.core.settings.lease_timeout_s)
        self._room = Room(self._spool, self._log, *limits)
        await self._settle()
        self._trace_again()
        await self.server.start()
        log.info("listening on %s", self.server.address)

    @property
    def busy(self) -> bool:
        """Whether side jobs (assembly, traces, shortening the log) are under way."""
        return bool(self._background)

    def stop(self) -> None:
        self._stopping.set()
        self._notify()

    async def run(self) -> None:
        """Serve until `stop`; raises the OSError that made the log unwritable."""
        reported_s = ticked_s = time.monotonic()
        while not self._stopping.is_set() and self._commit_log.failure is None:
            try:
                await asyncio.wait_for(self._stopping.wait(), self.settings.tick_s)
            except TimeoutError:
                gap_s, ticked_s = time.monotonic() - ticked_s, time.monotonic()
                tick(self.core, self._room, gap_s)
                if self._room.worth_shortening(self.core.ledger):
                    self._shorten()
                self._log_events()
            if time.monotonic() - reported_s >= self.settings.report_interval_s:
                reported_s = time.monotonic()
                report_levels(self._publisher, self.core, self._spool.size_bytes, None)
        await self.server.stop()
        if self._commit_log.full is not None:
            for task in self._background:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._assembler.close()
        self._log_events()
        await self._commit_log.close()
        if self._commit_log.failure is not None:
            raise self._commit_log.failure

    # -- plumbing

    def _handler(self, kind: str) -> Callable[[Request], Awaitable[Reply]]:
        method = getattr(self, f"_{kind}")

        async def handle(request: Request) -> Reply:
            try:
                body, arrays = await method(request)
            except Refusal as refusal:
                self._log_events()
                raise RpcFailure(refusal.code, str(refusal)) from refusal
            if kind in NEVER_WAIT or body.get("status") in ("busy", "wait"):
                self._log_events()
            else:
                await self._settle()
            return Reply(body, arrays)

        return handle

    async def _settle(self) -> None:
        """Log what happened, wake the waiting requests, return when it is durable."""
        self._log_events()
        try:
            await self._commit_log.durable()
        except OSError:
            self._stopping.set()
            raise

    @property
    def _commit_log(self) -> GroupCommit:
        if self._log is None:
            raise RuntimeError("the service was not started")
        return self._log

    def _log_events(self) -> None:
        events = self.core.take_events()
        for event in events:
            tag = (event.body["group_id"], event.body["sample"]) if event.kind == "traj" else None
            self._commit_log.append(event, tag)
        if events and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_later(self.settings.wake_s, self._notify)

    def _notify(self) -> None:
        self._waking = False
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
                self._log_events()
                continue
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                return attempt()

    # -- handlers: Request -> (body, arrays)

    async def _hello(self, request: Request) -> Answer:
        name = field(request, "name", str)
        self._hellos[name] += 1
        self._notify()
        self.core.desk.hello(name, field(request, "role", str), field(request, "pid", int))
        return {"epoch": self.core.ledger.epoch, "version": self.core.ledger.version}, {}

    async def _lease(self, request: Request) -> Answer:
        worker, capacity = field(request, "worker", str), field(request, "capacity", int)
        name = str(request.body.get("request", ""))[:200]
        generation = self._hellos[worker]

        def attempt() -> list[Any] | None:
            if self.core.ledger.finished or self._hellos[worker] != generation:  # the asker was replaced: grant nothing
                return []
            if name and (before := self.core.desk.answered(worker, name)) is not None:
                return before
            return self.core.desk.lease_anew(worker, capacity, name) or None

        leases = await self._until(request, attempt) or []
        return {"leases": [pack(lease)[0] for lease in leases], "draining": self.core.ledger.finished}, {}

    async def _trajectory(self, request: Request) -> Answer:
        if cause := self._room.missing():
            self.core.refused[cause] += 1
            return {"status": "busy", "cause": cause, "why": self._room.explain("no room for trajectories")}, {}
        try:
            traj = unpack(Trajectory, request.body, request.arrays)
        except RecordError as error:
            log.warning("trajectory from %s rejected: %s", request.client, error)
            if isinstance(given := request.body.get("lease_id"), str):
                self.core.desk.reject(given, error.cause, num_tokens=length(request))
            return {"status": "rejected", "cause": error.cause}, {}
        verdict = self.core.trajectory(traj)
        return {"status": verdict.status, "cause": verdict.cause}, {}

    async def _reject(self, request: Request) -> Answer:
        given, cause = field(request, "lease_id", str), field(request, "cause", str)
        detail = str(request.body.get("detail", ""))[:500]
        log.info("%s gives up %s (%s): %s", request.client, given, cause, detail)
        num_tokens = request.body.get("num_tokens")
        self.core.desk.reject(given, cause, detail, num_tokens if isinstance(num_tokens, int) else None)
        return {}, {}

    async def _heartbeat(self, request: Request) -> Answer:
        worker, lease_ids = field(request, "worker", str), field(request, "lease_ids", list)
        return {"unknown": self.core.desk.heartbeat(worker, lease_ids, lengths(request))}, {}

    async def _shard(self, request: Request) -> Answer:
        rank, world_size, step = (field(request, name, int) for name in ("rank", "world_size", "step"))
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
            return {"status": "wait", "have": why.have, "need": why.need, "why": self._room.explain(why.why)}, {}
        plain, arrays = pack(shard)
        return {"status": "ready", **plain}, arrays

    def _ask_core(self, rank: int, world_size: int, step: int) -> Shard | Waiting:
        if step in self._failed_assembly:
            raise Refusal("assembly", self._failed_assembly.pop(step))
        asked_before = self._assembling.get(step)
        result = self.core.ask(rank, world_size, step)
        if not isinstance(result, Assembly):
            if isinstance(result, Waiting) and self._room.hopeless(step):
                raise Refusal("spool_full", f"{self._room.explain(result.why)}; no batch can be completed like this")
            return result
        if asked_before is not result:
            self._assembling[step] = result
            self._later(self._assemble(result))
        return Waiting(self.core.ledger.counts.ready, self.core.settings.batch_groups, "the batch is being assembled")

    async def _assemble(self, assembly: Assembly) -> None:
        """Put a batch together elsewhere, fix it here."""
        step, new = assembly.step, assembly.step == self.core.ledger.next_step
        try:
            async with self._files:
                order = await self._order(self.core.located(assembly), traced=new)
                with self._publisher.span("time/assemble", step=step):
                    batch = await self._assembler.run(order)
        except (AssemblyError, SettingsError) as error:
            log.error("%s", error)
            self.core.give_up(assembly)
            self._failed_assembly[step] = str(error)
        else:
            self.core.fix(batch)
            self._report_batches()
        finally:
            self._assembling.pop(step, None)
        await self._settle()
        self._notify()

    async def _order(self, assembly: Assembly, traced: bool) -> Order:
        trace = self._trace_path(assembly.step) if traced else None
        if self.settings.measured_cost is not None:
            assembly = assembly.with_cost(await soon(self.settings.measured_cost))
        return Order(assembly, self.settings.spool_dir.resolve(), trace, self.settings.domain)

    def _trace_path(self, step: int) -> Path | None:
        return self.settings.trace_dir.resolve() / f"batch_{step:06d}.npz" if self.settings.trace_dir else None

    async def _published(self, request: Request) -> Answer:
        self.core.published(field(request, "number", int), field(request, "epoch", int))
        return {}, {}

    async def _commit(self, request: Request) -> Answer:
        self.core.commit(field(request, "step", int), str(request.body.get("checkpoint", "")))
        self._shorten()
        return {}, {}

    async def _eval_start(self, request: Request) -> Answer:
        return {"total": self.core.eval_start(field(request, "tag", str), field(request, "number", int))}, {}

    async def _eval_result(self, request: Request) -> Answer:
        tag = field(request, "tag", str)

        def attempt() -> dict[str, Any] | None:
            result = self.core.eval_result(tag)
            return result if result["finished"] else None

        finished = await self._until(request, attempt)
        return finished or self.core.eval_result(tag), {}

    async def _status(self, request: Request) -> Answer:
        room = {"spool_bytes": self._spool.size_bytes, "no_room": self._room.missing()}
        return {**self.core.status(), **room, "torn_bytes": self._spool.truncated_bytes}, {}

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

    def _shorten(self) -> None:
        self._room.shortening += 1
        self._later(self._compact())

    async def _compact(self) -> None:
        try:
            async with self._files:
                self._log_events()
                await compact(self.core.ledger, self._spool, self._commit_log, self._room.spool_bytes)
        finally:
            self._room.shortening -= 1

    def _report_batches(self) -> None:
        for batch in self.core.take_batches():
            report_batch(self._publisher, batch)
            report_levels(self._publisher, self.core, self._spool.size_bytes, batch.stats.step)

    def _trace_again(self) -> None:
        """Traces that a kill cut short: those of the batches that can still be asked for."""
        ledger = self.core.ledger
        for step in range(max(ledger.committed_step + 1, ledger.next_step - KEPT_BATCHES), ledger.next_step):
            path = self._trace_path(step)
            if path is not None and not path.exists():
                self._later(self._trace(step))

    async def _trace(self, step: int) -> None:
        async with self._files:
            try:
                assembly = self.core.rebuild(step)
            except Refusal:  # a checkpoint covers it by now
                log.warning("no trace of step %d: its arrays were let go", step)
                return
            await self._assembler.run(await self._order(assembly, traced=True))

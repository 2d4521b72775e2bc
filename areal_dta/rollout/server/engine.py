"""The model thread: steps the scheduler and, between steps, does what the event loop asks for."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from areal_dta.drafter.reporter import ServerReporter
from areal_dta.metrics import Publisher
from areal_dta.nn import DecoderConfig, DecoderWeights, load_decoder
from areal_dta.nn.loading import decoder_from
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits, StepStats
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, Progress, Sequence
from areal_dta.rollout.server.spec_control import SpecControl, SpecSettings
from areal_dta.rollout.server.ticket import EngineDead, MemoryReleased, Stream, Ticket
from areal_dta.weights import folder_digest, read_manifest, verify

__all__ = ["RUNNING_MODES", "Engine", "EngineDead", "Update"]

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_WAIT_S = 0.5  # an idle model thread looks this often whether it should stop or report
PAUSE_MODES = ("abort", "in_place", "retract")
RUNNING_MODES = ("recompute", "keep", "abort")  # what a weight update does with running requests


@dataclass(frozen=True)
class Update:
    """Weights read and checked, ready to be swapped in."""

    weights: DecoderWeights
    version: str


class Engine:
    """Owns the scheduler and its thread; every method here may be called from the event loop."""

    def __init__(
        self,
        weights: DecoderWeights,
        version: str,
        limits: SchedulerLimits,
        publisher: Publisher,
        decode_text: Callable[[list[int]], str] | None = None,
        report_interval_s: float = 1.0,
        threads: int = 1,
        speculation: SpecSettings | None = None,
        reporter: ServerReporter | None = None,
    ) -> None:
        self.config: DecoderConfig = weights.config
        self.dtype = weights.dtype
        self._device = weights.device
        self._scheduler = Scheduler(weights, version, limits, decode_text)
        self._reporter = reporter  # tells the drafter's training whether there is work
        self.speculation = None if speculation is None else SpecControl(self._scheduler, speculation)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._streams: dict[Sequence, Stream] = {}
        self._released: str | None = None  # "wait", "refuse" or "resume" while the KV memory is given back
        self._tokens_per_s = 0.0
        self._live: dict[str, list[Sequence]] = {}  # by rid
        self._paused = False
        self._stopping = False
        self._error: BaseException | None = None
        self._publisher = publisher
        self._report_interval_s = report_interval_s
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What killed the model thread, None while it lives or after an orderly stop."""
        return self._error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    @property
    def version(self) -> str:
        return self._scheduler.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def released(self) -> str | None:
        """What requests do while the KV memory is given back: "wait", "refuse", "resume"; None: it is there."""
        return self._released

    @property
    def stats(self) -> StepStats:
        return self._scheduler.stats

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output together: bounded by the model's positions and by the KV pool."""
        return min(self.config.max_positions, self._scheduler.capacity_tokens)

    def load(self) -> dict[str, int | float]:
        """Numbers for ``/get_server_info``; read while the thread runs, so only approximately simultaneous."""
        s = self._scheduler
        return {
            "num_running": len(s.running),
            "num_waiting": len(s.waiting),
            "cached_tokens_in_tree": s.cache.num_cached * s.limits.page_size,
            "max_total_tokens": s.capacity_tokens,
            "max_batch": s.limits.max_batch,
            "kv_bytes": s.runner.kv.num_bytes,
            "kv_use": 1.0 - s.cache.num_available / s.cache.num_pages,
            "tokens_per_s": self._tokens_per_s,
            "generated_tokens": s.stats.generated_tokens,
            "prompt_tokens": s.stats.prompt_tokens,
            "prompt_cached_tokens": s.stats.cached_tokens,
            "retractions": s.stats.retractions,
            "steps": s.stats.steps,
        }

    def submit(self, request: GenerationRequest, put: Callable[[Progress], None] | None = None) -> Ticket:
        """Queue a request; the answer arrives on the calling loop, there also ``put`` gets every new token. Cancelling
        the future aborts nothing: `abandon` does. Raises MemoryReleased or EngineDead."""
        if self._released == "refuse":
            raise MemoryReleased(
                "the KV memory is released; call /resume_memory_occupation or send it to another server"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def done(seq: Sequence, completion: Completion) -> None:
            siblings = self._live.get(request.rid, [])
            if seq in siblings:
                siblings.remove(seq)
            if not siblings:
                self._live.pop(request.rid, None)
            stream = self._streams.pop(seq, None)
            if stream is not None:
                self._outbox.append((loop, functools.partial(stream.put, stream.progress(seq, completion))))
            self._outbox.append((loop, functools.partial(_resolve, future, completion)))

        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else sampling.stop_token_ids | set(self.config.eos_token_ids)
        limit = min(len(request.input_ids) + sampling.max_new_tokens, self.max_sequence_tokens)
        seq = Sequence(request, limit, frozenset(t for t in stop_ids if 0 <= t < self.config.vocab_size), done)

        def add() -> None:
            self._live.setdefault(request.rid, []).append(seq)
            if put is not None:
                self._streams[seq] = Stream(loop, put)
            if self._released == "resume":
                self._scheduler.resume_memory()
                self._released = None
            self._scheduler.add(seq)
            self._tell_load()

        self._post(add)
        return Ticket(future, seq)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the model thread between two steps."""
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return  # the caller is gone; setting a result would raise and take the model thread along
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who asked for it
                result.set_exception(error)

        self._post(run)
        return result

    def _post(self, job: Callable[[], None]) -> None:
        if self._stopping or not self._thread.is_alive():
            raise EngineDead(f"the model thread has stopped ({self._error or 'shutdown'})")
        self._inbox.put(job)

    def pause(self, mode: str) -> Future[int]:
        """Stop stepping. ``abort``: answer every request with what it has; ``retract``: release running requests' KV;
        ``in_place``: leave them as they are. The result is the number of requests affected."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(PAUSE_MODES)}")

        def run() -> int:
            self._paused = True
            s = self._scheduler
            if mode == "abort":
                return self._abort_all("Aborted by pause", "pause")
            return s.retract_all() if mode == "retract" else len(s.running)

        return self.call(run)

    def resume(self) -> Future[None]:
        def run() -> None:
            self._paused = False

        return self.call(run)

    def abort(self, rid: str | None) -> Future[int]:
        """Abort one request (all of its prompts), or all with None; returns how many."""

        def run() -> int:
            if rid is None:
                return self._abort_all("Aborted by request", "request")
            return self._scheduler.abort(list(self._live.get(rid, ())), "Aborted by request", "request")

        return self.call(run)

    def abandon(self, tickets: Iterable[Ticket], cause: str) -> Future[int]:
        """Abort what still runs of ``tickets``: nobody waits for them any more (``cause``: client_gone, timeout)."""
        seqs = [t.seq for t in tickets]

        def run() -> int:
            live = [seq for seq in seqs if seq in self._live.get(seq.request.rid, ())]
            return self._scheduler.abort(live, f"Abandoned: {cause}", cause)

        return self.call(run)

    def _abort_all(self, message: str, cause: str) -> int:
        s = self._scheduler
        unstarted = [seq for seq in s.waiting if not seq.num_output]
        started = [*s.running, *(seq for seq in s.waiting if seq.num_output)]
        return s.abort(started, message, cause) + s.abort(unstarted, f"Abort before prefill: {message}", cause)

    def release_memory(self, meanwhile: str) -> Future[int | None]:
        """Give the KV memory back; ``meanwhile`` requests "wait", are refused ("refuse"), or the first one takes the
        memory again ("resume"). None: requests are running."""

        def run() -> int | None:
            if self._scheduler.running or (self._scheduler.waiting and not self._paused and not self._released):
                return None
            self._released = meanwhile
            return self._scheduler.release_memory()

        return self.call(run)

    def resume_memory(self) -> Future[int]:
        def run() -> int:
            num_bytes = self._scheduler.resume_memory()
            self._released = None
            return num_bytes

        return self.call(run)

    def flush(self) -> Future[bool]:
        """Drop every cached prefix; False (nothing done) while requests run or wait."""

        def run() -> bool:
            if self._scheduler.has_work:
                return False
            self._scheduler.cache.reset_tree()
            return True

        return self.call(run)

    def read_update(self, folder: Path, weight_version: str | None) -> Update:
        """Read and verify new weights without touching the running ones; call it off the event loop and the model
        thread.

        Raises TornWeights, WeightsMismatch, ValueError or OSError; then nothing has changed. Without ``weight_version``
        the folder's manifest names the version, or else its digest does.
        """
        manifest = verify(folder) if read_manifest(folder) is not None else None
        if manifest is not None and weight_version not in (None, manifest.weight_version):
            raise ValueError(f"{folder} holds version {manifest.weight_version}, not {weight_version}")
        version = weight_version or (manifest.weight_version if manifest else f"sha256:{folder_digest(folder)[:16]}")
        return Update(load_decoder(folder, self.config, self.dtype, self._device), version)

    def make_update(self, tensors: Mapping[str, torch.Tensor], version: str) -> Update:
        """Check tensors that came otherwise, as `read_update` does; raises WeightsMismatch."""
        return Update(decoder_from(tensors, self.config, self.dtype, self._device), version)

    def apply_update(self, update: Update, running: str) -> Future[int]:
        """Swap the weights between two steps. Running requests are recomputed with the new weights, "keep" their KV,
        or are aborted; returns how many requests there were."""

        def run() -> int:
            affected = len(self._scheduler.running) + len(self._scheduler.waiting)
            if running == "abort":
                self._abort_all("Aborted by weight update", "weight_update")
            self._scheduler.swap_weights(update.weights, update.version, running == "keep")
            return affected

        return self.call(run)

    def stop(self, timeout_s: float) -> None:
        """Answer what is under way with an error, end the thread; raises TimeoutError when it does not end in time."""
        if self._thread.is_alive():
            self._stopping = True
            self._inbox.put(lambda: None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the model thread did not stop within {timeout_s} s")
        for part in (self.speculation, self._reporter):
            if part is not None:
                part.close()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        last_report = time.monotonic()
        generated = 0
        try:
            while not self._stopping:
                self._drain(block=self._halted or not self._scheduler.has_work)
                if not self._halted and not self._stopping:
                    self._scheduler.step()
                    self._tell_streams()
                    self._tell_load()
                self._deliver()
                now = time.monotonic()
                if now - last_report >= self._report_interval_s:
                    self._tokens_per_s = (self.stats.generated_tokens - generated) / (now - last_report)
                    self._report(self._tokens_per_s)
                    last_report, generated = now, self.stats.generated_tokens
            self._drain(block=False)
            self._fail_all("the server is shutting down; send the request to another")
        except BaseException as error:
            # The thread cannot go on with a half-done step: say why, answer everybody, let /health report it.
            log.exception("model thread failed")
            self._error = error
            self._fail_all(f"the model thread failed: {error!r}")
        self._deliver()

    def _drain(self, block: bool) -> None:
        try:
            job = self._inbox.get(timeout=IDLE_WAIT_S) if block else self._inbox.get_nowait()
            while True:
                job()
                job = self._inbox.get_nowait()
        except queue.Empty:
            return

    @property
    def _halted(self) -> bool:
        return self._paused or self._released is not None

    def _tell_load(self) -> None:
        if self._reporter is not None:
            self._reporter.update(len(self._scheduler.running), len(self._scheduler.waiting))

    def _tell_streams(self) -> None:
        for seq, stream in self._streams.items():
            if len(seq.output) > stream.num_sent:
                self._outbox.append((stream.loop, functools.partial(stream.put, stream.progress(seq))))

    def _deliver(self) -> None:
        if not self._outbox:
            return
        ready, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for loop, job in ready:
            by_loop.setdefault(loop, []).append(job)
        for loop, jobs in by_loop.items():
            loop.call_soon_threadsafe(_run_all, jobs)

    def _fail_all(self, why: str) -> None:
        for seqs in list(self._live.values()):
            for seq in list(seqs):
                seq.fail(why, self._scheduler.version)

    def _report(self, tokens_per_s: float) -> None:
        s = self._scheduler
        self._publisher.emit("server/tokens_per_s", tokens_per_s)
        self._publisher.emit("server/running", len(s.running))
        self._publisher.emit("server/waiting", len(s.waiting))
        self._publisher.emit("server/generated_tokens", s.stats.generated_tokens)
        if s.stats.prompt_tokens:
            self._publisher.emit("server/cache_hit_share", s.stats.cached_tokens / s.stats.prompt_tokens)
        if self.speculation is not None:
            self.speculation.report(self._publisher)


def _resolve(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


def _run_all(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()

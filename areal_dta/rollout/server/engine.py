"""The model thread: steps the scheduler and, between steps, does what the event loop asks for."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from areal_dta.metrics import Publisher
from areal_dta.nn import DecoderConfig, DecoderWeights, load_decoder
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits, StepStats
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, Sequence
from areal_dta.weights import folder_digest, read_manifest, verify

__all__ = ["Engine", "EngineDead", "Update"]

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_WAIT_S = 0.5  # an idle model thread looks this often whether it should stop or report
PAUSE_MODES = ("abort", "in_place", "retract")


class EngineDead(RuntimeError):
    """The model thread has stopped (shutdown, or an error named in the message)."""


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
    ) -> None:
        self.config: DecoderConfig = weights.config
        self.dtype = weights.dtype
        self._device = weights.device
        self._scheduler = Scheduler(weights, version, limits, decode_text)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Completion], Completion]] = []
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
    def stats(self) -> StepStats:
        return self._scheduler.stats

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output together: bounded by the model's positions and by the KV pool."""
        return min(self.config.max_positions, self._scheduler.capacity_tokens)

    def load(self) -> dict[str, int | float]:
        """Numbers for ``/get_server_info``; read without stopping the thread, so only approximately simultaneous."""
        s = self._scheduler
        return {
            "num_running": len(s.running),
            "num_waiting": len(s.waiting),
            "cached_tokens_in_tree": s.cache.num_cached * s.limits.page_size,
            "max_total_tokens": s.capacity_tokens,
            "max_batch": s.limits.max_batch,
            "kv_bytes": s.runner.kv.num_bytes,
            "generated_tokens": s.stats.generated_tokens,
            "prompt_tokens": s.stats.prompt_tokens,
            "prompt_cached_tokens": s.stats.cached_tokens,
            "retractions": s.stats.retractions,
            "steps": s.stats.steps,
        }

    def submit(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        """Queue a request; the future resolves on the calling loop. Cancelling it aborts nothing: `abort` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def done(seq: Sequence, completion: Completion) -> None:
            siblings = self._live.get(request.rid, [])
            if seq in siblings:
                siblings.remove(seq)
            if not siblings:
                self._live.pop(request.rid, None)
            self._done.append((loop, future, completion))

        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else sampling.stop_token_ids | set(self.config.eos_token_ids)
        limit = min(len(request.input_ids) + sampling.max_new_tokens, self.max_sequence_tokens)
        seq = Sequence(request, limit, frozenset(t for t in stop_ids if 0 <= t < self.config.vocab_size), done)

        def add() -> None:
            self._live.setdefault(request.rid, []).append(seq)
            self._scheduler.add(seq)

        self._post(add)
        return future

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
                return self._abort_all("Aborted by pause")
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
                return self._abort_all("Aborted by request")
            return self._scheduler.abort(list(self._live.get(rid, ())), "Aborted by request")

        return self.call(run)

    def _abort_all(self, message: str) -> int:
        s = self._scheduler
        unstarted = [seq for seq in s.waiting if not seq.num_output]
        started = [*s.running, *(seq for seq in s.waiting if seq.num_output)]
        return s.abort(started, message) + s.abort(unstarted, f"Abort before prefill: {message}")

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

    def apply_update(self, update: Update, abort_running: bool) -> Future[int]:
        """Swap the weights between two steps; running requests are aborted or recomputed with the new weights."""

        def run() -> int:
            affected = len(self._scheduler.running) + len(self._scheduler.waiting)
            if abort_running:
                self._abort_all("Aborted by weight update")
            self._scheduler.swap_weights(update.weights, update.version)
            return affected

        return self.call(run)

    def stop(self, timeout_s: float) -> None:
        """Answer what is under way with an error, end the thread; raises TimeoutError when it does not end in time."""
        if not self._thread.is_alive():
            return
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the model thread did not stop within {timeout_s} s")

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        last_report = time.monotonic()
        generated = 0
        try:
            while not self._stopping:
                self._drain(block=self._paused or not self._scheduler.has_work)
                if not self._paused and not self._stopping:
                    self._scheduler.step()
                self._deliver()
                now = time.monotonic()
                if now - last_report >= self._report_interval_s:
                    self._report((self.stats.generated_tokens - generated) / (now - last_report))
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

    def _deliver(self) -> None:
        if not self._done:
            return
        finished, self._done = self._done, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for loop, future, completion in finished:
            by_loop.setdefault(loop, []).append((future, completion))
        for loop, items in by_loop.items():
            loop.call_soon_threadsafe(_resolve, items)

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


def _resolve(items: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, completion in items:
        if not future.done():
            future.set_result(completion)

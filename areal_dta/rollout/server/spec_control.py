"""Speculation of one server as its owner sees it: settings, the drafter in use, and numbers for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_dta.drafter.arms import DEFAULT_ARMS, Arm, available_arms
from areal_dta.drafter.buffer import BufferWriter
from areal_dta.drafter.eagle import EagleWeights
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.drafter.ngram import NgramIndex, NgramLimits
from areal_dta.drafter.step_model import StepCosts, measure_steps
from areal_dta.drafter.tuner import Tuner, TunerSettings
from areal_dta.metrics import Publisher
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.feature_recorder import FeatureRecorder, RecorderSettings
from areal_dta.rollout.server.ngram_drafter import NgramDrafter
from areal_dta.rollout.server.paged_attention import Span
from areal_dta.rollout.server.scheduler import Scheduler
from areal_dta.rollout.server.speculation import Speculator

__all__ = ["DrafterUpdate", "SpecControl", "SpecSettings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpecSettings:
    """How a server speculates. ``drafter`` is a folder of trained weights; without one only n-gram arms play.

    ``buffer`` is the folder that takes samples for the drafter's training (None: nothing is recorded), within
    ``buffer_bytes``; with ``eagle3`` the outputs of three layers are recorded, before there is any drafter as well.
    """

    arms: tuple[Arm, ...] = DEFAULT_ARMS
    drafter: Path | None = None
    tuner: TunerSettings = field(default_factory=TunerSettings)
    ngram: NgramLimits = field(default_factory=NgramLimits)
    buffer: Path | None = None
    buffer_bytes: int = 1 << 30
    recorder: RecorderSettings = field(default_factory=RecorderSettings)
    eagle3: bool = False


@dataclass(frozen=True)
class DrafterUpdate:
    """A drafter read and checked, ready to be installed."""

    weights: EagleWeights
    version: str


class SpecControl:
    """Puts a `Speculator` into ``scheduler``. Only `read` may be called off the model thread once that runs."""

    def __init__(self, scheduler: Scheduler, settings: SpecSettings) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._writer: BufferWriter | None = None
        recorder = None
        if settings.buffer is not None:
            self._writer = BufferWriter(settings.buffer, settings.buffer_bytes)
            recorder = FeatureRecorder(self._writer, settings.recorder, scheduler.version)
        if settings.eagle3:
            scheduler.rebuild((), EagleConfig.for_target(scheduler.runner.weights.config, "eagle3").hidden_layers)
        fitting = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= scheduler.capacity_tokens]
        costs = StepCosts(measure_steps(lambda rows: _step_seconds(scheduler, rows), fitting))
        tuner = Tuner(costs, available_arms(settings.arms, ("ngram",)), settings.tuner)
        uses_ngram = any(arm.drafter == "ngram" for arm in settings.arms)
        ngram = NgramDrafter(NgramIndex(settings.ngram)) if uses_ngram else None
        clock = _clock(scheduler)
        self._speculator = Speculator(scheduler.cache, tuner, ngram, None, recorder, clock)
        scheduler.speculator = self._speculator
        if settings.drafter is not None:
            try:
                self.install(self.read(settings.drafter, None, None))
            except (ValueError, OSError, MemoryError) as error:
                self._speculator.problem = str(error)
                log.warning("decoding goes on without the drafter %s: %s", settings.drafter, error)

    @property
    def drafter_version(self) -> str | None:
        drafter = self._speculator.drafter
        return drafter.version if isinstance(drafter, EagleRuntime) else None

    def read(self, folder: Path, version: str | None, digest: str | None) -> DrafterUpdate:
        """Read and check a drafter without touching the one in use; raises DrafterMismatch, ValueError or OSError."""
        weights, manifest = read_drafter(folder, self._scheduler.runner.weights, expected_digest=digest)
        if version not in (None, manifest.weight_version):
            raise DrafterMismatch(f"{folder} holds drafter version {manifest.weight_version}, not {version}")
        return DrafterUpdate(weights, manifest.weight_version)

    def install(self, update: DrafterUpdate) -> None:
        """Use a drafter from the next step on. The first one makes running requests compute their prompts again.

        MemoryError when there is no room for its KV: then there is no drafter."""
        drafter, scheduler = self._speculator.drafter, self._scheduler
        if self._speculator.recorder is not None and bool(update.weights.config.hidden_layers) != self._settings.eagle3:
            raise DrafterMismatch(
                f"drafter {update.version} is of kind {update.weights.config.kind}, but this server records what the "
                "training of another kind needs; set tlt.kind"
            )
        if isinstance(drafter, EagleRuntime) and drafter.fits(update.weights):
            drafter.swap(update.weights, update.version)
        else:
            config = update.weights.config
            # Until the new one is in place there is none: should it not fit, decoding goes on without.
            self._speculator.drafter = None
            self._speculator.tuner.set_arms(available_arms(self._settings.arms, ("ngram",)))
            had_memory = scheduler.runner.kv.num_bytes > 0
            try:
                scheduler.rebuild(((config.num_kv_heads, config.head_dim),), config.hidden_layers)
                self._speculator.drafter = EagleRuntime(scheduler.runner, update.weights, update.version)
            except (RuntimeError, MemoryError) as error:
                if had_memory:
                    scheduler.runner.kv.restore()
                self._speculator.problem = f"no memory for drafter {update.version}; lower max_total_tokens ({error})"
                raise MemoryError(self._speculator.problem) from error
        self._speculator.tuner.set_arms(available_arms(self._settings.arms, ("ngram", "eagle")))
        self._speculator.tuner.new_version("eagle")
        self._speculator.problem = None
        log.info("drafter %s in use", update.version)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def report(self, publisher: Publisher) -> None:
        """What the dashboard and the summary show; may be asked for while the model thread runs."""
        stats = self._speculator.stats
        publisher.emit("tlt/accept_length", stats.accept_length)
        publisher.emit("tlt/draft_steps", stats.sequence_steps)
        publisher.emit("tlt/drafted_tokens", stats.drafted_tokens)
        publisher.emit("tlt/accepted_tokens", stats.accepted_tokens)
        publisher.emit("tlt/loss_to_plain", self._speculator.tuner.loss_to_plain)
        for arm, steps in list(stats.steps_by_arm.items()):
            publisher.emit("tlt/steps", steps, arm=arm)
            publisher.emit("tlt/seconds", stats.seconds_by_arm.get(arm, 0.0), arm=arm)
            publisher.emit("tlt/tokens", stats.tokens_by_arm[arm], arm=arm)

    def snapshot(self) -> dict[str, Any]:
        """Cumulative numbers, read while the model thread runs, so only approximately simultaneous."""
        stats = self._speculator.stats
        taken = dict(self._writer.counters) if self._writer is not None else {}
        return {
            "drafter_version": self.drafter_version,
            "problem": self._speculator.problem,
            "accept_length": stats.accept_length,
            "draft_steps": stats.sequence_steps,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "starved": stats.starved,
            "steps_by_arm": dict(stats.steps_by_arm),
            "buffer": taken,
            "tuner": self._speculator.tuner.snapshot(),
        }


def _step_seconds(scheduler: Scheduler, num_rows: int) -> float:
    """A decoding step of ``num_rows`` rows over pages that nobody uses yet, vocabulary head included."""
    cache, runner = scheduler.cache, scheduler.runner
    pages = cache.allocate(-(-num_rows // cache.page_size))
    try:
        clock = _clock(scheduler)
        start = clock()
        hidden_TD = runner.forward([Span(pages, 0, num_rows)], [0] * num_rows)
        runner.logits(hidden_TD, range(num_rows)).argmax(-1).tolist()
        return clock() - start
    finally:
        cache.give_back(pages)


def _clock(scheduler: Scheduler) -> Callable[[], float]:
    """On a CPU the model thread's processor time: what else the machine does must not choose the arms."""
    return time.thread_time if scheduler.runner.weights.device.type == "cpu" else time.perf_counter

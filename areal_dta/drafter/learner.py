"""A drafter in training on buffered samples: draws micro-batches, keeps the heads they need, stays within a time.

Legend of shape suffixes: T tokens, F feature width, D hidden.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_dta.drafter.averaging import Share
from areal_dta.drafter.buffer import BufferReader, is_held_out
from areal_dta.drafter.buffer_files import FrozenTarget, Sample, find_version
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.drafter.packing import DraftSample, PackedBatch
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import UnsupportedModel, WeightsMismatch

__all__ = ["Learner", "LearnerSettings", "crop"]

log = logging.getLogger(__name__)
HEADS_KEPT = 3


@dataclass(frozen=True)
class LearnerSettings:
    """A micro-step should take ``micro_step_s``: it bounds how long preemption takes. Its tokens follow from that.

    ``duty`` is the share of the time spent computing: servers on other cores share memory bandwidth and caches with it.
    """

    micro_step_s: float = 0.3
    min_micro_tokens: int = 32
    max_micro_tokens: int = 4096
    duty: float = 0.6
    first_micro_tokens: int = 128


class Learner:
    """``target_folders``: where folders of policy versions are found, each with its manifest; the first is the model
    itself, which may have none and is then version ``start_version``."""

    def __init__(
        self,
        trainer: DrafterTrainer,
        reader: BufferReader,
        target_folders: Sequence[Path],
        settings: LearnerSettings,
        seed: int,
        start_version: str = "",
    ) -> None:
        self.trainer, self.reader = trainer, reader
        self._folders, self._settings = list(target_folders), settings
        self._start_version = start_version
        self._rng = random.Random(seed)
        self._micro_tokens = settings.first_micro_tokens
        self._tokens_per_s = settings.first_micro_tokens / settings.micro_step_s  # of the last whole micro-step
        self._heads: OrderedDict[str, FrozenTarget] = OrderedDict()
        self._places: dict[str, Path] = {}
        self._refused: set[str] = set()
        self._version = ""
        self.last_tokens = 0  # of the last micro-step
        self.longest_micro_step_s = 0.0
        self.rest_s = 0.0  # to be waited after the last micro-step
        self.counters: Counter[str] = Counter()

    def refresh(self) -> int:
        """Look at the buffer again; returns how many samples can be trained on (their version's head is there)."""
        self.reader.refresh()
        versions = self.reader.versions()
        self._places = {v: p for v, p in self._places.items() if v in versions and p.exists()}
        for version in versions:
            if version not in self._places and version not in self._refused:
                is_start = version == self._start_version
                folder = self._folders[0] if is_start else find_version(self._folders, version)
                if folder is not None:
                    self._places[version] = folder
        ready = self._ready()
        return sum(1 for e in self.reader.entries if e.policy_version in ready and not is_held_out(e))

    def _ready(self) -> set[str]:
        return (set(self._places) | set(self._heads)) - self._refused

    def micro_step(self, limit_s: float = math.inf) -> Share | None:
        """Summed gradients of one packed micro-batch, None when there is nothing to learn from. One that is to be ready
        within ``limit_s`` may have fewer tokens."""
        within = self._tokens_per_s * max(0.0, limit_s)
        is_whole = within >= self._micro_tokens
        num_tokens = self._micro_tokens if is_whole else max(int(within), self._settings.min_micro_tokens)
        batch = self._draw(num_tokens, False, self._rng)
        if batch is None or not bool(batch.loss_T.any()):
            return None
        self.last_tokens = batch.num_tokens
        start_s = time.perf_counter()
        found = self.trainer.gradients([batch])
        took_s = time.perf_counter() - start_s
        self.longest_micro_step_s = max(self.longest_micro_step_s, took_s)
        self.rest_s = took_s * (1 - self._settings.duty) / self._settings.duty
        if is_whole:
            self._tokens_per_s = batch.num_tokens / max(took_s, 1e-6)
            self._resize()
        return Share(found.mean_P * found.num_rows, found.num_rows, found.loss * found.num_rows, found.scores)

    def apply(self, share: Share) -> None:
        """One optimiser step with the mean; raises NonFiniteGradient or DrafterMismatch and changes nothing."""
        self.trainer.apply(share.sum_P / max(1, share.num_rows))

    def _resize(self) -> None:
        """Towards the wanted duration, upwards with care: one measurement may be lucky."""
        wanted = min(self._tokens_per_s * self._settings.micro_step_s, self._micro_tokens * 1.25)
        low, high = self._settings.min_micro_tokens, self._settings.max_micro_tokens
        self._micro_tokens = int(min(max(wanted, low), high))

    def held_out(self) -> PackedBatch | None:
        """A micro-batch to measure accuracy on, the same until the buffer changes; None: nothing is held out yet."""
        return self._draw(self._micro_tokens, True, random.Random(0))

    def top3(self, batch: PackedBatch, folder: Path | None = None) -> float:
        """Top-3 accuracy on ``batch``, just drawn, of the drafter in training or of the one in ``folder``.

        Raises DrafterMismatch when that one cannot be read.
        """
        trainer = self.trainer
        if folder is not None:
            head = self._heads[self._version].weights
            weights, _ = read_drafter(folder, head)
            trainer = DrafterTrainer(weights, head, settings=self.trainer.settings)
        return float(trainer.evaluate([batch], num_steps=1).rates()["top3"])

    def _draw(self, max_tokens: int, held_out: bool, rng: random.Random) -> PackedBatch | None:
        while True:
            batch = self.reader.sample(max_tokens, self._ready(), held_out, rng)
            if batch is None:
                return None
            if self._use_head(batch.policy_version):
                return PackedBatch.of([crop(s, max_tokens, rng) for s in batch.samples])

    def _use_head(self, version: str) -> bool:
        """Train against the head of ``version``; False: it cannot be had, its samples are passed over from now on."""
        try:
            head = self._heads.get(version)
            if head is None:
                head = FrozenTarget.load(self._places[version], version)
                self._heads[version] = head
                while len(self._heads) > HEADS_KEPT:
                    self._heads.popitem(last=False)
            if version != self._version:
                self.trainer.set_target(head.weights)
                self._version = version
            return True
        except (OSError, WeightsMismatch, UnsupportedModel, DrafterMismatch) as error:
            self._heads.pop(version, None)
            self._refused.add(version)
            self.counters["refused_version"] += 1
            log.warning("samples of version %s cannot be used: %s", version, error)
            return False

    def follow_latest(self) -> None:
        """Take copied head rows from the newest version there are samples of; before publishing."""
        for version in self.reader.versions():
            if version in self._ready() and self._use_head(version):
                return


def crop(sample: Sample, max_tokens: int, rng: random.Random) -> DraftSample:
    """A window of at most ``max_tokens`` tokens over the loss span, at a random place, in fp32.

    A window that begins inside the sequence has no feature before its first token, so nothing is learned there.
    """
    start = 0
    if sample.num_tokens > max_tokens:
        lowest = max(0, min(sample.loss_start, sample.num_tokens) - max_tokens // 2)
        highest = max(lowest, sample.loss_end - max_tokens)
        start = rng.randint(lowest, highest)
    stop = min(sample.num_tokens, start + max_tokens)
    return DraftSample(
        ids_T=sample.ids_T[start:stop],
        features_TF=sample.features_TF[start:stop].to(torch.float32),
        loss_start=min(max(sample.loss_start - start, 1 if start else 0), stop - start),
        loss_end=max(min(sample.loss_end, stop) - start, min(max(sample.loss_start - start, 1), stop - start)),
        hidden_TD=None if sample.hidden_TD is None else sample.hidden_TD[start:stop].to(torch.float32),
    )

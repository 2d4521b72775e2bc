"""Where drafters speculate and learn: a scheduler that records its rollouts, and a trainer on what was recorded.

Legend of shape suffixes: T tokens, B sequences, L their length, D hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.buffer import BufferReader, BufferWriter
from areal_dta.drafter.eagle import EagleWeights
from areal_dta.drafter.learner import crop
from areal_dta.drafter.packing import DraftSample, PackedBatch
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.feature_recorder import FeatureRecorder, RecorderSettings
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import SpecStats, Speculator
from scripts.benchlib.drift_world import EOS, Document, hidden_states
from scripts.benchlib.spec_play import FixedArm

__all__ = ["Rollout", "Site", "Student", "samples_of"]

MAX_BATCH = 96
BUFFER_BYTES = 128 << 20


class _ConstantTuner(FixedArm):
    def new_version(self) -> None:
        """There is nothing to age."""


@dataclass(frozen=True)
class Rollout:
    """``accept_length``: tokens per sequence and verification, the target's own included."""

    docs: tuple[Document, ...]
    accept_length: float


class Site:
    """A scheduler that speculates with one arm. With ``folder`` its rollouts are recorded there for training."""

    def __init__(self, target: DecoderWeights, drafter: EagleWeights, arm: Arm, folder: Path | None = None) -> None:
        self._scheduler = Scheduler(target, "drift:0", SchedulerLimits(MAX_BATCH, MAX_BATCH * 256))
        config = drafter.config
        self._scheduler.rebuild(((config.num_kv_heads, config.head_dim),), config.hidden_layers)
        self._runtime = EagleRuntime(self._scheduler.runner, drafter, "0")
        self._writer = None if folder is None else BufferWriter(folder, BUFFER_BYTES, queue_samples=4096)
        recorder = None
        if self._writer is not None:
            recorder = FeatureRecorder(self._writer, RecorderSettings(), self._scheduler.version)
        tuner = _ConstantTuner(arm)
        cache = self._scheduler.cache
        self._speculator = Speculator(cache, tuner, None, self._runtime, recorder)  # type: ignore[arg-type]
        self._scheduler.speculator = self._speculator

    @property
    def version(self) -> str:
        return self._scheduler.version

    def set_target(self, target: DecoderWeights, update: int) -> None:
        """The policy was updated; the drafter stays what it is."""
        self._scheduler.swap_weights(target, f"drift:{update}")

    def set_drafter(self, drafter: EagleWeights) -> None:
        self._runtime.swap(drafter, self._scheduler.version)

    def roll(self, prompts: Sequence[tuple[int, ...]], seed: int, max_tokens: int) -> Rollout:
        """Continue ``prompts`` at T = 1; the answers depend on ``seed`` and the target, not on the drafter."""
        sampling = SamplingParams(max_new_tokens=max_tokens)
        done: dict[str, Completion] = {}

        def finish(seq: ServerSequence, completion: Completion) -> None:
            done[seq.request.rid] = completion

        self._speculator.stats = SpecStats()
        for i, prompt in enumerate(prompts):
            request = GenerationRequest(str(i), prompt, sampling, seed * 1_000_003 + i)
            self._scheduler.add(ServerSequence(request, len(prompt) + max_tokens, frozenset({EOS}), finish))
        while self._scheduler.has_work:
            self._scheduler.step()
        if self._writer is not None:
            self._writer.flush(timeout_s=60.0)
        docs = tuple(Document(p + done[str(i)].output_ids, len(p)) for i, p in enumerate(prompts))
        return Rollout(docs, self._speculator.stats.accept_length)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@torch.no_grad()
def samples_of(target: DecoderWeights, docs: Sequence[Document]) -> list[PackedBatch]:
    """The documents as evaluation batches."""
    _, hidden_BLD = hidden_states(target, docs)
    samples = [
        DraftSample(torch.tensor(d.ids), hidden_LD[: len(d.ids)], d.prompt_len - 1, len(d.ids))
        for d, hidden_LD in zip(docs, hidden_BLD, strict=True)
    ]
    return [PackedBatch.of(samples[i : i + 16]) for i in range(0, len(samples), 16)]


class Student:
    """A drafter in training on the samples of ``folder``, as many steps at a time as its caller grants."""

    def __init__(self, trainer: DrafterTrainer, folder: Path, batch_tokens: int, seed: int) -> None:
        self.trainer = trainer
        self.num_tokens = 0  # trained on so far
        self._reader = BufferReader(folder, seed)
        self._rng = random.Random(seed)
        self._batch_tokens = batch_tokens

    def train(self, num_steps: int, targets: dict[str, DecoderWeights]) -> EagleWeights:
        """``targets``: the policies whose samples may be used, by version. The trainer is left at the newest one."""
        self._reader.refresh()
        for _ in range(num_steps):
            batch = self._reader.sample(self._batch_tokens, set(targets))
            if batch is None:
                raise RuntimeError(f"no samples of versions {', '.join(targets)} to train on; record rollouts first")
            self.trainer.set_target(targets[batch.policy_version])
            self.trainer.step([PackedBatch.of([crop(s, self._batch_tokens, self._rng) for s in batch.samples])])
            self.num_tokens += batch.num_tokens
        self.trainer.set_target(targets[max(targets, key=lambda v: int(v.rpartition(":")[2]))])
        return self.trainer.weights()

    def top3(self, batches: Sequence[PackedBatch]) -> float:
        return self.trainer.evaluate(batches, num_steps=1).rates()["top3"]

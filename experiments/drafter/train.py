"""Train a drafter on collected answers and say how often it is right on answers to prompts it has not seen.

The state is saved after every epoch and every few minutes; a repeated call goes on from there. The drafter is written
whenever the state is, so there is a usable one early.

Legend of shape suffixes: T tokens, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from areal_dta.drafter.draft_vocab import count_tokens, covered_share, frequent_tokens
from areal_dta.drafter.eagle import EagleWeights, init_weights, trained_tensors, with_tensors
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig, sglang_obstacles
from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.drafter.losses import DraftScores
from areal_dta.drafter.packing import DraftSample, PackedBatch, pack
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights

__all__ = ["Acceptance", "TrainSettings", "Trained", "choose_vocabulary", "measure", "train"]

Report = Callable[[str], None]
STATE_FILE, PROGRESS_FILE = "state.safetensors", "progress.json"
REPORT_EVERY_S = 20.0
CHAIN = 5  # drafted tokens of the simulated chains
LAST_RATE = 0.05  # of the learning rate, at the end
RATE_STEPS = 16  # the rate is lowered this often
DRAFT_VOCAB = 4096
PROMPT_WEIGHT = 0.1  # of a prompt's token in the choice of the vocabulary, against one of an answer


@dataclass(frozen=True)
class TrainSettings:
    """``batch_tokens`` per optimisation step; the rate falls from ``learning_rate`` along half a cosine. Every answer
    is preceded by at most ``context`` tokens of its prompt. ``portable``: of parts that SGLang's drafter classes can
    load as well. ``draft_vocab`` None: as many tokens as the drafter to start from has, else DRAFT_VOCAB. ``seconds``
    bounds one call."""

    kind: str = "eagle"
    draft_vocab: int | None = None
    portable: bool = False
    epochs: int = 6
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    context: int = 256
    seconds: float = 1e9
    save_every_s: float = 180.0
    seed: int = 0


@dataclass(frozen=True)
class Acceptance:
    """On held-out answers: the first drafted token's accuracy, and of chains drafted greedily below every position the
    share ``by_position[j]`` whose first j + 1 tokens are right."""

    top1: float
    top3: float
    by_position: tuple[float, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per verification, the target's own included."""
        return 1.0 + sum(self.by_position)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "accept_length": self.accept_length}


@dataclass(frozen=True)
class Trained:
    """What came of all calls together."""

    epochs: float
    num_steps: int
    seconds: float
    covered: float  # share of the held-out answers' tokens that the draft vocabulary holds
    acceptance: Acceptance
    complete: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance.to_json()}


def choose_vocabulary(samples: Sequence[DraftSample], target: DecoderWeights, size: int) -> torch.Tensor:
    """Ids (Vd,): the ends of a turn, then what the answers (and a little what the prompts) say most often."""
    vocab_size = target.config.vocab_size
    said_V = count_tokens((s.ids_T[s.loss_start + 1 :].numpy() for s in samples), vocab_size)
    prompt_V = count_tokens((s.ids_T[: s.loss_start + 1].numpy() for s in samples), vocab_size)
    counts_V = (said_V / PROMPT_WEIGHT + prompt_V).astype(np.int64)
    return torch.from_numpy(frequent_tokens(counts_V, size, target.config.eos_token_ids))


def measure(trainer: DrafterTrainer, batches: Sequence[PackedBatch], chain: int = CHAIN) -> Acceptance:
    """Chains of every length up to ``chain``; the difference between two lengths is one position's share."""
    lengths = [1.0]
    for num_steps in range(1, chain + 1):
        rates = trainer.evaluate(batches, num_steps).rates()
        lengths.append(max(lengths[-1], rates["accept_length"]))
    shares = tuple(b - a for a, b in pairwise(lengths))
    return Acceptance(rates["top1"], rates["top3"], shares)


def train(
    target: DecoderWeights,
    samples: Sequence[DraftSample],
    held_out: Sequence[DraftSample],
    out: Path,
    work: Path,
    settings: TrainSettings,
    report: Report = print,
    start: EagleWeights | None = None,
) -> Trained:
    """Train and write the drafter to ``out``; ``work`` holds the state. ``start``: a drafter to go on from, whose parts
    are kept, and whose vocabulary unless the settings have another; eagle and hass are the same network, so the one may
    become the other. Raises DrafterMismatch."""
    return _Training(target, samples, held_out, out, work, settings, report, start).run()


class _Training:
    def __init__(
        self,
        target: DecoderWeights,
        samples: Sequence[DraftSample],
        held_out: Sequence[DraftSample],
        out: Path,
        work: Path,
        settings: TrainSettings,
        report: Report,
        start: EagleWeights | None,
    ) -> None:
        self._settings, self._report = settings, report
        self._samples, self._out, self._work = list(samples), out, work
        self._held_out = pack([_in_fp32(s) for s in held_out], settings.batch_tokens)
        self._start = (
            _untrained(target, samples, settings) if start is None else _continued(start, target, samples, settings)
        )
        said_V = count_tokens((s.ids_T[s.loss_start + 1 :].numpy() for s in held_out), target.config.vocab_size)
        ids_Vd = self._start.draft_ids_Vd
        self._covered = 1.0 if ids_Vd is None else covered_share(said_V, ids_Vd.numpy())
        self._num_tokens = sum(s.num_tokens for s in samples)
        self._steps_in_all = sum(len(self._batches(epoch)) for epoch in range(settings.epochs))
        self._done = 0  # steps
        self._earlier_s = 0.0
        self._trainer = DrafterTrainer(self._start, target, self._rate())

    def _batches(self, epoch: int) -> list[list[int]]:
        """Indices of the samples of every step: packed first-fit, so that steps have about the same size."""
        order = list(range(len(self._samples)))
        random.Random(f"{self._settings.seed}-{epoch}").shuffle(order)
        groups: list[list[int]] = [[]]
        size = 0
        for index in order:
            tokens = self._samples[index].num_tokens
            if groups[-1] and size + tokens > self._settings.batch_tokens:
                groups.append([])
                size = 0
            groups[-1].append(index)
            size += tokens
        return groups

    def _schedule(self) -> Iterator[list[int]]:
        """The samples of the steps that are left."""
        number = 0
        for epoch in range(self._settings.epochs):
            for group in self._batches(epoch):
                number += 1
                if number > self._done:
                    yield group

    def _rate(self) -> float:
        share = int(RATE_STEPS * self._done / max(1, self._steps_in_all)) / RATE_STEPS
        return self._settings.learning_rate * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)

    def run(self) -> Trained:
        self._resume()
        settings = self._settings
        began_s = told_s = saved_s = time.monotonic()
        first, num_tokens, scores = self._done, 0, DraftScores()
        for group in self._schedule():
            rate = self._trainer.learning_rate = self._rate()
            batch = PackedBatch.of([_in_fp32(self._samples[i]) for i in group])
            scores = scores + self._trainer.step([batch]).scores
            self._done += 1
            num_tokens += batch.num_tokens
            now_s = time.monotonic()
            if now_s - told_s > REPORT_EVERY_S:
                told_s = now_s
                self._tell(first, num_tokens, now_s - began_s, scores, rate)
                scores = DraftScores()
            if now_s - saved_s > settings.save_every_s:
                saved_s = now_s
                self._save(self._earlier_s + now_s - began_s)
            if now_s - began_s > settings.seconds:
                break
        self._earlier_s += time.monotonic() - began_s
        self._save(self._earlier_s)
        acceptance = measure(self._trainer, self._held_out)
        epochs = self._done / max(1, self._steps_in_all) * settings.epochs
        complete = self._done >= self._steps_in_all
        return Trained(epochs, self._done, self._earlier_s, self._covered, acceptance, complete)

    def _tell(self, first: int, num_tokens: int, seconds: float, scores: DraftScores, rate: float) -> None:
        left_s = (self._steps_in_all - self._done) * seconds / (self._done - first)
        rates = scores.rates()
        self._report(
            f"step {self._done} of {self._steps_in_all}, {num_tokens / seconds:.0f} tokens/s, {left_s:.0f} s left, "
            f"rate {rate:.1e}, top-1 {rates['top1']:.3f}, top-3 {rates['top3']:.3f}, "
            f"token loss {rates['token_loss']:.3f}"
        )

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        kept = {k: v for k, v in asdict(self._settings).items() if k not in ("seconds", "save_every_s")}
        kept["draft_vocab"] = self._start.config.num_draft_tokens
        return {**kept, "num_samples": len(self._samples), "num_tokens": self._num_tokens}

    def _resume(self) -> None:
        path = self._work / PROGRESS_FILE
        if not path.exists():
            return
        progress = json.loads(path.read_text())
        if {"portable": False} | progress["identity"] != self._identity():  # older states do not say so
            self._report(f"{path} is of other settings or other samples: starting anew")
            return
        self._done, self._earlier_s = progress["steps"], progress["seconds"]
        self._trainer.load_state_dict(load_file(self._work / progress["state"]))
        self._report(f"going on after step {self._done} of {self._steps_in_all}")

    def _save(self, seconds: float) -> None:
        """The state first, then the file that names it: a crash in between leaves the older pair."""
        self._work.mkdir(parents=True, exist_ok=True)
        name = f"{self._done}-{STATE_FILE}"
        save_file(self._trainer.state_dict(), self._work / name)
        progress = {"identity": self._identity(), "steps": self._done, "seconds": seconds, "state": name}
        partial = self._work / f".{PROGRESS_FILE}"
        partial.write_text(json.dumps(progress, indent=1))
        os.replace(partial, self._work / PROGRESS_FILE)
        for old in self._work.glob(f"*-{STATE_FILE}"):
            if old.name != name:
                old.unlink()
        write_drafter(self._out, self._trainer.weights(), f"{self._settings.kind}-{self._done}")


def _untrained(target: DecoderWeights, samples: Sequence[DraftSample], settings: TrainSettings) -> EagleWeights:
    size, ids_Vd = _vocabulary(target, samples, DRAFT_VOCAB if settings.draft_vocab is None else settings.draft_vocab)
    config = EagleConfig.for_target(target.config, settings.kind, size, portable=settings.portable)
    return init_weights(config, target, torch.Generator().manual_seed(settings.seed), ids_Vd)


def _vocabulary(target: DecoderWeights, samples: Sequence[DraftSample], size: int) -> tuple[int, torch.Tensor | None]:
    """Size and ids (Vd,) for `EagleConfig`; the whole vocabulary is 0 and None."""
    if size == 0 or size >= target.config.vocab_size:
        return 0, None
    return size, choose_vocabulary(samples, target, size)


def _continued(
    start: EagleWeights, target: DecoderWeights, samples: Sequence[DraftSample], settings: TrainSettings
) -> EagleWeights:
    kind = settings.kind
    if start.config.kind != kind and "eagle3" in (start.config.kind, kind):
        raise DrafterMismatch(f"a drafter of kind {start.config.kind} cannot go on as {kind}; leave --start out")
    config = replace(start.config, kind=kind)
    obstacles = sglang_obstacles(config)
    if settings.portable and obstacles:
        raise DrafterMismatch(
            f"the drafter to start from has {', '.join(obstacles)}, so it cannot go on as a portable one; leave out "
            "--start, to train a new one, or --portable"
        )
    start = replace(start, config=config)
    if settings.draft_vocab is None:
        return start
    size, ids_Vd = _vocabulary(target, samples, settings.draft_vocab)
    if size == config.draft_vocab_size:
        return start
    if config.trains_head:
        raise DrafterMismatch(
            f"the drafter to start from has a trained head of {config.num_draft_tokens} tokens, not "
            f"{settings.draft_vocab}; leave out --draft-vocab or --start"
        )
    recut = init_weights(replace(config, draft_vocab_size=size), target, torch.Generator(), ids_Vd)
    return with_tensors(recut, trained_tensors(start))


def _in_fp32(sample: DraftSample) -> DraftSample:
    """Samples stay in 16 bits until they are used."""
    hidden_TD = None if sample.hidden_TD is None else sample.hidden_TD.float()
    return DraftSample(sample.ids_T, sample.features_TF.float(), sample.loss_start, sample.loss_end, hidden_TD)

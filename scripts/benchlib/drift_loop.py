"""The updates of `bench.py drift`, one after the other, with every drafter's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights
from scripts.benchlib.drift_site import Rollout, Site, Student, samples_of
from scripts.benchlib.drift_world import Language, Policy, policy_distance
from scripts.benchlib.report import progress

__all__ = ["QUICK", "Converged", "Curves", "Drafters", "DriftLoop", "DriftSettings", "converge"]


@dataclass(frozen=True)
class DriftSettings:
    """``rate``: learning rate of drafters; ``last_share``: of all slots, rewarded at the end."""

    teach_steps: int = 450
    first_rollouts: int = 256
    first_steps: int = 500
    rollouts: int = 64  # per update
    response_tokens: int = 72
    curve_prompts: int = 96
    final_prompts: int = 192
    policy_steps: int = 10  # per update
    policy_rate: float = 2e-3
    last_share: float = 0.8
    batch_tokens: int = 512
    rate: float = 2e-3
    last_rollouts: int = 512
    round_steps: int = 80
    max_rounds: int = 32


QUICK = DriftSettings(
    teach_steps=15,
    first_rollouts=24,
    first_steps=20,
    rollouts=16,
    response_tokens=10,
    curve_prompts=8,
    final_prompts=16,
    policy_steps=8,
    policy_rate=4e-3,
    batch_tokens=256,
    last_rollouts=16,
    round_steps=8,
    max_rounds=2,
)
PATIENCE, MIN_RISE = 2, 0.01  # rounds without a rise of accept length by this much end a learning rate
RATE_CUT, NUM_CUTS = 0.3, 2
WARMUP_STEPS = 20
FINAL_SEED, ROUND_SEED = 7, 8


@dataclass
class Curves:
    """One value per update."""

    kl_to_start: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)  # per token, before the update
    top3_before: list[float] = field(default_factory=list)
    top3_after: list[float] = field(default_factory=list)
    top3_recovered: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)  # accept length of the rollouts, before the drafter has learnt
    adapted: list[float] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    extra_first: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Drafters:
    """What drafts at the end of an update."""

    frozen: EagleWeights
    adapted: EagleWeights
    extra_first: EagleWeights


@dataclass(frozen=True)
class Converged:
    """A drafter trained until nothing was gained: its accept length, that after each round on other prompts, the round
    it was taken from, and whether it did stop rising before the rounds were used up."""

    accept_length: float
    round_lengths: list[float]
    best_round: int
    stopped_rising: bool


class DriftLoop:
    """Everything up to the first update happens in the constructor, one update in each call of `update`."""

    def __init__(self, settings: DriftSettings, arm: Arm, kind: str, seed: int, folder: Path) -> None:
        self.settings, self.arm, self.kind, self.seed, self.folder = settings, arm, kind, seed, folder
        self._rng = np.random.default_rng(seed + 1)
        self._language = Language(seed, settings.last_share)
        self._curve_prompts = self._language.prompts(settings.curve_prompts, self._rng)
        self.final_prompts = self._language.prompts(settings.final_prompts, self._rng)
        self.round_prompts = self._language.prompts(settings.final_prompts // 2, self._rng)
        self.curves = Curves()
        self.num_different = 0  # outputs that differ from one drafter to the next; there must be none
        self._policy = Policy(seed)
        loss = self._policy.teach(self._language, settings.teach_steps, self._rng)
        self.target = self._first = first = self._policy.weights()
        progress(f"policy taught, loss {loss:.2f}")
        trainer = self.trainer(self.untrained(seed))
        self._first_site = Site(first, trainer.weights(), arm, folder / "first")
        self.roll(self._first_site, settings.first_rollouts, 10_000)
        self.extra = Student(trainer, folder / "first", settings.batch_tokens, seed)
        frozen = self.extra.train(settings.first_steps, {self._first_site.version: first})
        self._first_site.set_drafter(frozen)
        self.first_tokens = self.extra.num_tokens
        progress(f"first drafter trained, {self.first_tokens} tokens")
        self.adapted = Student(self.trainer(trainer), folder / "actor", settings.batch_tokens, seed)
        self._actor = Site(first, frozen, arm, folder / "actor")
        self._rollout = self.roll(self._actor, settings.rollouts, 0)
        self.start_length = self._rollout.accept_length
        self._known = {self._actor.version: first}  # the last two policies
        self._top3 = self.adapted.top3(samples_of(first, self._measure_curve(frozen).docs))
        self.drafters = Drafters(frozen, frozen, frozen)

    def update(self, progress_share: float, num_steps: int) -> None:
        """Update the policy, roll out, and let the adapted drafter and the first policy's learn ``num_steps`` steps."""
        curves, settings, language = self.curves, self.settings, self._language
        number = len(curves.reward) + 1
        policy_steps, rate = settings.policy_steps, settings.policy_rate
        curves.reward.append(
            self._policy.improve(language, self._rollout.docs, progress_share, self._first, policy_steps, rate)
        )
        self.target = self._policy.weights()
        self._actor.set_target(self.target, number)
        self._known = {**dict(list(self._known.items())[-1:]), self._actor.version: self.target}
        self._rollout = self.roll(self._actor, settings.rollouts, number)
        curves.served.append(self._rollout.accept_length)
        self.roll(self._first_site, settings.rollouts, number)
        played = self._measure_curve(self.drafters.frozen)
        curves.frozen.append(played.accept_length)
        curves.kl_to_start.append(policy_distance(self.target, self._first, played.docs))
        self._adapt(played, num_steps)
        for name in ("adapted", "extra_first"):
            other = self._measure_curve(getattr(self.drafters, name))
            getattr(curves, name).append(other.accept_length)
            self.num_different += sum(a != b for a, b in zip(other.docs, played.docs, strict=True))
        progress(self._line(number))

    def _adapt(self, played: Rollout, num_steps: int) -> None:
        """Top-3 accuracy on the new policy's answers before and after learning."""
        batches = samples_of(self.target, played.docs)
        self.adapted.trainer.set_target(self.target)
        self.curves.top3_before.append(self._top3)
        self.curves.top3_after.append(self.adapted.top3(batches))
        weights = self.adapted.train(num_steps, self._known)
        self._actor.set_drafter(weights)
        self._top3 = self.adapted.top3(batches)
        self.curves.top3_recovered.append(self._top3)
        extra = self.extra.train(num_steps, {self._first_site.version: self._first})
        self.drafters = Drafters(self.drafters.frozen, weights, extra)

    def close(self) -> None:
        self._actor.close()
        self._first_site.close()

    def roll(self, site: Site, count: int, number: int) -> Rollout:
        """New prompts answered at ``site``."""
        prompts = self._language.prompts(count, self._rng)
        return site.roll(prompts, 1_000 + self.seed * 100_000 + number, self.settings.response_tokens)

    def measure(self, drafter: EagleWeights, prompts: Sequence[tuple[int, ...]], seed: int) -> Rollout:
        """On the present policy, with KV computed from nothing: no other drafter's is left in the pages."""
        return Site(self.target, drafter, self.arm).roll(prompts, seed, self.settings.response_tokens)

    def _measure_curve(self, drafter: EagleWeights) -> Rollout:
        return self.measure(drafter, self._curve_prompts, self.seed)

    def untrained(self, seed: int) -> EagleWeights:
        config = EagleConfig.for_target(self.target.config, self.kind)
        return init_weights(config, self.target, torch.Generator().manual_seed(seed))

    def trainer(self, start: EagleWeights | DrafterTrainer, rate: float | None = None) -> DrafterTrainer:
        """For a new drafter, or going on with another trainer's, optimizer state included."""
        weights = start.weights() if isinstance(start, DrafterTrainer) else start
        new = DrafterTrainer(weights, self.target, rate or self.settings.rate, warmup_steps=WARMUP_STEPS)
        if isinstance(start, DrafterTrainer):
            new.load_state_dict(start.state_dict())
        return new

    def _line(self, number: int) -> str:
        c = self.curves
        return (
            f"update {number}: KL {c.kl_to_start[-1]:.2f}, reward {c.reward[-1]:.3f}, top-3 {c.top3_before[-1]:.3f} > "
            f"{c.top3_after[-1]:.3f} > {c.top3_recovered[-1]:.3f}; accept length adapted {c.adapted[-1]:.2f} "
            f"(served {c.served[-1]:.2f}), frozen {c.frozen[-1]:.2f}, extra_first {c.extra_first[-1]:.2f}"
        )


def converge(loop: DriftLoop) -> dict[str, Converged]:
    """Train on many rollouts of the last policy, from the adapted drafter and from scratch."""
    site = Site(loop.target, loop.drafters.adapted, loop.arm, loop.folder / "last")
    loop.roll(site, loop.settings.last_rollouts, 20_000)
    site.close()
    starts = {
        "from_adapted": loop.trainer(loop.adapted.trainer),
        "from_scratch": loop.trainer(loop.untrained(loop.seed + 1)),
    }
    found = {name: _until_flat(loop, trainer, {site.version: loop.target}) for name, trainer in starts.items()}
    for name, run in found.items():
        end = "flat" if run.stopped_rising else "still rising"
        progress(
            f"converged {name}: {run.accept_length:.3f}, round {run.best_round} of {len(run.round_lengths)}, {end}"
        )
    return found


def _until_flat(loop: DriftLoop, trainer: DrafterTrainer, targets: dict[str, DecoderWeights]) -> Converged:
    """Rounds at falling learning rates, and the best round's drafter."""
    settings = loop.settings
    lengths: list[float] = []
    rate, best, weights, stale, num_cuts = settings.rate, 0, trainer.weights(), 0, 0
    while len(lengths) < settings.max_rounds and num_cuts <= NUM_CUTS:
        student = Student(trainer, loop.folder / "last", settings.batch_tokens, loop.seed + len(lengths))
        trained = student.train(settings.round_steps, targets)
        lengths.append(loop.measure(trained, loop.round_prompts, ROUND_SEED).accept_length)
        stale = 0 if lengths[-1] > lengths[best] + MIN_RISE else stale + 1
        if lengths[-1] >= lengths[best]:
            best, weights = len(lengths) - 1, trained
        if stale == PATIENCE:
            rate, stale, num_cuts = rate * RATE_CUT, 0, num_cuts + 1
            trainer = loop.trainer(trainer, rate)
    final = loop.measure(weights, loop.final_prompts, FINAL_SEED).accept_length
    return Converged(final, lengths, best, stopped_rising=num_cuts > NUM_CUTS)

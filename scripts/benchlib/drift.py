"""`bench.py drift`: does a drafter that keeps learning stay good while reinforcement learning changes the policy?

A tiny policy is improved by policy gradient. After every update the server rolls out with the new weights, speculating
with the adapted drafter and recording, then the drafter trains a fixed number of steps on what was recorded (the
finished part of this step and the long tail of the step before). Beside it: the drafter of the start left as it was
(frozen), the same given as many steps on fresh rollouts of the first policy (extra_first), and drafters trained on the
last policy until held-out accept length stops rising, from the adapted one and from scratch (converged: the better).
Accept lengths are those of real verification on prompts that nothing was trained on, T = 1. Budgets are steps and
tokens, never seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights
from scripts.benchlib.drift_plot import Line, Panel, svg
from scripts.benchlib.drift_site import Rollout, Site, Student, samples_of
from scripts.benchlib.drift_world import Language, Policy, policy_distance
from scripts.benchlib.report import UsageError, at_least, commit, progress

__all__ = ["add_arguments", "run"]


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
    policy_steps: int = 6  # per update
    policy_rate: float = 1e-3
    last_share: float = 0.6
    batch_tokens: int = 512
    rate: float = 2e-3
    last_rollouts: int = 512
    round_steps: int = 80
    max_rounds: int = 14


QUICK = DriftSettings(
    teach_steps=25,
    first_rollouts=24,
    first_steps=20,
    rollouts=16,
    response_tokens=10,
    curve_prompts=8,
    final_prompts=16,
    batch_tokens=256,
    last_rollouts=16,
    round_steps=10,
    max_rounds=2,
)
PATIENCE, MIN_RISE = 2, 0.01  # rounds without a rise of accept length by this before the rate is cut, then the end
TARGET_SHARE = 0.9
WARMUP_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=20, help="policy updates (default: 20)")
    parser.add_argument("--steps", type=int, default=40, help="drafter steps per update (default: 40)")
    parser.add_argument("--arm", default="eagle-d4-k2-v7", help="the arm every drafter plays (default: eagle-d4-k2-v7)")
    parser.add_argument("--kind", choices=("eagle", "hass"), default="eagle", help="of drafter (default: eagle)")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write the plot there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="little training and few prompts: does it run at all")


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "updates", "steps")
    try:
        arm = Arm.parse(args.arm)
    except ValueError as error:
        raise UsageError(f"--arm: {error}") from error
    if arm.drafter != "eagle":
        raise UsageError(f"--arm {arm.name} does not use a trained drafter; give one such as eagle-d4-k2-v7")
    with tempfile.TemporaryDirectory(prefix="bench-drift-") as folder:
        bench = _Bench(args, arm, QUICK if args.quick else DriftSettings(), Path(folder))
        bench.go()
        result = bench.report()
    if args.svg is not None:
        args.svg.write_text(plot(result))
    return result


@dataclass
class _Curves:
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


class _Bench:
    def __init__(self, args: argparse.Namespace, arm: Arm, settings: DriftSettings, folder: Path) -> None:
        self._args, self._arm, self._settings, self._folder = args, arm, settings, folder
        self._rng = np.random.default_rng(args.seed + 1)
        self._language = Language(args.seed, settings.last_share)
        self._curve_prompts = self._language.prompts(settings.curve_prompts, self._rng)
        self._final_prompts = self._language.prompts(settings.final_prompts, self._rng)
        self._round_prompts = self._language.prompts(settings.final_prompts // 2, self._rng)
        self._curves = _Curves()
        self._accept: dict[str, float] = {}
        self._converged: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._num_different = 0

    def go(self) -> None:
        args, settings = self._args, self._settings
        policy = Policy(args.seed)
        loss = policy.teach(self._language, settings.teach_steps, self._rng)
        first = policy.weights()
        progress(f"policy taught, loss {loss:.2f}")
        extra, first_site = self._first_drafter(first)
        frozen = extra.trainer.weights()
        adapted = Student(self._copy(extra.trainer, first), self._folder / "actor", settings.batch_tokens, args.seed)
        actor = Site(first, frozen, self._arm, self._folder / "actor")
        rollout = self._roll(actor, settings.rollouts, 0)
        known = {actor.version: first}
        docs = self._measure(first, frozen, self._curve_prompts, args.seed).docs
        self._start_length = rollout.accept_length
        recovered = adapted.top3(samples_of(first, docs))
        current = first
        for update in range(1, args.updates + 1):
            share = update / args.updates
            self._curves.reward.append(
                policy.improve(self._language, rollout.docs, share, first, settings.policy_steps, settings.policy_rate)
            )
            current = policy.weights()
            actor.set_target(current, update)
            rollout = self._roll(actor, settings.rollouts, update)
            self._curves.served.append(rollout.accept_length)
            self._roll(first_site, settings.rollouts, update)
            played = self._measure(current, frozen, self._curve_prompts, args.seed)
            self._curves.frozen.append(played.accept_length)
            docs = played.docs
            batches = samples_of(current, docs)
            self._curves.top3_before.append(recovered)
            adapted.trainer.set_target(current)
            self._curves.top3_after.append(adapted.top3(batches))
            known = {**{v: known[v] for v in list(known)[-1:]}, actor.version: current}
            weights = adapted.train(args.steps, known)
            actor.set_drafter(weights)
            recovered = adapted.top3(batches)
            self._curves.top3_recovered.append(recovered)
            self._curves.kl_to_start.append(policy_distance(current, first, docs))
            trained_on_first = extra.train(args.steps, {first_site.version: first})
            learning = {"adapted": weights, "extra_first": trained_on_first}
            for name, drafter in learning.items():
                played = self._measure(current, drafter, self._curve_prompts, args.seed)
                getattr(self._curves, name).append(played.accept_length)
                self._num_different += sum(a != b for a, b in zip(played.docs, docs, strict=True))
            progress(self._line(update))
        actor.close()
        first_site.close()
        first_steps = settings.first_steps
        trained = {"adapted": adapted, "extra_first": extra}
        self._steps = {name: s.trainer.num_steps - first_steps for name, s in trained.items()}
        self._tokens = {"adapted": adapted.num_tokens, "extra_first": extra.num_tokens - self._first_tokens}
        for name, drafter in {"frozen": frozen, **learning}.items():
            self._accept[name] = self._measure(current, drafter, self._final_prompts, 7).accept_length
        self._converge(current, adapted.trainer)

    def _first_drafter(self, first: DecoderWeights) -> tuple[Student, Site]:
        settings, args = self._settings, self._args
        config = EagleConfig.for_target(first.config, args.kind)
        start = init_weights(config, first, torch.Generator().manual_seed(args.seed))
        site = Site(first, start, self._arm, self._folder / "first")
        self._roll(site, settings.first_rollouts, 10_000)
        trainer = DrafterTrainer(start, first, settings.rate, warmup_steps=WARMUP_STEPS)
        student = Student(trainer, self._folder / "first", settings.batch_tokens, args.seed)
        site.set_drafter(student.train(settings.first_steps, {site.version: first}))
        self._first_tokens = student.num_tokens
        progress(f"first drafter trained, {student.num_tokens} tokens")
        return student, site

    def _copy(self, trainer: DrafterTrainer, target: DecoderWeights, rate: float | None = None) -> DrafterTrainer:
        rate = self._settings.rate if rate is None else rate
        copy = DrafterTrainer(trainer.weights(), target, rate, warmup_steps=WARMUP_STEPS)
        copy.load_state_dict(trainer.state_dict())
        return copy

    def _converge(self, target: DecoderWeights, adapted: DrafterTrainer) -> None:
        """Train on the last policy from both starts, with many rollouts, until nothing is gained."""
        settings, args = self._settings, self._args
        site = Site(target, adapted.weights(), self._arm, self._folder / "last")
        self._roll(site, settings.last_rollouts, 20_000)
        site.close()
        config = EagleConfig.for_target(target.config, args.kind)
        scratch = init_weights(config, target, torch.Generator().manual_seed(args.seed + 1))
        starts = {
            "from_adapted": self._copy(adapted, target),
            "from_scratch": DrafterTrainer(scratch, target, settings.rate, warmup_steps=WARMUP_STEPS),
        }
        for name, trainer in starts.items():
            rounds, weights, best = self._until_flat(trainer, {site.version: target})
            found = self._measure(target, weights, self._final_prompts, 7).accept_length
            self._converged[name] = {"accept_length": found, "round_lengths": rounds, "best_round": best}
            progress(f"converged {name}: {found:.3f} after {len(rounds)} rounds")

    def _until_flat(
        self, trainer: DrafterTrainer, targets: dict[str, DecoderWeights]
    ) -> tuple[list[float], EagleWeights, int]:
        """Accept length after every round, the best weights, and their round. The rate is cut twice on the way."""
        settings, args = self._settings, self._args
        target = next(iter(targets.values()))
        lengths: list[float] = []
        rate, best, weights = settings.rate, 0, trainer.weights()
        stale = cuts = 0
        while len(lengths) < settings.max_rounds and cuts <= 2:
            student = Student(trainer, self._folder / "last", settings.batch_tokens, args.seed + len(lengths))
            trained = student.train(settings.round_steps, targets)
            lengths.append(self._measure(target, trained, self._round_prompts, 8).accept_length)
            rose = lengths[-1] > lengths[best] + MIN_RISE
            if lengths[-1] >= lengths[best]:
                best, weights = len(lengths) - 1, trained
            stale = 0 if rose else stale + 1
            if stale == PATIENCE:
                rate, stale, cuts = rate * 0.3, 0, cuts + 1
                trainer = self._copy(trainer, target, rate)
        return lengths, weights, best

    def _roll(self, site: Site, count: int, number: int) -> Rollout:
        prompts = self._language.prompts(count, self._rng)
        return site.roll(prompts, 1_000 + self._args.seed * 100_000 + number, self._settings.response_tokens)

    def _measure(
        self, target: DecoderWeights, drafter: EagleWeights, prompts: Sequence[tuple[int, ...]], seed: int
    ) -> Rollout:
        """With KV computed from nothing, so that no other drafter's is left in the pages."""
        return Site(target, drafter, self._arm).roll(prompts, seed, self._settings.response_tokens)

    def _line(self, update: int) -> str:
        c = self._curves
        return (
            f"update {update}: KL {c.kl_to_start[-1]:.2f}, reward {c.reward[-1]:.3f}, top-3 {c.top3_before[-1]:.3f} > "
            f"{c.top3_after[-1]:.3f} > {c.top3_recovered[-1]:.3f}; accept length adapted {c.adapted[-1]:.2f} "
            f"(served {c.served[-1]:.2f}), frozen {c.frozen[-1]:.2f}, extra_first {c.extra_first[-1]:.2f}"
        )

    def report(self) -> dict[str, Any]:
        c, accept = self._curves, self._accept
        converged = max(found["accept_length"] for found in self._converged.values())
        drops = [a < b for b, a in zip(c.top3_before, c.top3_after, strict=True)]
        gains = [r > a for a, r in zip(c.top3_after, c.top3_recovered, strict=True)]
        of_converged = accept["adapted"] / converged
        passed = of_converged >= TARGET_SHARE and accept["adapted"] > max(accept["frozen"], accept["extra_first"])
        return {
            "commit": commit(),
            "passed": passed,
            "frozen": accept["frozen"],
            "adapted": accept["adapted"],
            "ratio": accept["adapted"] / accept["frozen"],
            "extra_first": accept["extra_first"],
            "converged": converged,
            "of_converged": of_converged,
            "converged_runs": self._converged,
            "start": self._start_length,
            "kl_to_start": c.kl_to_start,
            "reward": c.reward,
            "top3_before": c.top3_before,
            "top3_after": c.top3_after,
            "top3_recovered": c.top3_recovered,
            "top3_drops": sum(drops),
            "top3_recoveries": sum(gains),
            "accept_length": {name: getattr(c, name) for name in ("served", "adapted", "frozen", "extra_first")},
            "trained_steps": self._steps,
            "trained_tokens": {"first": self._first_tokens, **self._tokens},
            "arm": self._arm.name,
            "kind": self._args.kind,
            "different_outputs": self._num_different,
        }


def plot(result: dict[str, Any]) -> str:
    """Both figures as one SVG document."""
    zigzag: list[tuple[float, float]] = []
    steps = range(1, len(result["top3_before"]) + 1)
    for update, before, after, recovered in zip(
        steps, result["top3_before"], result["top3_after"], result["top3_recovered"], strict=True
    ):
        zigzag += [(update, before), (update, after), (update + 0.8, recovered)]
    lengths: dict[str, Sequence[float]] = result["accept_length"]
    curves = [Line(name, list(zip(steps, lengths[name], strict=True))) for name in ("adapted", "frozen", "extra_first")]
    curves.append(Line("converged on the last policy", [(1, result["converged"]), (len(steps), result["converged"])]))
    kl = Line("KL to the start, nats per token", list(zip(steps, result["kl_to_start"], strict=True)))
    return svg(
        [
            Panel("Top-3 accuracy of the adapted drafter, down at an update, then up", [Line("top-3", zigzag)]),
            Panel("Accept length", curves),
            Panel("Policy", [kl]),
        ],
        "policy updates",
    )

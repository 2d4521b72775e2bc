"""A simulated server for the tuner: step costs as measured, acceptance by position, rough latencies."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import Tuner, TunerSettings

# SmolLM2-135M in fp32 on one AVX2 core: a step's cost by the tokens it verifies, relative to one token.
CPU_COSTS = {1: 1.0, 2: 1.6, 4: 1.9, 8: 1.9, 16: 2.4, 32: 3.4, 64: 5.5}
# A GPU decodes small batches in the time of one.
GPU_COSTS = {1: 1.0, 8: 1.02, 32: 1.06, 64: 1.15, 128: 1.4, 256: 2.2}


@dataclass
class Machine:
    costs: dict[int, float] = field(default_factory=lambda: CPU_COSTS)
    rates: dict[str, float] = field(default_factory=dict)  # chance that the next drafted token is accepted
    draft_share: float = 0.1  # of a target step per level
    unit_s: float = 0.13
    noise: float = 0.05
    outliers: float = 0.0  # share of steps that take ten times as long
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.truth = self.model()

    def model(self) -> StepCosts:
        return StepCosts({rows: self.unit_s * cost for rows, cost in self.costs.items()})

    def seconds(self, arm: Arm, batch: int) -> float:
        truth = self.truth
        step_s = truth.prior_s(batch * (1 + arm.num_verify))
        if arm.drafter == "eagle":
            step_s += arm.depth * self.draft_share * truth.prior_s(batch * arm.top_k)
        return step_s

    def rate(self, arm: Arm) -> float:
        """Alternatives catch a part of what the likeliest token misses."""
        rate = self.rates.get(arm.drafter, 0.0)
        return rate + (1 - rate) * rate * 0.4 * (1 - 1 / arm.top_k) if arm.top_k > 1 else rate

    def tokens(self, arm: Arm) -> float:
        return sum(self.rate(arm) ** d for d in range(arm.depth + 1))

    def speed(self, arm: Arm, batch: int) -> float:
        """True expected tokens per second of a sequence."""
        return self.tokens(arm) / self.seconds(arm, batch)

    def step(self, arm: Arm, batch: int) -> tuple[float, list[int]]:
        """Latency and accepted counts by depth, as a server would see them."""
        counts = [0] * arm.depth
        rate = self.rate(arm) if arm.depth else 0.0
        for _ in range(batch):
            for depth in range(arm.depth):
                if self.rng.random() >= rate:
                    break
                counts[depth] += 1
        slow = 10.0 if self.rng.random() < self.outliers else 1.0
        return self.seconds(arm, batch) * slow * math.exp(self.rng.gauss(0, self.noise)), counts


@dataclass
class Outcome:
    """Times without noise of what was chosen; ``plain_s`` and ``best_s`` are what other choices take for its tokens."""

    seconds: float = 0.0
    plain_s: float = 0.0
    best_s: float = 0.0
    real_plain_s: float = 0.0  # for the tokens that came, where plain_s is for those expected
    lowest: float = math.inf  # of real_plain_s / seconds over time, from the first step on
    arms: dict[str, int] = field(default_factory=dict)

    @property
    def to_plain(self) -> float:
        return self.plain_s / self.seconds

    @property
    def to_best(self) -> float:
        return self.best_s / self.seconds


def play(tuner: Tuner, machine: Machine, batches: Iterable[int], context: int = 500) -> Outcome:
    outcome = Outcome()
    best_speeds = {batch: max(machine.speed(a, batch) for a in DEFAULT_ARMS) for batch in range(1, 65)}
    for batch in batches:
        arm = tuner.choose(batch, context)
        seconds, counts = machine.step(arm, batch)
        num_tokens = batch + sum(counts)
        tuner.record(arm, batch, context, num_tokens, seconds, counts)
        outcome.seconds += machine.seconds(arm, batch)
        outcome.plain_s += machine.tokens(arm) * machine.seconds(OFF, batch)
        outcome.best_s += machine.tokens(arm) / best_speeds[batch]
        outcome.real_plain_s += num_tokens / batch * machine.seconds(OFF, batch)
        outcome.lowest = min(outcome.lowest, outcome.real_plain_s / outcome.seconds)
        outcome.arms[arm.name] = outcome.arms.get(arm.name, 0) + 1
    return outcome


def tuner_for(machine: Machine, seed: int = 0, max_batch: int | None = None) -> Tuner:
    return Tuner(machine.model(), DEFAULT_ARMS, TunerSettings(seed=seed, max_batch=max_batch))

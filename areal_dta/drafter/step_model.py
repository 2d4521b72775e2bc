"""What a decoding step costs and what a drafter yields, before an arm was tried where it is asked for.

Both start from a calibration or a prior and learn from every step of any arm, pooled over batch sizes; the tuner uses
their optimistic and pessimistic readings to decide what is worth trying.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from areal_dta.drafter.arms import Arm

__all__ = ["Acceptance", "RowCost", "StepCosts", "measure_steps"]

RATIO_AGE = 1000  # steps of any size after which a measured one no longer shows the machine's pace
RATIO_WINDOW = 16  # measured against predicted steps remembered per size
# Sequences' worth of evidence that the prior is given.
OPTIMIST_WEIGHT = 10.0
PESSIMIST_WEIGHT = 5.0
PRIOR_RATE = 0.9  # what a drafter may accept at best where nothing is known
STEP_UP = 0.1  # a deeper or wider place may accept this much more than its known neighbour
ROW_KEEP = 0.998  # what a step weighs in the cost of a row when the next one comes
ROW_REFIT = 32  # steps
RIDGE = 1e-6
ROW_PRIOR_STEPS = 0.01  # a row is a small part of a step, so that a few of these outweigh many steps
MAX_EVIDENCE = 2000.0  # older observations fade beyond this many sequences
DRAFT_SHARES = {"eagle": 0.1, "ngram": 0.002}  # cost of one drafted level, relative to a target step of as many rows


def measure_steps(
    step_s: Callable[[int], float], rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64), repeats: int = 3
) -> dict[int, float]:
    """Calibration: ``step_s(num_rows)`` runs one target step and returns its seconds; the fastest of ``repeats``."""
    return {num_rows: min(step_s(num_rows) for _ in range(repeats)) for num_rows in rows}


class StepCosts:
    """Seconds of a step by the rows that the target computes, and of drafting.

    ``points`` maps rows of a whole batch to seconds (`measure_steps`); between them costs are interpolated on
    logarithmic axes, beyond the last they grow in proportion. Steps observed at a size and context correct it there.
    """

    def __init__(self, points: Mapping[int, float], draft_shares: Mapping[str, float] | None = None) -> None:
        if not points or min(points) < 1 or min(points.values()) <= 0:
            raise ValueError(f"step costs {dict(points)!r}: give seconds > 0 for at least one number of rows >= 1")
        self._rows = sorted(points)
        self._seconds = [points[r] for r in self._rows]
        self._shares = DRAFT_SHARES | dict(draft_shares or {})
        # Context bucket -> octave of rows -> (step, measured / prior).
        self._ratios: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._step = 0
        self._recent: deque[float] = deque(maxlen=2 * RATIO_WINDOW)  # the same of steps of any size
        self._draft_ratios: dict[str, deque[float]] = {}
        self._fills: dict[tuple[str, int], float] = {}  # share of an arm's rows that its drafter really fills
        self._row_cost = RowCost((self._seconds[-1] - self._seconds[0]) / max(self._rows[-1] - self._rows[0], 1))

    def prior_s(self, num_rows: float) -> float:
        """The calibrated cost, never corrected: a fixed yardstick."""
        rows, seconds = self._rows, self._seconds
        if num_rows >= rows[-1]:
            return seconds[-1] * num_rows / rows[-1]
        hi = bisect_left(rows, num_rows)
        if hi == 0 or rows[hi] == num_rows:
            return seconds[hi]
        share = math.log(num_rows / rows[hi - 1]) / math.log(rows[hi] / rows[hi - 1])
        return seconds[hi - 1] ** (1 - share) * seconds[hi] ** share

    @property
    def row_s(self) -> float:
        """Seconds by which one more drafted token lengthens a step."""
        return self._row_cost.row_s

    def step_s(self, arm: Arm, batch: int, context: int) -> float:
        """Predicted seconds of one step of ``arm``, drafting included; ``context`` is the tuner's bucket."""
        num_rows = batch * (1 + arm.num_verify * self._fills.get((arm.drafter, arm.num_verify), 1.0))
        return self.prior_s(num_rows) * self._ratio(num_rows, context) + self._draft_s(arm, batch, context)

    def expect_rows(self, arm: Arm, share: float) -> None:
        """A draft on paper filled ``share`` of the rows that ``arm`` allows."""
        key = arm.drafter, arm.num_verify
        self._fills[key] = 0.9 * self._fills.get(key, share) + 0.1 * share

    def observe(
        self,
        arm: Arm,
        batch: int,
        context: int,
        seconds: float,
        draft_seconds: float | None = None,
        num_rows: int | None = None,
    ) -> None:
        """Learn from a step; without ``draft_seconds`` the predicted drafting is taken off."""
        drafted_s = self._draft_s(arm, batch, context) if draft_seconds is None else draft_seconds
        if num_rows is not None and arm.num_verify:
            self.expect_rows(arm, (num_rows - batch) / (batch * arm.num_verify))
        rows = num_rows or batch * (1 + arm.num_verify)
        self._row_cost.observe(batch, rows - batch, max(seconds - drafted_s, 0.05 * seconds))
        octaves = self._ratios.setdefault(context, {})
        window = octaves.setdefault(round(math.log2(rows)), deque(maxlen=RATIO_WINDOW))
        ratio = max(seconds - drafted_s, 0.05 * seconds) / self.prior_s(rows)
        self._step += 1
        window.append((self._step, ratio))
        self._recent.append(ratio)
        if draft_seconds is not None and arm.depth:
            ratios = self._draft_ratios.setdefault(arm.drafter, deque(maxlen=RATIO_WINDOW))
            ratios.append(max(draft_seconds, 1e-9) / self._draft_prior_s(arm, batch))

    def _draft_prior_s(self, arm: Arm, batch: int) -> float:
        return arm.depth * self._shares[arm.drafter] * self.prior_s(batch * arm.top_k)

    def _draft_s(self, arm: Arm, batch: int, context: int) -> float:
        if not arm.depth:
            return 0.0
        measured = self._draft_ratios.get(arm.drafter)
        ratio = statistics.median(measured) if measured else self._ratio(batch * arm.top_k, context)
        return self._draft_prior_s(arm, batch) * ratio

    def _ratio(self, num_rows: float, context: int) -> float:
        """Measured over calibrated cost at the nearest size of the nearest context that was seen."""
        if not self._ratios:
            return 1.0
        octaves = self._ratios[min(self._ratios, key=lambda c: abs(c - context))]
        nearest = octaves[min(octaves, key=lambda o: abs(o - math.log2(num_rows)))]
        # Two votes for what steps of any size say: the first steps of a size may be outliers.
        known = [ratio for step, ratio in nearest if self._step - step < RATIO_AGE]
        return statistics.median((*known, *[statistics.median(self._recent)] * 2))


class RowCost:
    """What a drafted row costs: least squares of ``seconds = a + b * batch + row_s * drafted`` over the steps of late,
    relative to each step's seconds. It starts as if ``guess_s`` had been measured."""

    def __init__(self, guess_s: float) -> None:
        self.row_s = self._guess_s = max(guess_s, 1e-9)
        self._sums = [0.0] * 9  # of the products of (1, batch, drafted) over seconds, then of the factors
        self._num_steps = 0

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        x, y, z = 1.0 / seconds, batch / seconds, drafted / seconds
        new = (x * x, x * y, x * z, y * y, y * z, z * z, x, y, z)
        self._sums = [ROW_KEEP * old + value for old, value in zip(self._sums, new, strict=True)]
        self._num_steps += 1
        if self._num_steps % ROW_REFIT == 0:
            self._refit()

    def _refit(self) -> None:
        xx, xy, xz, yy, yz, zz, x, y, z = self._sums
        zz += ROW_PRIOR_STEPS / self._guess_s**2
        z += ROW_PRIOR_STEPS / self._guess_s
        # The normal equations, a and then b eliminated; a little ridge, as steps of one batch do not tell these apart.
        yy, yz, zz, y, z = (
            yy * (1 + RIDGE) - xy * xy / xx,
            yz - xy * xz / xx,
            zz - xz * xz / xx,
            y - xy * x / xx,
            z - xz * x / xx,
        )
        self.row_s = max((z - yz * y / yy) / (zz - yz * yz / yy), 0.1 * self._guess_s)


class Acceptance:
    """How often the next drafted token is accepted, per drafter, width and depth."""

    def __init__(self) -> None:
        # (drafter, top_k) -> per depth: sequences that got there, and those of them that went on
        self._reached: dict[tuple[str, int], list[float]] = {}
        self._accepted: dict[tuple[str, int], list[float]] = {}

    def learn(self, arm: Arm, num_sequences: int, accepted_by_depth: Sequence[int]) -> None:
        """``accepted_by_depth[d]``: how many of the sequences accepted at least d + 1 drafted tokens."""
        key = arm.drafter, arm.top_k
        reached, accepted = self._reached.setdefault(key, []), self._accepted.setdefault(key, [])
        reached.extend([0.0] * (arm.depth - len(reached)))
        accepted.extend([0.0] * (arm.depth - len(accepted)))
        there: float = num_sequences
        for depth, went_on in enumerate(accepted_by_depth[: arm.depth]):
            reached[depth] += there
            accepted[depth] += went_on
            there = went_on
        if reached and reached[0] > MAX_EVIDENCE:
            self._scale(key, 0.5)

    def age(self, drafter: str | None = None) -> None:
        """Half of what is known is forgotten: the policy (None) or one drafter has a new version."""
        for key in self._reached:
            if drafter in (None, key[0]):
                self._scale(key, 0.5)

    def _scale(self, key: tuple[str, int], factor: float) -> None:
        self._reached[key] = [factor * x for x in self._reached[key]]
        self._accepted[key] = [factor * x for x in self._accepted[key]]

    def tokens(self, arm: Arm) -> tuple[float, float]:
        """Pessimistic and optimistic expectation of the tokens that a step of ``arm`` adds per sequence (at least 1).

        Each rate is the observed one mixed with a prior worth a few sequences: 0 for the pessimist; for the optimist
        slightly more than the neighbours' rate (the depth before, other widths of the drafter).
        """
        low = high = reach_low = reach_high = 1.0
        before = PRIOR_RATE
        for depth in range(arm.depth):
            reached, accepted = self._at((arm.drafter, arm.top_k), depth)
            prior = before if depth == 0 else min(before + STEP_UP, 0.95)
            others = [self._at(key, depth) for key in self._reached if key[0] == arm.drafter and key[1] != arm.top_k]
            known = [a / r for r, a in others if r >= OPTIMIST_WEIGHT]
            if known:
                prior = min(prior, max(known) + STEP_UP, 0.95)
            before = (accepted + OPTIMIST_WEIGHT * prior) / (reached + OPTIMIST_WEIGHT)
            reach_low *= accepted / (reached + PESSIMIST_WEIGHT)
            reach_high *= before
            low, high = low + reach_low, high + reach_high
        return low, high

    def _at(self, key: tuple[str, int], depth: int) -> tuple[float, float]:
        reached = self._reached.get(key, ())
        return (reached[depth], self._accepted[key][depth]) if depth < len(reached) else (0.0, 0.0)

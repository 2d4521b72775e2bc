"""BEG-MAB: a bucketed epsilon-greedy bandit that picks the decoding strategy of every step.

A bucket is a range of batch sizes and context lengths; within it, every arm has a sliding estimate of its speed
(`ArmStats`). The fastest proven arm is used; now and then another is tried for a short burst. Trying is paid from a
budget: in every bucket the estimated loss, against the best arm known and against plain decoding, stays below
``max_regret`` of the time spent there, so the tuner starts plain and earns its trials. Arms whose optimistic
prediction (`StepCosts`, `Acceptance`) is below the best known speed are not tried.

It reads no clock and no global random state: equal records and seed give equal choices.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_dta.drafter.arm_stats import ArmStats
from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.step_model import Acceptance, StepCosts

__all__ = ["Tuner", "TunerSettings"]

BATCH_EDGES = (1, 2, 4, 8, 16, 32)  # buckets 1, 2, 3-4, 5-8, 9-16, 17-32, 33+
CONTEXT_EDGES = (1024, 4096, 16384)  # tokens of a sequence, by powers of four
OUTLIER = 4.0  # a step this many times slower than its arm's is booked as if it were only that much slower
YOUNG_STEPS = 64  # of plain decoding; so long a bucket tries what even the pessimist recommends without drawing lots
PROVEN_STEPS = 32  # with fewer, bad luck may hide what the pooled acceptance knows
SWITCH_STEPS = 4  # a drafter that was idle for longer has to catch up
MARGIN = 1.01  # a rival must be this much faster before the arm in use is left
RESERVE = 0.25  # of the budget, for the error of the estimates that it is kept with
# Plain decoding is measured again after so many steps without it, then after twice as many, up to `stale_steps`: after
# a slow minute in which it was measured, every arm would look good for ever.
RECHECK_STEPS = 64
MIN_GAIN = 1.03  # an arm that cannot be this much faster is not worth a trial
# Budgets count recent time only, or a gain of long ago would pay for a loss today. A bound that holds for exponentially
# weighted sums at every step holds for the plain sums as well.
HORIZON_STEPS = 1000


@dataclass(frozen=True)
class TunerSettings:
    """``max_batch``: larger batches are never speculated on (None: the measurements alone decide)."""

    epsilon: float = 0.1  # chance of a trial where one is affordable
    max_regret: float = 0.02
    burst_steps: int = 4
    min_steps: int = 8  # steps before an arm's own measurement is trusted
    stale_steps: int = 1000  # an arm not tried for this many steps may have changed
    max_batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1 or not 0 <= self.max_regret < 1 or self.burst_steps < 2 or self.min_steps < 2:
            raise ValueError(f"{self!r}: epsilon and max_regret are shares, burst_steps and min_steps at least 2")


@dataclass
class _Account:
    seconds: float = 0.0
    trial_loss_s: float = 0.0  # against the best arm known at the time; negative where trials won
    plain_loss_s: float = 0.0  # of all speculation against plain decoding; negative: gained


@dataclass(eq=False)
class _Bucket:
    batch: int  # index of the range
    context: int
    arms: dict[Arm, ArmStats] = field(default_factory=dict)
    best: Arm = OFF
    trial: Arm | None = None
    trial_left: int = 0
    since_plain: int = 0  # steps since the last plain one
    recheck_after: int = RECHECK_STEPS
    total: _Account = field(default_factory=_Account)
    recent: _Account = field(default_factory=_Account)

    def book(self, seconds: float, trial_loss_s: float, plain_loss_s: float) -> None:
        for account, keep in ((self.total, 1.0), (self.recent, 1 - 1 / HORIZON_STEPS)):
            account.seconds = keep * account.seconds + seconds
            account.trial_loss_s = keep * account.trial_loss_s + trial_loss_s
            account.plain_loss_s = keep * account.plain_loss_s + plain_loss_s

    def stats(self, arm: Arm) -> ArmStats:
        return self.arms.setdefault(arm, ArmStats())

    def count(self, arm: Arm) -> int:
        return self.arms[arm].count if arm in self.arms else 0

    def speed(self, arm: Arm) -> tuple[float, float]:
        return self.arms[arm].speed()


class Tuner:
    """One per server. ``choose`` before a step, ``record`` after it."""

    def __init__(
        self, costs: StepCosts, arms: Iterable[Arm] = DEFAULT_ARMS, settings: TunerSettings | None = None
    ) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.settings = settings or TunerSettings()
        self._random = random.Random(self.settings.seed)
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._arms: tuple[Arm, ...] = ()
        self._used: dict[str, int] = {}  # drafter -> the last step it drafted in
        self._step = 0
        self.set_arms(arms)

    def set_arms(self, arms: Iterable[Arm]) -> None:
        """The arms that may be chosen from now on (a drafter came or went); what is known of others is kept."""
        self._arms = tuple(dict.fromkeys((OFF, *arms)))
        for bucket in self._buckets.values():
            if bucket.trial not in self._arms:
                bucket.trial, bucket.trial_left = None, 0

    def remove(self, drafter: str) -> None:
        """No arm of ``drafter`` may be chosen any more."""
        self.set_arms(arm for arm in self._arms if arm.drafter != drafter)

    def choose(self, batch: int, context_tokens: int) -> Arm:
        """The arm for a step of ``batch`` sequences of ``context_tokens`` each (their mean)."""
        settings = self.settings
        if len(self._arms) == 1 or (settings.max_batch is not None and batch > settings.max_batch):
            return OFF
        bucket = self._bucket(batch, context_tokens)
        if bucket.count(OFF) < settings.min_steps and bucket.best == OFF:
            return OFF
        trial = bucket.trial if bucket.trial_left else None
        if trial is not None and (trial == OFF or self._affordable(bucket, trial, batch)):
            return trial
        bucket.trial, bucket.trial_left = None, 0
        if bucket.since_plain >= min(bucket.recheck_after * self._gain(bucket) ** 2, settings.stale_steps):
            bucket.recheck_after = min(2 * bucket.recheck_after, settings.stale_steps)
            bucket.stats(OFF).forget_latencies()
            bucket.trial, bucket.trial_left = OFF, settings.min_steps
            return OFF
        bucket.best = self._best(bucket)
        if bucket.best != OFF and bucket.recent.plain_loss_s > settings.max_regret * bucket.recent.seconds:
            bucket.best = OFF  # it looked faster than it was
        if bucket.best == OFF:
            bucket.recheck_after = RECHECK_STEPS
        is_drawn = self._random.random() < settings.epsilon
        if is_drawn or (bucket.best == OFF and bucket.count(OFF) < YOUNG_STEPS):
            bucket.trial = self._promising(bucket, batch, only_sure=not is_drawn)
            if bucket.trial is not None:
                if self._is_stale(bucket.stats(bucket.trial)):
                    bucket.stats(bucket.trial).forget_tokens()
                    bucket.stats(bucket.trial).forget_latencies()
                # Long enough to be trusted afterwards, if it pays its way: every step must stay affordable.
                unproven = settings.min_steps + 1 - bucket.count(bucket.trial)
                bucket.trial_left = max(settings.burst_steps, unproven)
        return bucket.trial or bucket.best

    def beside_prefill(self, batch: int, context_tokens: int, num_rows: int) -> Arm:
        """The arm for a step that also computes ``num_rows`` rows of prompts: the best one known, if the tokens it adds
        are worth more than its rows cost there, where rows are no longer almost free. Changes nothing."""
        key = bisect_left(BATCH_EDGES, batch), bisect_left(CONTEXT_EDGES, context_tokens)
        bucket = self._buckets.get(key)
        if bucket is None or bucket.best == OFF or bucket.best not in self._arms or not bucket.count(bucket.best):
            return OFF
        arm, cost_s = bucket.best, self.costs.prior_s
        gained_s = (bucket.stats(arm).mean_tokens - 1) * cost_s(batch)
        rows_s = cost_s(num_rows + batch * (1 + arm.num_verify)) - cost_s(num_rows + batch)
        return arm if gained_s > rows_s else OFF

    def least_chance(self, batch: int, context_tokens: int) -> float:
        """The chance of being accepted from which one more drafted token is worth its row: what the row takes over the
        time that a token takes at the best speed known."""
        bucket = self._bucket(batch, context_tokens)
        speed = bucket.speed(bucket.best)[0] if bucket.count(bucket.best) else 1.0
        return self.costs.row_s * batch * speed / self.costs.prior_s(batch)

    def on_paper(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """A chain of ``num_drafted`` tokens, cut where `least_chance` says, was drafted without being verified; of it
        ``num_accepted`` would have been accepted."""
        chains = [arm for arm in self._arms if arm.drafter == drafter and arm.top_k == 1]
        for arm in chains:
            self.costs.expect_rows(arm, min(num_drafted, arm.num_verify) / arm.num_verify)
        if chains:
            deepest = max(chains)
            self.acceptance.learn(deepest, 1, [int(num_accepted > depth) for depth in range(deepest.depth)])

    def record(
        self,
        arm: Arm,
        batch: int,
        context_tokens: int,
        num_tokens: int,
        seconds: float,
        accepted_by_depth: Sequence[int] | None = None,
        draft_seconds: float | None = None,
        num_rows: int | None = None,
    ) -> None:
        """A step happened: ``num_tokens`` were produced by all sequences in ``seconds`` (drafting and catching up
        included). ``accepted_by_depth[d]``: sequences that accepted at least d + 1 drafted tokens;
        ``draft_seconds``: the share of drafting; ``num_rows``: rows that the target computed."""
        if batch < 1 or seconds <= 0:
            raise ValueError(f"a step of {batch} sequences in {seconds} s; both must be positive")
        self._step += 1
        bucket = self._bucket(batch, context_tokens)
        if accepted_by_depth is not None and arm != OFF:
            self.acceptance.learn(arm, batch, accepted_by_depth)
        # The first step after a switch pays for the drafter's catching up: a cost of switching, not of the arm. Buckets
        # that take turns are no switch: little is to be caught up, and none of their steps would ever count.
        switched = arm != OFF and self._step - self._used.get(arm.drafter, -SWITCH_STEPS) > SWITCH_STEPS
        self._used[arm.drafter] = self._step
        if not switched:
            self.costs.observe(arm, batch, bucket.context, seconds, draft_seconds, num_rows)
        unit_s = self.costs.prior_s(batch)
        tokens = num_tokens / batch
        stats = bucket.stats(arm)
        bucket.since_plain = 0 if arm == OFF else bucket.since_plain + 1
        bucket.book(seconds, *self._losses(bucket, arm, batch, tokens, seconds))
        if stats.add(self._step, tokens, seconds, None if switched else seconds / unit_s):
            self.new_version(arm.drafter)  # nobody said so, but its acceptance is another

    def new_version(self, drafter: str | None = None) -> None:
        """The policy (None) or one drafter changed: what is known about its acceptance ages.

        The arm in use keeps the newer half of its window; of the others the pooled acceptance, halved as well, is all
        that is kept, so that they can be proven anew."""
        self.acceptance.age(drafter)
        for bucket in self._buckets.values():
            for arm, stats in bucket.arms.items():
                if arm == OFF or drafter not in (None, arm.drafter):
                    continue
                if arm == bucket.best:
                    stats.age()
                else:
                    stats.forget_tokens()

    @property
    def loss_to_plain(self) -> float:
        """Time that plain decoding would have saved, as a share of all; negative where speculation gained."""
        totals = [bucket.total for bucket in list(self._buckets.values())]
        return sum(t.plain_loss_s for t in totals) / max(sum(t.seconds for t in totals), 1e-9)

    def snapshot(self) -> dict[str, Any]:
        """For metrics: shares of steps and accept length by arm, loss estimates, and the table of buckets."""
        totals: dict[Arm, list[float]] = {}
        table = []
        buckets = sorted(self._buckets.values(), key=lambda b: (b.batch, b.context))  # copies: others may ask, too
        for bucket in buckets:
            for arm, stats in list(bucket.arms.items()):
                sums = totals.setdefault(arm, [0.0, 0.0, 0.0])
                for i, value in enumerate((stats.num_steps, stats.num_tokens, stats.seconds)):
                    sums[i] += value
            table.append(
                {
                    "batch": _range_name(BATCH_EDGES, bucket.batch),
                    "context": _range_name(CONTEXT_EDGES, bucket.context),
                    "best": bucket.best.name,
                    "seconds": bucket.total.seconds,
                    "trial_loss_s": bucket.total.trial_loss_s,
                    "plain_loss_s": bucket.total.plain_loss_s,
                    "speeds": {a.name: s.speed()[0] for a, s in list(bucket.arms.items()) if s.count},
                }
            )
        num_steps = max(self._step, 1)
        seconds = max(sum(b.total.seconds for b in buckets), 1e-9)
        return {
            "steps": self._step,
            "share": {a.name: sums[0] / num_steps for a, sums in totals.items()},
            "time_share": {a.name: sums[2] / seconds for a, sums in totals.items()},
            "accept_length": {a.name: sums[1] / sums[0] for a, sums in totals.items() if sums[0]},
            "regret": sum(b.total.trial_loss_s for b in buckets) / seconds,
            "loss_to_plain": self.loss_to_plain,
            "buckets": table,
        }

    def _bucket(self, batch: int, context_tokens: int) -> _Bucket:
        key = bisect_left(BATCH_EDGES, batch), bisect_left(CONTEXT_EDGES, context_tokens)
        if key not in self._buckets:
            bucket = _Bucket(*key)
            # A context that grows past an edge must not start from nothing.
            alike = [b for b in self._buckets.values() if b.batch == bucket.batch]
            if alike:
                near = min(alike, key=lambda b: abs(b.context - bucket.context))
                bucket.arms = {arm: stats.heir() for arm, stats in near.arms.items() if stats.count}
                bucket.best = near.best
            self._buckets[key] = bucket
        return self._buckets[key]

    def _losses(self, bucket: _Bucket, arm: Arm, batch: int, tokens: float, seconds: float) -> tuple[float, float]:
        """Seconds that a step lost against the best arm (if it was a trial) and against plain decoding."""
        if arm == OFF and not bucket.trial_left:
            return 0.0, 0.0
        seconds = min(seconds, OUTLIER * self._usual_s(bucket, arm, batch))
        unit_s, trial_loss_s, plain_loss_s = self.costs.prior_s(batch), 0.0, 0.0
        if arm != OFF and bucket.count(OFF):
            plain_loss_s = seconds - tokens * unit_s / sum(bucket.speed(OFF))  # its error counted against the arm
        if arm == bucket.trial and bucket.trial_left:
            bucket.trial_left -= 1
            if bucket.count(bucket.best):
                trial_loss_s = seconds - tokens * unit_s / bucket.speed(bucket.best)[0]
        return trial_loss_s, plain_loss_s

    def _gain(self, bucket: _Bucket) -> float:
        """Of the arm in use over plain decoding, where both are known: the larger, the longer it will do without a
        new measurement of plain decoding, and the more that costs."""
        if not bucket.count(OFF) or not bucket.count(bucket.best):
            return 1.0
        return max(1.0, bucket.speed(bucket.best)[0] / bucket.speed(OFF)[0])

    def _affordable(self, bucket: _Bucket, arm: Arm, batch: int) -> bool:
        """Whether a step of ``arm``, if it goes as the pessimist expects, stays within both budgets."""
        low, _, step_s = self._bounds(bucket, arm, batch)
        best, plain = (bucket.speed(a)[0] if bucket.count(a) else 1.0 for a in (bucket.best, OFF))
        budget_s = (1 - RESERVE) * self.settings.max_regret * bucket.recent.seconds
        against_best_s = step_s * (1 - low / best)
        against_plain_s = step_s * (1 - low / plain) if arm != OFF else 0.0
        return (
            bucket.recent.trial_loss_s + against_best_s <= budget_s
            and bucket.recent.plain_loss_s + against_plain_s <= budget_s
        )

    def _best(self, bucket: _Bucket) -> Arm:
        """The fastest arm that is faster than plain decoding beyond doubt; the one in use unless clearly beaten."""
        plain, plain_error = bucket.speed(OFF) if bucket.count(OFF) else (1.0, 0.0)
        best, best_speed = OFF, plain
        for arm in self._arms:
            if arm == OFF or bucket.count(arm) < self.settings.min_steps:
                continue
            speed, error = bucket.speed(arm)
            if (
                speed - math.hypot(error, plain_error) > plain
                and speed * (MARGIN if arm == bucket.best else 1.0) > best_speed
            ):
                best, best_speed = arm, speed * (MARGIN if arm == bucket.best else 1.0)
        return best

    def _promising(self, bucket: _Bucket, batch: int, only_sure: bool) -> Arm | None:
        """What to try next: the arm that may gain most for what its trial may lose, if that can be afforded by now.

        Waiting for the most promising arm beats trying others: cheap trials without a prospect would eat its budget."""
        best = bucket.speed(bucket.best)[0] if bucket.count(bucket.best) else 1.0
        found, found_value = None, 0.0
        for arm in self._arms:
            low, high, step_s = self._bounds(bucket, arm, batch)
            if arm != bucket.best and (low if only_sure else high) > MIN_GAIN * best:
                value = (high / best - 1) / max(step_s * (1 - low / best), 1e-6 * step_s)
                if value > found_value:
                    found, found_value = arm, value
        return found if found is not None and self._affordable(bucket, found, batch) else None

    def _bounds(self, bucket: _Bucket, arm: Arm, batch: int) -> tuple[float, float, float]:
        """Pessimistic and optimistic speed of an arm, and the seconds one step of it takes."""
        step_s = self._usual_s(bucket, arm, batch)
        few, many = (tokens * self.costs.prior_s(batch) / step_s for tokens in self.acceptance.tokens(arm))
        if bucket.count(arm) < self.settings.min_steps:
            return few, many, step_s
        speed, error = bucket.speed(arm)
        low, high = speed - 2 * error, speed + 1.5 * error
        if self._is_stale(bucket.stats(arm)):
            low = min(low, few)
        if self._is_stale(bucket.stats(arm)) or bucket.count(arm) < PROVEN_STEPS:
            high = max(high, many)
        return low, high, step_s

    def _is_stale(self, stats: ArmStats) -> bool:
        return self._step - stats.last_step > self.settings.stale_steps

    def _usual_s(self, bucket: _Bucket, arm: Arm, batch: int) -> float:
        """Seconds of a step: measured here, or predicted from other sizes."""
        if bucket.count(arm) < self.settings.min_steps or self._is_stale(bucket.stats(arm)):
            return self.costs.step_s(arm, batch, bucket.context)
        return bucket.stats(arm).latency * self.costs.prior_s(batch)


def _range_name(edges: Sequence[int], index: int) -> str:
    low = edges[index - 1] + 1 if index else 1
    if index == len(edges):
        return f"{low}+"
    return str(low) if low == edges[index] else f"{low}-{edges[index]}"

"""Sliding statistics of one arm in one bucket."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence

__all__ = ["ArmStats"]

TOKENS_WINDOW = 256  # steps; accepted tokens are few-valued, so their mean needs many
LATENCY_WINDOW = 32  # steps; a median settles sooner and follows the machine
RECENT = 16  # steps that may show that the acceptance has changed
HEIR_LATENCIES = 8
CHANGE_SIGMAS = 4.0


class ArmStats:
    """Speed = mean tokens per sequence / median latency.

    The median keeps outliers of the machine out. Tokens are bounded, so their mean is safe, and it must be a mean: the
    median of {1, 1, 5} tokens says nothing about throughput. Latency is relative to a calibrated plain step of the same
    batch, so that the sizes within a bucket compare; speed 1 is then about plain decoding.
    """

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=TOKENS_WINDOW)
        self._sum = self._squares = 0.0  # of the tokens
        self._latencies: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._cached: tuple[float, float] | None = None
        self.last_step = 0
        self.num_steps = 0
        self.num_tokens = 0.0  # per sequence, summed over all steps ever
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """Steps that the estimate rests on."""
        return min(len(self._tokens), len(self._latencies) * (TOKENS_WINDOW // LATENCY_WINDOW))

    def add(self, step: int, tokens: float, seconds: float, latency: float | None) -> bool:
        """One step; no ``latency`` when it does not show the arm's own pace (a switch just happened).

        Returns whether the recent tokens differ from those before beyond chance; these are then forgotten."""
        if len(self._tokens) == TOKENS_WINDOW:
            oldest = self._tokens[0]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._tokens.append(tokens)
        self._sum += tokens
        self._squares += tokens * tokens
        if latency is not None:
            self._latencies.append(latency)
        self._cached = None
        self.last_step = step
        self.num_steps += 1
        self.num_tokens += tokens
        self.seconds += seconds
        return self.num_steps % (RECENT // 2) == 0 and len(self._tokens) >= 3 * RECENT and self._has_changed()

    def _has_changed(self) -> bool:
        values = list(self._tokens)
        before, recent = values[:-RECENT], values[-RECENT:]
        spread = max(_deviation(before, statistics.fmean(before)), 0.05)
        distance = abs(statistics.fmean(recent) - statistics.fmean(before))
        if distance <= CHANGE_SIGMAS * spread / math.sqrt(RECENT):
            return False
        self._keep(recent)
        return True

    def _keep(self, tokens: Sequence[float]) -> None:
        self._tokens = deque(tokens, maxlen=TOKENS_WINDOW)
        self._sum, self._squares = math.fsum(tokens), math.fsum([t * t for t in tokens])
        self._cached = None

    def heir(self) -> ArmStats:
        """What a neighbouring bucket may start from: the newest of what is known, soon outweighed by its own steps."""
        heir = ArmStats()
        heir._keep(list(self._tokens)[-RECENT:])
        heir._latencies.extend(list(self._latencies)[-HEIR_LATENCIES:])
        heir.last_step = self.last_step
        return heir

    def age(self) -> None:
        """Keep the newer half of the tokens."""
        self._keep(list(self._tokens)[len(self._tokens) // 2 :])

    def forget_tokens(self) -> None:
        """Of tokens nothing is known any more; latencies stay what they were."""
        self._keep([])

    def forget_latencies(self) -> None:
        """Of the pace nothing is known any more."""
        self._latencies.clear()
        self._cached = None

    @property
    def mean_tokens(self) -> float:
        """Tokens per sequence and step; needs ``count`` > 0."""
        return statistics.fmean(self._tokens)

    @property
    def latency(self) -> float:
        """Median relative latency; needs ``count`` > 0."""
        return statistics.median(self._latencies)

    def speed(self) -> tuple[float, float]:
        """Estimate and its standard error; needs ``count`` > 0."""
        if self._cached is None:
            num, times = len(self._tokens), sorted(self._latencies)  # a copy: a snapshot may ask on another thread
            mean, median = self._sum / num, statistics.median(times)
            spread = math.sqrt(max(self._squares / num - mean * mean, 0.0) / num) / mean
            quartiles = times[(3 * len(times)) // 4] - times[len(times) // 4]
            wobble = 0.93 * quartiles / median / math.sqrt(len(times))  # of a median: 1.25 sigma / sqrt(n)
            self._cached = mean / median, mean / median * math.hypot(spread, wobble)
        return self._cached


def _deviation(values: Collection[float], mean: float) -> float:
    # Several times faster than statistics.pstdev, which adds exactly.
    return math.sqrt(sum([(v - mean) ** 2 for v in values]) / len(values))

"""Rates and gauges over the running time of a run, on a grid that coarsens so that it never grows beyond a bound."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Bucket", "Timeline"]

GAP_S = 120.0  # silence of this length means that nothing ran: it is cut out of the axis


@dataclass
class Bucket:
    """``amounts`` happened within the bucket (tokens), ``gauges`` are the last levels seen in it."""

    amounts: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    revision: int = 0


class Timeline:
    """Buckets of ``width_s`` seconds of running time; the width doubles beyond ``max_buckets`` buckets."""

    def __init__(self, width_s: float = 2.0, max_buckets: int = 600) -> None:
        self.width_s = width_s
        self.buckets: dict[int, Bucket] = {}
        self.now_s = 0.0  # running time of the latest observation
        self._max_buckets = max_buckets
        self._origin: float | None = None
        self._latest_t = 0.0
        self._cut_s = 0.0
        self._counts: dict[tuple[str, str], tuple[float, float]] = {}

    def place(self, t: float) -> float:
        """Running seconds at unix time ``t``; each call moves the clock, so call it in order of arrival."""
        if self._origin is None:
            self._origin = self._latest_t = t
        if t - self._latest_t > GAP_S:
            self._cut_s += t - self._latest_t
        self._latest_t = max(self._latest_t, t)
        at_s = max(0.0, t - self._origin - self._cut_s)
        self.now_s = max(self.now_s, at_s)
        return at_s

    def gauge(self, at_s: float, name: str, level: float, revision: int) -> None:
        bucket = self._bucket(at_s, revision)
        bucket.gauges[name] = level

    def count(self, at_s: float, name: str, source: str, total: float, revision: int) -> None:
        """What a cumulative count grew by since its last report; one that fell was begun again from 0."""
        before, before_s = self._counts.get((name, source), (0.0, at_s))
        self._counts[name, source] = (total, at_s)
        delta = total - before if total >= before else total
        if delta > 0:
            self.spread(before_s, at_s, name, delta, revision)

    def spread(self, from_s: float, to_s: float, name: str, amount: float, revision: int) -> None:
        """Distribute an amount evenly over an interval of running time."""
        from_s = min(max(0.0, from_s), to_s)
        self._bucket(to_s, revision)  # coarsens first, where needed
        first, last = int(from_s // self.width_s), int(to_s // self.width_s)
        for index in range(first, last + 1):
            low, high = max(from_s, index * self.width_s), min(to_s, (index + 1) * self.width_s)
            share = (high - low) / (to_s - from_s) if to_s > from_s else 1.0
            bucket = self._bucket(index * self.width_s, revision)
            bucket.amounts[name] = bucket.amounts.get(name, 0.0) + amount * share

    def _bucket(self, at_s: float, revision: int) -> Bucket:
        while at_s >= self.width_s * self._max_buckets:
            self._coarsen(revision)
        bucket = self.buckets.setdefault(int(at_s // self.width_s), Bucket())
        bucket.revision = revision
        return bucket

    def _coarsen(self, revision: int) -> None:
        merged: dict[int, Bucket] = {}
        for index in sorted(self.buckets):
            bucket = self.buckets[index]
            target = merged.setdefault(index // 2, Bucket(revision=revision))
            target.gauges.update(bucket.gauges)
            for name, amount in bucket.amounts.items():
                target.amounts[name] = target.amounts.get(name, 0.0) + amount
        self.buckets = merged
        self.width_s *= 2

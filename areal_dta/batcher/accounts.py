"""What became of every episode, in counters whose size does not grow with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Accounts", "BatchTally", "length_bucket"]

RECENT_GROUPS = 16384  # groups behind the newest one whose episodes are still recognised when they come again


@dataclass(frozen=True)
class BatchTally:
    """What a batch adds to the run's summary."""

    num_episodes: int
    staleness_max: int
    num_mixed: int  # episodes whose tokens are of more than one version


def length_bucket(num_tokens: int) -> int:
    """The power of two that bounds this length; 0 of nothing."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens > 0 else 0


@dataclass
class Accounts:
    """Acknowledged, trained, dropped, rejected. ``trained`` sums the batches of this lineage (`tallies`)."""

    acknowledged: int = 0
    duplicated: int = 0  # episodes that a batch took although another one had them
    tallies: dict[int, BatchTally] = field(default_factory=dict)  # by step, of this lineage
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)  # by cause, of what was dropped or rejected
    reissued: int = 0  # prompts leased again because their group was dropped
    _seen: dict[int, int] = field(default_factory=dict)  # group -> bits of its acknowledged samples

    @property
    def trained(self) -> int:
        return sum(t.num_episodes for t in self.tallies.values())

    def knows(self, group_id: int, sample: int) -> bool:
        """Whether this episode was acknowledged (asked of recent groups)."""
        return sample >= 0 and bool(self._seen.get(group_id, 0) >> sample & 1)

    def acknowledge(self, group_id: int, sample: int) -> None:
        self.acknowledged += 1
        self._seen[group_id] = self._seen.get(group_id, 0) | 1 << sample

    def forget(self, group_id: int) -> None:
        """Its episodes may come anew."""
        self._seen.pop(group_id, None)

    def trim(self, oldest_live: int) -> None:
        """Let go what lies far behind the oldest group that is still in use."""
        for group_id in [g for g in self._seen if g < oldest_live - RECENT_GROUPS]:
            del self._seen[group_id]

    def drop(self, cause: str, num_tokens: int) -> None:
        self.dropped[cause] += 1
        self.dropped_tokens[cause] += num_tokens
        self.measure(cause, num_tokens)

    def reject(self, cause: str, num_tokens: int | None) -> None:
        """Count a failed attempt; None: nobody told how long it was."""
        self.rejected[cause] += 1
        self.measure(cause, num_tokens or 0)

    def measure(self, cause: str, num_tokens: int, count: int = 1) -> None:
        """Count the length of what was dropped or rejected, so that lengths add up to those counts. 0: unknown, or
        nothing was generated.
        """
        self.lengths.setdefault(cause, Counter())[length_bucket(num_tokens)] += count

    def dump(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "acknowledged": self.acknowledged,
            "duplicated": self.duplicated,
            "reissued": self.reissued,
            "tallies": [[s, t.num_episodes, t.staleness_max, t.num_mixed] for s, t in self.tallies.items()],
            "dropped": dict(self.dropped),
            "dropped_tokens": dict(self.dropped_tokens),
            "rejected": dict(self.rejected),
            "lengths": {cause: list(map(list, counts.items())) for cause, counts in self.lengths.items()},
            "seen": [[g, bits.to_bytes((bits.bit_length() + 7) // 8)] for g, bits in self._seen.items()],
        }

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Accounts:
        return cls(
            acknowledged=plain["acknowledged"],
            duplicated=plain["duplicated"],
            reissued=plain["reissued"],
            tallies={step: BatchTally(*values) for step, *values in plain["tallies"]},
            dropped=Counter(plain["dropped"]),
            dropped_tokens=Counter(plain["dropped_tokens"]),
            rejected=Counter(plain["rejected"]),
            lengths={cause: Counter(dict(counts)) for cause, counts in plain["lengths"].items()},
            _seen={g: int.from_bytes(bits) for g, bits in plain["seen"]},
        )

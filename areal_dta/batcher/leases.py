"""Groups, their samples and the leases on them; the data stream the groups are drawn from. No I/O, no clock.

A *group* is one prompt of the stream, sampled ``group_size`` times; its id is its position in the stream. A sample is
free, leased to a worker, done (its episode was accepted) or failed (attempts used up).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from areal_dta.records import Trajectory

__all__ = ["DataStream", "Episode", "Group", "GroupState", "LeaseTerm", "Sample", "lease_id", "lease_seed"]


class DataStream:
    """Item indices by stream position: epoch after epoch of the data set, each in its own seeded order. Nothing is
    dropped at the end of an epoch, so a batch may span two.
    """

    def __init__(self, num_items: int, seed: int, shuffle: bool) -> None:
        self._num_items, self._seed, self._shuffle = num_items, seed, shuffle
        self._orders: dict[int, np.ndarray] = {}

    def item(self, position: int) -> int:
        epoch, index = divmod(position, self._num_items)
        if not self._shuffle:
            return index
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._num_items)
        return int(self._orders[epoch][index])


def lease_id(epoch: int, group_id: int, sample: int, attempt: int) -> str:
    """Deterministic, so that leases granted before a restart of the batcher are recognised after it."""
    return f"e{epoch}.g{group_id}.s{sample}.a{attempt}"


def lease_seed(*parts: object) -> int:
    """A 31-bit seed fixed by its parts, equal on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True)
class LeaseTerm:
    """Who holds a sample since which policy version; `expires_s` is on the batcher's clock."""

    lease_id: str
    worker: str
    pid: int
    version: int
    expires_s: float


def rebased_versions(versions: np.ndarray, base: int) -> np.ndarray:
    """Policy numbers of an earlier launch on the axis of one that continues at `base`.

    Numbers beyond `base` name weights of an abandoned branch, and this launch will give the same numbers to other
    weights. A token of number n > base is (n - base) updates away from the fork, so it goes to base - (n - base): its
    distance to this launch's policy k is then (n - base) + (k - base), the updates between the two along the branches.
    -1, which marks tokens nobody generated, is passed over.
    """
    mirrored = np.where(versions > base, 2 * base - versions, versions)
    return np.where((versions > base) & (mirrored < 0), mirrored - 1, mirrored)


@dataclass(frozen=True)
class Episode:
    """An accepted trajectory: what accounting needs, and the arrays as long as they may be needed (else None)."""

    group_id: int
    sample: int
    reward: float
    num_tokens: int
    num_sequences: int
    version_min: int  # over generated tokens
    version_max: int
    trajectory: Trajectory | None

    @classmethod
    def of(cls, traj: Trajectory) -> Episode:
        versions = traj.versions_T[traj.loss_mask_T.astype(bool)]
        return cls(
            group_id=traj.group_id,
            sample=traj.sample,
            reward=float(traj.reward),
            num_tokens=traj.num_tokens,
            num_sequences=traj.num_sequences,
            version_min=int(versions.min()),
            version_max=int(versions.max()),
            trajectory=traj,
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.group_id, self.sample

    @property
    def mixed(self) -> bool:
        return self.version_min != self.version_max

    def staleness(self, step: int) -> int:
        """Largest distance of any of its tokens' versions from the version that step trains."""
        return max(abs(step - self.version_min), abs(step - self.version_max))

    def rebased(self, base: int) -> Episode:
        """As seen from a launch that continues at policy number `base`; see `rebased_versions`."""
        oldest, newest = rebased_versions(np.asarray([self.version_min, self.version_max]), base).tolist()
        traj = self.trajectory
        if traj is not None:
            mask_T = np.asarray(traj.loss_mask_T).astype(bool)
            versions_T = np.where(mask_T, rebased_versions(traj.versions_T, base), traj.versions_T).astype(np.int32)
            traj = replace(traj, versions_T=versions_T)
            oldest, newest = int(versions_T[mask_T].min()), int(versions_T[mask_T].max())
        return replace(self, version_min=min(oldest, newest), version_max=max(oldest, newest), trajectory=traj)

    def without_arrays(self) -> Episode:
        return replace(self, trajectory=None)


@dataclass
class Sample:
    """One sample of a group; `attempt` is the number of the next (or current) attempt."""

    attempt: int = 0
    failures: int = 0
    term: LeaseTerm | None = None
    episode: Episode | None = None
    failed: bool = False

    @property
    def free(self) -> bool:
        return self.term is None and self.episode is None and not self.failed


class GroupState(Enum):
    OPEN = "open"
    READY = "ready"
    BATCHED = "batched"


@dataclass
class Group:
    """A prompt in progress, complete, or in a batch that no checkpoint covers yet."""

    group_id: int
    opened_s: float
    samples: list[Sample] = field(default_factory=list)
    state: GroupState = GroupState.OPEN

    @property
    def episodes(self) -> list[Episode]:
        return [s.episode for s in self.samples if s.episode is not None]

    @property
    def settled(self) -> bool:
        return all(s.episode is not None or s.failed for s in self.samples)

    def version_min(self, current: int) -> int:
        """The oldest version any of its tokens has or may have; `current` is what a free sample would start with."""
        versions = [s.episode.version_min for s in self.samples if s.episode is not None]
        versions += [s.term.version for s in self.samples if s.term is not None]
        return min(versions, default=current)

    def version_max(self) -> int:
        return max((e.version_max for e in self.episodes), default=0)

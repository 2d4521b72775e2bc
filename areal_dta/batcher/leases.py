"""Groups, their samples and the leases on them; the data stream the groups are drawn from. No I/O, no clock.

A *group* is one prompt of the stream, sampled ``group_size`` times; its id is its position in the stream. A sample is
free, leased to a worker, done (its episode was accepted) or failed (attempts used up).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from areal_dta.records import Trajectory

__all__ = ["DataStream", "Episode", "Group", "GroupState", "LeaseTerm", "Place", "Sample", "lease_id", "lease_seed"]


_KEPT_ORDERS = 3  # permutations of a data set: prompts come from this epoch, a few from the one before


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
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._num_items)
        return int(self._orders[epoch][index])


def lease_id(epoch: int, group_id: int, sample: int, attempt: int) -> str:
    """Deterministic, so that leases granted before a restart of the batcher are recognised after it."""
    return f"e{epoch}.g{group_id}.s{sample}.a{attempt}"


def attempt_of(identity: str) -> int | None:
    """The attempt of a training lease, None for what `lease_id` did not make."""
    _, dot, attempt = identity.rpartition(".a")
    return int(attempt) if dot and attempt.isdigit() else None


def launch_of(identity: str) -> int:
    """The launch (run epoch) that granted a lease; ValueError for what `lease_id` did not make."""
    launch, dot, _ = identity.partition(".")
    if not dot or not launch.startswith("e") or not launch[1:].isdigit():
        raise ValueError(f"{identity!r} is no lease id")
    return int(launch[1:])


def lease_seed(*parts: object) -> int:
    """A 31-bit seed fixed by its parts, equal on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True)
class LeaseTerm:
    """Who holds a sample since which policy version. Not in the log: `expires_s` on the batcher's clock, and
    ``num_tokens``, how long the episode was when its worker last told (None: never).
    """

    lease_id: str
    worker: str
    pid: int
    version: int
    expires_s: float
    num_tokens: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a record of the log lies: file name, offset and size of the record."""

    segment: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Episode:
    """An accepted trajectory: what accounting needs, and its arrays: in memory, or at their place in the log."""

    group_id: int
    sample: int
    reward: float
    num_tokens: int
    num_sequences: int
    version_min: int  # over generated tokens
    version_max: int
    base: int | None = None  # see `rebased`
    trajectory: Trajectory | None = None
    place: Place | None = None

    @classmethod
    def of(cls, traj: Trajectory) -> Episode:
        versions = traj.versions_T[traj.loss_mask_T != 0]
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

    def rebased(self, base: int) -> Episode:
        """As seen from a launch that continues at policy number `base`.

        Numbers beyond `base` name weights of a branch that was abandoned, and this launch will give them to other
        weights. Both branches come from the policy at the fork, so such a token counts as the fork's.
        """
        oldest, newest = min(self.version_min, base), min(self.version_max, base)
        lowest = base if self.base is None else min(base, self.base)
        return replace(self, version_min=oldest, version_max=newest, base=lowest)

    def arrays(self, read: Callable[[Place], Trajectory] | None = None) -> Trajectory:
        """Its trajectory, from memory or from the log; raises LookupError when it is in neither."""
        traj = self.trajectory
        if traj is None and self.place is not None and read is not None:
            traj = read(self.place)
        if traj is None:
            raise LookupError(f"the arrays of episode {self.key} are gone: a checkpoint already covers it")
        if self.base is not None:
            traj = replace(traj, versions_T=np.minimum(traj.versions_T, self.base))
        return traj

    def stored(self, place: Place) -> Episode:
        """With its arrays in the log only."""
        return replace(self, trajectory=None, place=place)


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
    first_attempt: int = 0  # earlier attempts belong to a time before this prompt was leased again
    reissues: int = 0  # how often that happened

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

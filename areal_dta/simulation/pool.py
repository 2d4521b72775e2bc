"""Episodes between admission and training, by the batcher's own rules: `admissible_groups` decides what may start,
`choose` what a step trains on. What `areal_dta.batcher.desk` and `core` do around them is done here with counters
instead of a log, so that a simulated step costs milliseconds; a test holds the two against each other.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from areal_dta.batcher.leases import Episode, Group, GroupState, LeaseTerm, Sample
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.batcher.staleness import admissible_groups, choose
from areal_dta.simulation.settings import SimulationSettings

__all__ = ["Counts", "Finished", "Grant", "Pool"]

_NEVER_S = float("inf")


@dataclass(frozen=True)
class Grant:
    """Permission to run one sample of a group; ``attempt`` counts from 0."""

    group_id: int
    sample: int
    attempt: int


@dataclass(frozen=True)
class Finished:
    """A finished episode: generated tokens by the policy version that made them."""

    grant: Grant
    tokens_by_version: Mapping[int, int]

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_version.values())


@dataclass
class Counts:
    """Episodes by fate. Every granted one is running, or counted by one of the others."""

    granted: int = 0
    running: int = 0
    failed: int = 0  # attempts
    trained: int = 0
    dropped: int = 0


class Pool:
    """The batcher's state: version, next step, groups."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.version = 0
        self.next_step = 0
        self.counts = Counts()
        self.groups: dict[int, Group] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self._position = 0
        self._free: deque[tuple[int, int]] = deque()  # samples that wait for an attempt, in order of groups
        self._requeued: dict[int, int] = {}  # prompts of groups dropped as stale, with their next attempt
        self._reissues: Counter[int] = Counter()
        self._rules = BatcherSettings(
            num_items=settings.batch_groups,
            batch_groups=settings.batch_groups,
            group_size=settings.group_size,
            eta=settings.eta,
            min_group_size=settings.min_group_size,
            stale_reissues=settings.stale_reissues,
        )

    # -- admission

    @property
    def pooled(self) -> int:
        """Finished episodes that are neither trained nor dropped."""
        return len(self.finished)

    @property
    def closed(self) -> bool:
        """Whether nothing may start until the trainer takes a batch or publishes a version."""
        return not self._free and self._admissible() == 0

    def grant(self, capacity: int) -> list[Grant]:
        """Up to ``capacity`` episodes to start now, repeated attempts and begun groups first."""
        capacity = min(capacity, self.settings.concurrent - self.counts.running)
        grants: list[Grant] = []
        while len(grants) < capacity and self._free:
            grants.append(self._start(*self._free.popleft()))
        if len(grants) >= capacity:
            return grants
        for _ in range(self._admissible()):
            self._open()
            while len(grants) < capacity and self._free:
                grants.append(self._start(*self._free.popleft()))
            if len(grants) >= capacity:
                break
        return grants

    def _open(self) -> None:
        """Begin the next group, again a dropped one if there is any; its samples wait to be started."""
        group_id = min(self._requeued, default=self._position)
        attempt = self._requeued.pop(group_id, 0)
        self._position = max(self._position, group_id + 1)
        samples = [Sample(attempt=attempt) for _ in range(self.settings.group_size)]
        self.groups[group_id] = Group(group_id, 0.0, samples)
        self._free.extend((group_id, sample) for sample in range(len(samples)))

    def _start(self, group_id: int, sample: int) -> Grant:
        slot = self.groups[group_id].samples[sample]
        slot.term = LeaseTerm("", "", 0, self.version, _NEVER_S)
        self.counts.granted += 1
        self.counts.running += 1
        return Grant(group_id, sample, slot.attempt)

    def _admissible(self) -> int:
        s = self.settings
        waiting = self.groups.values()
        return admissible_groups(
            eta=s.eta,
            version=self.version,
            consumed_batches=self.next_step,
            batch_groups=s.batch_groups,
            outstanding=sum(g.version_max() - s.eta <= self.next_step for g in waiting),
            total_steps=s.total_steps,
        )

    # -- what becomes of episodes

    def finish(self, done: Finished) -> None:
        """Take an episode."""
        grant = done.grant
        group = self.groups[grant.group_id]
        slot = group.samples[grant.sample]
        versions = [v for v, tokens in done.tokens_by_version.items() if tokens]
        slot.term = None
        slot.episode = Episode(
            grant.group_id, grant.sample, 0.0, done.num_tokens, 1, min(versions), max(versions), trajectory=None
        )
        self.finished[grant.group_id, grant.sample] = done
        self.counts.running -= 1
        self._settle(group)

    def fail(self, grant: Grant) -> None:
        """An attempt ended without an episode."""
        group = self.groups[grant.group_id]
        slot = group.samples[grant.sample]
        slot.term, slot.attempt = None, slot.attempt + 1
        slot.failures += 1
        slot.failed = slot.failures >= self.settings.max_attempts
        self.counts.running -= 1
        self.counts.failed += 1
        if not slot.failed:
            bisect.insort(self._free, (grant.group_id, grant.sample))
        self._settle(group)

    def _settle(self, group: Group) -> None:
        if group.state is not GroupState.OPEN or not group.settled:
            return
        if len(group.episodes) >= self._rules.min_group:
            group.state = GroupState.READY
        else:
            self._give_up(group)

    def _give_up(self, group: Group) -> None:
        for episode in group.episodes:
            self._forget(episode)
        del self.groups[group.group_id]

    def _forget(self, episode: Episode) -> None:
        del self.finished[episode.key]
        self.counts.dropped += 1

    # -- training

    def batch(self) -> list[list[Finished]] | None:
        """The groups of the next step, which are then the trainer's; None while there are none."""
        s = self.settings
        self._drop_stale()
        if sum(g.state is GroupState.READY for g in self.groups.values()) < s.batch_groups:
            return None
        choice = choose(
            self.groups.values(), self.next_step, eta=s.eta, batch_groups=s.batch_groups, version=self.version,
            policy=s.policy,
        )  # fmt: skip
        if not choice.groups:
            return None
        batch = [[self.finished.pop(e.key) for e in group.episodes] for group in choice.groups]
        for group in choice.groups:
            del self.groups[group.group_id]
        self.counts.trained += sum(map(len, batch))
        self.next_step += 1
        return batch

    def _drop_stale(self) -> None:
        s = self.settings
        if s.policy not in ("wait", "drop"):
            return
        for group in [g for g in self.groups.values() if g.state is GroupState.READY]:
            stale = [x for x in group.samples if x.episode and self.next_step - x.episode.version_min > s.eta]
            for slot in stale:
                assert slot.episode is not None
                self._forget(slot.episode)
                slot.episode, slot.failed = None, True
            if stale and len(group.episodes) < self._rules.min_group:
                self._give_up(group)
                if self._reissues[group.group_id] < self._rules.stale_reissues:
                    self._reissues[group.group_id] += 1
                    self._requeued[group.group_id] = 1 + max(x.attempt for x in group.samples)

    def published(self, version: int) -> None:
        self.version = version

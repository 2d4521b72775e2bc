"""The batcher's state as a fold over its events: what the spool replays is exactly what running produced.

Only `Ledger.apply` changes the state, and only from the event and the settings, so a restart that replays the events
stands where the killed process stood. Rules that a resume may change are in the ``epoch`` event of their launch. (Lease
expiry times are the exception: they start anew.)

Events: ``epoch`` a launch of the run begins · ``grant`` a sample is leased · ``traj`` an episode is accepted · ``fail``
an attempt ended without one · ``close`` a group ends before all its samples did · ``drop`` accepted episodes are given
up, with the cause · ``batch`` a step's episodes · ``commit`` a checkpoint covers the steps so far · ``published`` a
policy version is being served · ``eval_start``, ``eval`` evaluation · ``finish`` no more training · ``snapshot`` the
whole state (`areal_dta.batcher.snapshot`), ``held`` the arrays of an episode that it names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_dta.batcher.accounts import Accounts, BatchTally
from areal_dta.batcher.evaluation import EvalRound
from areal_dta.batcher.leases import Episode, Group, GroupState, LeaseTerm, Place, Sample, lease_id
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.records import Trajectory, unpack

__all__ = ["Event", "Key", "LeaseRequest", "Ledger", "LedgerError", "Requeued"]

Key = tuple[int, int]  # (group_id, sample)
COVERED = "covered_by_a_later_checkpoint"
KEPT_EVALS = 16


class LedgerError(ValueError):
    """A log that does not belong to these settings or to this program."""


@dataclass(frozen=True)
class Event:
    kind: str
    body: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Requeued:
    """A prompt that waits to be leased again: its first new attempt, and how often this happened to it."""

    first_attempt: int
    reissues: int


@dataclass(frozen=True)
class LeaseRequest:
    """The latest request of a worker for leases, and what it was granted."""

    request: str
    keys: tuple[Key, ...]


@dataclass
class _Counts:
    """Samples and groups by state, kept up to date so that nobody has to count."""

    leased: int = 0
    free: int = 0
    pooled: int = 0  # accepted, neither trained nor dropped
    open: int = 0
    ready: int = 0

    def add(self, group: Group, sign: int) -> None:
        is_open = group.state is GroupState.OPEN
        if is_open:
            self.open += sign
            self.leased += sign * sum(s.term is not None for s in group.samples)
            self.free += sign * sum(s.free for s in group.samples)
        self.ready += sign * (group.state is GroupState.READY)
        if group.state is not GroupState.BATCHED:
            self.pooled += sign * sum(s.episode is not None for s in group.samples)


class Ledger:
    """Groups, batches, counters. `now_s` arguments are the batcher's own clock, used for expiry only."""

    def __init__(self, settings: BatcherSettings) -> None:
        self.settings = settings
        self.epoch = -1
        self.min_group, self.max_attempts = settings.min_group, settings.max_attempts  # of the launch being replayed
        self.version = 0
        self.next_step = 0
        self.committed_step = -1
        self.position = 0  # next unopened place in the data stream
        self.finished = False
        self.groups: dict[int, Group] = {}  # open, ready, or batched since the last checkpoint
        self.batches: dict[int, tuple[Key, ...]] = {}  # by step, since the last checkpoint
        self.accounts = Accounts()
        self.requeued: dict[int, Requeued] = {}
        self.requests: dict[str, LeaseRequest] = {}  # by worker
        self.evals: dict[str, EvalRound] = {}
        self.failed_in_a_row = 0  # groups given up since one last became ready
        self.equal_in_a_row = 0  # groups dropped for equal rewards since the last batch
        self.became_ready: deque[int] = deque()  # groups, for whoever looks at them first
        self.revision = 0  # changes with every event
        self.counts = _Counts()

    def apply(self, event: Event, now_s: float, place: Place | None = None) -> None:
        """Change the state; `place` is where the log holds the event's arrays, None while they are in memory."""
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is None:
            raise LedgerError(
                f"the log holds an event of the unknown kind {event.kind!r}; was it written by a newer version?"
            )
        self.revision += 1
        handler(event, now_s)
        if place is not None and event.kind in ("traj", "held"):
            self.stored((event.body["group_id"], event.body["sample"]), place)

    def stored(self, key: Key, place: Place) -> None:
        """The arrays of an episode are in the log (or were moved there) and need no memory."""
        group = self.groups.get(key[0])
        sample = group.samples[key[1]] if group else None
        if sample is not None and sample.episode is not None:
            sample.episode = sample.episode.stored(place)

    def recount(self) -> None:
        """Count anew, after the groups were replaced as a whole."""
        self.counts = _Counts()
        for group in self.groups.values():
            self.counts.add(group, 1)

    def of_state(self, state: GroupState) -> Iterator[Group]:
        return (g for g in self.groups.values() if g.state is state)

    def leased(self) -> Iterator[tuple[Group, int, Sample]]:
        """(group, sample index, sample) of every training lease."""
        for group in self.of_state(GroupState.OPEN):
            for index, sample in enumerate(group.samples):
                if sample.term is not None:
                    yield group, index, sample

    def held(self) -> dict[Key, Episode]:
        """Every episode that a resume from the last checkpoint could still train."""
        return {e.key: e for group in self.groups.values() for e in group.episodes}

    def fingerprint(self) -> dict[str, Any]:
        """What a log depends on: the data stream and the size of groups."""
        s = self.settings
        return {"num_items": s.num_items, "group_size": s.group_size, "seed": s.seed, "shuffle": s.shuffle}

    def check_fingerprint(self, written: Mapping[str, Any]) -> None:
        """Raise LedgerError when a log was written with another data stream or size of groups."""
        for name, value in self.fingerprint().items():
            if written.get(name) != value:
                raise LedgerError(
                    f"the spool was written with {name}={written.get(name)!r}, the config now says {value!r}; "
                    "restore the value or start a new run"
                )

    def _on_epoch(self, event: Event, now_s: float) -> None:
        self.check_fingerprint(event.body["fingerprint"])
        first = self.epoch < 0
        self.epoch = event.body["epoch"]
        self.min_group, self.max_attempts = event.body.get("rules") or (self.min_group, self.max_attempts)
        resume_step = event.body["resume_step"]
        last = -1 if resume_step is None else resume_step
        self.next_step = self.version = last + 1
        self.committed_step = min(self.committed_step, last)
        self.finished, self.failed_in_a_row, self.equal_in_a_row = False, 0, 0
        if first:  # a resume without its spool: go on where the checkpoint's data ended, at least
            self.position = self.next_step * self.settings.batch_groups
            return
        for step in [s for s in self.accounts.tallies if s > last]:
            self._unbatch(step)
        for group in self.groups.values():
            for sample in group.samples:
                sample.term = None  # its worker belonged to the previous launch
                if sample.episode is not None and group.state is not GroupState.BATCHED:
                    sample.episode = sample.episode.rebased(self.version)
        self.requests.clear()
        self.recount()
        self.evals = {tag: r for tag, r in self.evals.items() if r.number <= self.version}

    def _unbatch(self, step: int) -> None:
        keys, tally = self.batches.pop(step, None), self.accounts.tallies.pop(step)
        if keys is None:  # a later checkpoint covered it and its arrays were let go
            self.accounts.dropped[COVERED] += tally.num_episodes
            self.accounts.measure(COVERED, 0, tally.num_episodes)
            return
        for group_id in {g for g, _ in keys}:
            self.groups[group_id].state = GroupState.READY

    def _on_grant(self, event: Event, now_s: float) -> None:
        b = event.body
        group = self.groups.get(b["group_id"])
        if group is None:
            group = self._open_group(b["group_id"], now_s)
        else:
            self.counts.add(group, -1)
        identity = lease_id(self.epoch, b["group_id"], b["sample"], b["attempt"])
        expires_s = now_s + self.settings.lease_timeout_s
        group.samples[b["sample"]].term = LeaseTerm(identity, b["worker"], b["pid"], b["version"], expires_s)
        self.counts.add(group, 1)
        if request := b.get("request"):
            before = self.requests.get(b["worker"])
            earlier = before.keys if before is not None and before.request == request else ()
            self.requests[b["worker"]] = LeaseRequest(request, (*earlier, (b["group_id"], b["sample"])))

    def _open_group(self, group_id: int, now_s: float) -> Group:
        """A group of free samples, not counted yet."""
        again = self.requeued.pop(group_id, None)
        first = again.first_attempt if again else 0
        samples = [Sample(attempt=first) for _ in range(self.settings.group_size)]
        reissues = again.reissues if again else 0
        group = Group(group_id, now_s, samples, first_attempt=first, reissues=reissues)
        self.groups[group_id] = group
        self.position = max(self.position, group_id + 1)
        if again:
            self.accounts.forget(group_id)
        return group

    def _on_traj(self, event: Event, now_s: float) -> None:
        episode = Episode.of(unpack(Trajectory, event.body, event.arrays))
        group = self.groups.get(episode.group_id)
        if group is None:
            raise LedgerError(f"the log accepts an episode of group {episode.group_id}, which is not open")
        self.accounts.acknowledge(episode.group_id, episode.sample)
        self.counts.add(group, -1)
        sample = group.samples[episode.sample]
        sample.episode, sample.term = episode, None
        self._settle(group)

    def _on_held(self, event: Event, now_s: float) -> None:
        traj = unpack(Trajectory, event.body, event.arrays)
        group = self.groups.get(traj.group_id)
        sample = group.samples[traj.sample] if group else None
        if sample is not None and sample.episode is not None:
            sample.episode = replace(sample.episode, trajectory=traj)

    def _on_fail(self, event: Event, now_s: float) -> None:
        b = event.body
        self.accounts.reject(b["cause"], b.get("num_tokens"))
        group = self.groups.get(b["group_id"])
        if group is None:
            return
        self.counts.add(group, -1)
        sample = group.samples[b["sample"]]
        sample.term, sample.attempt = None, b["attempt"] + 1
        sample.failures += b["cause"] != "aborted"  # handed back by a worker that stops: not the episode's fault
        sample.failed = sample.failures >= self.max_attempts
        self._settle(group)

    def _on_close(self, event: Event, now_s: float) -> None:
        group = self.groups.get(event.body["group_id"])
        if group is None:
            return
        self.counts.add(group, -1)
        lengths = dict(event.body.get("lengths", ()))  # by sample, of episodes that were under way
        for index, sample in enumerate(group.samples):
            if sample.episode is None and not sample.failed:
                self.accounts.reject(event.body["cause"], lengths.get(index))
                sample.failed, sample.term = True, None
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Count the group again. If all its samples ended it is ready, or given up when too few episodes are left."""
        self.counts.add(group, 1)
        if group.state is not GroupState.OPEN or not group.settled:
            return
        if len(group.episodes) < self.min_group:
            self.failed_in_a_row += 1
            self._give_up(group, "group_too_small")
            return
        self.counts.add(group, -1)
        group.state, self.failed_in_a_row = GroupState.READY, 0
        self.counts.add(group, 1)
        self.became_ready.append(group.group_id)

    def _give_up(self, group: Group, cause: str) -> None:
        for episode in group.episodes:
            self.accounts.drop(cause, episode.num_tokens)
        self.counts.add(group, -1)
        del self.groups[group.group_id]

    def _on_drop(self, event: Event, now_s: float) -> None:
        cause, again = event.body["cause"], event.body.get("again", ())
        for group_id, index in event.body["episodes"]:
            group = self.groups[group_id]
            sample = group.samples[index]
            if sample.episode is None:
                raise LedgerError(f"the log drops sample {index} of group {group_id}, which has no episode")
            self.accounts.drop(cause, sample.episode.num_tokens)
            self.counts.add(group, -1)
            sample.episode, sample.failed = None, True
            self.counts.add(group, 1)
        for group_id in {g for g, _ in event.body["episodes"]}:
            group = self.groups[group_id]
            if len(group.episodes) >= self.min_group:
                self.became_ready.append(group_id)  # anew, with what is left of it
                continue
            self._give_up(group, cause)
            self.equal_in_a_row += cause == "equal_rewards"
            if group_id in again:
                first_attempt = 1 + max(s.attempt for s in group.samples)
                self.requeued[group_id] = Requeued(first_attempt, group.reissues + 1)
                self.accounts.reissued += 1

    def _on_batch(self, event: Event, now_s: float) -> None:
        b = event.body
        keys = tuple((int(g), int(s)) for g, s in b["episodes"])
        self.batches[b["step"]] = keys
        self.accounts.tallies[b["step"]] = BatchTally(len(keys), b["staleness_max"], b["num_mixed"])
        self.next_step, self.equal_in_a_row = b["step"] + 1, 0
        for group_id, _ in keys:
            group = self.groups.get(group_id)
            self.accounts.duplicated += group is None or group.state is GroupState.BATCHED
        for group_id in {g for g, _ in keys}:
            if (group := self.groups.get(group_id)) is not None:
                self.counts.add(group, -1)
                group.state = GroupState.BATCHED
                self.counts.add(group, 1)

    def _on_commit(self, event: Event, now_s: float) -> None:
        for step in [s for s in self.batches if s <= event.body["step"]]:
            for group_id in {g for g, _ in self.batches.pop(step)}:
                if (group := self.groups.pop(group_id, None)) is not None:
                    self.counts.add(group, -1)
        self.committed_step = max(self.committed_step, event.body["step"])
        self.accounts.trim(min(self.groups, default=self.position))

    def _on_published(self, event: Event, now_s: float) -> None:
        if event.body["epoch"] == self.epoch:
            self.version = max(self.version, event.body["number"])

    def _on_eval_start(self, event: Event, now_s: float) -> None:
        b = event.body
        self.evals[b["tag"]] = EvalRound.start(b["tag"], b["number"], b["epoch"], b["num_items"], b["num_samples"])
        for tag in [t for t, r in self.evals.items() if r.finished][:-KEPT_EVALS]:
            del self.evals[tag]

    def _on_eval(self, event: Event, now_s: float) -> None:
        b = event.body
        task = self.evals[b["tag"]].task(b["index"], b["sample"]) if b["tag"] in self.evals else None
        if task is not None:
            task.task_id, task.reward, task.lease_id = b["task_id"], b["reward"], None

    def _on_finish(self, event: Event, now_s: float) -> None:
        self.finished = True

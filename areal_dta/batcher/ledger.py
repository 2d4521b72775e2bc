"""The batcher's state as a fold over its events: what the spool replays is exactly what running produced.

Only `Ledger.apply` changes the state, and only from the event and the settings, so a restart that replays the events
stands where the killed process stood. (Lease expiry times are the exception: they start anew.)

Events: ``epoch`` a launch of the run begins · ``grant`` a sample is leased · ``traj`` an episode is accepted · ``fail``
an attempt ended without one · ``close`` a group ends before all its samples did · ``drop`` accepted episodes are given
up, with the cause · ``batch`` a step's episodes · ``commit`` a checkpoint covers the steps so far · ``published`` a
policy version is being served · ``eval_start``, ``eval`` evaluation · ``finish`` no more training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from areal_dta.batcher.evaluation import EvalRound
from areal_dta.batcher.leases import Episode, Group, GroupState, LeaseTerm, Sample, lease_id
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.records import Trajectory, unpack

__all__ = ["Event", "Key", "Ledger", "LedgerError", "without_arrays"]

Key = tuple[int, int]  # (group_id, sample)


class LedgerError(ValueError):
    """A log that does not belong to these settings or to this program."""


@dataclass(frozen=True)
class Event:
    kind: str
    body: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def without_arrays(event: Event) -> Event:
    """A ``traj`` event reduced to what accounting needs; replaying it gives the same episode without arrays."""
    episode = Episode.of(unpack(Trajectory, event.body, event.arrays))
    body = {f.name: getattr(episode, f.name) for f in fields(Episode) if f.name != "trajectory"}
    return Event(event.kind, body)


@dataclass(frozen=True)
class BatchTally:
    """What a batch adds to the run's summary."""

    staleness_max: int
    num_mixed: int  # episodes whose tokens are of more than one version


class Ledger:
    """Groups, batches, counters. `now_s` arguments are the batcher's own clock, used for expiry only."""

    def __init__(self, settings: BatcherSettings) -> None:
        self.settings = settings
        self.epoch = -1
        self.version = 0
        self.next_step = 0
        self.committed_step = -1
        self.position = 0  # next unopened place in the data stream
        self.finished = False
        self.groups: dict[int, Group] = {}  # open, ready, or batched since the last checkpoint
        self.batches: dict[int, tuple[Key, ...]] = {}  # by step, of this lineage
        self.tallies: dict[int, BatchTally] = {}  # likewise
        self.acknowledged: set[Key] = set()
        self.dropped: dict[Key, str] = {}
        self.dropped_tokens: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.evals: dict[str, EvalRound] = {}
        self.failed_in_a_row = 0  # groups given up since one last became ready

    def apply(self, event: Event, now_s: float) -> None:
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is None:
            raise LedgerError(
                f"the log holds an event of the unknown kind {event.kind!r}; was it written by a newer version?"
            )
        handler(event, now_s)

    def of_state(self, state: GroupState) -> Iterator[Group]:
        return (g for g in self.groups.values() if g.state is state)

    def leased(self) -> Iterator[tuple[Group, int, Sample]]:
        """(group, sample index, sample) of every training lease."""
        for group in self.of_state(GroupState.OPEN):
            for index, sample in enumerate(group.samples):
                if sample.term is not None:
                    yield group, index, sample

    def pooled(self) -> set[Key]:
        """Accepted episodes that are neither trained nor dropped."""
        return {e.key for g in self.groups.values() if g.state is not GroupState.BATCHED for e in g.episodes}

    def trained(self) -> Counter[Key]:
        """How often each episode is in a batch of this lineage."""
        return Counter(key for keys in self.batches.values() for key in keys)

    def needs_arrays(self, key: Key) -> bool:
        """Whether a resume from the last checkpoint could still train this episode."""
        group = self.groups.get(key[0])
        return group is not None and any(e.key == key for e in group.episodes)

    def fingerprint(self) -> dict[str, Any]:
        """What a log depends on: the data stream and the size of groups."""
        s = self.settings
        return {"num_items": s.num_items, "group_size": s.group_size, "seed": s.seed, "shuffle": s.shuffle}

    def _on_epoch(self, event: Event, now_s: float) -> None:
        for name, value in self.fingerprint().items():
            if event.body["fingerprint"].get(name) != value:
                raise LedgerError(
                    f"the spool was written with {name}={event.body['fingerprint'].get(name)!r}, the config now says "
                    f"{value!r}; restore the value or start a new run"
                )
        first = self.epoch < 0
        self.epoch = event.body["epoch"]
        resume_step = event.body["resume_step"]
        last = -1 if resume_step is None else resume_step
        self.next_step = self.version = last + 1
        self.committed_step = min(self.committed_step, last)
        self.finished, self.failed_in_a_row = False, 0
        if first:  # a resume without its spool: go on where the checkpoint's data ended, at least
            self.position = self.next_step * self.settings.batch_groups
            return
        for step in [s for s in self.batches if s > last]:
            self._unbatch(self.batches.pop(step))
            del self.tallies[step]
        for group in self.groups.values():
            for sample in group.samples:
                sample.term = None  # its worker belonged to the previous launch
                if sample.episode is not None and group.state is not GroupState.BATCHED:
                    sample.episode = sample.episode.rebased(self.version)
        self.evals = {tag: r for tag, r in self.evals.items() if r.number <= self.version}

    def _unbatch(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            group = self.groups.get(key[0])
            if group is not None:
                group.state = GroupState.READY
            else:  # a later checkpoint covered it and its arrays were let go
                self.dropped[key] = "covered_by_a_later_checkpoint"

    def _on_grant(self, event: Event, now_s: float) -> None:
        b = event.body
        group = self.groups.get(b["group_id"])
        if group is None:
            samples = [Sample() for _ in range(self.settings.group_size)]
            group = self.groups[b["group_id"]] = Group(b["group_id"], now_s, samples)
            self.position = max(self.position, b["group_id"] + 1)
        identity = lease_id(self.epoch, b["group_id"], b["sample"], b["attempt"])
        expires_s = now_s + self.settings.lease_timeout_s
        group.samples[b["sample"]].term = LeaseTerm(identity, b["worker"], b["pid"], b["version"], expires_s)

    def _on_traj(self, event: Event, now_s: float) -> None:
        traj = unpack(Trajectory, event.body, event.arrays) if event.arrays else None
        episode = Episode.of(traj) if traj is not None else Episode(**event.body, trajectory=None)
        self.acknowledged.add(episode.key)
        group = self.groups.get(episode.group_id)
        if group is None:
            raise LedgerError(f"the log accepts an episode of group {episode.group_id}, which is not open")
        sample = group.samples[episode.sample]
        sample.episode, sample.term = episode, None
        self._settle(group)

    def _on_fail(self, event: Event, now_s: float) -> None:
        b = event.body
        self.rejected[b["cause"]] += 1
        group = self.groups.get(b["group_id"])
        if group is None:
            return
        sample = group.samples[b["sample"]]
        sample.term, sample.attempt = None, b["attempt"] + 1
        sample.failures += b["cause"] != "aborted"  # handed back by a worker that stops: not the episode's fault
        sample.failed = sample.failures >= self.settings.max_attempts
        self._settle(group)

    def _on_close(self, event: Event, now_s: float) -> None:
        group = self.groups.get(event.body["group_id"])
        if group is None:
            return
        self.rejected[event.body["cause"]] += sum(s.episode is None and not s.failed for s in group.samples)
        for sample in group.samples:
            if sample.episode is None:
                sample.failed, sample.term = True, None
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """A group whose samples all ended is ready, or given up when too few episodes are left."""
        if group.state is not GroupState.OPEN or not group.settled:
            return
        if len(group.episodes) >= self.settings.min_group:
            group.state, self.failed_in_a_row = GroupState.READY, 0
            return
        self.failed_in_a_row += 1
        self._give_up(group, "group_too_small")

    def _give_up(self, group: Group, cause: str) -> None:
        for episode in group.episodes:
            self.dropped[episode.key] = cause
            self.dropped_tokens[cause] += episode.num_tokens
        del self.groups[group.group_id]

    def _on_drop(self, event: Event, now_s: float) -> None:
        for group_id, index in event.body["episodes"]:
            group = self.groups[group_id]
            sample = group.samples[index]
            if sample.episode is None:
                raise LedgerError(f"the log drops sample {index} of group {group_id}, which has no episode")
            self.dropped[sample.episode.key] = event.body["cause"]
            self.dropped_tokens[event.body["cause"]] += sample.episode.num_tokens
            sample.episode, sample.failed = None, True
        for group_id in {g for g, _ in event.body["episodes"]}:
            group = self.groups[group_id]
            if len(group.episodes) < self.settings.min_group:
                self._give_up(group, event.body["cause"])

    def _on_batch(self, event: Event, now_s: float) -> None:
        keys = tuple((int(g), int(s)) for g, s in event.body["episodes"])
        self.batches[event.body["step"]] = keys
        self.tallies[event.body["step"]] = BatchTally(event.body["staleness_max"], event.body["num_mixed"])
        self.next_step = event.body["step"] + 1
        for group_id in {g for g, _ in keys}:
            if group_id in self.groups:
                self.groups[group_id].state = GroupState.BATCHED

    def _on_commit(self, event: Event, now_s: float) -> None:
        for step in range(self.committed_step + 1, event.body["step"] + 1):
            for group_id in {g for g, _ in self.batches.get(step, ())}:
                self.groups.pop(group_id, None)
        self.committed_step = max(self.committed_step, event.body["step"])

    def _on_published(self, event: Event, now_s: float) -> None:
        if event.body["epoch"] == self.epoch:
            self.version = max(self.version, event.body["number"])

    def _on_eval_start(self, event: Event, now_s: float) -> None:
        b = event.body
        self.evals[b["tag"]] = EvalRound.start(b["tag"], b["number"], b["epoch"], b["num_items"], b["num_samples"])

    def _on_eval(self, event: Event, now_s: float) -> None:
        b = event.body
        task = self.evals[b["tag"]].task(b["index"], b["sample"]) if b["tag"] in self.evals else None
        if task is not None:
            task.task_id, task.reward, task.lease_id = b["task_id"], b["reward"], None

    def _on_finish(self, event: Event, now_s: float) -> None:
        self.finished = True

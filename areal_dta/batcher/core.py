"""The batcher's decisions: who may start an episode, what is accepted, what a step trains on. No I/O, no sockets, no
wall clock.

Every change of state is an `Event`, applied at once and handed out by `take_events` for the log; the caller answers a
request only when the events up to it are durable. `replay` feeds a log back in. A batch is put together outside: `ask`
gives the `Assembly`, a frozen record, and `fix` takes its result; everything else goes on meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_dta.batcher import snapshot
from areal_dta.batcher.accounts import length_bucket
from areal_dta.batcher.desk import LeaseDesk
from areal_dta.batcher.dispatch import Assembly, Batch
from areal_dta.batcher.leases import Episode, Group, GroupState, Place, attempt_of, launch_of
from areal_dta.batcher.ledger import Event, Key, Ledger
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.batcher.staleness import Choice, choose
from areal_dta.records import RecordError, Shard, Trajectory, is_finite_number, pack

__all__ = ["KEPT_BATCHES", "BatcherCore", "Refusal", "Verdict", "Waiting"]

KEPT_BATCHES = 2  # steps whose shards can be asked for again


class Refusal(ValueError):
    """A request that makes no sense now; `code` for programs, the text for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Verdict:
    """Answer to a trajectory: accepted, duplicate, rejected (with the cause) or busy (send it again later)."""

    status: str
    cause: str = ""


@dataclass(frozen=True)
class Waiting:
    """No shard yet: complete groups, groups needed, and what is missing."""

    have: int
    need: int
    why: str


class BatcherCore:
    """`items` and `eval_items` are the lines of the data sets; `clock` gives seconds that never go back."""

    def __init__(
        self,
        settings: BatcherSettings,
        items: Sequence[Mapping[str, Any]],
        eval_items: Sequence[Mapping[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings.check()
        self.ledger = Ledger(settings)
        self.desk = LeaseDesk(self.ledger, items, eval_items, self._emit, clock)
        self._num_eval_items, self._clock = len(eval_items), clock
        self._events: list[Event] = []
        self._assemblies: dict[int, Assembly] = {}  # asked for, not fixed yet
        self._batches: dict[int, Batch] = {}
        self._new_batches: list[Batch] = []
        self._chosen: tuple[int, Choice] | None = None  # at which revision of the ledger, what
        self._swept = (-1, -1)  # revision and step of the last search for stale episodes
        self.refused: Counter[str] = Counter()  # answered without an event: duplicate, late, busy, ...
        self.refused_lengths: dict[str, Counter[int]] = {}  # of those that were not told to come again

    # -- events

    def replay(self, event: Event, place: Place | None = None) -> None:
        """Apply an event of the log, which holds its arrays at `place`."""
        if event.kind == "snapshot":
            snapshot.load(self.ledger, event.body, self._clock())
        else:
            self.ledger.apply(event, self._clock(), place)

    def begin(self, epoch: int, resume_step: int | None) -> None:
        """Start serving launch `epoch`, after the whole log was replayed: a new launch returns the batches after its
        checkpoint to the pool; a restart within a launch goes on where the log ends.
        """
        if self.ledger.epoch > epoch:
            raise Refusal(
                "epoch",
                f"the spool belongs to launch {self.ledger.epoch}, this is launch {epoch}; start it with "
                "`areal-dta resume`, which counts launches",
            )
        if self.ledger.epoch != epoch:
            body = {"epoch": epoch, "resume_step": resume_step, "fingerprint": self.ledger.fingerprint()}
            self._emit("epoch", {**body, "rules": [self.settings.min_group, self.settings.max_attempts]})
        self.ledger.became_ready.extend(g.group_id for g in self.ledger.of_state(GroupState.READY))
        self._filter_equal()

    def take_events(self) -> list[Event]:
        """Events since the last call, in order; log them before answering."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_batches(self) -> list[Batch]:
        """Batches fixed since the last call, for metrics (re-assembled ones are not among them)."""
        batches, self._new_batches = self._new_batches, []
        return batches

    def _emit(self, kind: str, body: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        event = Event(kind, body, arrays or {})
        self.ledger.apply(event, self._clock())
        self._events.append(event)
        if kind in ("traj", "fail", "close", "drop"):
            self._filter_equal()

    def _filter_equal(self) -> None:
        """Drop complete groups whose episodes all have one reward: without a difference there is nothing to learn."""
        ready = self.ledger.became_ready
        while ready:
            group = self.ledger.groups.get(ready.popleft())
            if not self.settings.filter_equal_rewards or group is None or group.state is not GroupState.READY:
                continue
            if len({e.reward for e in group.episodes}) == 1:
                self._emit("drop", {"episodes": [e.key for e in group.episodes], "cause": "equal_rewards"})

    # -- intake

    def trajectory(self, traj: Trajectory) -> Verdict:
        """Take one finished episode. It is accepted once per (group, sample), whichever of its leases comes first."""
        if traj.eval_tag is not None:
            return self._eval_trajectory(traj)
        verdict = self._screen(traj, self.ledger.groups.get(traj.group_id))
        if verdict is not None:
            cause = verdict.cause or verdict.status
            self.refused[cause] += 1
            if verdict.status != "busy":
                self.refused_lengths.setdefault(cause, Counter())[length_bucket(traj.num_tokens)] += 1
            if cause in ("malformed", "unknown_group"):  # its worker is done with the lease
                self.desk.reject(traj.lease_id, cause, num_tokens=traj.num_tokens)
            return verdict
        try:
            traj.validate()
        except RecordError as error:
            self.desk.fail_terms(lambda term: term.lease_id == traj.lease_id, error.cause, traj.num_tokens)
            return Verdict("rejected", error.cause)
        plain, arrays = pack(traj)
        self._emit("traj", plain, arrays)
        return Verdict("accepted")

    def _screen(self, traj: Trajectory, group: Group | None) -> Verdict | None:
        try:
            if launch_of(traj.lease_id) != self.ledger.epoch:  # its versions are of another branch
                return Verdict("rejected", "late")
        except ValueError:
            return Verdict("rejected", "malformed")
        if group is not None and 0 <= traj.sample < len(group.samples):
            attempt = attempt_of(traj.lease_id)
            if attempt is not None and attempt < group.first_attempt:  # of the group that was dropped
                return Verdict("rejected", "late")
        if self.ledger.accounts.knows(traj.group_id, traj.sample):
            return Verdict("duplicate")
        if group is None:
            return Verdict("rejected", "late" if traj.group_id < self.ledger.position else "unknown_group")
        if not 0 <= traj.sample < len(group.samples):
            return Verdict("rejected", "malformed")
        if group.samples[traj.sample].failed:
            return Verdict("rejected", "late")
        return Verdict("busy", "intake_full") if self.crowded else None

    @property
    def crowded(self) -> bool:
        """Whether so much lies ready that trajectories must wait for the trainer."""
        return self.ledger.counts.pooled >= self.settings.intake_limit and self.ready(self.ledger.next_step)

    def _eval_trajectory(self, traj: Trajectory) -> Verdict:
        round_ = self.ledger.evals.get(traj.eval_tag or "")
        task = round_.task(traj.group_id, traj.sample) if round_ else None
        if round_ is None or task is None:
            return Verdict("rejected", "unknown_group")
        if task.settled:
            return Verdict("duplicate")
        if not is_finite_number(traj.reward):
            self.desk.reject(traj.lease_id, "bad_reward")
            return Verdict("rejected", "bad_reward")
        body = {"tag": round_.tag, "index": task.index, "sample": task.sample}
        self._emit("eval", {**body, "task_id": traj.task_id, "reward": float(traj.reward)})
        return Verdict("accepted")

    # -- consumption

    def ask(self, rank: int, world_size: int, step: int) -> Shard | Assembly | Waiting:
        """The shard of one rank, or what must be put together first (`fix` takes it), or why there is nothing yet."""
        if world_size != self.settings.num_ranks or not 0 <= rank < world_size:
            raise Refusal(
                "rank", f"rank {rank} of {world_size} asked, the run has {self.settings.num_ranks} data-parallel ranks"
            )
        if step > self.ledger.next_step:
            raise Refusal("step", f"step {step} asked, but the next step is {self.ledger.next_step}")
        if step in self._batches:
            return self._batches[step].shards[rank]
        if step not in self._assemblies:
            if step < self.ledger.next_step:
                self._assemblies[step] = self.rebuild(step)
            else:
                self._drop_stale(step)
                choice = self._choose()
                if not choice.groups:
                    return self._waiting(choice.why)
                self._assemblies[step] = self._assembly(step, [g.episodes for g in choice.groups])
        return self._assemblies[step]

    def shard(self, rank: int, world_size: int, step: int) -> Shard | Waiting:
        """As `ask`, with the batch put together here and now."""
        answer = self.ask(rank, world_size, step)
        if not isinstance(answer, Assembly):
            return answer
        self.fix(answer.run())
        return self._batches[step].shards[rank]

    def fix(self, batch: Batch) -> None:
        """What an `Assembly` gave: for the next step this makes it the batch; old ones are let go."""
        step = batch.stats.step
        self._assemblies.pop(step, None)
        if step == self.ledger.next_step:
            body = {
                "step": step,
                "episodes": batch.keys,
                "staleness_max": batch.stats.staleness_max,
                "num_mixed": round(batch.stats.mixed_version_share * batch.stats.episodes),
            }
            self._emit("batch", body)
            self._new_batches.append(batch)
        self._batches[step] = batch
        for old in [s for s in self._batches if s < self.ledger.next_step - KEPT_BATCHES]:
            del self._batches[old]

    def give_up(self, assembly: Assembly) -> None:
        """It could not be put together; the next `ask` starts anew."""
        self._assemblies.pop(assembly.step, None)

    def rebuild(self, step: int) -> Assembly:
        """The batch of a step that was fixed before; raises Refusal when its arrays are gone."""
        groups: dict[int, list[Episode]] = {}
        if step >= self.ledger.next_step - KEPT_BATCHES:
            for group_id, index in self.ledger.batches.get(step, ()):
                episode = self.ledger.groups[group_id].samples[index].episode
                if episode is not None:
                    groups.setdefault(group_id, []).append(episode)
        if not groups:
            raise Refusal("step", f"step {step} is no longer kept, the next step is {self.ledger.next_step}")
        return self._assembly(step, list(groups.values()))

    def located(self, assembly: Assembly) -> Assembly:
        """With the arrays where they lie now: the log may have been rewritten since."""
        held = self.ledger.held()
        return replace(assembly, groups=tuple(tuple(held.get(e.key, e) for e in g) for g in assembly.groups))

    def _assembly(self, step: int, groups: Sequence[Sequence[Episode]]) -> Assembly:
        return Assembly(step, self.ledger.epoch, tuple(tuple(g) for g in groups), self.settings)

    def ready(self, step: int) -> bool:
        """Whether the batch of `step` can be put together now (it may still turn out stale)."""
        return step == self.ledger.next_step and (step in self._assemblies or bool(self._choose().groups))

    def _choose(self) -> Choice:
        s, ledger = self.settings, self.ledger
        if self._chosen is None or self._chosen[0] != ledger.revision:
            choice = choose(
                ledger.groups.values(),
                ledger.next_step,
                eta=s.eta,
                batch_groups=s.batch_groups,
                version=ledger.version,
                policy=s.staleness_policy,
            )
            self._chosen = (ledger.revision, choice)
        return self._chosen[1]

    def _waiting(self, why: str) -> Waiting:
        ledger, s = self.ledger, self.settings
        causes = ", ".join(f"{cause} {n}" for cause, n in ledger.accounts.rejected.most_common(4))
        if ledger.failed_in_a_row >= s.max_failed_groups:
            example = f"; the last one said: {self.desk.last_detail}" if self.desk.last_detail else ""
            text = f"the last {ledger.failed_in_a_row} groups gave no usable episodes ({causes}){example}"
            raise Refusal("no_progress", f"{text}; the workers' logs have the rest, resume once the cause is mended")
        if ledger.equal_in_a_row >= s.max_equal_groups:
            raise Refusal(
                "no_progress",
                f"{ledger.equal_in_a_row} groups in a row had no two different rewards and were filtered out; "
                "change the data or the reward, or set batcher.filter_equal_rewards=false",
            )
        return Waiting(ledger.counts.ready, s.batch_groups, f"{why}; {self.desk.in_flight()} episodes are running")

    def _drop_stale(self, step: int) -> None:
        """Under `wait` and `drop`; prompts of groups that end by this are leased again, a bounded number of times."""
        s = self.settings
        if s.staleness_policy not in ("wait", "drop") or self._swept == (self.ledger.revision, step):
            return
        stale: list[Key] = []
        again = []
        for group in self.ledger.of_state(GroupState.READY):
            keys = [e.key for e in group.episodes if step - e.version_min > s.eta]
            if keys and len(group.episodes) - len(keys) < self.ledger.min_group and group.reissues < s.stale_reissues:
                again.append(group.group_id)
            stale += keys
        if stale:
            self._emit("drop", {"episodes": stale, "cause": "stale", "again": again})
        self._swept = (self.ledger.revision, step)

    # -- the rest

    def published(self, number: int, epoch: int) -> None:
        """A new policy version is being served; announcements of other launches are ignored."""
        if epoch == self.ledger.epoch and number > self.ledger.version:
            self._emit("published", {"number": number, "epoch": epoch})

    def commit(self, step: int, checkpoint: str) -> None:
        """A checkpoint covers everything up to and including `step`."""
        if step >= self.ledger.next_step:
            raise Refusal(
                "step", f"a checkpoint of step {step} was announced, but the next step is {self.ledger.next_step}"
            )
        if step > self.ledger.committed_step:
            self._emit("commit", {"step": step, "checkpoint": checkpoint})

    def eval_start(self, tag: str, number: int) -> int:
        """Begin an evaluation round (once per tag); returns its number of episodes."""
        if not self._num_eval_items:
            raise Refusal(
                "no_eval_items",
                "there are no evaluation items; set valid_dataset.path, or have prepare write dataset/eval.jsonl",
            )
        if tag not in self.ledger.evals:
            sizes = {"num_items": self._num_eval_items, "num_samples": self.settings.eval_samples}
            self._emit("eval_start", {"tag": tag, "number": number, "epoch": self.ledger.epoch, **sizes})
        return len(self.ledger.evals[tag].tasks)

    def eval_result(self, tag: str) -> dict[str, Any]:
        if tag not in self.ledger.evals:
            raise Refusal("unknown_tag", f"no evaluation {tag!r} was started")
        return self.ledger.evals[tag].result()

    def finish(self) -> None:
        """Training is over: no more leases."""
        if not self.ledger.finished:
            self._emit("finish", {})

    def status(self) -> dict[str, Any]:
        """Counters. ``lost`` is what was acknowledged and is neither trained, dropped with a cause, nor pooled."""
        ledger, accounts, counts = self.ledger, self.ledger.accounts, self.ledger.counts
        trained, dropped = accounts.trained, dict(accounts.dropped)
        tallies = accounts.tallies.values()
        return {
            "acknowledged": accounts.acknowledged,
            "trained": trained - accounts.duplicated,
            "pooled": counts.pooled,
            "lost": accounts.acknowledged - (trained - accounts.duplicated) - counts.pooled - sum(dropped.values()),
            "duplicated": accounts.duplicated,
            "dropped": dropped,
            "dropped_tokens": dict(accounts.dropped_tokens),
            "rejected": dict(accounts.rejected),
            "lengths": _by_length(accounts.lengths),
            "refused": dict(self.refused),
            "refused_lengths": _by_length(self.refused_lengths),
            "reissued": accounts.reissued,
            "in_flight": self.desk.in_flight(),
            "open_groups": counts.open,
            "ready_groups": counts.ready,
            "epoch": ledger.epoch,
            "version": ledger.version,
            "step": ledger.next_step,
            "committed_step": ledger.committed_step,
            "position": ledger.position,
            "data_epoch": ledger.position // self.settings.num_items,
            "max_staleness": max((t.staleness_max for t in tallies), default=0),
            "mixed_version_share": sum(t.num_mixed for t in tallies) / max(1, trained),
            "eval_failures": dict(self.desk.eval_failures),
            "draining": ledger.finished,
        }


def _by_length(lengths: Mapping[str, Counter[int]]) -> dict[str, dict[str, int]]:
    return {cause: {str(n): k for n, k in sorted(by.items())} for cause, by in lengths.items()}

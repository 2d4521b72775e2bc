"""The batcher's decisions: who may start an episode, what is accepted, what a step trains on. No I/O, no sockets, no
wall clock.

Every change of state is an `Event`, applied at once and handed out by `take_events` for the log; the caller answers a
request only when the events up to it are durable. `replay` feeds a log back in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_dta.batcher.desk import LeaseDesk
from areal_dta.batcher.dispatch import Batch, assemble
from areal_dta.batcher.leases import Episode, Group, GroupState
from areal_dta.batcher.ledger import Event, Key, Ledger
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.batcher.staleness import choose
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
        self._batches: dict[int, Batch] = {}
        self._new_batches: list[Batch] = []
        self.refused: Counter[str] = Counter()  # answered without an event: duplicate, late, busy, ...

    # -- events

    def replay(self, event: Event) -> None:
        """Apply an event of the log."""
        self.ledger.apply(event, self._clock())

    def begin(self, epoch: int, resume_step: int | None) -> None:
        """Start serving launch `epoch`, after the whole log was replayed: a new launch returns the batches after its
        checkpoint to the pool; a restart within a launch goes on where the log ends.
        """
        if self.ledger.epoch > epoch:
            raise Refusal("epoch", f"the spool belongs to launch {self.ledger.epoch}, this is launch {epoch}")
        if self.ledger.epoch != epoch:
            body = {"epoch": epoch, "resume_step": resume_step, "fingerprint": self.ledger.fingerprint()}
            self._emit("epoch", body)
        for step in [s for s in self.ledger.batches if s < self.ledger.next_step - KEPT_BATCHES]:
            self._release(step)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order; log them before answering."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def num_ready(self) -> int:
        """Complete groups that wait for a batch."""
        return sum(1 for _ in self.ledger.of_state(GroupState.READY))

    def take_batches(self) -> list[Batch]:
        """Batches assembled since the last call, for metrics and traces (re-assembled ones are not among them)."""
        batches, self._new_batches = self._new_batches, []
        return batches

    def _emit(self, kind: str, body: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        event = Event(kind, body, arrays or {})
        self.ledger.apply(event, self._clock())
        self._events.append(event)

    # -- intake

    def trajectory(self, traj: Trajectory) -> Verdict:
        """Take one finished episode. It is accepted once per (group, sample), whichever of its leases comes first."""
        if traj.eval_tag is not None:
            return self._eval_trajectory(traj)
        group = self.ledger.groups.get(traj.group_id)
        verdict = self._screen(traj, group)
        if verdict is not None:
            self.refused[verdict.cause or verdict.status] += 1
            return verdict
        try:
            traj.validate()
        except RecordError as error:
            self.desk.fail_terms(lambda term: term.lease_id == traj.lease_id, error.cause)
            return Verdict("rejected", error.cause)
        plain, arrays = pack(traj)
        self._emit("traj", plain, arrays)
        return Verdict("accepted")

    def _screen(self, traj: Trajectory, group: Group | None) -> Verdict | None:
        if (traj.group_id, traj.sample) in self.ledger.acknowledged:
            return Verdict("duplicate")
        if group is None:
            return Verdict("rejected", "late" if traj.group_id < self.ledger.position else "unknown_group")
        if not 0 <= traj.sample < len(group.samples):
            return Verdict("rejected", "malformed")
        if group.samples[traj.sample].failed:
            return Verdict("rejected", "late")
        if len(self.ledger.pooled()) >= self.settings.intake_limit and self.ready(self.ledger.next_step):
            return Verdict("busy")
        return None

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

    def shard(self, rank: int, world_size: int, step: int) -> Shard | Waiting:
        """The shard of one rank; the first rank that asks for the next step fixes its batch."""
        if world_size != self.settings.num_ranks or not 0 <= rank < world_size:
            raise Refusal(
                "rank", f"rank {rank} of {world_size} asked, the run has {self.settings.num_ranks} data-parallel ranks"
            )
        if step > self.ledger.next_step:
            raise Refusal("step", f"step {step} asked, but the next step is {self.ledger.next_step}")
        if step < self.ledger.next_step:
            return self.batch(step).shards[rank]
        self._drop_stale(step)
        groups = self._choose()
        if isinstance(groups, str):
            return self._waiting(groups)
        self._fix(step, groups)
        return self._batches[step].shards[rank]

    def _fix(self, step: int, groups: Sequence[Sequence[Episode]]) -> None:
        """Make these groups the batch of the next step, and let old ones go from memory."""
        batch = self._assemble(step, groups)
        body = {
            "step": step,
            "episodes": [e.key for group in groups for e in group],
            "staleness_max": batch.stats.staleness_max,
            "num_mixed": round(batch.stats.mixed_version_share * batch.stats.episodes),
        }
        self._emit("batch", body)
        self._batches[step] = batch
        self._new_batches.append(batch)
        for old in [s for s in self._batches if s <= step - KEPT_BATCHES]:
            del self._batches[old]
        self._release(step - KEPT_BATCHES)

    def batch(self, step: int) -> Batch:
        """A batch already fixed, put together again after a restart; raises Refusal when its arrays are gone."""
        if step not in self._batches:
            self._batches[step] = self._assemble(step, self._regroup(step))
        return self._batches[step]

    def ready(self, step: int) -> bool:
        """Whether the batch of `step` can be put together now (it may still turn out stale)."""
        return step == self.ledger.next_step and not isinstance(self._choose(), str)

    def _choose(self) -> list[list[Episode]] | str:
        s, ledger = self.settings, self.ledger
        choice = choose(
            ledger.groups.values(),
            ledger.next_step,
            eta=s.eta,
            batch_groups=s.batch_groups,
            version=ledger.version,
            policy=s.staleness_policy,
        )
        return [g.episodes for g in choice.groups] if choice.groups else choice.why

    def _waiting(self, why: str) -> Waiting:
        if self.ledger.failed_in_a_row >= self.settings.max_failed_groups:
            causes = ", ".join(f"{cause} {n}" for cause, n in self.ledger.rejected.most_common(4))
            example = f"; the last one said: {self.desk.last_detail}" if self.desk.last_detail else ""
            raise Refusal(
                "no_progress",
                f"the last {self.ledger.failed_in_a_row} groups gave no usable episodes ({causes}){example}",
            )
        return Waiting(
            self.num_ready, self.settings.batch_groups, f"{why}; {self.desk.in_flight()} episodes are running"
        )

    def _drop_stale(self, step: int) -> None:
        if self.settings.staleness_policy not in ("wait", "drop"):
            return
        ready = self.ledger.of_state(GroupState.READY)
        stale = [e.key for g in ready for e in g.episodes if step - e.version_min > self.settings.eta]
        if stale:
            self._emit("drop", {"episodes": stale, "cause": "stale"})

    def _assemble(self, step: int, groups: Sequence[Sequence[Episode]]) -> Batch:
        return assemble(groups, step, self.ledger.epoch, self.settings)

    def _regroup(self, step: int) -> list[list[Episode]]:
        groups: dict[int, list[Episode]] = {}
        for group_id, index in self.ledger.batches.get(step, ()):
            group = self.ledger.groups.get(group_id)
            episode = group.samples[index].episode if group else None
            if episode is None or episode.trajectory is None:
                raise Refusal("step", f"step {step} is no longer kept, the next step is {self.ledger.next_step}")
            groups.setdefault(group_id, []).append(episode)
        if not groups:
            raise Refusal("step", f"step {step} is not known here, the next step is {self.ledger.next_step}")
        return list(groups.values())

    def _release(self, step: int) -> None:
        """Let the arrays of a step go from memory; the log keeps them until a checkpoint covers the step."""
        for group_id in {g for g, _ in self.ledger.batches.get(step, ())}:
            group = self.ledger.groups.get(group_id)
            for sample in group.samples if group else ():
                if sample.episode is not None:
                    sample.episode = sample.episode.without_arrays()

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
        ledger, trained, pooled = self.ledger, self.ledger.trained(), self.ledger.pooled()
        accounted: set[Key] = set(trained) | set(ledger.dropped) | pooled
        return {
            "acknowledged": len(ledger.acknowledged),
            "trained": len(trained),
            "pooled": len(pooled),
            "lost": len(ledger.acknowledged - accounted),
            "duplicated": sum(trained.values()) - len(trained),
            "dropped": dict(Counter(ledger.dropped.values())),
            "dropped_tokens": dict(ledger.dropped_tokens),
            "rejected": dict(ledger.rejected),
            "refused": dict(self.refused),
            "in_flight": self.desk.in_flight(),
            "open_groups": sum(1 for _ in ledger.of_state(GroupState.OPEN)),
            "ready_groups": self.num_ready,
            "epoch": ledger.epoch,
            "version": ledger.version,
            "step": ledger.next_step,
            "committed_step": ledger.committed_step,
            "position": ledger.position,
            "data_epoch": ledger.position // self.settings.num_items,
            "max_staleness": max((t.staleness_max for t in ledger.tallies.values()), default=0),
            "mixed_version_share": sum(t.num_mixed for t in ledger.tallies.values()) / max(1, sum(trained.values())),
            "eval_failures": dict(self.desk.eval_failures),
            "draining": ledger.finished,
        }

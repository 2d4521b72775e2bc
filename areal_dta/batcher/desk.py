"""The lease desk: who may start an episode, and what becomes of leases whose holder is late, gone or gives up. No
I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_dta.batcher.evaluation import EvalRound, EvalTask
from areal_dta.batcher.leases import DataStream, GroupState, LeaseTerm, lease_id, lease_seed
from areal_dta.batcher.ledger import Ledger
from areal_dta.batcher.staleness import admissible_groups
from areal_dta.records import Lease

__all__ = ["LeaseDesk"]

_MAX_CAUSES = 64  # that workers may make up; every one is counted, and published, for ever


class LeaseDesk:
    """Grants, prolongs and voids leases. `emit` logs and applies an event; `items` are the lines of the data sets."""

    def __init__(
        self,
        ledger: Ledger,
        items: Sequence[Mapping[str, Any]],
        eval_items: Sequence[Mapping[str, Any]],
        emit: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self.settings = ledger.settings
        self.ledger, self._items, self._eval_items, self._emit, self._clock = ledger, items, eval_items, emit, clock
        self._stream = DataStream(self.settings.num_items, self.settings.seed, self.settings.shuffle)
        self._pids: dict[str, int] = {}
        self.eval_failures: Counter[str] = Counter()
        self.last_detail = ""  # what the worker said of the last episode it gave up

    def hello(self, name: str, role: str, pid: int) -> None:
        """A process introduces itself; a worker that comes back under its name with another pid has lost its
        episodes.
        """
        if role != "worker":
            return
        is_known = self._pids.get(name) == pid  # and says it again: nothing of it is lost
        self._pids[name] = pid
        self.fail_terms(lambda term: term.worker == name and term.pid != pid, "worker_restarted")
        self._fail_evals(lambda task: task.worker == name and not is_known, "worker_restarted")

    def in_flight(self) -> int:
        evals = sum(t.lease_id is not None for r in self.ledger.evals.values() for t in r.tasks)
        return evals + self.ledger.counts.leased

    def answered(self, worker: str, request: str) -> list[Lease] | None:
        """What this request was granted before (its reply was lost), without what has ended since; None if nothing."""
        granted = self.ledger.requests.get(worker)
        leases, known = [], granted is not None and granted.request == request
        for group_id, index in granted.keys if known and granted else ():
            group = self.ledger.groups.get(group_id)
            term = group.samples[index].term if group else None
            if group is None or term is None or term.worker != worker:
                continue
            if self._pids.get(worker, term.pid) == term.pid:  # unknown: this batcher was restarted, the worker was not
                leases.append(self._lease(group_id, index, group.samples[index].attempt, term.version))
        for round_ in self.ledger.evals.values():
            for task in round_.tasks:
                if task.lease_id is not None and (task.worker, task.request) == (worker, request):
                    leases.append(self._eval_lease(round_, task))
        return leases if known or leases else None

    def _pid(self, worker: str) -> int:
        return self._pids.get(worker, 0)

    def lease(self, worker: str, capacity: int, request: str = "") -> list[Lease]:
        """Up to `capacity` leases: evaluation first, then samples to be tried again, then prompts to be tried again and
        new groups as admission allows. `request` names the request; the same one again gets the same leases.
        """
        if request and (before := self.answered(worker, request)) is not None:
            return before
        return self.lease_anew(worker, capacity, request)

    def lease_anew(self, worker: str, capacity: int, request: str) -> list[Lease]:
        """As `lease`, for a request that was not `answered` before."""
        if self.settings.max_concurrent is not None:
            capacity = min(capacity, self.settings.max_concurrent - self.in_flight())
        if self.ledger.finished or capacity <= 0:
            return []
        leases = self._lease_evals(worker, capacity, request)
        if self.ledger.counts.free:
            for group in sorted(self.ledger.of_state(GroupState.OPEN), key=lambda g: g.group_id):
                for index, sample in enumerate(group.samples):
                    if sample.free and len(leases) < capacity:
                        leases.append(self._grant(worker, group.group_id, index, sample.attempt, request))
        for _ in range(self._admissible() if len(leases) < capacity else 0):
            group_id = min(self.ledger.requeued, default=self.ledger.position)
            again = self.ledger.requeued.get(group_id)
            for index in range(min(self.settings.group_size, capacity - len(leases))):
                leases.append(self._grant(worker, group_id, index, again.first_attempt if again else 0, request))
            if len(leases) >= capacity:
                break
        return leases

    def _admissible(self) -> int:
        ledger, s = self.ledger, self.settings
        waiting = [g for g in ledger.groups.values() if g.state is not GroupState.BATCHED]
        return admissible_groups(
            eta=s.eta,
            version=ledger.version,
            consumed_batches=ledger.next_step,
            batch_groups=s.batch_groups,
            outstanding=sum(g.version_max() - s.eta <= ledger.next_step for g in waiting),
            total_steps=s.total_steps,
        )

    def _grant(self, worker: str, group_id: int, sample: int, attempt: int, request: str) -> Lease:
        version = self.ledger.version
        body = {"group_id": group_id, "sample": sample, "attempt": attempt, "version": version}
        self._emit("grant", {**body, "worker": worker, "pid": self._pid(worker), "request": request})
        return self._lease(group_id, sample, attempt, version)

    def _lease(self, group_id: int, sample: int, attempt: int, version: int) -> Lease:
        epoch = self.ledger.epoch
        return Lease(
            lease_id=lease_id(epoch, group_id, sample, attempt),
            group_id=group_id,
            sample=sample,
            attempt=attempt,
            item=dict(self._items[self._stream.item(group_id)]),
            version=version,
            epoch=epoch,
            seed=lease_seed(self.settings.seed, group_id, sample),
        )

    def _lease_evals(self, worker: str, capacity: int, request: str) -> list[Lease]:
        leases: list[Lease] = []
        for round_ in self.ledger.evals.values():
            for task in round_.tasks:
                if task.free and len(leases) < capacity:
                    task.lease_id, task.worker, task.request = round_.lease_id(task), worker, request
                    task.expires_s = self._clock() + self.settings.lease_timeout_s
                    leases.append(self._eval_lease(round_, task))
        return leases

    def _eval_lease(self, round_: EvalRound, task: EvalTask) -> Lease:
        return Lease(
            lease_id=round_.lease_id(task),
            group_id=task.index,
            sample=task.sample,
            attempt=task.attempt,
            item=dict(self._eval_items[task.index]),
            version=self.ledger.version,
            epoch=self.ledger.epoch,
            seed=lease_seed(self.settings.seed, "eval", task.index, task.sample),
            eval_tag=round_.tag,
        )

    def heartbeat(self, worker: str, lease_ids: Sequence[str], lengths: Sequence[int] = ()) -> list[str]:
        """Prolong these leases; returns those that are void (expired, done elsewhere, revoked): the worker may stop
        them. `lengths`: the tokens of their episodes so far.
        """
        known, expires_s = set(), self._clock() + self.settings.lease_timeout_s
        told: dict[str, int | None] = {**dict.fromkeys(lease_ids), **dict(zip(lease_ids, lengths, strict=False))}
        for _, _, sample in self.ledger.leased():
            if sample.term is not None and sample.term.lease_id in told:
                sample.term = replace(sample.term, expires_s=expires_s, num_tokens=told[sample.term.lease_id])
                known.add(sample.term.lease_id)
        for round_ in self.ledger.evals.values():
            for task in round_.tasks:
                if task.lease_id is not None and task.lease_id in told:
                    task.expires_s = expires_s
                    known.add(task.lease_id)
        return [i for i in lease_ids if i not in known]

    def reject(self, given_lease: str, cause: str, detail: str = "", num_tokens: int | None = None) -> None:
        """The worker gives an episode up; a lease that is no longer valid changes nothing. `detail` is for people."""
        rejected = self.ledger.accounts.rejected
        if cause not in rejected and len(rejected) >= _MAX_CAUSES:
            cause = "other"
        if detail:
            self.last_detail = f"{cause}: {detail}"
        self.fail_terms(lambda term: term.lease_id == given_lease, cause, num_tokens)
        self._fail_evals(lambda task: task.lease_id == given_lease, cause)

    def tick(self) -> None:
        """Expire leases without heartbeat and groups over their time."""
        now_s = self._clock()
        self.fail_terms(lambda term: term.expires_s <= now_s, "expired")
        self._fail_evals(lambda task: task.expires_s <= now_s, "expired")
        for group in list(self.ledger.of_state(GroupState.OPEN)):
            if now_s - group.opened_s >= self.settings.group_timeout_s:
                lengths = [[i, s.term.num_tokens] for i, s in enumerate(group.samples) if s.term is not None]
                self._emit("close", {"group_id": group.group_id, "cause": "group_timeout", "lengths": lengths})

    def delay(self, seconds: float, *, leases: bool) -> None:
        """Put the ends of groups off (and those of leases): for a time in which nobody could deliver (or be heard)."""
        for group in self.ledger.of_state(GroupState.OPEN):
            group.opened_s += seconds
            for sample in group.samples if leases else ():
                if sample.term is not None:
                    sample.term = replace(sample.term, expires_s=sample.term.expires_s + seconds)
        for task in (t for r in self.ledger.evals.values() for t in r.tasks if leases):
            task.expires_s += seconds

    def fail_terms(self, matches: Callable[[LeaseTerm], bool], cause: str, num_tokens: int | None = None) -> None:
        """End the training leases that match without an episode, counted by cause and by length: `num_tokens`, or what
        the worker told last.
        """
        hits = [(g.group_id, i, s.attempt, s.term) for g, i, s in self.ledger.leased() if s.term and matches(s.term)]
        for group_id, sample, attempt, term in hits:
            length = term.num_tokens if num_tokens is None else num_tokens
            body = {"group_id": group_id, "sample": sample, "attempt": attempt, "cause": cause, "num_tokens": length}
            self._emit("fail", body)

    def _fail_evals(self, matches: Callable[[EvalTask], bool], cause: str) -> None:
        for round_ in self.ledger.evals.values():
            for task in round_.tasks:
                if task.lease_id is not None and matches(task):
                    self.eval_failures[cause] += 1
                    round_.fail(task, self.settings.max_attempts)

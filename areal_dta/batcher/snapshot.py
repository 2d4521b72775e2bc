"""The ledger's whole state as plain values, so that the log needs nothing from before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_dta.batcher.accounts import Accounts
from areal_dta.batcher.evaluation import EvalRound, EvalTask
from areal_dta.batcher.leases import Episode, Group, GroupState, LeaseTerm, Sample
from areal_dta.batcher.ledger import LeaseRequest, Ledger, Requeued

__all__ = ["dump", "load"]

_SCALARS = (
    "epoch",
    "version",
    "next_step",
    "committed_step",
    "position",
    "finished",
    "failed_in_a_row",
    "equal_in_a_row",
    "min_group",
    "max_attempts",
)
_EPISODE = ("reward", "num_tokens", "num_sequences", "version_min", "version_max", "base")
_TASK = ("index", "sample", "attempt", "task_id", "reward", "failed")


def dump(ledger: Ledger) -> dict[str, Any]:
    """Everything but the arrays and the times."""
    return {
        **{name: getattr(ledger, name) for name in _SCALARS},
        "fingerprint": ledger.fingerprint(),
        "groups": [_dump_group(g) for g in ledger.groups.values()],
        "batches": [[step, list(map(list, keys))] for step, keys in ledger.batches.items()],
        "accounts": ledger.accounts.dump(),
        "requeued": [[g, r.first_attempt, r.reissues] for g, r in ledger.requeued.items()],
        "requests": [[worker, r.request, list(map(list, r.keys))] for worker, r in ledger.requests.items()],
        "evals": [
            [r.tag, r.number, r.epoch, [[getattr(t, name) for name in _TASK] for t in r.tasks]]
            for r in ledger.evals.values()
        ],
    }


def load(ledger: Ledger, plain: Mapping[str, Any], now_s: float) -> None:
    """Put the ledger where `dump` found it; leases and groups get their whole time anew. Raises LedgerError when it
    was written with other settings that matter.
    """
    ledger.check_fingerprint(plain["fingerprint"])
    for name in _SCALARS:
        setattr(ledger, name, plain.get(name, getattr(ledger, name)))  # rules are missing in older logs
    groups = [_load_group(raw, now_s, ledger.settings.lease_timeout_s) for raw in plain["groups"]]
    ledger.groups = {group.group_id: group for group in groups}
    ledger.batches = {step: tuple((g, s) for g, s in keys) for step, keys in plain["batches"]}
    ledger.accounts = Accounts.load(plain["accounts"])
    ledger.requeued = {g: Requeued(first, reissues) for g, first, reissues in plain["requeued"]}
    ledger.requests = {w: LeaseRequest(r, tuple((g, s) for g, s in keys)) for w, r, keys in plain["requests"]}
    ledger.evals = {
        tag: EvalRound(tag, number, epoch, [EvalTask(**dict(zip(_TASK, t, strict=True))) for t in tasks])
        for tag, number, epoch, tasks in plain["evals"]
    }
    ledger.recount()


def _dump_group(group: Group) -> dict[str, Any]:
    return {
        "id": group.group_id,
        "state": group.state.value,
        "first_attempt": group.first_attempt,
        "reissues": group.reissues,
        "samples": [_dump_sample(s) for s in group.samples],
    }


def _dump_sample(sample: Sample) -> list[Any]:
    term, episode = sample.term, sample.episode
    return [
        sample.attempt,
        sample.failures,
        sample.failed,
        None if term is None else [term.lease_id, term.worker, term.pid, term.version],
        None if episode is None else [getattr(episode, name) for name in _EPISODE],
    ]


def _load_group(raw: Mapping[str, Any], now_s: float, timeout_s: float) -> Group:
    samples = []
    for index, (attempt, failures, failed, term, episode) in enumerate(raw["samples"]):
        sample = Sample(attempt=attempt, failures=failures, failed=failed)
        if term is not None:
            identity, worker, pid, version = term
            sample.term = LeaseTerm(identity, worker, pid, version, now_s + timeout_s)
        if episode is not None:
            sample.episode = Episode(raw["id"], index, **dict(zip(_EPISODE, episode, strict=True)))
        samples.append(sample)
    return Group(raw["id"], now_s, samples, GroupState(raw["state"]), raw["first_attempt"], raw["reissues"])

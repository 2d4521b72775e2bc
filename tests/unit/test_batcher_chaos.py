"""Seeded chaos: lost leases, bad and repeated deliveries, time-outs, kills, shortened logs, resumes with other rules.

Whatever happens, the counts add up, a lineage trains nothing twice or too stale, and then the run goes on.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from areal_dta.batcher import snapshot as snapshots
from areal_dta.batcher.dispatch import Assembly
from areal_dta.batcher.ledger import Event
from tests.unit.batcher_kit import Clock, make_core, trajectory

SAME_AFTER_A_KILL = (
    "acknowledged", "trained", "pooled", "rejected", "dropped", "lengths", "step", "version", "position", "open_groups",
    "ready_groups", "committed_step",
)  # fmt: skip


class Chaos:
    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 5))
        self.changes = {
            "group_size": size,
            "eta": int(rng.integers(0, 4)),
            "batch_groups": int(rng.integers(1, 4)),
            "max_attempts": int(rng.integers(1, 4)),
            "num_ranks": int(rng.integers(1, 4)),
            "staleness_policy": str(rng.choice(["wait", "drop", "mask", "keep"])),
            "lease_timeout_s": 10,
            "group_timeout_s": float(rng.choice([30, 100])),
            "intake_limit": int(rng.choice([16, 4096])),
            "stale_reissues": int(rng.integers(0, 3)),
            "min_group_size": int(rng.integers(1, size + 1)),
            "filter_equal_rewards": bool(size > 1 and rng.random() < 0.4),
            "max_concurrent": int(rng.integers(1, 8)) if rng.random() < 0.4 else None,
        }
        self.clock, self.log, self.epoch, self.resume_step = Clock(), [], 0, None
        self.running, self.num_requests = [], 0
        self.trained: dict[int, tuple] = {}  # by step, of this lineage
        self.start()

    def start(self) -> None:
        given = {"epoch": self.epoch, "resume_step": self.resume_step, "log": self.log}
        self.core = make_core(self.clock, **given, **self.changes)
        self.save()

    def save(self) -> None:
        for event in self.core.take_events():
            body = msgpack.unpackb(msgpack.packb(dict(event.body)))
            self.log.append(Event(event.kind, body, event.arrays))

    def act(self) -> None:
        actions = (self.lease, self.deliver, self.train, self.wait, self.kill, self.resume)
        self.rng.choice(np.asarray(actions, object), p=(0.25, 0.35, 0.18, 0.1, 0.08, 0.04))()
        self.save()
        self.check()

    def lease(self) -> None:
        self.num_requests += 1
        leases = self.core.desk.lease("w", int(self.rng.integers(1, 7)), f"1.{self.num_requests}")
        if self.rng.random() > 0.2:  # else nobody knows of them
            self.running += leases

    def deliver(self) -> None:
        if not self.running:
            return
        lease, lot = self.running.pop(int(self.rng.integers(len(self.running)))), self.rng.random()
        if lot < 0.15:
            self.core.desk.reject(lease.lease_id, "raised", "", int(self.rng.integers(0, 100)))
        elif lot < 0.2:
            self.core.trajectory(replace(trajectory(lease), reward=float("nan")))
        else:
            versions = [lease.version, max(self.core.ledger.version, lease.version)] if lot < 0.6 else None
            made = trajectory(lease, reward=float(self.rng.integers(0, 2)), version=versions)
            if self.core.trajectory(made).status == "busy":
                self.running.append(lease)
            elif lot > 0.9:
                assert self.core.trajectory(made).status in ("duplicate", "rejected", "busy")

    def train(self) -> None:
        step = self.core.ledger.next_step
        assembly = self.core.ask(0, self.core.settings.num_ranks, step)
        if not isinstance(assembly, Assembly):
            return
        self.deliver()  # intake goes on meanwhile
        self.wait()
        batch = assembly.run()
        self.core.fix(batch)
        assert not set(batch.keys) & {key for keys in self.trained.values() for key in keys}
        if self.core.settings.staleness_policy in ("wait", "drop"):
            assert batch.stats.staleness_max <= self.core.settings.eta
        self.trained[step] = batch.keys
        if self.rng.random() < 0.9:
            self.core.published(step + 1, self.epoch)
        if self.rng.random() < 0.3:
            self.core.commit(step, "c")

    def wait(self) -> None:
        self.clock.now_s += float(self.rng.integers(1, 15))
        beats = [lease.lease_id for lease in self.running if self.rng.random() < 0.9]
        self.core.desk.heartbeat("w", beats, self.rng.integers(0, 500, len(beats)).tolist())
        self.core.desk.tick()

    def kill(self) -> None:
        self.save()
        if self.rng.random() < 0.3:
            arrays = {(e.body["group_id"], e.body["sample"]): e for e in self.log if e.kind in ("traj", "held")}
            state = msgpack.unpackb(msgpack.packb(snapshots.dump(self.core.ledger)))
            held = [Event("held", arrays[key].body, arrays[key].arrays) for key in self.core.ledger.held()]
            self.log = [Event("snapshot", state), *held]
        before = self.core.status()
        self.start()
        after = self.core.status()
        assert {k: after[k] for k in SAME_AFTER_A_KILL} == {k: before[k] for k in SAME_AFTER_A_KILL}

    def resume(self) -> None:
        self.save()
        last = self.core.ledger.committed_step
        self.epoch, self.resume_step, self.running = self.epoch + 1, last if last >= 0 else None, []
        self.trained = {step: keys for step, keys in self.trained.items() if step <= last}
        if self.rng.random() < 0.3:
            self.changes["min_group_size"] = int(self.rng.integers(1, self.core.settings.group_size + 1))
            self.changes["max_attempts"] = int(self.rng.integers(1, 4))
        self.start()
        assert self.core.ledger.next_step == self.core.ledger.version == last + 1

    def check(self) -> None:
        status, counts = self.core.status(), copy.copy(self.core.ledger.counts)
        assert (status["lost"], status["duplicated"]) == (0, 0)
        rejected, dropped = status["rejected"], status["dropped"]
        lengths = {cause: sum(by.values()) for cause, by in status["lengths"].items()}
        assert lengths == {c: rejected.get(c, 0) + dropped.get(c, 0) for c in {*rejected, *dropped}}
        self.core.ledger.recount()
        assert self.core.ledger.counts == counts

    def go_on(self) -> None:
        """From now on all goes well: five more steps."""
        goal = self.core.ledger.next_step + 5
        for _ in range(300):
            step = self.core.ledger.next_step
            if step == goal:
                return
            self.core.published(step, self.epoch)
            self.running += self.core.desk.lease("w", 5)
            made = [(lease, trajectory(lease, reward=float(self.rng.random()))) for lease in self.running]
            self.running = [lease for lease, traj in made if self.core.trajectory(traj).status == "busy"]
            self.clock.now_s += 3
            self.core.desk.heartbeat("w", [lease.lease_id for lease in self.running])
            self.core.desk.tick()
            answer = self.core.ask(0, self.core.settings.num_ranks, step)
            if isinstance(answer, Assembly):
                self.core.fix(answer.run())
        raise AssertionError((answer, self.core.status()))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_counts_add_up_nothing_is_trained_twice_and_the_run_goes_on(seed):
    chaos = Chaos(seed)
    for _ in range(200):
        chaos.act()
    chaos.go_on()
    chaos.check()

"""The event log: replay equals what ran, a restart keeps every promise, a resume trains each episode once per
lineage.
"""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.batcher import snapshot as snapshots
from areal_dta.batcher.core import Refusal, Waiting
from areal_dta.batcher.ledger import Event, LedgerError
from areal_dta.records import pack
from tests.unit.batcher_kit import Clock, finish_all, make_core, train, trajectory


def wire(event: Event) -> Event:
    """As the log would return it: tuples become lists."""
    return Event(event.kind, msgpack.unpackb(msgpack.packb(dict(event.body))), event.arrays)


class Run:
    """A run whose batcher can be killed (`restart`) and which can be resumed from a checkpoint (`resume`)."""

    def __init__(self, **changes):
        self.changes, self.log, self.epoch, self.resume_step = changes, [], 0, None
        self.core = make_core(**changes)
        self.save()

    def save(self):
        self.log += [wire(e) for e in self.core.take_events()]

    def restart(self):
        self.core = make_core(epoch=self.epoch, resume_step=self.resume_step, log=self.log, **self.changes)
        self.save()

    def compact(self):
        """The log becomes a snapshot and the arrays of what may still be trained."""
        self.save()
        held = self.core.ledger.held()
        events = {(e.body["group_id"], e.body["sample"]): e for e in self.log if e.kind in ("traj", "held")}
        arrays = [Event("held", events[key].body, events[key].arrays) for key in held]
        self.log = [wire(Event("snapshot", snapshots.dump(self.core.ledger))), *arrays]

    def resume(self, step):
        self.epoch, self.resume_step = self.epoch + 1, step
        self.restart()


def snapshot(core):
    status = core.status()
    for transient in ("refused", "refused_lengths", "eval_failures", "in_flight"):
        del status[transient]
    groups = {
        g.group_id: (g.state, [(s.episode and s.episode.key, s.failed) for s in g.samples])
        for g in core.ledger.groups.values()
    }
    return status, groups, core.ledger.batches


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_kill_at_any_point_changes_nothing_and_every_episode_is_trained_at_most_once(seed):
    rng = np.random.default_rng(seed)
    run, running, step = Run(max_attempts=2, eta=1), [], 0
    for _ in range(60):
        core = run.core
        action = rng.integers(0, 8)
        if action <= 2:
            running += core.desk.lease("w", int(rng.integers(1, 5)))
        elif action <= 4 and running:
            lease = running.pop(int(rng.integers(len(running))))
            if rng.random() < 0.2:
                core.desk.reject(lease.lease_id, "raised")
            else:
                core.trajectory(trajectory(lease))
                if rng.random() < 0.3:
                    assert core.trajectory(trajectory(lease)).status in ("duplicate", "rejected")
        elif action == 5 and core.ready(step):
            if isinstance(core.shard(0, core.settings.num_ranks, step), Waiting):
                continue  # what was ready was of an abandoned branch and too stale
            train(core, step)
            step += 1
            if rng.random() < 0.3:
                core.commit(step - 1, "ckpt")
        elif action == 6:
            run.save()
            before = snapshot(core)
            run.restart()
            assert snapshot(run.core) == before
        elif action == 7 and rng.random() < 0.3:
            run.save()
            run.resume(run.core.ledger.committed_step if run.core.ledger.committed_step >= 0 else None)
            step, running = run.core.ledger.next_step, []
        run.save()
    status = run.core.status()
    assert (status["lost"], status["duplicated"]) == (0, 0)
    assert status["acknowledged"] == status["trained"] + status["pooled"] + sum(status["dropped"].values())
    assert status["max_staleness"] <= 1


def test_a_lease_granted_before_the_restart_is_honoured_after_it():
    run = Run()
    lease, other = run.core.desk.lease("w", 2)
    run.save()
    run.restart()
    assert run.core.desk.heartbeat("w", [lease.lease_id, other.lease_id]) == []
    assert run.core.trajectory(trajectory(lease)).status == "accepted"
    assert run.core.trajectory(trajectory(lease)).status == "duplicate"
    assert {x.group_id for x in run.core.desk.lease("w", 2)} == {1}  # the other one is still out


def test_after_a_restart_the_shards_of_the_last_step_are_rebuilt_alike():
    run = Run(num_minibatches=2)
    for step in range(3):
        finish_all(run.core)
        shards = train(run.core, step)
    run.save()
    run.restart()
    for rank, before in enumerate(shards):
        plain, arrays = pack(run.core.shard(rank, 2, 2))
        assert plain == pack(before)[0]
        for name, array in pack(before)[1].items():
            np.testing.assert_array_equal(arrays[name], array)
    with pytest.raises(Refusal, match="step 0 is no longer kept"):
        run.core.shard(0, 2, 0)


def test_a_resume_returns_later_batches_to_the_pool_and_keeps_earlier_ones_trained():
    run = Run(eta=1)
    for step in range(4):
        finish_all(run.core)
        train(run.core, step)
        if step == 1:
            run.core.commit(1, "step_1")
    run.save()
    batches = dict(run.core.ledger.batches)
    run.resume(1)
    status = run.core.status()
    assert (status["step"], status["version"], status["epoch"]) == (2, 2, 1)
    assert (status["trained"], status["lost"], status["duplicated"]) == (8, 0, 0)
    position = status["position"]
    for step in (2, 3):
        train(run.core, step)
        assert run.core.ledger.batches[step] == batches[step]
    assert run.core.status()["position"] == position
    run.resume(None)
    assert run.core.status()["step"] == 0
    assert run.core.status()["lost"] == 0


def test_leases_of_the_previous_launch_are_free_after_a_resume_and_the_bound_starts_at_the_checkpoint():
    run = Run(eta=0)
    run.core.desk.lease("w", 100)
    run.save()
    run.resume(None)
    leases = run.core.desk.lease("w", 100)
    assert [(x.group_id, x.sample, x.epoch) for x in leases] == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


def test_a_snapshot_stands_for_the_whole_log_and_forgets_what_a_checkpoint_covers():
    run = Run(eta=1)
    for step in range(3):
        finish_all(run.core)
        train(run.core, step)
    run.core.desk.lease("w", 3, "the request")
    run.core.eval_start("v0", 0)
    run.core.commit(0, "step_0")
    run.save()
    before = snapshot(run.core)
    full = len(run.log)
    run.compact()
    assert len(run.log) < full / 2
    run.restart()
    assert snapshot(run.core) == before
    assert {x.lease_id for x in run.core.desk.lease("w", 1, "the request")} <= {
        t.term.lease_id for _, _, t in run.core.ledger.leased()
    }
    shards = [run.core.shard(r, 2, 2) for r in range(2)]
    assert sum(s.num_rows for s in shards) == 8
    run.save()
    run.resume(0)
    assert run.core.ready(1)
    train(run.core, 1)
    assert (run.core.status()["lost"], run.core.status()["duplicated"]) == (0, 0)


def test_the_size_of_a_snapshot_does_not_grow_with_the_run():
    run, sizes = Run(eta=0), []
    for step in range(60):
        finish_all(run.core)
        train(run.core, step)
        run.core.commit(step, f"step_{step}")
        run.core.take_events()
        plain = snapshots.dump(run.core.ledger)
        sizes.append(len(msgpack.packb({**plain, "accounts": None})))
    assert sizes[-1] <= sizes[5] + 8
    assert len(msgpack.packb(plain["accounts"])) < 60 * 30


def test_evaluation_results_survive_a_restart_and_those_of_undone_versions_a_resume_forgets():
    run = Run()
    run.core.eval_start("v0", 0)
    run.core.eval_start("v9", 9)
    lease = run.core.desk.lease("w", 1)[0]
    run.core.trajectory(trajectory(lease, reward=0.5))
    run.save()
    run.restart()
    assert run.core.eval_result("v0")["done"] == 1
    assert run.core.desk.lease("w", 1)[0].group_id == 1
    run.save()
    run.resume(None)
    assert run.core.eval_result("v0")["mean_reward"] == 0.5
    with pytest.raises(Refusal):
        run.core.eval_result("v9")


def test_a_log_of_other_settings_or_a_later_launch_is_refused_with_the_key():
    run = Run()
    with pytest.raises(LedgerError, match="group_size=2, the config now says 3"):
        make_core(log=run.log, group_size=3, epoch=1)
    with pytest.raises(LedgerError, match="unknown kind 'nonsense'"):
        make_core(log=[Event("nonsense", {})])
    run.resume(None)
    with pytest.raises(Refusal, match="belongs to launch 1"):
        make_core(log=run.log, epoch=0)


def test_groups_restart_their_time_out_after_a_restart():
    clock = Clock()
    run = Run(clock=clock, group_timeout_s=50)
    run.core.desk.lease("w", 2)
    run.save()
    clock.now_s += 49
    run.restart()
    clock.now_s += 49
    run.core.desk.tick()
    assert run.core.status()["open_groups"] == 1


def test_a_resume_without_its_spool_goes_on_behind_the_data_that_was_trained():
    core = make_core(epoch=2, resume_step=3)
    assert (core.ledger.next_step, core.ledger.version) == (4, 4)
    assert core.desk.lease("w", 1)[0].group_id == 8


def test_after_a_resume_tokens_of_the_abandoned_branch_count_as_the_forks_and_keep_their_launch():
    run = Run(eta=2)
    for step in range(4):
        finish_all(run.core)
        train(run.core, step)
    run.save()
    run.resume(1)
    base = run.core.ledger.version
    assert base == 2
    episodes = [e for g in run.core.ledger.groups.values() for e in g.episodes]
    assert episodes
    assert all(e.version_max <= base for e in episodes)
    before = {e.key: e.version_min for e in episodes}
    run.restart()  # the log alone gives the same
    assert {e.key: e.version_min for g in run.core.ledger.groups.values() for e in g.episodes} == before
    (shard, *_) = [run.core.shard(r, run.core.settings.num_ranks, 2) for r in range(run.core.settings.num_ranks)]
    assert shard.epoch == 1
    assert shard.launches_S.tolist() == [0] * shard.num_rows


@pytest.mark.parametrize("eta", [0, 2])
def test_a_crash_and_a_resume_skip_no_prompt_with_very_unequal_lengths(eta):
    """Checkpoints at every third step, a crash after each fifth; lengths from 1 turn to 60, finished in any order."""
    rng = np.random.default_rng(eta)
    run = Run(eta=eta, group_timeout_s=1e9)
    running, trained = [], {}
    crashes = iter([4, 9, 14])
    crash = next(crashes)
    step = 0
    while step < 18:
        core = run.core
        running += core.desk.lease("w", int(rng.integers(1, 9)))
        rng.shuffle(running)
        for _ in range(int(rng.integers(0, len(running) + 1))):
            lease = running.pop()
            assert core.trajectory(trajectory(lease, turns=int(rng.choice([1, 2, 60])))).status == "accepted"
        run.save()
        if isinstance(core.shard(0, 2, step), Waiting):
            continue
        train(core, step)
        trained[step] = {g for g, _ in core.ledger.batches[step]}
        if step % 3 == 2:
            core.commit(step, f"step_{step}")
        run.save()
        if step == crash:
            crash = next(crashes, -1)
            committed = core.ledger.committed_step
            run.resume(committed)
            running = []
            assert run.core.status()["step"] == committed + 1
            step = committed
            trained = {s: groups for s, groups in trained.items() if s <= committed}
        step += 1
    groups = [g for s in range(18) for g in sorted(trained[s])]
    assert len(groups) == len(set(groups)) == 36  # each prompt of the stream once
    skipped = set(range(max(groups) + 1)) - set(groups) - set(run.core.ledger.groups)
    assert not skipped
    status = run.core.status()
    assert (status["lost"], status["duplicated"]) == (0, 0)
    assert set(status["dropped"]) <= {"stale"}  # of the branch given up: too old by then, and leased again
    assert status["reissued"] * 2 == status["dropped"].get("stale", 0)
    assert status["max_staleness"] <= eta


@pytest.mark.parametrize("change", [{"min_group_size": 3}, {"max_attempts": 3}, {"filter_equal_rewards": True}])
def test_a_resume_with_other_rules_reads_the_log_by_the_rules_it_was_written_under(change):
    run = Run(group_size=3, max_attempts=1)
    for lease in run.core.desk.lease("w", 100):
        if lease.sample == 2:
            run.core.desk.reject(lease.lease_id, "raised")
        else:
            run.core.trajectory(trajectory(lease, reward=float(lease.sample)))
    train(run.core, 0)
    run.core.commit(0, "step_0")
    run.save()
    before = run.core.status()
    run.changes.update(change)
    run.resume(0)
    after = run.core.status()
    for name in ("acknowledged", "trained", "pooled", "ready_groups", "dropped", "lost", "duplicated"):
        assert after[name] == before[name], name
    run.compact()
    run.restart()
    assert run.core.ledger.min_group == run.core.settings.min_group
    assert run.core.ledger.max_attempts == run.core.settings.max_attempts


def test_causes_that_a_worker_makes_up_do_not_pile_up():
    core = make_core(max_attempts=1000, group_size=2)
    for n in range(200):
        (lease,) = core.desk.lease("w", 1)
        core.desk.reject(lease.lease_id, f"cause {n}")
    rejected = core.status()["rejected"]
    assert len(rejected) <= 65 and sum(rejected.values()) == 200

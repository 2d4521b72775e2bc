"""Counts by cause and by length add up; a restart forgets neither a lease reply nor whose leases they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_dta.batcher.accounts import length_bucket
from areal_dta.batcher.leases import DataStream
from tests.unit.batcher_kit import Clock, finish_all, make_core, train, trajectory


def by_cause(status: dict) -> dict[str, int]:
    return {cause: sum(by.values()) for cause, by in status["lengths"].items()}


@pytest.mark.parametrize(("tokens", "bound"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_a_length_is_counted_under_the_power_of_two_that_bounds_it(tokens, bound):
    assert length_bucket(tokens) == bound


def test_stragglers_are_counted_by_the_length_that_their_worker_told_last():
    clock = Clock()
    core = make_core(clock, group_size=4, lease_timeout_s=10, group_timeout_s=100, max_attempts=1, min_group_size=1)
    leases = core.desk.lease("w", 4)
    core.trajectory(trajectory(leases[0]))
    clock.now_s += 5
    core.desk.heartbeat("w", [x.lease_id for x in leases[1:]], [3000, 70, 500])
    clock.now_s += 8
    core.desk.heartbeat("w", [leases[1].lease_id], [5000])
    clock.now_s += 5
    core.desk.tick()  # two have been silent
    clock.now_s += 85
    core.desk.heartbeat("w", [leases[1].lease_id], [6000])
    core.desk.tick()
    status = core.status()
    assert status["rejected"] == {"expired": 2, "group_timeout": 1}
    assert status["lengths"] == {"expired": {"128": 1, "512": 1}, "group_timeout": {"8192": 1}}
    assert status["ready_groups"] == 1


def test_lengths_add_up_to_every_rejection_and_drop():
    clock = Clock()
    core = make_core(clock, max_attempts=2, eta=1, filter_equal_rewards=True, staleness_policy="drop")
    core.desk.hello("w", "worker", 1)
    leases = core.desk.lease("w", 5)
    core.desk.reject(leases[0].lease_id, "raised")  # an older worker tells no length
    core.trajectory(replace(trajectory(leases[1]), reward=float("nan")))
    core.trajectory(replace(trajectory(leases[2]), sample=99))
    core.desk.hello("w", "worker", 2)
    for step in range(3):
        for _ in range(3):
            finish_all(core, reward=lambda lease: float(lease.sample * (lease.group_id % 3)))
        if core.ready(step):
            train(core, step)
    core.desk.lease("w", 3)
    clock.now_s += 1000
    core.desk.tick()
    status = core.status()
    assert {"raised", "bad_reward", "malformed", "worker_restarted", "expired"} <= set(status["rejected"])
    assert status["dropped"]["equal_rewards"] > 0
    assert by_cause(status) == {**status["rejected"], **status["dropped"]}
    assert status["refused_lengths"]["malformed"] == {"32": 1}


def test_what_a_later_checkpoint_covered_is_counted_by_length_too():
    core = make_core(eta=1)
    for step in range(3):
        finish_all(core)
        train(core, step)
    core.commit(2, "step_2")
    again = make_core(eta=1, epoch=1, resume_step=0, log=core.take_events())
    status = again.status()
    assert status["dropped"] == {"covered_by_a_later_checkpoint": 8}
    assert by_cause(status) == status["dropped"]


def test_a_lease_reply_lost_with_the_batcher_is_repeated_by_its_successor_without_a_greeting():
    """The worker lives on and greets nobody: it only sends its request again."""
    core = make_core()
    core.desk.hello("w", "worker", 7)
    lost = core.desk.lease("w", 3, "7.1")
    after = make_core(log=core.take_events())
    assert after.desk.lease("w", 3, "7.1") == lost
    assert after.desk.heartbeat("w", [x.lease_id for x in lost]) == []
    assert after.desk.answered("v", "7.1") is None
    later = after.desk.lease("w", 1, "7.2")
    assert later and later[0] not in lost
    after.desk.hello("w", "worker", 8)  # another process by that name
    assert after.desk.answered("w", "7.2") == []
    assert after.status()["rejected"] == {"worker_restarted": 4}


def test_a_greeting_that_is_repeated_loses_no_evaluation_and_a_new_process_does():
    core = make_core()
    core.eval_start("before", 0)
    core.desk.hello("w", "worker", 1)
    lease = core.desk.lease("w", 1)[0]
    core.desk.hello("w", "worker", 1)
    assert core.desk.heartbeat("w", [lease.lease_id]) == []
    core.desk.hello("w", "worker", 2)
    assert core.desk.heartbeat("w", [lease.lease_id]) == [lease.lease_id]


def test_an_episode_of_an_earlier_launch_is_late_because_its_versions_mean_other_weights():
    core = make_core()
    old = core.desk.lease("w", 1)[0]
    resumed = make_core(epoch=1, log=core.take_events())
    assert resumed.trajectory(trajectory(old)).cause == "late"
    new = resumed.desk.lease("w", 1)[0]
    assert (new.group_id, new.sample) == (old.group_id, old.sample)
    assert resumed.trajectory(trajectory(new)).status == "accepted"


def test_an_episode_under_a_made_up_lease_never_reaches_a_batch():
    core = make_core()
    lease = core.desk.lease("w", 1)[0]
    assert core.trajectory(trajectory(replace(lease, lease_id="mine"))).cause == "malformed"
    assert core.trajectory(trajectory(lease)).status == "accepted"


def test_orders_of_past_epochs_are_let_go_and_come_back_the_same():
    stream = DataStream(50, seed=2, shuffle=True)
    first = [stream.item(p) for p in range(50)]
    for epoch in range(20):
        stream.item(50 * epoch)
    assert len(stream._orders) <= 3
    assert [stream.item(p) for p in range(50)] == first

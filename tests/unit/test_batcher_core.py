"""Leases, admission, intake and consumption of the batcher core. Not covered here: sockets, the log on disk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.batcher.core import Refusal, Waiting
from areal_dta.batcher.leases import DataStream
from areal_dta.batcher.settings import SettingsError
from areal_dta.records import Shard, Trajectory, pack, unpack
from tests.unit.batcher_kit import Clock, finish_all, make_core, settings, train, trajectory


def test_every_item_comes_once_per_epoch_in_a_seeded_order():
    stream = DataStream(5, seed=1, shuffle=True)
    first, second = [stream.item(p) for p in range(5)], [stream.item(p) for p in range(5, 10)]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second
    assert [DataStream(5, 1, True).item(p) for p in range(10)] == first + second
    assert [DataStream(5, 1, False).item(p) for p in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_admission_is_areals_formula():
    core = make_core(eta=1)
    assert len(core.desk.lease("w", 1000)) == (1 + 0 + 1) * 4  # (eta + version + 1) * batch
    assert core.desk.lease("w", 1000) == []
    core.published(1, epoch=0)
    assert len(core.desk.lease("w", 1000)) == 4
    assert core.desk.in_flight() == 12
    core.published(2, epoch=7)  # another launch's version
    assert core.desk.lease("w", 1000) == []


def test_capacity_and_max_concurrent_bound_the_leases():
    core = make_core(max_concurrent=3)
    leases = core.desk.lease("w", 2)
    assert [(x.group_id, x.sample) for x in leases] == [(0, 0), (0, 1)]
    assert [(x.group_id, x.sample) for x in core.desk.lease("v", 5)] == [(1, 0)]
    assert core.desk.lease("v", 5) == []
    core.trajectory(trajectory(leases[0]))
    assert [(x.group_id, x.sample) for x in core.desk.lease("v", 0)] == []
    assert [(x.group_id, x.sample) for x in core.desk.lease("v", 5)] == [(1, 1)]


def test_no_group_starts_beyond_the_last_step():
    core = make_core(eta=5, total_steps=2)
    assert len(core.desk.lease("w", 1000)) == 2 * 4


def test_a_lease_names_its_item_version_and_a_fixed_seed():
    one, two = make_core().desk.lease("w", 4), make_core().desk.lease("w", 4)
    assert one == two
    assert len({x.seed for x in one}) == 4
    assert one[0].item["task_id"].startswith("t")
    assert (one[0].version, one[0].epoch, one[0].attempt) == (0, 0, 0)


def test_failed_attempts_are_tried_again_with_the_same_seed_then_the_group_goes_on_without():
    core = make_core(group_size=3, max_attempts=2)
    first, *others = core.desk.lease("w", 3)
    core.desk.reject(first.lease_id, "raised")
    core.desk.reject(first.lease_id, "raised")  # a repeated report counts once
    (again,) = core.desk.lease("w", 1)
    assert (again.group_id, again.sample, again.seed, again.attempt) == (0, 0, first.seed, 1)
    assert again.lease_id != first.lease_id
    core.desk.reject(again.lease_id, "timeout")
    for lease in others:
        core.trajectory(trajectory(lease))
    assert core.status()["ready_groups"] == 1
    assert core.status()["rejected"] == {"raised": 1, "timeout": 1}
    late = core.trajectory(trajectory(again))
    assert (late.status, late.cause) == ("rejected", "late")


def test_a_group_with_too_few_episodes_is_replaced_by_the_next_prompt():
    core = make_core(max_attempts=1, eta=0)
    leases = core.desk.lease("w", 100)
    assert {x.group_id for x in leases} == {0, 1}
    core.trajectory(trajectory(leases[0]))
    core.desk.reject(leases[1].lease_id, "raised")
    assert {x.group_id for x in core.desk.lease("w", 100)} == {2}
    status = core.status()
    assert status["dropped"] == {"group_too_small": 1}
    assert (status["acknowledged"], status["lost"], status["pooled"]) == (1, 0, 0)


def test_work_handed_back_by_a_stopping_worker_does_not_use_up_attempts():
    core = make_core(max_attempts=1)
    (lease,) = core.desk.lease("w", 1)
    core.desk.reject(lease.lease_id, "aborted")
    assert core.desk.lease("w", 1)[0].sample == lease.sample


def test_nothing_but_failures_is_an_error_not_an_endless_wait():
    core = make_core(max_attempts=1)
    for _ in range(40):
        for lease in core.desk.lease("w", 100):
            core.desk.reject(lease.lease_id, "raised", "prompt too long")
    with pytest.raises(Refusal, match=r"no usable episodes \(raised \d+\); the last one said: raised: prompt too long"):
        core.shard(0, 2, 0)


def test_silent_leases_expire_and_heartbeats_prolong_them():
    clock = Clock()
    core = make_core(clock, lease_timeout_s=10)
    kept, lost = core.desk.lease("w", 2)
    clock.now_s += 8
    assert core.desk.heartbeat("w", [kept.lease_id, "e9.g9.s9.a9"]) == ["e9.g9.s9.a9"]
    clock.now_s += 3
    core.desk.tick()
    assert core.desk.heartbeat("w", [kept.lease_id, lost.lease_id]) == [lost.lease_id]
    assert [(x.sample, x.attempt) for x in core.desk.lease("v", 1)] == [(lost.sample, 1)]
    assert core.trajectory(trajectory(lost)).status == "accepted"  # whoever comes first is taken
    assert core.trajectory(trajectory(replace(lost, lease_id="e0.g0.s1.a1"))).status == "duplicate"


def test_a_worker_that_restarts_under_its_name_frees_its_leases_at_once():
    core = make_core()
    core.desk.hello("w", "worker", 1)
    (lease,) = core.desk.lease("w", 1)
    core.desk.hello("w", "worker", 1)
    assert core.desk.heartbeat("w", [lease.lease_id]) == []
    core.desk.hello("w", "worker", 2)
    assert core.desk.heartbeat("w", [lease.lease_id]) == [lease.lease_id]
    assert core.status()["rejected"] == {"worker_restarted": 1}


def test_a_group_over_its_time_is_completed_or_replaced():
    clock = Clock()
    core = make_core(clock, group_size=3, lease_timeout_s=1000, group_timeout_s=50)
    leases = core.desk.lease("w", 6)
    for lease in (leases[0], leases[1], leases[3]):  # two of the first group, one of the second
        core.trajectory(trajectory(lease))
    clock.now_s += 51
    core.desk.tick()
    assert core.status()["ready_groups"] == 1
    assert core.status()["dropped"] == {"group_too_small": 1}
    assert core.status()["rejected"] == {"group_timeout": 3}
    assert core.desk.heartbeat("w", [leases[2].lease_id]) == [leases[2].lease_id]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"reward": float("nan")}, "bad_reward"),
        ({"rewards_S": np.array([1.0, np.inf])}, "bad_reward"),
        ({"loss_mask_T": np.zeros(19, np.uint8)}, "empty"),
        ({"logprobs_T": np.full(19, np.nan)}, "malformed"),
        ({"versions_T": np.full(19, -1)}, "malformed"),
        ({"logprobs_T": np.zeros(3)}, "malformed"),
    ],
)
def test_bad_trajectories_are_rejected_by_cause_and_their_sample_is_tried_again(change, cause):
    core = make_core()
    (lease,) = core.desk.lease("w", 1)
    verdict = core.trajectory(replace(trajectory(lease), **change))
    assert (verdict.status, verdict.cause) == ("rejected", cause)
    assert core.status()["rejected"] == {cause: 1}
    assert core.desk.lease("w", 1)[0].attempt == 1


def test_unknown_groups_and_samples_are_rejected():
    core = make_core()
    (lease,) = core.desk.lease("w", 1)
    assert core.trajectory(trajectory(replace(lease, group_id=99))).cause == "unknown_group"
    assert core.trajectory(trajectory(replace(lease, sample=9))).cause == "malformed"


def test_workers_are_told_to_wait_only_while_a_full_batch_lies_ready():
    core = make_core(intake_limit=4, eta=3)
    leases = core.desk.lease("w", 6)
    assert [core.trajectory(trajectory(x)).status for x in leases] == ["accepted"] * 4 + ["busy"] * 2
    train(core, 0)
    assert [core.trajectory(trajectory(x)).status for x in leases[4:]] == ["accepted"] * 2


def test_shards_hold_the_batch_once_sorted_and_are_the_same_when_asked_again():
    core = make_core()
    finish_all(core)
    shards = train(core, 0)
    again = [core.shard(r, 2, 0) for r in range(2)]
    for a, b in zip(shards, again, strict=True):
        for x, y in zip(pack(a)[1].values(), pack(b)[1].values(), strict=True):
            np.testing.assert_array_equal(x, y)
    rows = [
        (int(g), int(s), tuple(sh.input_ids_T[a:b].tolist()))
        for sh in shards
        for g, s, a, b in zip(sh.group_ids_S, sh.samples_S, sh.offsets_S1, sh.offsets_S1[1:], strict=False)
    ]
    assert len(rows) == len(set(rows)) == shards[0].num_rows_total == 8
    assert sum(int(sh.loss_mask_T.sum()) for sh in shards) == shards[0].num_loss_tokens_total == 16
    for sh in shards:
        own = [tuple(sh.input_ids_T[a:b].tolist()) for a, b in zip(sh.offsets_S1, sh.offsets_S1[1:], strict=False)]
        assert own == sorted(own)
        assert unpack(Shard, *pack(sh)).num_rows == sh.num_rows > 0


def test_a_step_is_asked_for_in_order_and_by_the_right_ranks():
    core = make_core()
    assert isinstance(core.shard(0, 2, 0), Waiting)
    with pytest.raises(Refusal, match="next step is 0"):
        core.shard(0, 2, 1)
    with pytest.raises(Refusal, match="rank 0 of 3 asked, the run has 2"):
        core.shard(0, 3, 0)
    waiting = core.shard(1, 2, 0)
    assert (waiting.have, waiting.need) == (0, 2)
    assert "0 of 2 groups are complete" in waiting.why
    with pytest.raises(Refusal, match="checkpoint of step 0"):
        core.commit(0, "x")


def test_evaluation_goes_first_greedy_and_apart_from_training():
    core = make_core()
    assert core.eval_start("before", 0) == 2
    assert core.eval_start("before", 0) == 2
    leases = core.desk.lease("w", 3)
    assert [x.eval_tag for x in leases] == ["before", "before", None]
    assert core.trajectory(replace(trajectory(leases[0]), reward=0.25)).status == "accepted"
    assert core.trajectory(trajectory(leases[0])).status == "duplicate"
    result = core.eval_result("before")
    assert (result["done"], result["finished"], result["mean_reward"]) == (1, False, 0.25)
    for _ in range(3):
        lease = leases[1] if leases[1].attempt == 0 else core.desk.lease("w", 1)[0]
        core.desk.reject(lease.lease_id, "raised")
        leases[1] = replace(leases[1], attempt=1)
    result = core.eval_result("before")
    assert (result["finished"], result["failed"], result["mean_reward"]) == (True, 1, 0.25)
    assert result["rewards"] == {"t0": [0.25]}
    assert core.status()["acknowledged"] == 0
    with pytest.raises(Refusal, match="no evaluation 'after'"):
        core.eval_result("after")


def test_finish_stops_leases():
    core = make_core()
    core.finish()
    assert core.desk.lease("w", 10) == []
    assert core.status()["draining"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_items": 1}, "1 items, fewer than train_dataset.batch_size=2; lower batch_size or add items"),
        ({"eta": -1}, "max_head_offpolicyness is -1"),
        ({"batch_groups": 0}, "batch_groups is 0"),
        ({"num_minibatches": 3}, "ppo_n_minibatches=3"),
        ({"intake_limit": 3}, "intake_limit=3"),
    ],
)
def test_impossible_settings_are_refused_at_start(change, text):
    with pytest.raises(SettingsError, match=text):
        settings(**change).check()


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["wait", "drop"]), st.integers(0, 3))
def test_no_trained_token_is_ever_staler_than_eta(seed, policy, eta):
    """Random interleaving of leases, results in any order (versions between grant and now), steps and publishes."""
    rng = np.random.default_rng(seed)
    core = make_core(eta=eta, staleness_policy=policy, group_size=2, batch_groups=2)
    running, step, idle = [], 0, 0
    while step < 6 and idle < 60:
        idle += 1
        running += core.desk.lease("w", int(rng.integers(0, 7)))
        rng.shuffle(running)
        for _ in range(min(len(running), int(rng.integers(0, 5)))):
            lease = running.pop()
            core.trajectory(trajectory(lease, version=[lease.version, core.ledger.version]))
        if core.ledger.version >= step and isinstance(core.shard(0, 2, step), Shard):
            step, idle = step + 1, 0
            core.published(step, 0)
    assert step == 6, core.shard(0, 2, step)
    status = core.status()
    assert status["max_staleness"] <= eta
    assert status["lost"] == status["duplicated"] == 0
    if policy == "wait":
        assert status["dropped"] == {}


def straggle(policy: str):
    """Two groups straggle while four others overtake them (eta 2, batches of two); returns the core at step 2."""
    core = make_core(eta=2, staleness_policy=policy)
    slow, stragglers = core.desk.lease("w", 1000), []
    for lease in slow:
        if lease.group_id < 4:
            stragglers.append(lease)
        else:
            core.trajectory(trajectory(lease))
    train(core, 0)
    finish_all(core)
    return core, stragglers


def test_wait_holds_a_step_back_for_stragglers_that_would_miss_their_deadline():
    core, stragglers = straggle("wait")
    waiting = core.shard(0, 2, 1)
    assert isinstance(waiting, Waiting) and "stragglers of groups 0, 1, 2, 3" in waiting.why
    for lease in stragglers[:4]:
        core.trajectory(trajectory(lease))
    assert isinstance(core.shard(0, 2, 1), Shard)
    assert set(core.ledger.batches[1]) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_drop_goes_on_and_drops_the_late_episodes_by_cause():
    core, stragglers = straggle("drop")
    train(core, 1)
    finish_all(core)
    train(core, 2)
    for lease in stragglers:
        assert core.trajectory(trajectory(lease)).status == "accepted"
    core.shard(0, 2, 3)
    assert core.status()["dropped"] == {"stale": 8}
    assert core.status()["dropped_tokens"]["stale"] > 0
    assert core.status()["lost"] == 0


@pytest.mark.parametrize(("policy", "loss_tokens", "staleness"), [("mask", 8, 0), ("keep", 16, 3)])
def test_mask_keeps_stale_tokens_as_context_without_loss_and_keep_trains_them(policy, loss_tokens, staleness):
    core = make_core(eta=1, staleness_policy=policy)
    leases = core.desk.lease("w", 1000)
    for lease in leases[:4]:
        core.trajectory(trajectory(lease))
    for step in range(3):  # groups 2 and 3 are overtaken three times
        train(core, step)
        finish_all(core)
    for lease in leases[4:]:
        core.trajectory(trajectory(lease, version=[0, 3]))
    shards = train(core, 3)
    assert {key[0] for key in core.ledger.batches[3]} == {2, 3}
    assert shards[0].num_rows_total == 8
    assert sum(int(s.loss_mask_T.sum()) for s in shards) == shards[0].num_loss_tokens_total == loss_tokens
    assert core.status()["max_staleness"] == staleness
    assert core.status()["mixed_version_share"] == 4 / 16


def test_rewards_of_a_trajectory_that_are_not_numbers_are_named():
    core = make_core()
    (lease,) = core.desk.lease("w", 1)
    plain, arrays = pack(trajectory(lease))
    with pytest.raises(ValueError, match="reward is None") as caught:
        unpack(Trajectory, {**plain, "reward": None}, arrays)
    assert caught.value.cause == "bad_reward"

"""Filtering, minimum size, leasing stale prompts again, counting; order of deliveries; intake during an assembly. Not
covered here: sockets, the log on disk.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal_dta.batcher.core import Refusal
from areal_dta.batcher.settings import SettingsError
from tests.unit.batcher_kit import finish_all, make_core, settings, train, trajectory


def drop_stale_group(**changes):
    """One prompt is overtaken until its episodes are too old; returns the core right after they were dropped, and the
    leases of that prompt.
    """
    core = make_core(eta=1, staleness_policy="drop", **changes)
    leases = core.desk.lease("w", 1000)
    slow = [x for x in leases if x.group_id == 0]
    for lease in leases:
        if lease not in slow:
            core.trajectory(trajectory(lease))
    for step in range(3):
        while not core.ready(step):
            finish_all(core)
        train(core, step)
    finish_all(core, capacity=0)
    for lease in slow:
        assert core.trajectory(trajectory(lease)).status == "accepted"
    core.ask(0, 2, 3)
    assert core.status()["dropped"] == {"stale": 2}
    return core, slow


def test_the_prompt_of_a_group_dropped_as_stale_is_leased_again_and_counted():
    core, slow = drop_stale_group(stale_reissues=1)
    assert core.status()["reissued"] == 1
    again = [x for x in core.desk.lease("w", 1000) if x.group_id == 0]
    assert [(x.sample, x.item, x.seed) for x in again] == [(x.sample, x.item, x.seed) for x in slow]
    assert not {x.lease_id for x in again} & {x.lease_id for x in slow}
    assert core.trajectory(trajectory(slow[0])).cause == "late"  # of the first time
    assert [core.trajectory(trajectory(x)).status for x in again] == ["accepted", "accepted"]
    assert core.trajectory(trajectory(again[0])).status == "duplicate"
    core.shard(0, 2, 3)
    assert {g for g, _ in core.ledger.batches[3]} >= {0}
    assert (core.status()["lost"], core.status()["duplicated"]) == (0, 0)


def test_reissues_are_bounded_and_can_be_switched_off():
    core, _ = drop_stale_group(stale_reissues=0)
    assert core.status()["reissued"] == 0
    assert 0 not in {x.group_id for x in core.desk.lease("w", 1000)}


def test_a_reissued_prompt_takes_a_place_of_admission_like_any_other():
    core, _ = drop_stale_group(stale_reissues=1)
    admitted = {x.group_id for x in core.desk.lease("w", 1000)}
    other, _ = drop_stale_group(stale_reissues=0)
    assert len(admitted) == len({x.group_id for x in other.desk.lease("w", 1000)})


def test_groups_without_a_difference_in_reward_are_filtered_and_give_their_admission_back():
    core = make_core(eta=0, filter_equal_rewards=True)
    leases = core.desk.lease("w", 1000)
    assert {x.group_id for x in leases} == {0, 1}
    for lease in leases:
        core.trajectory(trajectory(lease, reward=1.0 if lease.group_id == 0 else float(lease.sample)))
    status = core.status()
    assert (status["dropped"], status["ready_groups"], status["lost"]) == ({"equal_rewards": 2}, 1, 0)
    assert {x.group_id for x in core.desk.lease("w", 1000)} == {2}
    assert core.status()["lengths"] == {"equal_rewards": {"32": 2}}
    unfiltered = make_core(eta=0)
    finish_all(unfiltered, reward=lambda lease: 1.0)
    assert unfiltered.status()["ready_groups"] == 2


def test_nothing_but_equal_rewards_is_an_error_not_an_endless_wait():
    core = make_core(eta=0, filter_equal_rewards=True)
    for _ in range(16):
        finish_all(core, reward=lambda lease: 1.0)
    with pytest.raises(Refusal, match="32 groups in a row had no two different rewards"):
        core.shard(0, 2, 0)


def test_the_smallest_usable_group_is_a_setting():
    for smallest, ready in ((1, 1), (3, 0)):
        core = make_core(group_size=3, max_attempts=1, min_group_size=smallest)
        first, *others = core.desk.lease("w", 3)
        core.trajectory(trajectory(first))
        for lease in others:
            core.desk.reject(lease.lease_id, "raised")
        assert core.status()["ready_groups"] == ready
        assert core.status()["dropped"] == ({} if ready else {"group_too_small": 1})
    with pytest.raises(SettingsError, match="set to 4 episodes, it must be 1 to gconfig.n_samples=3"):
        settings(group_size=3, min_group_size=4).check()


def test_rejections_are_counted_by_cause_and_by_length():
    core = make_core()
    first, second = core.desk.lease("w", 2)
    core.trajectory(replace(trajectory(first, turns=2), reward=float("nan")))  # 19 tokens
    core.desk.reject(second.lease_id, "too_long", "", 40_000)
    status = core.status()
    assert status["rejected"] == {"bad_reward": 1, "too_long": 1}
    assert status["lengths"] == {"bad_reward": {"32": 1}, "too_long": {"65536": 1}}


def test_duplicates_and_any_order_of_deliveries_count_each_episode_once():
    rng = np.random.default_rng(5)
    core = make_core(eta=1)
    leases = core.desk.lease("w", 1000)
    order = rng.permutation(np.repeat(np.arange(len(leases)), 3)).tolist()
    verdicts = [core.trajectory(trajectory(leases[i])).status for i in order]
    assert verdicts.count("accepted") == len(leases)
    assert verdicts.count("duplicate") == 2 * len(leases)
    assert core.status()["acknowledged"] == len(leases)


def test_eta_0_trains_only_what_the_current_policy_produced():
    core = make_core(eta=0)
    for step in range(5):
        assert len(core.desk.lease("w", 1000)) == 4
        assert core.desk.lease("w", 1000) == []  # nothing runs ahead
        for group, index, _ in list(core.ledger.leased()):
            lease = core.desk._lease(group.group_id, index, 0, core.ledger.version)
            core.trajectory(trajectory(lease))
        shards = train(core, step)
        for shard in shards:
            assert set(shard.versions_T[shard.loss_mask_T == 1].tolist()) <= {step}
    assert core.status()["max_staleness"] == 0


def test_intake_goes_on_while_a_batch_is_assembled_and_the_batch_is_what_was_chosen():
    core = make_core(eta=1)
    leases = core.desk.lease("w", 1000)
    for lease in leases[:4]:
        core.trajectory(trajectory(lease))
    assembly = core.ask(0, 2, 0)
    assert core.ask(1, 2, 0) is assembly
    for lease in leases[4:]:
        assert core.trajectory(trajectory(lease)).status == "accepted"
    core.fix(assembly.run())
    assert {g for g, _ in core.ledger.batches[0]} == {0, 1}
    assert core.status()["ready_groups"] == 2

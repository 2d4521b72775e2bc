"""Reward shaping, minibatch deal and shard rewards. The reference numbers follow AReaL's formulas, written out by hand
here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal_dta.batcher.dispatch import assemble
from areal_dta.batcher.leases import Episode, lease_id
from areal_dta.batcher.rewards import shape, standardise
from areal_dta.batcher.settings import RewardSettings
from areal_dta.records import Lease
from areal_dta.tree.cost import CostModel
from areal_dta.tree.minibatch import deal_groups
from tests.unit.batcher_kit import settings, trajectory

GROUPS = [np.array([0.0, 1.0, 1.0, 2.0]), np.array([3.0, 3.0])]


def normalised(config, groups=GROUPS):
    means, divisors = standardise(groups, config)
    return [(g - m) / d for g, m, d in zip(groups, means, divisors, strict=True)]


def test_rewards_are_shifted_then_scaled_then_clipped():
    config = RewardSettings(bias=-0.5, scaling=10.0, clip=4.0)
    np.testing.assert_allclose(shape(np.array([0.0, 0.6, 1.0]), config), [-4.0, 1.0, 4.0])


def test_group_normalisation_uses_the_group_mean_and_deviation():
    config = RewardSettings(mean_level="group", std_level="group", unbiased_std=True, eps=1e-5)
    first, second = normalised(config)
    np.testing.assert_allclose(first, (GROUPS[0] - 1.0) / (np.sqrt(2 / 3) + 1e-5))
    np.testing.assert_allclose(second, 0.0)
    biased = normalised(replace(config, unbiased_std=False))[0]
    np.testing.assert_allclose(biased, (GROUPS[0] - 1.0) / (np.sqrt(0.5) + 1e-5))


def test_mean_only_and_leave_one_out():
    first, second = normalised(RewardSettings(mean_level="group"))
    np.testing.assert_allclose(first, GROUPS[0] - 1.0)
    first, second = normalised(RewardSettings(mean_level="group", leave_one_out=True))
    np.testing.assert_allclose(first, [-4 / 3, 0, 0, 4 / 3])
    alone = normalised(RewardSettings(mean_level="group", leave_one_out=True, std_level="group"), [np.array([2.0])])
    np.testing.assert_allclose(alone[0], [2.0 / (1 + 1e-5)])


def test_batch_levels_use_all_episodes():
    everything = np.concatenate(GROUPS)
    config = RewardSettings(mean_level="batch", std_level="batch", unbiased_std=False, eps=0.0)
    np.testing.assert_allclose(np.concatenate(normalised(config)), (everything - everything.mean()) / everything.std())
    mixed = normalised(RewardSettings(mean_level="group", std_level="batch", unbiased_std=False, eps=0.0))
    centred = np.concatenate([g - g.mean() for g in GROUPS])
    np.testing.assert_allclose(np.concatenate(mixed), centred / np.sqrt((centred**2).mean()))
    np.testing.assert_allclose(np.concatenate(normalised(RewardSettings())), everything)


def episodes(group_id: int, rewards, turns) -> list[Episode]:
    out = []
    for sample, (reward, num_turns) in enumerate(zip(rewards, turns, strict=True)):
        lease = Lease(lease_id(0, group_id, sample, 0), group_id, sample, 0, {"task_id": "t"}, 0, 0, 0)
        out.append(Episode.of(trajectory(lease, reward=reward, turns=num_turns)))
    return out


def test_an_episode_of_many_turns_does_not_weigh_more_in_its_groups_mean():
    rewards = RewardSettings(mean_level="group", bias=1.0, scaling=2.0)
    config = settings(batch_groups=1, num_ranks=1, rewards=rewards)
    (shard,) = assemble([episodes(0, [0.0, 1.0], [1, 5])], 0, 0, config).shards
    by_sample = {int(s): float(r) for s, r in zip(shard.samples_S, shard.rewards_S, strict=True)}
    assert by_sample == {0: -1.0, 1: 1.0}
    assert sorted(set(shard.raw_rewards_S.tolist())) == [0.0, 1.0]
    assert len(shard.rewards_S) == 6


def test_turn_level_rewards_keep_their_differences():
    first, second = episodes(0, [0.0, 1.0], [2, 2])
    second = replace(second, trajectory=replace(second.trajectory, rewards_S=np.array([0.5, 1.0])))
    config = settings(batch_groups=1, num_ranks=1, rewards=RewardSettings(mean_level="group"))
    (shard,) = assemble([[first, second]], 0, 0, config).shards
    assert sorted(shard.rewards_S.tolist()) == [-0.375, -0.375, 0.125, 0.625]  # mean over episodes of their turns


def test_groups_are_dealt_evenly_and_by_seed_and_every_minibatch_is_cut_over_the_ranks():
    deal = deal_groups(10, 3, seed=1, step=5)
    assert sorted(np.bincount(deal).tolist()) == [3, 3, 4]
    np.testing.assert_array_equal(deal, deal_groups(10, 3, seed=1, step=5))
    assert any((deal != deal_groups(10, 3, seed=1, step=s)).any() for s in range(5))
    groups = [episodes(g, [0.0, 1.0], [4, 4]) for g in range(6)]
    config = settings(batch_groups=6, num_minibatches=2, num_ranks=2, cost=CostModel(1.0, 0.1))
    batch = assemble(groups, 0, 0, config)
    for shard in batch.shards:
        assert set(shard.minibatch_S.tolist()) == {0, 1}
    placed = {(int(g), int(m)) for s in batch.shards for g, m in zip(s.group_ids_S, s.minibatch_S, strict=True)}
    assert len(placed) == 6  # a group stays in one minibatch
    assert max(batch.stats.rank_costs) < 1.5 * min(batch.stats.rank_costs)
    assert batch.stats.tree_ratio == pytest.approx(batch.stats.tokens / batch.stats.tree_tokens)


def test_more_ranks_than_rows_leave_well_formed_empty_shards():
    batch = assemble([episodes(0, [0.0, 1.0], [1, 1])], 0, 0, settings(batch_groups=1, num_ranks=4))
    assert sorted(s.num_rows for s in batch.shards) == [0, 0, 1, 1]
    empty = next(s for s in batch.shards if s.num_rows == 0)
    assert empty.offsets_S1.tolist() == [0] and empty.num_rows_total == 2 and empty.cost == 0.0


def test_a_group_of_equal_episodes_with_unequal_turns_gets_no_exploding_rewards():
    rewards = RewardSettings(mean_level="group", std_level="group", eps=1e-5)
    config = settings(batch_groups=1, num_ranks=1, rewards=rewards)
    group = episodes(0, [0.0, 0.0], [2, 2])
    penalised = np.array([-0.1, 0.0], np.float32)  # one malformed turn in each
    group = [replace(e, trajectory=replace(e.trajectory, rewards_S=penalised)) for e in group]
    (shard,) = assemble([group], 0, 0, config).shards
    assert np.abs(shard.rewards_S).max() < 2.0
    assert len(np.unique(shard.rewards_S)) == 2

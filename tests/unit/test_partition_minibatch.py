"""The deal of groups to minibatches and the cut of each over the ranks."""

from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest

from areal_dta.batcher.settings import BatcherSettings
from areal_dta.config_schema import BatcherConfig
from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.minibatch import cut_minibatches, deal_groups
from areal_dta.tree.partition import DEFAULT_METHOD, METHODS, bin_cost
from areal_dta.tree.trie import sort_rows


def batch(num_rows=30, seed=0):
    rng = np.random.default_rng(seed)
    rows = [[7] * 20 + rng.integers(0, 9, int(rng.integers(1, 40))).tolist() for _ in range(num_rows)]
    return sort_rows(np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)]))


def test_groups_are_dealt_evenly_by_seed_and_step():
    deal = deal_groups(10, 4, seed=3, step=7)
    assert sorted(np.bincount(deal, minlength=4).tolist()) == [2, 2, 3, 3]
    np.testing.assert_array_equal(deal, deal_groups(10, 4, seed=3, step=7))
    others = [deal_groups(10, 4, seed, step) for seed, step in ((3, 8), (4, 7), (3, 9))]
    assert all((deal != other).any() for other in others)
    assert deal_groups(2, 4, seed=0, step=0).max() < 4
    with pytest.raises(ValueError, match="10 groups to 0 minibatches"):
        deal_groups(10, 0, seed=0, step=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_minibatch_is_cut_over_all_ranks_and_its_heaviest_rank_counts(method):
    rows, model = batch(), CostModel(2.0, 0.1)
    minibatch_R = deal_groups(rows.num_rows, 3, seed=0, step=0)
    cuts = cut_minibatches(rows, minibatch_R, 3, 4, method, model)
    for m, bins in enumerate(cuts.bins):
        assert sorted(np.concatenate(bins).tolist()) == np.flatnonzero(minibatch_R == m).tolist()
        for k, members in enumerate(bins):
            assert cuts.costs_MK[m, k] == pytest.approx(bin_cost(rows, members, model))
            assert cuts.tree_tokens_MK[m, k] == bin_cost(rows, members, TREE_TOKENS)
    assert cuts.step_cost == pytest.approx(sum(max(costs) for costs in cuts.costs_MK.tolist()))
    by_rank = [cuts.of_rank(k) for k in range(4)]
    assert all((np.diff(positions) > 0).all() for positions in by_rank)
    assert sorted(np.concatenate(by_rank).tolist()) == list(range(rows.num_rows))


def test_a_minibatch_without_rows_costs_nothing():
    rows = batch(3)
    cuts = cut_minibatches(rows, np.zeros(3, int), 2, 2, DEFAULT_METHOD, TREE_TOKENS)
    assert cuts.costs_MK[1].tolist() == [0, 0]
    assert cuts.step_cost == cuts.costs_MK[0].max()
    assert [len(members) for members in cuts.bins[1]] == [0, 0]


@pytest.mark.parametrize("minibatch", [[0, 1], [0, 1, 2], [0, 0, -1]])
def test_a_wrong_minibatch_is_refused(minibatch):
    with pytest.raises(ValueError, match="each of the 3 rows needs a minibatch from 0 to 1"):
        cut_minibatches(batch(3), np.asarray(minibatch), 2, 2, DEFAULT_METHOD, TREE_TOKENS)


def test_the_configuration_names_every_method_and_has_the_same_default():
    assert set(get_args(get_type_hints(BatcherConfig)["partition"])) == set(METHODS)
    assert BatcherConfig().partition == DEFAULT_METHOD == "refined"
    assert BatcherSettings(num_items=1, batch_groups=1, group_size=1, eta=0).partition == DEFAULT_METHOD

"""The local search behind `refined`: exact costs of its moves, and what its result may never be. That it finds the best
cut is not claimed; how close it gets on recorded batches is measured by `scripts/bench.py partition`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.tree import partition_refined
from areal_dta.tree.cost import TREE_TOKENS, CostModel, lower_bound
from areal_dta.tree.lcp import RangeMinimum, leaf_positions
from areal_dta.tree.partition import bin_costs, contiguous, ffd_tokens, ffd_tree, refined
from areal_dta.tree.partition_units import LeafCosts, merged, without
from tests.unit.partition_kit import MODELS, naive_cost, sort

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=0, max_size=14)


def common_tokens(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def agents(seed, num_groups=12, num_samples=8, num_turns=6, system=400):
    """Conversations of uneven length as a row per turn, on one system prompt and a question per group."""
    rng = np.random.default_rng(seed)
    prompt, rows = rng.integers(0, 500, system).tolist(), []
    for _ in range(num_groups):
        question = prompt + rng.integers(0, 500, 60).tolist()
        for _ in range(num_samples):
            conversation = question
            for _ in range(int(rng.integers(1, num_turns + 1))):
                conversation = conversation + rng.integers(0, 500, int(rng.integers(20, 400))).tolist()
                rows.append(conversation)
    return rows


@hypothesis_settings(deadline=None)
@given(ROWS)
def test_leaves_are_the_rows_that_no_later_row_contains_and_pairs_share_their_common_prefix(rows):
    ordered, s = sorted(rows), sort(rows)
    leaves = [i for i, r in enumerate(ordered) if not any(o[: len(r)] == r for o in ordered[i + 1 :])]
    assert leaf_positions(s).tolist() == leaves
    pairs = np.asarray(list(itertools.combinations(range(len(rows)), 2)), np.int64).reshape(-1, 2)
    shared = [common_tokens(ordered[a], ordered[b]) for a, b in pairs]
    assert RangeMinimum(s.lcp_R).over(pairs[:, 0], pairs[:, 1]).tolist() == shared


@hypothesis_settings(deadline=None)
@given(ROWS, MODELS, st.randoms(use_true_random=False))
def test_gain_and_addition_of_every_unit_equal_the_naive_trie(rows, model, random):
    s = sort(rows)
    leaf_rows = [sorted(rows)[i] for i in leaf_positions(s)]
    costs = LeafCosts(s.subset(leaf_positions(s)), model)
    owner = [random.randrange(2) for _ in leaf_rows]
    mine, theirs = (np.asarray([i for i, b in enumerate(owner) if b == k], np.int64) for k in (0, 1))

    def naive(members):
        return naive_cost([leaf_rows[i] for i in members], model)

    assert costs.bin(mine) == pytest.approx(naive(mine))
    if not len(mine):
        return
    units = costs.units(mine)
    added = costs.added(theirs, units)
    assert units.num_units >= len(mine)
    for u in range(units.num_units):
        rest, run = without(mine, units, u)
        assert len(run) and len(rest) + len(run) == len(mine)
        assert units.gain_U[u] == pytest.approx(naive(mine) - naive(rest))
        assert units.alone_U[u] == pytest.approx(naive(run))
        between = ((theirs > run[0]) & (theirs < run[-1])).any()
        expected = np.inf if between else naive(merged(theirs, run)) - naive(theirs)
        assert added[u] == pytest.approx(expected)


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(1, 5), MODELS)
def test_refined_is_never_costlier_than_any_baseline_and_leaves_no_rank_empty(rows, num_bins, model):
    s = sort(rows)
    bins = refined(s, num_bins, model)
    assert len(bins) == num_bins
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(rows)))
    assert sum(len(b) == 0 for b in bins) == max(0, num_bins - len(rows))
    heaviest = bin_costs(s, bins, model).max()
    for baseline in (contiguous, ffd_tokens, ffd_tree):
        assert heaviest <= bin_costs(s, baseline(s, num_bins, model), model).max() * (1 + 1e-12)
    assert heaviest >= lower_bound(s, num_bins, model)[0] * (1 - 1e-12)


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(2, 6), MODELS, st.booleans(), st.randoms(use_true_random=False))
def test_the_search_lightens_any_start_and_empties_no_rank(rows, num_bins, model, bounded, random):
    s = sort(rows)
    leaf_rows = [sorted(rows)[i] for i in leaf_positions(s)]
    leaves = s.subset(leaf_positions(s))
    owner = np.asarray([random.randrange(num_bins) for _ in leaf_rows], np.int64)
    start = [np.flatnonzero(owner == k) for k in range(num_bins)]
    bound = lower_bound(leaves, num_bins, model)[0] if bounded else 0.0
    bins, heaviest = partition_refined._improve(start, LeafCosts(leaves, model), bound)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(leaf_rows)))
    assert sum(len(b) == 0 for b in bins) <= sum(len(b) == 0 for b in start)
    loads = [[naive_cost([leaf_rows[i] for i in b], model) for b in cut] for cut in (bins, start)]
    assert heaviest == pytest.approx(max(loads[0])) and heaviest <= max(loads[1]) * (1 + 1e-12)


@pytest.mark.parametrize("model", [TREE_TOKENS, CostModel(3000.0, 1.0)])
@pytest.mark.parametrize("num_bins", [4, 8])
def test_agent_turns_are_balanced_where_neither_published_method_balances_them(num_bins, model):
    s = sort(agents(num_bins))
    bound, set_by_row = lower_bound(s, num_bins, model)
    assert not set_by_row
    excess, *published = (
        bin_costs(s, method(s, num_bins, model), model).max() / bound - 1 for method in (refined, contiguous, ffd_tree)
    )
    assert excess < 0.015 and excess < 0.4 * min(published)


def test_prefix_rows_stay_with_their_leaf_so_that_turns_cost_what_whole_conversations_cost():
    turns = agents(3)
    whole = [r for r in turns if not any(o[: len(r)] == r and len(o) > len(r) for o in turns)]
    for num_bins in (2, 5):
        loads = [
            np.sort(bin_costs(s, refined(s, num_bins, TREE_TOKENS), TREE_TOKENS)) for s in map(sort, (turns, whole))
        ]
        np.testing.assert_array_equal(*loads)


def test_a_used_up_work_limit_still_gives_a_cut_no_worse_than_the_baselines(monkeypatch):
    monkeypatch.setattr(partition_refined, "_WORK", 0)
    s = sort(agents(1))
    heaviest = bin_costs(s, refined(s, 6, TREE_TOKENS), TREE_TOKENS).max()
    for baseline in (contiguous, ffd_tokens, ffd_tree):
        assert heaviest <= bin_costs(s, baseline(s, 6, TREE_TOKENS), TREE_TOKENS).max()


def test_many_ranks_ask_only_some_bins_and_the_same_batch_is_cut_the_same_way(monkeypatch):
    monkeypatch.setattr(partition_refined, "_WIDE", 0)
    s = sort(agents(2))
    first, second = (refined(s, 12, TREE_TOKENS) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert bin_costs(s, first, TREE_TOKENS).max() < bin_costs(s, contiguous(s, 12, TREE_TOKENS), TREE_TOKENS).max()


def test_more_ranks_than_leaves_get_the_shortest_rows_that_cost_nothing_where_they_were():
    rows = [[1] * n for n in (2, 5, 9)] + [[2] * 9]
    s = sort(rows)
    bins = refined(s, 4, TREE_TOKENS)
    assert sorted(s.lens_R[b].tolist() for b in bins) == [[2], [5], [9], [9]]
    assert sorted(sorted(s.lens_R[b].tolist()) for b in refined(s, 3, TREE_TOKENS)) == [[2], [5, 9], [9]]

"""Cost model, contiguous cut and greedy baselines against brute force on small batches. Not covered: wall time of
batches beyond a few thousand rows, which `scripts/bench.py partition` measures.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.tree.cost import TREE_TOKENS, RunCosts, flop_model, lower_bound
from areal_dta.tree.partition import METHODS, bin_cost, contiguous, duplicated_tokens, ffd_tokens, ffd_tree, partition
from areal_dta.tree.partition_greedy import ffd_tree_below
from tests.unit.partition_kit import MODELS, naive_cost, sort

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=0, max_size=9)


@hypothesis_settings(deadline=None)
@given(ROWS, MODELS)
def test_run_and_subset_costs_equal_the_naive_trie(rows, model):
    ordered, s = sorted(rows), sort(rows)
    costs = RunCosts.of(s, model)
    assert model.tree(s) == pytest.approx(naive_cost(rows, model))
    for i, j in itertools.combinations(range(len(rows) + 1), 2):
        assert costs.run(i, j) == pytest.approx(naive_cost(ordered[i:j], model))
    subset = np.arange(0, len(rows), 2)
    assert bin_cost(s, subset, model) == pytest.approx(naive_cost([ordered[i] for i in subset], model))


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(1, 5), MODELS)
def test_contiguous_has_the_smallest_maximum_and_no_needless_empty_rank(rows, num_bins, model):
    s = sort(rows)
    costs = RunCosts.of(s, model)
    bins = contiguous(s, num_bins, model)
    assert len(bins) == num_bins
    np.testing.assert_array_equal(np.concatenate([np.arange(0), *bins]), np.arange(len(rows)))
    cuts = itertools.combinations_with_replacement(range(len(rows) + 1), num_bins - 1)
    best = min(max(costs.run(i, j) for i, j in itertools.pairwise([0, *cut, len(rows)])) for cut in cuts)
    assert max(bin_cost(s, b, model) for b in bins) == pytest.approx(best, rel=1e-12)
    assert sum(len(b) == 0 for b in bins) == max(0, num_bins - len(rows))
    duplicated = sum(bin_cost(s, b, TREE_TOKENS) for b in bins) - s.tree_tokens
    assert duplicated <= (num_bins - 1) * max((len(r) for r in rows), default=0)


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(1, 5), MODELS, st.sampled_from(sorted(METHODS)))
def test_every_method_gives_every_row_to_one_rank(rows, num_bins, model, method):
    bins = partition(method, sort(rows), num_bins, model)
    assert len(bins) == num_bins
    assert sorted(np.concatenate([np.arange(0), *bins]).tolist()) == list(range(len(rows)))
    assert all((np.diff(b) > 0).all() for b in bins)
    assert sum(len(b) == 0 for b in bins) == max(0, num_bins - len(rows))
    computed = sum(naive_cost(pick(rows, b), TREE_TOKENS) for b in bins)
    assert duplicated_tokens(sort(rows), bins) == computed - naive_cost(rows, TREE_TOKENS)


def pick(rows, members):
    ordered = sorted(rows)
    return [ordered[i] for i in members]


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(1, 5), MODELS)
def test_greedy_baselines_equal_their_slow_twins(rows, num_bins, model):
    ordered, s = sorted(rows), sort(rows)
    by_tokens = [[] for _ in range(num_bins)]
    by_tree = [[] for _ in range(num_bins)]
    for i in sorted(range(len(ordered)), key=lambda i: -len(ordered[i])):
        min(by_tokens, key=lambda b: sum(len(ordered[j]) for j in b)).append(i)
        after = [round(naive_cost([ordered[j] for j in [*b, i]], model), 6) for b in by_tree]
        by_tree[min(range(num_bins), key=lambda b: (after[b], len(by_tree[b])))].append(i)
    assert [b.tolist() for b in ffd_tokens(s, num_bins, model)] == [sorted(b) for b in by_tokens]
    greedy = ffd_tree(s, num_bins, model)
    if model.per_token in (0.0, 1.0, 3.0):  # exact in floating point; elsewhere ties may be broken by rounding
        assert [b.tolist() for b in greedy] == [sorted(b) for b in by_tree]
    heaviest = max(bin_cost(s, b, model) for b in greedy)
    assert ffd_tree_below(s, num_bins, model, 0.99 * heaviest) is None or heaviest == 0
    assert ffd_tree_below(s, num_bins, model, 1.01 * heaviest) is not None


@hypothesis_settings(deadline=None)
@given(ROWS, st.integers(1, 4), MODELS)
def test_no_assignment_of_rows_to_ranks_beats_the_lower_bound(rows, num_bins, model):
    rows = rows[:5]
    s = sort(rows)
    bound, set_by_row = lower_bound(s, num_bins, model)
    best = min(
        max(naive_cost([r for r, b in zip(rows, chosen, strict=True) if b == k], model) for k in range(num_bins))
        for chosen in itertools.product(range(num_bins), repeat=len(rows))
    )
    assert bound <= best * (1 + 1e-12)
    longest = max((naive_cost([r], model) for r in rows), default=0.0)
    assert bound == pytest.approx(longest) if set_by_row else bound >= longest * (1 - 1e-12)


def test_eight_equal_rows_on_two_ranks_leave_none_empty():
    bins = contiguous(sort([[1, 2, 3]] * 8), 2, TREE_TOKENS)
    assert [len(b) for b in bins] == [4, 4] or min(len(b) for b in bins) > 0


def test_many_rows_of_a_realistic_batch_are_balanced():
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(12):
        chain = rng.integers(0, 500, 600).tolist()
        rows += [chain[: int(n)] for n in np.sort(rng.integers(100, 600, 40))]
    s, model = (
        sort(rows),
        flop_model(
            hidden_size=192, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32, ffn_size=512, vocab_size=2048
        ),
    )
    bins = contiguous(s, 4, model)
    costs = [bin_cost(s, b, model) for b in bins]
    assert max(costs) <= 1.35 * model.tree(s) / 4
    assert max(costs) <= max(bin_cost(s, b, model) for b in partition("ffd_tokens", s, 4, model))


def test_flops_of_a_known_model():
    model = flop_model(hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, vocab_size=10)
    weights = 2 * (8 * 8 + 8 * 4 * 2 + 8 * 8 + 3 * 8 * 16) + 8 * 10
    assert model.per_token == 6 * weights
    assert model.per_pair == 12 * 2 * 2 * 4


def test_wrong_requests_are_refused():
    with pytest.raises(ValueError, match="unknown partition 'best'; choose one of refined, contiguous"):
        partition("best", sort([[1]]), 1, TREE_TOKENS)
    with pytest.raises(ValueError, match="over 0 ranks"):
        partition("contiguous", sort([[1]]), 0, TREE_TOKENS)

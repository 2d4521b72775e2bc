"""The array trie against a naive dictionary of prefixes. Not covered: batches of several GB."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.tree.trie import build_trie, sort_rows

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=0, max_size=12)


def ragged(rows):
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    return np.asarray([t for r in rows for t in r], np.int32), offsets


@hypothesis_settings(deadline=None)
@given(ROWS)
def test_order_lcp_and_leaves_match_the_definitions(rows):
    trie = build_trie(*ragged(rows))
    ordered = [rows[i] for i in trie.order_S]
    assert ordered == sorted(rows)
    for rank, lcp in enumerate(trie.lcp_S):
        before = ordered[rank - 1] if rank else []
        shared = [a == b for a, b in zip(before, ordered[rank], strict=False)] + [False]
        assert lcp == shared.index(False)
    for i, row in enumerate(rows):
        extended = any(other[: len(row)] == row and len(other) > len(row) for other in rows)
        last_equal = max(rank for rank, j in enumerate(trie.order_S) if rows[j] == row)
        assert trie.is_leaf_S[i] == (not extended and trie.order_S[last_equal] == i)
        leaf = trie.leaf_of_row_S[i]
        assert trie.is_leaf_S[leaf]
        assert rows[leaf][: len(row)] == row
    assert [rows[i] for i in trie.leaf_rows] == sorted(rows[i] for i in np.flatnonzero(trie.is_leaf_S))


@hypothesis_settings(deadline=None)
@given(ROWS)
def test_trie_tokens_are_the_distinct_prefixes(rows):
    trie = build_trie(*ragged(rows))
    prefixes = sorted({tuple(r[: n + 1]) for r in rows for n in range(len(r))})
    assert trie.num_tokens == len(prefixes) == sort_rows(*ragged(rows)).tree_tokens
    index = {p: u for u, p in enumerate(prefixes)}  # sorted prefixes are in depth-first order
    for i, row in enumerate(rows):
        assert trie.path(i).tolist() == [index[tuple(row[: n + 1])] for n in range(len(row))]
    for u, p in enumerate(prefixes):
        assert (trie.ids_U[u], trie.depth_U[u]) == (p[-1], len(p) - 1)
        assert trie.parent_U[u] == (index[p[:-1]] if len(p) > 1 else -1)


@hypothesis_settings(deadline=None)
@given(ROWS)
def test_segments_are_the_unbranched_runs(rows):
    trie = build_trie(*ragged(rows))
    children = [[] for _ in range(trie.num_tokens)]
    for u, parent in enumerate(trie.parent_U):
        if parent >= 0:
            children[parent].append(u)
    assert trie.segment_len_G.sum() == trie.num_tokens
    ancestors = [set() for _ in range(trie.num_segments)]
    for g, (start, length, parent) in enumerate(
        zip(trie.segment_start_G, trie.segment_len_G, trie.segment_parent_G, strict=True)
    ):
        run = range(start, start + length)
        for u in run[:-1]:
            assert children[u] == [u + 1]
        assert len(children[run[-1]]) != 1
        above = trie.parent_U[start]
        if parent < 0:
            assert above < 0
        else:
            assert above == trie.segment_start_G[parent] + trie.segment_len_G[parent] - 1
        ancestors[g] = {g} | (ancestors[parent] if parent >= 0 else set())
    for a in range(trie.num_segments):
        for b in range(trie.num_segments):
            assert (a in ancestors[b]) == (a <= b < trie.segment_end_G[a])
    for i in range(len(rows)):
        g, end = trie.leaf_segment_S[i], trie.path(i)[-1]
        assert trie.segment_start_G[g] <= end < trie.segment_start_G[g] + trie.segment_len_G[g]
        if trie.is_leaf_S[i]:
            assert end == trie.segment_start_G[g] + trie.segment_len_G[g] - 1 and not children[end]


def test_large_ids_sort_by_value_not_by_byte():
    rows = [[70000, 1], [255, 1], [256, 1], [65536], [1, 70000]]
    assert [rows[i] for i in sort_rows(*ragged(rows)).order_R] == sorted(rows)


def test_malformed_rows_are_refused_with_the_value():
    with pytest.raises(ValueError, match="from 0 to 3"):
        build_trie(np.arange(3), np.array([0, 2]))
    with pytest.raises(ValueError, match="row 1 is empty"):
        build_trie(np.arange(3), np.array([0, 3, 3]))
    with pytest.raises(ValueError, match="from -1"):
        build_trie(np.array([-1, 2]), np.array([0, 2]))
    with pytest.raises(ValueError, match="float64"):
        build_trie(np.zeros(2), np.array([0, 2]))


def test_a_batch_of_agent_size_takes_seconds_not_minutes():
    rng = np.random.default_rng(0)
    num_rows, length = 4000, 500
    ids = rng.integers(0, 40000, (num_rows, length), np.int32)
    ids[:, :400] = ids[rng.integers(0, 40, num_rows), :400]  # 40 trunks
    began = time.perf_counter()
    trie = build_trie(ids.reshape(-1), np.arange(num_rows + 1) * length)
    assert time.perf_counter() - began < 5
    assert 0 <= 40 * 400 + num_rows * 100 - trie.num_tokens < 100  # tails coincide by chance

"""Draft trees: structure, masks and the choice of the likeliest nodes, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm, available_arms
from areal_dta.drafter.draft_tree import EMPTY, ROOT, DraftTree, TreeBuilder, best_nodes


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num_nodes = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(num_nodes))
    return DraftTree(tuple(draw(st.integers(0, 3)) for _ in parents), parents)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    found = []
    while node != ROOT:
        found.append(node)
        node = tree.parents[node]
    return found


@given(trees())
def test_depths_paths_children_and_masks_follow_from_the_parents(tree: DraftTree) -> None:
    mask = tree.visible()
    assert mask.shape == (len(tree) + 1, len(tree) + 1)
    assert mask[0].tolist() == [True] + [False] * len(tree)
    for node in range(len(tree)):
        up = ancestors(tree, node)
        assert tree.depths[node] == len(up)
        assert tree.path(node) == tuple(reversed(up))
        assert set(np.flatnonzero(mask[node + 1])) == {0} | {i + 1 for i in up}
    for node in range(ROOT, len(tree)):
        for token in range(4):
            fitting = [i for i in range(len(tree)) if tree.parents[i] == node and tree.tokens[i] == token]
            assert tree.child(node, token) == (fitting[0] if fitting else None)


@given(trees(), st.integers(0, 5))
def test_trimming_drops_exactly_the_deeper_nodes(tree: DraftTree, max_depth: int) -> None:
    trimmed = tree.trimmed(max_depth)
    spelled = sorted(tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree)))
    kept = sorted(tuple(trimmed.tokens[i] for i in trimmed.path(n)) for n in range(len(trimmed)))
    assert kept == [path for path in spelled if len(path) <= max_depth]


def test_a_chain_is_a_lower_triangle() -> None:
    chain = DraftTree.chain([7, 8, 9])
    assert chain.parents == (ROOT, 0, 1)
    assert (chain.visible() == np.tri(4, dtype=bool)).all()
    assert EMPTY.visible().tolist() == [[True]]
    with pytest.raises(ValueError, match="read-only"):
        chain.visible()[0, 1] = True  # the array is shared between trees of one shape


@pytest.mark.parametrize(("tokens", "parents"), [((1,), (0,)), ((1, 2), (ROOT,)), ((1,), (-2,))])
def test_malformed_trees_are_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parent"):
        DraftTree(tokens, parents)


log_probs = st.one_of(
    st.floats(-5, 0), st.sampled_from([0.0, -1.0, -np.inf, np.nan, 1e-9])
)  # ties, impossible tokens, a broken drafter, rounding


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 12))
def test_the_batch_builder_equals_a_loop_over_nodes(
    data: st.DataObject, num_sequences: int, top_k: int, depth: int, num_verify: int
) -> None:
    builder = TreeBuilder(num_sequences, top_k)
    # Per sequence a list of (token, parent, path log-prob), and the frontier as node numbers.
    nodes: list[list[tuple[int, int, float]]] = [[] for _ in range(num_sequences)]
    frontier = [[ROOT] for _ in range(num_sequences)]
    expanded: list[list[int]] = [[] for _ in range(num_sequences)]
    for level in range(depth):
        shape = (num_sequences, len(frontier[0]), top_k)
        size = int(np.prod(shape))
        steps = np.array(data.draw(st.lists(log_probs, min_size=size, max_size=size))).reshape(shape)
        tokens = np.arange(size).reshape(shape) + 1000 * level
        grown = builder.grow(tokens, steps)
        for s in range(num_sequences):
            born = []
            for f, parent in enumerate(frontier[s]):
                for k in range(top_k):
                    step = steps[s, f, k]
                    step = -np.inf if np.isnan(step) else min(step, 0.0)
                    above = nodes[s][parent][2] if parent != ROOT else 0.0
                    born.append(len(nodes[s]))
                    nodes[s].append((int(tokens[s, f, k]), parent, above + step))
            chosen = sorted(born, key=lambda n: (-nodes[s][n][2], n))[:top_k]
            assert grown.tokens_BF[s].tolist() == [nodes[s][n][0] for n in chosen]
            assert [frontier[s][row] for row in grown.rows_BF[s]] == [nodes[s][n][1] for n in chosen]
            expanded[s] += chosen
            for f, node in enumerate(chosen):
                up = []
                while node != ROOT:
                    up.append(node)
                    node = nodes[s][node][1]
                assert {expanded[s][e] for e in np.flatnonzero(grown.seen_BFE[s, f])} == set(up)
            frontier[s] = chosen
    for s, tree in enumerate(builder.best_nodes(num_verify)):
        best = sorted(range(len(nodes[s])), key=lambda n: (-nodes[s][n][2], n))[:num_verify]
        best = sorted(n for n in best if nodes[s][n][2] > -np.inf)
        assert tree.tokens == tuple(nodes[s][n][0] for n in best)
        assert [best[p] if p != ROOT else ROOT for p in tree.parents] == [nodes[s][n][1] for n in best]


def test_an_unlikely_branch_gives_way_to_a_deeper_likely_one() -> None:
    tokens, parents = np.array([1, 2, 3, 4]), np.array([ROOT, ROOT, 0, 2])
    tree = best_nodes(tokens, parents, np.log([0.6, 0.1, 0.5, 0.4]), 3)
    assert tree == DraftTree.chain([1, 3, 4])


def test_candidates_of_the_wrong_shape_are_refused() -> None:
    builder = TreeBuilder(2, 3)
    with pytest.raises(ValueError, match="frontier of"):
        builder.grow(np.zeros((2, 2, 3), int), np.zeros((2, 2, 3)))
    assert builder.best_nodes(4) == [EMPTY, EMPTY]
    with pytest.raises(ValueError, match="at least 1"):
        TreeBuilder(0, 1)


def test_arms_read_back_from_their_names_and_off_is_always_there() -> None:
    for arm in DEFAULT_ARMS:
        assert Arm.parse(arm.name) == arm
    assert available_arms(DEFAULT_ARMS, ["ngram"]) == tuple(a for a in DEFAULT_ARMS if a.drafter != "eagle")
    assert available_arms([], ["eagle"]) == (OFF,)


@pytest.mark.parametrize("name", ["eagle", "medusa-d1-k1-v1", "eagle-d4-k1-v3", "ngram-d0-k1-v3"])
def test_impossible_arms_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        Arm.parse(name)
    with pytest.raises(ValueError, match="leave depth"):
        Arm("off", 1, 1, 1)

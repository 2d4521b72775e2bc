"""The walk's program: coverage, nesting, budgets, depth, pruning. No torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.plan import OpKind, PlanSettings, WalkPlan, plan_walk, prune, subtree_ends
from areal_dta.tree.trie import Trie, build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=0, max_size=14)
PLANS = (PlanSettings("classic"), PlanSettings("auto", 1), PlanSettings("auto", 8), PlanSettings("sparse"))


def trie_of(rows: list[list[int]]) -> Trie:
    offsets = np.cumsum([0, *map(len, rows)])
    return build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets)


def replay(plan: WalkPlan, trie: Trie) -> None:
    """Run the program on a symbolic stack: each block must find exactly its ancestors there."""
    stack: list[int] = []
    pushed: list[tuple[int, int]] = []
    seen: list[int] = []
    for op in plan.ops:
        block = plan.blocks[op.block]
        if op.kind is OpKind.POP:
            index, length = pushed.pop()
            assert index == op.block
            del stack[length:]
            continue
        tokens = list(range(block.start, block.end))
        seen += tokens
        assert len(stack) == block.depth == trie.depth_U[block.start]
        for token in tokens:
            parent = trie.parent_U[token]
            in_block = block.start <= parent < block.end
            assert in_block or (parent == -1 and not stack) or (stack and stack[-1] == parent)
            if block.is_chain and token > block.start:
                assert parent == token - 1
        if op.kind is OpKind.PUSH:
            assert block.is_chain
            pushed.append((op.block, len(stack)))
            stack += tokens
    assert not pushed
    assert seen == sorted(seen)


@given(ROWS)
@settings(max_examples=150, deadline=None)
def test_every_token_is_computed_once_below_its_ancestors(rows: list[list[int]]) -> None:
    trie = trie_of(rows)
    for choice in PLANS:
        plan = plan_walk(trie, choice)
        replay(plan, trie)
        assert plan.num_tokens == trie.num_tokens
        assert plan.stack_rows <= sum(map(len, rows))


@given(ROWS)
@settings(max_examples=100, deadline=None)
def test_visits_keep_the_token_budget_unless_one_leaf_is_longer(rows: list[list[int]]) -> None:
    trie = trie_of(rows)
    for budget in (1, 5, 12):
        for block in plan_walk(trie, PlanSettings("auto", budget)).blocks:
            assert block.is_chain or block.num_tokens <= budget


@given(ROWS)
@settings(max_examples=100, deadline=None)
def test_subtree_ends_mark_exactly_the_descendants(rows: list[list[int]]) -> None:
    trie = trie_of(rows)
    ends = subtree_ends(trie)
    for token in range(trie.num_tokens):
        inside = {token}
        for other in range(token + 1, trie.num_tokens):
            if int(trie.parent_U[other]) in inside:
                inside.add(other)
        assert sorted(inside) == list(range(token, ends[token]))


@given(ROWS, st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_pruning_leaves_out_exactly_the_blocks_without_an_active_token_below(rows: list[list[int]], seed: int) -> None:
    trie = trie_of(rows)
    active = np.random.default_rng(seed).random(trie.num_tokens) < 0.15
    for choice in PLANS:
        whole = plan_walk(trie, choice)
        pruned = prune(whole, active)
        replay(pruned, trie)
        kept = {(block.start, block.end) for block in pruned.blocks}
        for block in whole.blocks:
            assert ((block.start, block.end) in kept) == bool(active[block.start : block.subtree_end].any())


def test_classic_visits_one_leaf_at_a_time() -> None:
    plan = plan_walk(trie_of([[1, 2, 3], [1, 2, 4], [1, 5]]), PlanSettings("classic"))
    kinds = [op.kind.value for op in plan.ops]
    assert kinds == ["push", "push", "visit", "visit", "pop", "visit", "pop"]


def test_auto_bundles_small_siblings_and_keeps_the_trunk_apart() -> None:
    trunk = list(range(50))
    rows = [trunk + [100 + i, 200, 201] for i in range(6)]
    plan = plan_walk(trie_of(rows), PlanSettings("auto", 10))
    assert [(block.num_tokens, block.is_chain) for block in plan.blocks] == [(50, True), (9, False), (9, False)]


def test_sparse_is_one_visit() -> None:
    plan = plan_walk(trie_of([[1, 2], [1, 3], [4]]), PlanSettings("sparse"))
    assert [op.kind for op in plan.ops] == [OpKind.VISIT]


def test_thousands_of_nested_branches_need_no_recursion() -> None:
    depth = 5000
    trunk = list(range(depth))
    ids = np.concatenate([np.asarray([*trunk[: i + 1], depth + i], np.int32) for i in range(0, depth, 2)])
    lengths = [i + 2 for i in range(0, depth, 2)]
    trie = build_trie(ids, np.cumsum([0, *lengths]))
    plan = plan_walk(trie, PlanSettings("classic"))
    assert plan.num_tokens == trie.num_tokens
    assert sum(op.kind is OpKind.PUSH for op in plan.ops) == sum(op.kind is OpKind.POP for op in plan.ops) > 2000


def test_equal_programs_have_equal_digests() -> None:
    trie = trie_of([[1, 2, 3], [1, 2, 4], [1, 5]])
    assert plan_walk(trie, PlanSettings("classic")).digest() == plan_walk(trie, PlanSettings("auto", 1)).digest()
    assert plan_walk(trie, PlanSettings("classic")).digest() != plan_walk(trie, PlanSettings("sparse")).digest()


def test_unknown_plan_names_the_key_and_the_valid_values() -> None:
    with pytest.raises(ValueError, match=r"dta\.plan='fast' is not one of classic, auto, sparse"):
        PlanSettings("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dta\.max_block_tokens=0"):
        PlanSettings("auto", 0)

"""The walk's program: coverage, nesting, budgets, tiles. No torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree import tiles
from areal_dta.tree.forest import live_forest
from areal_dta.tree.memory import MemoryModel, default_budget
from areal_dta.tree.plan import ON_PATH, Block, ChildOrder, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import BUDGET_SHARE, plan_walk
from areal_dta.tree.tiles import TileKind, block_tiles, euler_mask
from areal_dta.tree.trie import Trie, build_trie, unshared_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=0, max_size=14)
ORDERS = ("lexicographic", "heavy_first", "heavy_last")
PLANS = (
    *(PlanSettings("classic", size, cut_tail=cut, order=order)
      for size, cut, order in itertools.product((2, 64), (True, False), ORDERS)),
    *(PlanSettings("auto", size, order=order) for size, order in itertools.product((1, 4, 8, 64), ORDERS)),
    PlanSettings("sparse"),
)  # fmt: skip
MEMORY = MemoryModel(
    bytes_per_kept_token=10.0, bytes_per_working_token=15.0, bytes_per_forward_token=3.0, bytes_per_stack_row=2.0,
    bytes_per_grad_row=2.0, bytes_per_checkpoint_token=4.0, bytes_fixed=100.0,
)  # fmt: skip


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray([t for row in rows for t in row], np.int32), np.cumsum([0, *map(len, rows)])


def trie_of(rows: list[list[int]]) -> Trie:
    return build_trie(*flat(rows))


def ancestors(trie: Trie, token: int) -> list[int]:
    """Token and what is above it, root first."""
    path = [token]
    while trie.parent_U[path[-1]] >= 0:
        path.append(int(trie.parent_U[path[-1]]))
    return path[::-1]


def check_block(block: Block, path: list[int], trie: Trie) -> None:
    """Each row's ancestors are exactly what its tiles show it, each once."""
    subtree_end_U = np.repeat(np.append(trie.segment_start_G, trie.num_tokens)[trie.segment_end_G], trie.segment_len_G)
    shown: list[list[int]] = [[] for _ in range(block.num_tokens)]
    covered = np.zeros(block.num_tokens, int)
    for tile in block_tiles(block):
        keys = path if tile.on_path else block.tokens_S.tolist()
        own = tile.kind is not TileKind.FULL
        visible = np.ones((tile.q_end - tile.q_start, tile.k_end - tile.k_start), bool)
        if tile.kind is TileKind.CAUSAL:
            visible = np.tril(visible)
        if tile.kind is TileKind.MASKED:
            visible = euler_mask(block.tokens_S, subtree_end_U, tile.q_start, tile.q_end)
        if own:
            assert (tile.q_start, tile.q_end) == (tile.k_start, tile.k_end) and not tile.on_path
            assert not covered[tile.q_start :].any(), "own tiles come first, in row order"
            covered[tile.q_start : tile.q_end] = 1
        else:
            assert covered.all(), "a rectangle merges into rows that have an output"
        for q, k in zip(*np.nonzero(visible), strict=True):
            shown[tile.q_start + q].append(int(keys[tile.k_start + k]))
    for row, token in enumerate(block.tokens_S.tolist()):
        assert sorted(shown[row]) == sorted(ancestors(trie, token))
        assert block.position_S[row] == trie.depth_U[token]


def replay(plan: WalkPlan, trie: Trie) -> list[int]:
    """Run the program on a symbolic stack; returns the tokens in the order of their backward."""
    path: list[int] = []
    pushed: list[int] = []
    done: list[int] = []
    for op in plan.ops:
        block = plan.blocks[op.block]
        tokens = block.tokens_S.tolist()
        if op.kind is OpKind.PUSH:
            assert block.is_chain and block.depth == len(path)
            check_block(block, path, trie)
            path += tokens
            pushed.append(op.block)
            assert len(path) <= plan.stack_rows
        elif op.kind is OpKind.VISIT:
            check_block(block, path[: block.depth] if op.absorbs else path, trie)
            if op.absorbs:
                assert path[block.depth :] == tokens[: len(path) - block.depth] and len(path) > block.depth
                del path[block.depth :]
                pushed = []  # pushed blocks of an absorbing program have no POP
            done += tokens
        else:
            assert pushed.pop() == op.block
            assert path[block.depth :] == tokens
            del path[block.depth :]
            done += tokens
    assert not path and (not pushed or not any(op.kind is OpKind.POP for op in plan.ops))
    return done


@given(ROWS, st.sampled_from((0, 50, 3000)))
@settings(max_examples=150, deadline=None)
def test_every_token_is_differentiated_once_with_all_its_ancestors_in_sight(
    rows: list[list[int]], overhead: int
) -> None:
    """``overhead`` decides between rectangles inside a block and masked squares."""
    with mock.patch.object(tiles, "TILE_OVERHEAD_PAIRS", overhead):
        _check_all_plans(rows)


def _check_all_plans(rows: list[list[int]]) -> None:
    trie = trie_of(rows)
    for choice in PLANS:
        plan = plan_walk(trie, choice)
        done = replay(plan, trie)
        assert sorted(done) == list(range(trie.num_tokens))
        assert plan.num_tokens == trie.num_tokens
        for u in range(trie.num_tokens):
            if trie.parent_U[u] >= 0 and choice.kind == "classic":
                parent = int(trie.parent_U[u])
                same_block = any({u, parent} <= set(block.tokens_S.tolist()) for block in plan.blocks)
                assert same_block or done.index(u) < done.index(parent)


@given(ROWS, st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_what_is_not_needed_is_left_out(rows: list[list[int]], seed: int) -> None:
    trie = trie_of(rows)
    need_U = np.random.default_rng(seed).random(trie.num_tokens) < 0.2
    wanted = sorted({a for token in np.flatnonzero(need_U) for a in ancestors(trie, int(token))})
    for choice in PLANS:
        assert sorted(replay(plan_walk(trie, choice, None, need_U), trie)) == wanted


@given(ROWS, st.sampled_from((True, False)))
@settings(max_examples=60, deadline=None)
def test_dense_plans_share_nothing(rows: list[list[int]], leaf_merge: bool) -> None:
    ids, offsets = flat(rows)
    trie = unshared_trie(ids, offsets, leaf_merge)
    plan = plan_walk(trie, PlanSettings("dense", 12, leaf_merge=leaf_merge))
    assert sorted(replay(plan, trie)) == list(range(trie.num_tokens))
    is_inside = [any(a != b and rows[a] == rows[b][: len(rows[a])] and (rows[a] != rows[b] or a < b)
                     for b in range(len(rows))) for a in range(len(rows))]  # fmt: skip
    kept = [row for row, inside in zip(rows, is_inside, strict=True) if not (leaf_merge and inside)]
    assert trie.num_tokens == sum(map(len, kept))
    for row in range(len(rows)):
        assert trie.ids_U[trie.path(row)].tolist() == rows[row]
    for block in plan.blocks:
        assert block.num_tokens <= 12 or block.num_chains == 1


@given(ROWS, st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_blocks_stay_within_their_bound(rows: list[list[int]], size: int) -> None:
    for kind in ("auto", "classic"):
        plan = plan_walk(trie_of(rows), PlanSettings(kind, size))
        visits = [plan.blocks[op.block] for op in plan.ops if op.kind is not OpKind.PUSH]
        assert all(block.num_tokens <= size for block in visits)


def _held_bytes(plan: WalkPlan) -> float:
    """Largest sum of kept graphs and the block at work."""
    kept, worst = [], 0.0
    for op in plan.ops:
        tokens = plan.blocks[op.block].num_tokens
        if op.kind is OpKind.PUSH:
            kept.append(10.0 * tokens if plan.keep_B[op.block] else 0.0)
            continue
        if op.kind is OpKind.POP:
            kept.pop()
        worst = max(worst, sum(kept) + 15.0 * tokens)
    return worst


@given(ROWS, st.integers(4, 40), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_kept_graphs_and_the_block_at_work_fit_the_budget(rows: list[list[int]], size: int, extra: int) -> None:
    trie = trie_of(rows)
    longest = max(map(len, rows), default=0)
    free = 15 * size + 10 * extra
    budget = math.ceil((MEMORY.bytes_fixed + MEMORY.row_bytes() * longest + free) / BUDGET_SHARE)
    plan = plan_walk(trie, PlanSettings("auto", size, activation_budget=budget), MEMORY)
    assert sorted(replay(plan, trie)) == list(range(trie.num_tokens))
    assert _held_bytes(plan) <= free + 1
    assert MEMORY.peak(plan) <= budget + MEMORY.bytes_per_forward_token * size


@given(ROWS, st.sampled_from(ORDERS))
@settings(max_examples=60, deadline=None)
def test_children_come_in_the_chosen_order(rows: list[list[int]], order: ChildOrder) -> None:
    forest = live_forest(trie_of(rows), None, order)
    walked, pending = [], forest.roots[::-1]
    while pending:
        walked.append(pending.pop())
        pending.extend(reversed(forest.children[walked[-1]]))
    assert sorted(walked) == list(range(forest.num_segments))
    for siblings in (forest.roots, *forest.children):
        weights = [forest.tokens[v] for v in siblings]
        if order == "lexicographic":
            assert siblings == sorted(siblings)
        else:
            assert weights == sorted(weights, reverse=order == "heavy_first")


def test_a_smaller_budget_gives_up_the_graphs_near_the_root_first() -> None:
    row = list(range(3, 43))
    trie = trie_of([row])
    plan = plan_walk(trie, PlanSettings("auto", 10), None)
    assert plan.keep_B == (True, True, True, False) and plan.recomputed_tokens == 0
    fixed = int(MEMORY.bytes_fixed + MEMORY.row_bytes() * 40)
    recomputed = []
    for blocks_kept in (3, 2, 1, 0):
        budget = math.ceil((fixed + 150 + 100 * blocks_kept) / BUDGET_SHARE)
        plan = plan_walk(trie, PlanSettings("auto", 10, activation_budget=budget), MEMORY)
        assert plan.keep_B == (blocks_kept >= 3, blocks_kept >= 2, blocks_kept >= 1, False)
        recomputed.append(plan.recomputed_tokens)
    assert recomputed == [0, 10, 20, 30]


def test_a_budget_too_small_for_any_block_names_the_key_and_the_bytes_needed() -> None:
    trie = trie_of([list(range(50))])
    with pytest.raises(ValueError, match=r"dta.activation_budget=150 bytes is too small.*at least \d+ are needed"):
        plan_walk(trie, PlanSettings("auto", 16, activation_budget=150), MEMORY)


def test_short_branches_of_a_long_trunk_share_a_block_at_their_own_depths() -> None:
    trunk = list(range(10, 40))
    rows = [trunk[:cut] + [5, 6] for cut in (3, 9, 15, 21)] + [trunk]
    plan = plan_walk(trie_of(rows), PlanSettings("auto", 16))
    ragged = [block for block in plan.blocks if (block.parent_C == ON_PATH).sum() > 1]
    assert len(ragged) == 1
    assert len(set(ragged[0].cut_C[ragged[0].parent_C == ON_PATH].tolist())) > 1
    assert len(plan.blocks) <= 4


def test_siblings_are_dealt_to_the_fewest_blocks_about_equally() -> None:
    rows = [[0, 0, i, *([7] * 4)] for i in range(1, 12)]  # 11 branches of 5 tokens
    plan = plan_walk(trie_of(rows), PlanSettings("auto", 20))
    visits = [plan.blocks[op.block].num_tokens for op in plan.ops if op.kind is OpKind.VISIT]
    assert sum(visits) == 55 and len(visits) == 3 and max(visits) == 20


def test_branches_of_a_chain_inside_a_block_see_it_through_rectangles() -> None:
    trunk = list(range(10, 20))
    rows = [trunk[:cut] + [5, *range(100, 106)] + [tail] for cut in (3, 6) for tail in (7, 8)] + [trunk]
    trie = trie_of(rows)
    with mock.patch.object(tiles, "TILE_OVERHEAD_PAIRS", 0):
        plan = plan_walk(trie, PlanSettings("sparse"))
        shapes = block_tiles(plan.blocks[0])
        replay(plan, trie)
    inner = [tile for tile in shapes if tile.kind is TileKind.FULL and not tile.on_path]
    assert len(inner) >= 3 and any(tile.k_start > 0 for tile in inner)


def test_small_siblings_are_joined_in_masked_squares() -> None:
    rows = [[0, 0, 0, i] for i in range(1, 900)]
    plan = plan_walk(trie_of(rows), PlanSettings("sparse"))
    tiles = block_tiles(plan.blocks[0])
    assert any(tile.kind is TileKind.MASKED for tile in tiles)
    assert len(tiles) < 60


def test_thousands_of_levels_of_branching_are_planned() -> None:
    trunk: list[int] = []
    rows = []
    for level in range(3000):
        rows.append([*trunk, 1 + level % 2])
        trunk.append(3)
    trie = trie_of(rows)
    for kind in ("auto", "sparse"):
        plan = plan_walk(trie, PlanSettings(kind, 64))
        assert plan.num_tokens == trie.num_tokens


def test_digest_tells_programs_apart() -> None:
    trie = trie_of([[1, 2, 3], [1, 2, 4], [1, 5]])
    choices = (PlanSettings("classic"), PlanSettings("sparse"), PlanSettings("auto", 1), PlanSettings("auto", 3))
    digests = {plan_walk(trie, choice).digest() for choice in choices}
    assert len(digests) == 4
    again = plan_walk(trie, PlanSettings("classic"))
    assert again.digest() in digests
    assert replace(again, keep_B=(True,) * len(again.keep_B)).digest() not in digests


def test_default_budget_lies_between_one_block_and_dense_training() -> None:
    for longest in (100, 1000, 10_000, 100_000):
        budget = default_budget(MEMORY, longest, 500)
        assert budget >= MEMORY.bytes_fixed + MEMORY.row_bytes() * longest + 15 * 250
        if longest >= 10_000:
            assert budget <= 0.5 * MEMORY.dense_peak(longest)
        assert budget <= max(
            MEMORY.checkpointed_peak(longest) + 15 * 500,
            (MEMORY.bytes_fixed + MEMORY.row_bytes() * longest + 15 * 250) / 0.9 + 15,
        )


def test_settings_reject_what_does_not_fit_together() -> None:
    for wrong, key in (
        ({"kind": "fast"}, "dta.plan"), ({"max_block_tokens": 0}, "dta.max_block_tokens"),
        ({"order": "random"}, "dta.order"), ({"activation_budget": -1}, "dta.activation_budget"),
        ({"leaf_merge": False}, "dta.leaf_merge"), ({"cut_tail": False}, "dta.cut_tail"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=key):
            PlanSettings(**wrong)  # type: ignore[arg-type]

"""Predicted bytes of a pipeline stage against the prediction for one stage, and under a budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import ChildOrder, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import program_tasks, simulate, stage_tasks
from areal_dta.tree.stage_memory import max_graph_tokens, path_reach, pipeline_tasks, stage_peak, tasks_within_budget
from areal_dta.tree.trie import build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
MEMORY = MemoryModel(
    bytes_per_kept_token=100.0,
    bytes_per_working_token=140.0,
    bytes_per_forward_token=30.0,
    bytes_per_stack_row=4.0,
    bytes_per_grad_row=8.0,
    bytes_per_checkpoint_token=20.0,
    bytes_fixed=1000.0,
)
PLANS = (
    PlanSettings("classic", 2),
    PlanSettings("classic", 3, cut_tail=False),
    PlanSettings("auto", 1),
    PlanSettings("auto", 4),
    PlanSettings("sparse"),
)


COMB = [[0] * cut + [1 + cut] * 9 for cut in range(6, 240, 6)] + [[0] * 240]  # branches pushed below a long trunk
HEAVY_ROWS = replace(MEMORY, bytes_per_stack_row=60.0)


def plan_of(rows: list[list[int]], choice: PlanSettings) -> WalkPlan:
    offsets = np.cumsum([0, *map(len, rows)])
    return plan_walk(build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets), choice, MEMORY)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_the_last_stage_needs_what_a_single_one_needs(rows: list[list[int]]) -> None:
    for choice in PLANS:
        plan = plan_of(rows, choice)
        assert stage_peak(MEMORY, plan, stage_tasks(plan.ops, 1, 2)) == pytest.approx(MEMORY.peak(plan))


@given(ROWS, st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_earlier_stages_need_no_less(rows: list[list[int]], pp: int) -> None:
    for choice in PLANS:
        plan = plan_of(rows, choice)
        peaks = [stage_peak(MEMORY, plan, stage_tasks(plan.ops, stage, pp)) for stage in range(pp)]
        assert peaks == sorted(peaks, reverse=True)


def test_an_explicit_budget_keeps_stages_from_running_ahead_of_it() -> None:
    rows = [[0, 1, 2, branch, *([branch] * 12)] for branch in range(10)]
    plan = plan_of(rows, PlanSettings("auto", 16))
    needed = MEMORY.peak(plan)
    free = stage_peak(MEMORY, plan, stage_tasks(plan.ops, 0, 4))
    assert free > 1.5 * needed
    for budget in (int(1.05 * needed), int(1.3 * needed), int(1.5 * needed)):
        limit = max_graph_tokens(plan, MEMORY, PlanSettings("auto", 16, activation_budget=budget))
        assert stage_peak(MEMORY, plan, pipeline_tasks(plan, 4, limit)[0]) <= budget
        lists = tasks_within_budget(plan, 4, MEMORY, PlanSettings("auto", 16, activation_budget=budget))
        assert max(stage_peak(MEMORY, plan, tasks) for tasks in lists) <= budget
    assert max_graph_tokens(plan, MEMORY, PlanSettings()) == float("inf")


@pytest.mark.parametrize("order", ["lexicographic", "heavy_first", "heavy_last"])
def test_a_budget_counts_copies_of_a_long_path_that_blocks_without_graph_hold_on_to(order: ChildOrder) -> None:
    offsets, ids = np.cumsum([0, *map(len, COMB)]), np.asarray([t for row in COMB for t in row], np.int32)
    for share in (1.0, 1.1, 1.5, 2.5):
        choice = PlanSettings("auto", 6, order=order)
        with pytest.raises(ValueError, match="too small") as told:
            plan_walk(build_trie(ids, offsets), replace(choice, activation_budget=1), HEAVY_ROWS)
        least = int(str(told.value).split("at least ")[1].split()[0])
        choice = replace(choice, activation_budget=int(share * least))
        plan = plan_walk(build_trie(ids, offsets), choice, HEAVY_ROWS)
        for pp in (2, 3):
            by_tokens = pipeline_tasks(plan, pp, max_graph_tokens(plan, HEAVY_ROWS, choice))
            assert stage_peak(HEAVY_ROWS, plan, by_tokens[0]) > 1.3 * choice.activation_budget
            lists = tasks_within_budget(plan, pp, HEAVY_ROWS, choice)
            assert max(stage_peak(HEAVY_ROWS, plan, tasks) for tasks in lists) <= choice.activation_budget
            simulate(lists, lambda stage, task: 1.0)


def test_a_budget_that_only_program_order_keeps_gives_program_order() -> None:
    plan = plan_of(COMB, PlanSettings("auto", 6))
    plan = replace(plan, keep_B=(False,) * len(plan.blocks))  # nothing counts as tokens in flight
    needed = int(HEAVY_ROWS.peak(plan)) + 1
    choice = PlanSettings("auto", 6, activation_budget=needed)
    assert stage_peak(HEAVY_ROWS, plan, pipeline_tasks(plan, 2, 0.0)[0]) > 1.05 * needed
    assert tasks_within_budget(plan, 2, HEAVY_ROWS, choice) == [program_tasks(plan.ops)] * 2


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_no_block_reaches_less_far_than_what_is_pushed_on_it(rows: list[list[int]]) -> None:
    for choice in PLANS:
        plan = plan_of(rows, choice)
        reach, path = path_reach(plan), list[int]()
        for op in plan.ops:
            block = plan.blocks[op.block]
            if op.kind is OpKind.PUSH:
                path = [b for b in path if plan.blocks[b].depth < block.depth] + [op.block]
                assert all(reach[b] >= block.depth + block.num_tokens for b in path)
        assert max(reach, default=0) == plan.stack_rows


def test_without_a_limit_the_lists_are_the_free_ones_and_a_push_without_graph_never_counts() -> None:
    plan = plan_of([[0, 1, 2, 3], [0, 1, 2, 4, 4], [0, 1, 5]], PlanSettings("auto", 2))
    free = [stage_tasks(plan.ops, stage, 3) for stage in range(3)]
    assert pipeline_tasks(plan, 3) == free
    only_visits = replace(plan, keep_B=(False,) * len(plan.blocks))
    most = max(block.num_tokens for block in plan.blocks)
    assert pipeline_tasks(only_visits, 3, 3 * most) == free

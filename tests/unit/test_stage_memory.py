"""Predicted bytes of a pipeline stage against the prediction for one stage, and under a budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import stage_tasks
from areal_dta.tree.stage_memory import max_graph_tokens, pipeline_tasks, stage_peak
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
    assert max_graph_tokens(plan, MEMORY, PlanSettings()) == float("inf")


def test_without_a_limit_the_lists_are_the_free_ones_and_a_push_without_graph_never_counts() -> None:
    plan = plan_of([[0, 1, 2, 3], [0, 1, 2, 4, 4], [0, 1, 5]], PlanSettings("auto", 2))
    free = [stage_tasks(plan.ops, stage, 3) for stage in range(3)]
    assert pipeline_tasks(plan, 3) == free
    only_visits = replace(plan, keep_B=(False,) * len(plan.blocks))
    most = max(block.num_tokens for block in plan.blocks)
    assert pipeline_tasks(only_visits, 3, 3 * most) == free

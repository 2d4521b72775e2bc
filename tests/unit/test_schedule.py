"""Lists of a pipeline's stages: order, nesting, bounds, no deadlock under unbuffered sends, less idling than in program
order. No torch, no real clock.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.plan import Op, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import (
    ScheduleError,
    Task,
    TaskKind,
    most_in_flight,
    most_unread,
    program_tasks,
    simulate,
    stage_tasks,
)
from areal_dta.tree.trie import build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)
PLANS = (
    PlanSettings("classic", 2),
    PlanSettings("classic", cut_tail=False),
    PlanSettings("auto", 1),
    PlanSettings("auto", 4),
    PlanSettings("sparse"),
)


def plans(rows: list[list[int]]) -> list[WalkPlan]:
    """Several plans of some rows."""
    offsets = np.cumsum([0, *map(len, rows)])
    trie = build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets)
    return [plan_walk(trie, choice) for choice in PLANS]


def programs(rows: list[list[int]]) -> list[tuple[Op, ...]]:
    return [plan.ops for plan in plans(rows)]


def lists_of(ops: tuple[Op, ...], num_stages: int) -> list[tuple[Task, ...]]:
    return [stage_tasks(ops, stage, num_stages) for stage in range(num_stages)]


def of_kind(tasks: tuple[Task, ...], kind: TaskKind) -> list[Task]:
    return [task for task in tasks if task.kind is kind]


def unit_cost(_stage: int, task: Task) -> float:
    return 1.0 if task.kind is TaskKind.FORWARD else 2.0


def shape(tasks: tuple[Task, ...]) -> str:
    return " ".join(f"{task.kind.name[0]}{task.block}" for task in tasks)


@given(ROWS, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_every_stage_runs_the_same_forwards_and_backwards_in_program_order(rows: list[list[int]], pp: int) -> None:
    for ops in programs(rows):
        program = program_tasks(ops)
        for tasks in lists_of(ops, pp):
            for kind in TaskKind:
                assert of_kind(tasks, kind) == of_kind(program, kind)


@given(ROWS, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_backward_follows_its_forward_and_all_that_the_program_puts_before_it(rows: list[list[int]], pp: int) -> None:
    for ops in programs(rows):
        program = program_tasks(ops)
        for tasks in lists_of(ops, pp):
            place = {task: i for i, task in enumerate(tasks)}
            for i, task in enumerate(program):
                if task.kind is TaskKind.BACKWARD:
                    assert all(place[earlier] < place[task] for earlier in program[:i])


@given(ROWS, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_stage_is_at_most_one_visit_per_later_stage_ahead(rows: list[list[int]], pp: int) -> None:
    for ops in programs(rows):
        program = program_tasks(ops)
        assert stage_tasks(ops, pp - 1, pp) == program
        for stage, tasks in enumerate(lists_of(ops, pp)):
            due = {task: set(program[:i]) for i, task in enumerate(program)}
            for i, task in enumerate(tasks):
                if task.kind is TaskKind.BACKWARD:
                    early = [t for t in tasks[:i] if t not in due[task]]
                    assert sum(t.op.kind is OpKind.VISIT for t in early) <= pp - 1 - stage
                    assert not early or early[-1].op.kind is OpKind.VISIT


@given(ROWS, st.integers(2, 5), st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_stages_never_deadlock_and_open_sends_never_wait(rows: list[list[int]], pp: int, seed: int) -> None:
    rng = random.Random(seed)
    costs = {key: rng.choice((0.0, 1.0, 7.0)) for key in itertools.product(range(pp), TaskKind, range(60))}

    def cost(stage: int, task: Task) -> float:
        return costs[stage, task.kind, task.block % 60]

    for ops in programs(rows):
        stages = lists_of(ops, pp)
        timeline = simulate(stages, cost)
        assert timeline.total == simulate(stages, cost, max_open_sends=len(ops) + 1).total
        for stage, tasks in enumerate(stages):
            assert timeline.busy_P[stage] == sum(cost(stage, task) for task in tasks)


@given(ROWS, st.integers(2, 5), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_a_limit_of_tokens_in_flight_holds_as_far_as_the_program_allows(
    rows: list[list[int]], pp: int, limit: int
) -> None:
    for plan in plans(rows):
        tokens = [block.num_tokens for block in plan.blocks]
        for op in plan.ops:
            if op.kind is OpKind.PUSH and not plan.keep_B[op.block]:
                tokens[op.block] = 0
        stages = [stage_tasks(plan.ops, stage, pp, tokens, limit) for stage in range(pp)]
        simulate(stages, unit_cost)
        needed = most_tokens(program_tasks(plan.ops), tokens)
        for tasks in stages:
            assert most_tokens(tasks, tokens) <= max(limit, needed)
        assert [stage_tasks(plan.ops, stage, pp, tokens, 1 << 30) for stage in range(pp)] == lists_of(plan.ops, pp)


def most_tokens(tasks: tuple[Task, ...], tokens: list[int]) -> int:
    signed = [tokens[task.block] * (1 if task.kind is TaskKind.FORWARD else -1) for task in tasks]
    return max(itertools.accumulate(signed), default=0)


def test_one_list_by_hand() -> None:
    push, pop = Op(OpKind.PUSH, 0), Op(OpKind.POP, 0)
    visits = [Op(OpKind.VISIT, i) for i in (1, 2, 3)]
    ops = (push, *visits, pop)
    assert shape(stage_tasks(ops, 1, 2)) == "F0 F1 B1 F2 B2 F3 B3 B0"
    assert shape(stage_tasks(ops, 0, 2)) == "F0 F1 F2 B1 F3 B2 B3 B0"
    assert shape(stage_tasks(ops, 0, 4)) == "F0 F1 F2 F3 B1 B2 B3 B0"


def test_pushes_on_the_way_to_the_next_visit_run_ahead_with_it() -> None:
    ops = (
        Op(OpKind.VISIT, 0),
        Op(OpKind.PUSH, 1),
        Op(OpKind.PUSH, 2),
        Op(OpKind.VISIT, 3),
        Op(OpKind.POP, 2),
        Op(OpKind.POP, 1),
    )
    assert shape(stage_tasks(ops, 0, 2)) == "F0 F1 F2 F3 B0 B3 B2 B1"


def test_a_push_that_a_visit_absorbs_is_not_in_flight() -> None:
    ops = (Op(OpKind.PUSH, 0), Op(OpKind.VISIT, 1), Op(OpKind.VISIT, 2, absorbs=True))
    assert most_in_flight(stage_tasks(ops, 0, 1)) == 1
    assert most_in_flight(stage_tasks(ops, 0, 2)) == 2


def test_two_stages_are_idle_a_twentieth_of_twenty_visits_instead_of_half() -> None:
    visits = tuple(Op(OpKind.VISIT, i) for i in range(20))
    ahead = simulate(lists_of(visits, 2), unit_cost)
    in_order = simulate([program_tasks(visits)] * 2, unit_cost)
    assert in_order.idle_share > 0.45
    assert ahead.idle_share == pytest.approx(0.05, abs=0.01)
    assert simulate([program_tasks(visits)], unit_cost).idle_share == 0.0


def test_open_sends_are_few() -> None:
    visits = tuple(Op(OpKind.VISIT, i) for i in range(50))
    stages = lists_of(visits, 4)
    for upper in range(3):
        assert most_unread(stages[upper], stages[upper + 1], TaskKind.FORWARD) <= 4
        assert most_unread(stages[upper + 1], stages[upper], TaskKind.BACKWARD) <= 4


def test_lists_that_wait_for_each_other_are_told() -> None:
    first, second = Op(OpKind.VISIT, 0), Op(OpKind.VISIT, 1)
    eager = (Task(TaskKind.FORWARD, first), Task(TaskKind.FORWARD, second))
    back = (Task(TaskKind.BACKWARD, first), Task(TaskKind.BACKWARD, second))
    with pytest.raises(ScheduleError, match="no stage can go on: stage 0 waits for input of"):
        simulate([program_tasks((first, second)), eager + back], unit_cost)
    with pytest.raises(ScheduleError, match="carries block 0, its receiver waits for block 1"):
        simulate([eager + back, eager[::-1] + back], unit_cost)
    with pytest.raises(ValueError, match="stage 2 is not one of 2"):
        stage_tasks((first,), 2, 2)

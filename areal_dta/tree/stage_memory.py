"""Lists of all stages of a pipeline under a memory budget, and the bytes of a walk on one of them; pure.

A forward that runs ahead costs its graph and, if it is pushed over rows in use, a copy of the path it lies on, which
the blocks in flight on it hold on to.

The list of the last stage (or of the only one) gives what `areal_dta.tree.memory.MemoryModel.peak` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import OpKind, PlanSettings, WalkPlan
from areal_dta.tree.schedule import Task, TaskKind, stage_tasks

__all__ = ["max_graph_tokens", "path_reach", "pipeline_tasks", "stage_peak", "tasks_within_budget"]

PROGRAM_ORDER = -1.0  # as a limit on tokens in flight: not even blocks without graph run ahead


def path_reach(plan: WalkPlan) -> list[int]:
    """Per block the rows of the longest path that it and the blocks pushed below it make; 0 if it is not pushed."""
    reach = [0] * len(plan.blocks)
    path: list[int] = []
    for op in plan.ops:
        if op.kind is OpKind.PUSH:
            block = plan.blocks[op.block]
            _leave_path(path, reach, plan, block.depth)
            reach[op.block] = block.depth + block.num_tokens
            path.append(op.block)
    _leave_path(path, reach, plan, 0)
    return reach


def _leave_path(path: list[int], reach: list[int], plan: WalkPlan, depth: int) -> None:
    while path and plan.blocks[path[-1]].depth >= depth:
        done = path.pop()
        if path:
            reach[path[-1]] = max(reach[path[-1]], reach[done])


def pipeline_tasks(plan: WalkPlan, num_stages: int, max_tokens: float = math.inf) -> list[tuple[Task, ...]]:
    """The lists of all stages; they run ahead while blocks in flight have at most ``max_tokens``. Copies of the path do
    not count; `tasks_within_budget` does count them.
    """
    tokens = _graph_tokens(plan)
    return [stage_tasks(plan.ops, stage, num_stages, tokens, max_tokens) for stage in range(num_stages)]


def _graph_tokens(plan: WalkPlan) -> list[int]:
    """Per block the tokens whose graph stays from its forward to its backward: none if a push is computed again."""
    tokens = [block.num_tokens for block in plan.blocks]
    for op in plan.ops:
        if op.kind is OpKind.PUSH and not plan.keep_B[op.block]:
            tokens[op.block] = 0
    return tokens


def max_graph_tokens(plan: WalkPlan, memory: MemoryModel, settings: PlanSettings) -> float:
    """Tokens that may be in flight under an explicit ``activation_budget``; no limit without one."""
    if not settings.activation_budget:
        return math.inf
    longest = max((block.depth + block.num_tokens for block in plan.blocks), default=0)
    largest = max((block.num_tokens for block in plan.blocks), default=0)
    at_work = (memory.bytes_per_working_token - memory.bytes_per_kept_token) * largest
    free = settings.activation_budget - memory.bytes_fixed - memory.row_bytes() * longest - at_work
    return max(free, 0.0) / memory.bytes_per_kept_token


def tasks_within_budget(
    plan: WalkPlan, num_stages: int, memory: MemoryModel, settings: PlanSettings
) -> list[tuple[Task, ...]]:
    """The lists of all stages that run ahead the furthest of a few choices whose predicted peak keeps to an explicit
    ``activation_budget`` on every stage; the last choice is program order, for which the plan was made.
    """
    most = max_graph_tokens(plan, memory, settings)
    if math.isinf(most):
        return pipeline_tasks(plan, num_stages)
    for limit in (most, most / 2, most / 4, 0.0):
        lists = pipeline_tasks(plan, num_stages, limit)
        if all(stage_peak(memory, plan, tasks) <= settings.activation_budget for tasks in lists):
            return lists
    return pipeline_tasks(plan, num_stages, PROGRAM_ORDER)


@dataclass
class _Pushed:
    """Rows of the path with an accumulator."""

    depth: int
    end: int
    grad_bytes: float


@dataclass(frozen=True)
class _InFlight:
    graph_bytes: float
    takes: tuple[_Pushed, ...]
    buffer: int


class _Stage:
    """Replays a list on counters; mirrors `areal_dta.engine.stack.PathStack`."""

    def __init__(self, memory: MemoryModel, plan: WalkPlan) -> None:
        self.memory, self.plan = memory, plan
        self.reach = path_reach(plan)
        self.live = self.peak = memory.bytes_per_stack_row * plan.stack_rows
        self.path: list[_Pushed] = []
        self.buffer = 0  # the current copy of the stack
        self.rows = {0: plan.stack_rows}  # by copy
        self.users = {0: 1}  # by copy: blocks in flight that read it, and one for being current
        self.in_flight: dict[int, _InFlight] = {}

    def run(self, tasks: Sequence[Task]) -> float:
        with_backward = {task.block for task in tasks if task.kind is TaskKind.BACKWARD}
        for task in tasks:
            if task.kind is TaskKind.BACKWARD:
                self._backward(task)
            else:
                self._forward(task, task.block in with_backward)
        return self.peak + self.memory.bytes_fixed

    def _forward(self, task: Task, has_backward: bool) -> None:
        memory, block = self.memory, self.plan.blocks[task.block]
        num_tokens, takes = block.num_tokens, tuple[_Pushed, ...]()
        graph = memory.bytes_per_kept_token * num_tokens
        if task.op.kind is OpKind.PUSH:
            graph = graph if self.plan.keep_B[task.block] else 0.0
            takes = (self._push(block.depth, num_tokens, self.reach[task.block]),)
        elif task.op.absorbs:
            takes = self._path_from(block.depth)
        self._reach(self.live + (graph or memory.bytes_per_forward_token * num_tokens))
        if has_backward:
            self.live += graph
            self.users[self.buffer] += 1
            self.in_flight[task.block] = _InFlight(graph, takes, self.buffer)

    def _push(self, depth: int, num_tokens: int, reach: int) -> _Pushed:
        in_use = bool(self.path) and self.path[-1].end > depth
        while self.path and self.path[-1].depth >= depth:
            self.path.pop()
        if in_use or reach > self.rows[self.buffer]:
            old, self.buffer = self.buffer, len(self.rows)
            self.users[self.buffer], self.rows[self.buffer] = 1, reach
            self.live += self.memory.bytes_per_stack_row * reach
            self._reach(self.live)  # while rows are copied
            self._leave(old)
        self.path.append(_Pushed(depth, depth + num_tokens, self.memory.bytes_per_grad_row * num_tokens))
        self.live += self.path[-1].grad_bytes
        return self.path[-1]

    def _path_from(self, depth: int) -> tuple[_Pushed, ...]:
        first = len(self.path)
        while first and self.path[first - 1].end > depth:
            first -= 1
        return tuple(self.path[first:])

    def _backward(self, task: Task) -> None:
        block, done = self.plan.blocks[task.block], self.in_flight.pop(task.block)
        self._reach(self.live + self.memory.bytes_per_working_token * block.num_tokens - done.graph_bytes)
        self.live -= done.graph_bytes
        for pushed in done.takes:
            pushed.end = min(pushed.end, max(block.depth, pushed.depth))
            if pushed.end == pushed.depth:
                self.live -= pushed.grad_bytes
                pushed.grad_bytes = 0.0
        while self.path and self.path[-1].end == self.path[-1].depth:
            self.path.pop()
        self._leave(done.buffer)

    def _leave(self, buffer: int) -> None:
        self.users[buffer] -= 1
        if not self.users[buffer]:
            self.live -= self.memory.bytes_per_stack_row * self.rows[buffer]

    def _reach(self, num_bytes: float) -> None:
        self.peak = max(self.peak, num_bytes)


def stage_peak(memory: MemoryModel, plan: WalkPlan, tasks: Sequence[Task]) -> float:
    """Predicted peak bytes of a backward walk on the stage that runs ``tasks``; ``memory`` is that of one stage."""
    return _Stage(memory, plan).run(tasks)

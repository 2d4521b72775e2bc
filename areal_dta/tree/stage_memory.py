"""Lists of all stages of a pipeline under a memory budget, and the bytes of a walk on one of them; pure.

The list of the last stage (or of the only one) gives what `areal_dta.tree.memory.MemoryModel.peak` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import OpKind, PlanSettings, WalkPlan
from areal_dta.tree.schedule import Task, TaskKind, stage_tasks

__all__ = ["max_graph_tokens", "pipeline_tasks", "stage_peak"]


def pipeline_tasks(plan: WalkPlan, num_stages: int, max_tokens: float = math.inf) -> list[tuple[Task, ...]]:
    """The lists of all stages; they run ahead while blocks in flight have at most ``max_tokens``."""
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


@dataclass
class _Pushed:
    """Rows of the path with an accumulator, and the copy of the stack that holds them."""

    depth: int
    end: int
    grad_bytes: float
    buffer: int


@dataclass(frozen=True)
class _InFlight:
    graph_bytes: float
    takes: tuple[_Pushed, ...]
    buffer: int


class _Stage:
    """Replays a list on counters; mirrors `areal_dta.engine.stack.PathStack`."""

    def __init__(self, memory: MemoryModel, plan: WalkPlan) -> None:
        self.memory, self.plan = memory, plan
        self.stack_bytes = memory.bytes_per_stack_row * plan.stack_rows
        self.live = self.peak = self.stack_bytes
        self.path: list[_Pushed] = []
        self.buffer = 0  # the current copy of the stack
        self.users: dict[int, int] = {0: 1}  # by copy: blocks in flight that read it, and one for being current
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
            takes = (self._push(block.depth, num_tokens),)
        elif task.op.absorbs:
            takes = tuple(pushed for pushed in self.path if pushed.end > block.depth)
        self._reach(self.live + (graph or memory.bytes_per_forward_token * num_tokens))
        if has_backward:
            self.live += graph
            self.users[self.buffer] += 1
            self.in_flight[task.block] = _InFlight(graph, takes, self.buffer)

    def _push(self, depth: int, num_tokens: int) -> _Pushed:
        end = depth + num_tokens
        if any(pushed.depth < end and pushed.end > depth for pushed in self.path):
            self._leave(self.buffer)
            self.buffer += 1
            self.users[self.buffer] = 1
            self.live += self.stack_bytes
        self.path = [pushed for pushed in self.path if pushed.depth < depth]
        self.path.append(_Pushed(depth, end, self.memory.bytes_per_grad_row * num_tokens, self.buffer))
        self.live += self.path[-1].grad_bytes
        return self.path[-1]

    def _backward(self, task: Task) -> None:
        block, done = self.plan.blocks[task.block], self.in_flight.pop(task.block)
        self._reach(self.live + self.memory.bytes_per_working_token * block.num_tokens - done.graph_bytes)
        self.live -= done.graph_bytes
        for pushed in done.takes:
            pushed.end = min(pushed.end, max(block.depth, pushed.depth))
            if pushed.end == pushed.depth:
                self.live -= pushed.grad_bytes
                pushed.grad_bytes = 0.0
        self.path = [pushed for pushed in self.path if pushed.end > pushed.depth]
        self._leave(done.buffer)

    def _leave(self, buffer: int) -> None:
        self.users[buffer] -= 1
        if not self.users[buffer]:
            self.live -= self.stack_bytes

    def _reach(self, num_bytes: float) -> None:
        self.peak = max(self.peak, num_bytes)


def stage_peak(memory: MemoryModel, plan: WalkPlan, tasks: Sequence[Task]) -> float:
    """Predicted peak bytes of a backward walk on the stage that runs ``tasks``; ``memory`` is that of one stage."""
    return _Stage(memory, plan).run(tasks)

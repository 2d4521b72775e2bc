"""Keys, values and gradient accumulators of the path, also when forwards run ahead of backwards (pipeline stages).

Rows hold token numbers in place of keys, and every block leaves a gradient of one on all rows it sees: what a row
reads and collects can be counted. No model, no attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.engine.stack import Frame, PathStack, PathView
from areal_dta.tree.plan import ON_PATH, Block, Op, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import TaskKind, stage_tasks
from areal_dta.tree.stage_memory import path_reach
from areal_dta.tree.trie import Trie, build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
PLANS = (
    PlanSettings("classic", 2),
    PlanSettings("classic", 3, cut_tail=False),
    PlanSettings("classic", cut_tail=False),
    PlanSettings("auto", 1),
    PlanSettings("auto", 4),
)


def trie_of(rows: list[list[int]]) -> Trie:
    offsets = np.cumsum([0, *map(len, rows)])
    return build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets)


def path_above(trie: Trie, block: Block) -> list[int]:
    """Trie tokens of the path rows that a block needs, root first."""
    deepest = int(np.flatnonzero((block.parent_C == ON_PATH) & (block.cut_C == block.depth))[0])
    token, path = int(trie.parent_U[block.tokens_S[block.start_C[deepest]]]), []
    while token >= 0:
        path.append(token)
        token = int(trie.parent_U[token])
    return path[::-1][: block.depth]


@dataclass(frozen=True)
class Started:
    view: PathView
    frames: tuple[Frame, ...]


class Walk:
    """One stage's walk on a stack of one layer, one head, head size 1."""

    def __init__(self, trie: Trie, plan: WalkPlan) -> None:
        self.trie, self.plan = trie, plan
        self.reach = path_reach(plan)
        self.stack = PathStack(1, 1, 1, plan.stack_rows, torch.float64, torch.device("cpu"), with_grad=True)
        self.collected = np.zeros(trie.num_tokens)  # gradients that the token's own backward found
        self.left = np.zeros(trie.num_tokens)  # gradients that other blocks left on it

    def forward(self, op: Op) -> Started:
        block = self.plan.blocks[op.block]
        if op.kind is not OpKind.PUSH:
            frames = self.stack.frames_from(block.depth) if op.absorbs else ()
            return Started(self.stack.view(block.depth), frames)
        frame = self.stack.push(block.depth, block.num_tokens, self.reach[op.block])
        view = self.stack.view(block.depth + block.num_tokens)
        rows = torch.from_numpy(block.tokens_S.astype(np.float64))[None, :, None]
        view.write(0, block.depth, rows, -rows)
        return Started(view, (frame,))

    def backward(self, block: Block, started: Started) -> None:
        path = path_above(self.trie, block)
        keys, values = started.view.rows(0, 0, block.depth)
        assert keys[0, :, 0].tolist() == path
        assert (-values[0, :, 0]).tolist() == path
        if block.depth:
            started.view.add_grad(0, torch.ones(1, block.depth, 1), torch.ones(1, block.depth, 1))
            self.left[path] += 1
        for frame in started.frames:
            for row in range(max(frame.depth, block.depth), min(frame.end, block.depth + block.num_tokens)):
                token = block.tokens_S[row - block.depth]
                self.collected[token] += sum(float(grad_k_GSH) for _, grad_k_GSH, _ in frame.grads(0, row, row + 1))
        self.stack.release(started.frames, block.depth)


@given(ROWS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rows_stay_and_gradients_arrive_however_far_forwards_run_ahead(rows: list[list[int]], pp: int) -> None:
    trie = trie_of(rows)
    for choice in PLANS:
        plan = plan_walk(trie, choice)
        for stage in range(pp):
            walk, started = Walk(trie, plan), {}
            for task in stage_tasks(plan.ops, stage, pp):
                block = plan.blocks[task.block]
                if task.kind is TaskKind.FORWARD:
                    started[task.block] = walk.forward(task.op)
                else:
                    walk.backward(block, started[task.block])
            np.testing.assert_array_equal(walk.collected, walk.left)


def test_a_push_over_rows_in_use_leaves_the_older_buffer_alone() -> None:
    stack = PathStack(1, 1, 1, 4, torch.float32, torch.device("cpu"), with_grad=True)
    stack.push(0, 2)
    first = stack.view(2)
    first.write(0, 0, torch.full((1, 2, 1), 7.0), torch.full((1, 2, 1), 7.0))
    stack.push(1, 2)
    second = stack.view(3)
    second.write(0, 1, torch.full((1, 2, 1), 9.0), torch.full((1, 2, 1), 9.0))
    assert first.rows(0, 0, 2)[0].flatten().tolist() == [7.0, 7.0]
    assert second.rows(0, 0, 3)[0].flatten().tolist() == [7.0, 9.0, 9.0]


def test_a_released_frame_never_grows_again() -> None:
    stack = PathStack(1, 1, 1, 8, torch.float32, torch.device("cpu"), with_grad=True)
    frame = stack.push(0, 8)
    early, late = stack.frames_from(3), stack.frames_from(5)
    stack.release(early, 3)
    stack.release(late, 5)
    assert frame.num_rows == 3


def test_a_buffer_for_a_branch_is_as_long_as_its_own_paths() -> None:
    stack = PathStack(1, 1, 1, 100, torch.float32, torch.device("cpu"), with_grad=True)
    stack.push(0, 50, 100)
    stack.push(50, 50)
    stack.push(10, 5, 20)  # runs ahead: the trunk is not released
    assert stack.view(15).k_LGCH.shape[2] == 20
    stack.push(15, 5)
    assert stack.view(20).k_LGCH.shape[2] == 20
    stack.release(stack.frames_from(10), 10)
    stack.push(10, 60)
    assert stack.view(70).k_LGCH.shape[2] == 70


def test_many_small_frames_are_few_ranges_and_accumulators_grow_with_the_path() -> None:
    stack = PathStack(1, 1, 1, 320, torch.float32, torch.device("cpu"), with_grad=True)
    frames = []
    for depth in range(320):
        frames.append(stack.push(depth, 1, 320))
        segments = {segment for frame in frames for segment in frame.segments}
        assert sum(segment.end - segment.start for segment in segments) <= depth + 20
    assert len(segments) <= 16
    for depth in reversed(range(320)):
        stack.release((frames[depth],), depth)
    assert not any(segment.num_frames for segment in segments)


def test_rows_that_a_later_push_takes_over_start_without_gradients() -> None:
    stack = PathStack(1, 1, 1, 64, torch.float32, torch.device("cpu"), with_grad=True)
    stack.push(0, 1, 64)
    first = stack.push(1, 1, 64)
    stack.view(2).add_grad(0, torch.ones(1, 2, 1), torch.ones(1, 2, 1))
    stack.release((first,), 1)
    second = stack.push(1, 1, 64)
    assert [float(grad_k_GSH) for _, grad_k_GSH, _ in second.grads(0, 1, 2)] == [0.0]

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
from areal_dta.tree.plan import ON_PATH, Block, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import TaskKind, stage_tasks
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
        self.stack = PathStack(1, 1, 1, plan.stack_rows, torch.float64, torch.device("cpu"), with_grad=True)
        self.collected = np.zeros(trie.num_tokens)  # gradients that the token's own backward found
        self.left = np.zeros(trie.num_tokens)  # gradients that other blocks left on it

    def forward(self, block: Block, is_push: bool, absorbs: bool) -> Started:
        if not is_push:
            frames = self.stack.frames_from(block.depth) if absorbs else ()
            return Started(self.stack.view(block.depth), frames)
        frame = self.stack.push(block.depth, block.num_tokens)
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
                assert frame.grad_k_LGSH is not None
                token = block.tokens_S[row - block.depth]
                self.collected[token] += float(frame.grad_k_LGSH[0, 0, row - frame.depth, 0])
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
                    started[task.block] = walk.forward(block, task.op.kind is OpKind.PUSH, task.op.absorbs)
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

"""The program of a depth-first walk: blocks of trie tokens and the operations PUSH, VISIT, POP on them; pure, numpy
only.

A block is a run of consecutive trie tokens (depth-first order), so a whole subtree, or neighbouring sibling subtrees,
are blocks as much as one segment is. ``PUSH`` computes a path block and keeps its rows on the stack for its
descendants, ``VISIT`` computes a terminal block and runs its backward at once, ``POP`` runs the backward of the block
pushed last and takes it off.

- ``classic``: one leaf per VISIT, the published walk.
- ``auto``: neighbouring sibling subtrees are visited together as long as they have at most ``max_block_tokens`` tokens;
  a tree mask keeps them apart. No cost model: only the token budget decides.
- ``sparse``: the whole forest is one VISIT; memory and masked attention grow with the tree, meant for small batches.

Legend: U trie tokens, G segments, in depth-first order (see `areal_dta.tree.trie`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

import numpy as np

from areal_dta.tree.trie import Trie

__all__ = ["Block", "Op", "OpKind", "PlanKind", "PlanSettings", "WalkPlan", "plan_walk", "prune", "subtree_ends"]

PlanKind = Literal["classic", "auto", "sparse"]


class OpKind(Enum):
    PUSH = "push"
    VISIT = "visit"
    POP = "pop"


@dataclass(frozen=True)
class PlanSettings:
    """How to cut the trie; ``max_block_tokens`` bounds a VISIT of several segments (a single leaf may be longer)."""

    kind: PlanKind = "auto"
    max_block_tokens: int = 512

    def __post_init__(self) -> None:
        if self.kind not in get_args(PlanKind):
            raise ValueError(f"dta.plan={self.kind!r} is not one of {', '.join(get_args(PlanKind))}")
        if self.max_block_tokens < 1:
            raise ValueError(f"dta.max_block_tokens={self.max_block_tokens} must be at least 1")

    @property
    def visit_budget(self) -> float:
        return {"classic": 0.0, "auto": float(self.max_block_tokens), "sparse": float("inf")}[self.kind]


@dataclass(frozen=True)
class Block:
    """Trie tokens ``start .. end-1`` below a path of ``depth`` tokens; ``subtree_end`` is one past its last descendant.

    ``is_chain``: each token is the parent of the next, so that the block's own mask is plain causal.
    """

    start: int
    end: int
    depth: int
    subtree_end: int
    is_chain: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Op:
    kind: OpKind
    block: int


@dataclass(frozen=True)
class WalkPlan:
    """Blocks in depth-first order and the program over them."""

    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]

    @property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)

    @property
    def stack_rows(self) -> int:
        """Rows the stack must hold: the longest path plus the block on top of it."""
        return max((block.depth + block.num_tokens for block in self.blocks), default=0)

    def digest(self) -> str:
        """Fingerprint of the program; equal on all ranks of a model-parallel group or their collectives would not
        match.
        """
        rows = [(b.start, b.end, b.depth, b.is_chain) for b in self.blocks]
        ops = [(op.kind.value, op.block) for op in self.ops]
        return hashlib.sha256(repr((rows, ops)).encode()).hexdigest()


def subtree_ends(trie: Trie) -> np.ndarray:
    """Per trie token one past the last token of its subtree [U]."""
    bounds_G1 = np.append(trie.segment_start_G, trie.num_tokens)
    return np.repeat(bounds_G1[trie.segment_end_G], trie.segment_len_G)


def plan_walk(trie: Trie, settings: PlanSettings) -> WalkPlan:
    """The program for a trie; every trie token is in exactly one block, every PUSH has its POP, last in, first out."""
    return _Planner(trie, settings).run()


class _Planner:
    """Walks sibling lists with an explicit stack, since a chain of branches may be thousands deep."""

    def __init__(self, trie: Trie, settings: PlanSettings) -> None:
        self.budget = settings.visit_budget
        self.start = [*trie.segment_start_G.tolist(), trie.num_tokens]
        self.end = trie.segment_end_G.tolist()
        self.depth = trie.depth_U[trie.segment_start_G].tolist() if trie.num_segments else []
        self.num_segments = trie.num_segments
        self.blocks: list[Block] = []
        self.ops: list[Op] = []

    def run(self) -> WalkPlan:
        pending: list[tuple[str, int, int]] = [("siblings", 0, self.num_segments)]
        while pending:
            action, first, last = pending.pop()
            if action == "pop":
                self.ops.append(Op(OpKind.POP, first))
            elif action == "push":
                pending += [("pop", len(self.blocks), 0), ("siblings", first + 1, self.end[first])]
                self._emit(OpKind.PUSH, first, first + 1)
            elif action == "visit":
                self._emit(OpKind.VISIT, first, last)
            else:
                pending += reversed(self._split(first, last))
        return WalkPlan(tuple(self.blocks), tuple(self.ops))

    def _split(self, first: int, last: int) -> list[tuple[str, int, int]]:
        """Cut the sibling subtrees of segments first .. last-1 into visits and pushes."""
        actions: list[tuple[str, int, int]] = []
        run_start = run_tokens = 0
        segment = first
        while segment < last:
            after = self.end[segment]
            tokens = self.start[after] - self.start[segment]
            if tokens > self.budget:
                is_leaf = after == segment + 1
                actions.append(("visit", segment, after) if is_leaf else ("push", segment, after))
                run_tokens = 0
            elif run_tokens and run_tokens + tokens <= self.budget:
                run_tokens += tokens
                actions[-1] = ("visit", run_start, after)
            else:
                run_start, run_tokens = segment, tokens
                actions.append(("visit", segment, after))
            segment = after
        return actions

    def _emit(self, kind: OpKind, first: int, last: int) -> None:
        start, end = self.start[first], self.start[last]
        subtree_end = self.start[self.end[first]] if kind is OpKind.PUSH else end
        self.ops.append(Op(kind, len(self.blocks)))
        self.blocks.append(Block(start, end, self.depth[first], subtree_end, is_chain=last == first + 1))


def prune(plan: WalkPlan, active_U: np.ndarray) -> WalkPlan:
    """Leave out blocks with no active token in them or below them (their gradient is zero); block numbers change."""
    counts = np.concatenate([[0], np.cumsum(active_U)])
    kept = [i for i, block in enumerate(plan.blocks) if counts[block.subtree_end] > counts[block.start]]
    renumbered = {old: new for new, old in enumerate(kept)}
    ops = tuple(Op(op.kind, renumbered[op.block]) for op in plan.ops if op.block in renumbered)
    return WalkPlan(tuple(plan.blocks[i] for i in kept), ops)

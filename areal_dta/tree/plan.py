"""The program of a depth-first walk: blocks of trie tokens and the operations PUSH, VISIT, POP on them; pure, numpy
only.

``PUSH`` computes a path block whose keys and values its descendants need: with its autograd graph (``keep``), or
without, to be computed again. ``VISIT`` computes a block with its graph and runs its backward at once; it may begin
with tokens that were pushed without graph, whose place and gradients it then takes (``absorbs``). ``POP`` runs the
backward of the block pushed last, computing it again if its graph was not kept.

A block is a set of *chains*: tokens that follow each other on one path. A chain hangs on the current path or on an
earlier chain of its block, after the first ``cut`` tokens of it, so one block may hold a trunk with all its branches,
or branches that leave the path at different depths (a ragged prefix).

Legend: U trie tokens, S rows (tokens) of a block, C chains of a block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, get_args

import numpy as np

__all__ = ["ON_PATH", "Block", "ChildOrder", "Op", "OpKind", "PlanKind", "PlanSettings", "WalkPlan"]

PlanKind = Literal["auto", "classic", "sparse", "dense"]
ChildOrder = Literal["lexicographic", "heavy_first", "heavy_last"]
ON_PATH = -1


class OpKind(Enum):
    PUSH = "push"
    VISIT = "visit"
    POP = "pop"


@dataclass(frozen=True)
class PlanSettings:
    """How to cut the trie.

    ``kind``: ``auto`` bundles light subtrees and keeps graphs as the memory budget allows; ``classic`` is the published
    walk: one leaf per VISIT, inner tokens computed twice; ``sparse`` visits the whole forest at once; ``dense`` shares
    nothing: every row alone, packed into blocks.

    ``max_block_tokens`` bounds a block (``sparse`` ignores it, and a row of ``dense`` is never cut).
    ``activation_budget`` bounds bytes of kept graphs, stack and the block at work for ``auto``; 0 derives it from the
    longest row (`areal_dta.tree.memory.default_budget`). ``order`` is the order of children. ``cut_tail`` (classic):
    the tail that a leaf's VISIT computes is not pushed before. ``leaf_merge`` (dense): duplicates and strict prefixes
    of other rows are trained inside them; a prefix tree does so by construction.
    """

    kind: PlanKind = "auto"
    max_block_tokens: int = 2048
    activation_budget: int = 0
    leaf_merge: bool = True
    cut_tail: bool = True
    order: ChildOrder = "lexicographic"

    def __post_init__(self) -> None:
        if self.kind not in get_args(PlanKind):
            raise ValueError(f"dta.plan={self.kind!r} is not one of {', '.join(get_args(PlanKind))}")
        if self.order not in get_args(ChildOrder):
            raise ValueError(f"dta.order={self.order!r} is not one of {', '.join(get_args(ChildOrder))}")
        if self.max_block_tokens < 1:
            raise ValueError(f"dta.max_block_tokens={self.max_block_tokens} must be at least 1")
        if self.activation_budget < 0:
            raise ValueError(f"dta.activation_budget={self.activation_budget} must not be negative; 0 is automatic")
        if not self.leaf_merge and self.kind != "dense":
            raise ValueError(f"dta.leaf_merge=false needs dta.plan=dense: plan {self.kind!r} walks a prefix tree")
        if not self.cut_tail and self.kind != "classic":
            raise ValueError(f"dta.cut_tail=false needs dta.plan=classic: plan {self.kind!r} pushes no leaf")


@dataclass(frozen=True, eq=False)
class Block:
    """Trie tokens computed together: row s of the block is trie token ``tokens_S[s]``.

    Chain c is rows ``start_C[c] .. start_C[c+1]-1`` (the last one ends at S), at path positions from ``depth_C[c]`` on.
    It sees ``cut_C[c]`` tokens of chain ``parent_C[c]`` (and what they see), or that many rows of the path when the
    parent is `ON_PATH`. Chains are in depth-first order: a chain's subtree is consecutive.
    """

    tokens_S: np.ndarray
    start_C: np.ndarray
    parent_C: np.ndarray
    cut_C: np.ndarray
    depth_C: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_S)

    @property
    def num_chains(self) -> int:
        return len(self.start_C)

    @property
    def is_chain(self) -> bool:
        return len(self.start_C) == 1

    @cached_property
    def depth(self) -> int:
        """Rows of the path that the block needs."""
        return int(self.cut_C[self.parent_C == ON_PATH].max())

    @cached_property
    def position_S(self) -> np.ndarray:
        """Position of each row's token in its sequence, from 0."""
        lens_C = np.diff(self.start_C, append=self.num_tokens)
        return np.arange(self.num_tokens) + np.repeat(self.depth_C - self.start_C, lens_C)

    @classmethod
    def chain(cls, tokens_S: np.ndarray, depth: int) -> Block:
        """A block of one chain below a path of ``depth`` rows."""
        zero = np.zeros(1, np.int64)
        return cls(tokens_S, zero, zero + ON_PATH, zero + depth, zero + depth)


@dataclass(frozen=True)
class Op:
    """One step of a program.

    ``absorbs``: a VISIT computes tokens again that were pushed without graph, all path rows from its first position on,
    and takes them off the stack.
    """

    kind: OpKind
    block: int
    absorbs: bool = False


@dataclass(frozen=True, eq=False)
class WalkPlan:
    """Blocks and the program over them; ``keep_B[b]``: a pushed block keeps its graph for its POP."""

    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    keep_B: tuple[bool, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed with a graph: each live trie token once."""
        return sum(self.blocks[op.block].num_tokens for op in self.ops if op.kind is not OpKind.PUSH)

    @cached_property
    def recomputed_tokens(self) -> int:
        """Tokens computed twice: pushed without a graph."""
        return sum(
            self.blocks[op.block].num_tokens for op in self.ops if op.kind is OpKind.PUSH and not self.keep_B[op.block]
        )

    @cached_property
    def stack_rows(self) -> int:
        """Rows of keys and values the stack must hold: the longest pushed path."""
        pushed = (self.blocks[op.block] for op in self.ops if op.kind is OpKind.PUSH)
        return max((block.depth + block.num_tokens for block in pushed), default=0)

    def digest(self) -> str:
        """Fingerprint of the program; equal on all ranks of a model-parallel group or their collectives would not
        match.
        """
        hasher = hashlib.sha256()
        for block in self.blocks:
            for array in (block.tokens_S, block.start_C, block.parent_C, block.cut_C, block.depth_C):
                hasher.update(np.ascontiguousarray(array, np.int64).tobytes())
        hasher.update(repr([(op.kind.value, op.block, op.absorbs) for op in self.ops]).encode())
        hasher.update(bytes(self.keep_B))
        return hasher.hexdigest()

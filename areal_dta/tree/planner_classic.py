"""The published walk (Dynamic Tree Attention): leaves one by one in depth-first order.

Of a leaf's new tokens, those that the next leaf shares are computed without a graph, for their keys and values. Then
the path is taken back to the point where the next leaf leaves it, block by block from the end: each block is computed
with its graph, whether for the first or the second time, and its backward run. ``cut_tail=False`` computes the last
block of a leaf without a graph first as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from areal_dta.tree.forest import Forest
from areal_dta.tree.plan import Block, Op, OpKind, WalkPlan

__all__ = ["classic_plan"]


@dataclass(frozen=True)
class _Leaf:
    path: list[int]  # segments, root first; valid until the next leaf is asked for
    length: int
    next_lcp: int  # where the next leaf leaves it


def classic_plan(forest: Forest, max_block_tokens: int, cut_tail: bool) -> WalkPlan:
    """The program of the published walk over ``forest``; blocks with a graph stay within ``max_block_tokens``."""
    blocks: list[Block] = []
    ops: list[Op] = []

    def emit(kind: OpKind, leaf: _Leaf, low: int, high: int, absorbs: bool = False) -> None:
        ops.append(Op(kind, len(blocks), absorbs))
        blocks.append(Block.chain(forest.path_tokens(leaf.path, low, high), low))

    on_stack = 0
    for leaf in _leaves(forest):
        span = leaf.length - leaf.next_lcp
        num_blocks = math.ceil(span / max_block_tokens)
        size = math.ceil(span / num_blocks)
        bounds = [max(leaf.length - i * size, leaf.next_lcp) for i in range(num_blocks + 1)]
        cached = bounds[1] if cut_tail else leaf.length
        if cached > on_stack:
            emit(OpKind.PUSH, leaf, on_stack, cached)
            on_stack = cached
        for high, low in itertools.pairwise(bounds):
            if high > low:
                emit(OpKind.VISIT, leaf, low, high, absorbs=on_stack > low)
                on_stack = min(on_stack, low)
    return WalkPlan(tuple(blocks), tuple(ops), (False,) * len(blocks))


def _leaves(forest: Forest) -> Iterator[_Leaf]:
    path: list[int] = []
    pending = forest.roots[::-1]
    while pending:
        segment = pending.pop()
        depth = forest.depth[segment]
        if path and not forest.children[path[-1]]:
            yield _Leaf(path, forest.depth[path[-1]] + forest.length(path[-1]), depth)
        while path and forest.depth[path[-1]] >= depth:
            path.pop()
        path.append(segment)
        pending.extend(reversed(forest.children[segment]))
    if path:
        yield _Leaf(path, forest.depth[path[-1]] + forest.length(path[-1]), 0)

"""The part of a trie that a walk must compute, as a forest of segments with children in a chosen order.

Legend: U trie tokens, G segments of the trie, V live segments, in depth-first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_dta.tree.plan import Block, ChildOrder
from areal_dta.tree.trie import Trie

__all__ = ["ChainBuilder", "Forest", "live_forest"]


@dataclass(frozen=True)
class Forest:
    """Live segments: trie tokens ``start[v] .. stop[v]-1`` at positions from ``depth[v]``; ``tokens[v]`` are the live
    tokens of its subtree, ``children[v]`` in walking order.

    Plain lists: planners read single elements.
    """

    start: list[int]
    stop: list[int]
    depth: list[int]
    tokens: list[int]
    children: list[list[int]]
    roots: list[int]

    @property
    def num_segments(self) -> int:
        return len(self.start)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens[root] for root in self.roots)

    def length(self, segment: int) -> int:
        return self.stop[segment] - self.start[segment]

    def path_tokens(self, path: Sequence[int], low: int, high: int) -> np.ndarray:
        """Trie tokens at positions low .. high-1 of a path of segments, each the parent of the next."""
        runs = []
        for segment in reversed(path):
            depth = self.depth[segment]
            first, last = max(low - depth, 0), min(high - depth, self.length(segment))
            if last > first:
                runs.append(np.arange(self.start[segment] + first, self.start[segment] + last))
            if depth <= low:
                break
        return np.concatenate(runs[::-1])

    def heaviest(self, segment: int) -> int:
        """The child with the largest subtree (the first of equals), -1 for a leaf."""
        best, weight = -1, -1
        for child in self.children[segment]:
            if self.tokens[child] > weight:
                best, weight = child, self.tokens[child]
        return best


def live_forest(trie: Trie, need_U: np.ndarray | None = None, order: ChildOrder = "lexicographic") -> Forest:
    """Segments with a needed token in or below them; a leaf of that forest ends at its last needed token.

    ``need_U`` (bool) marks tokens whose hidden state is wanted; None means all.
    """
    start_G, stop_G = trie.segment_start_G, trie.segment_start_G + trie.segment_len_G
    end_G, parent_G = trie.segment_end_G, trie.segment_parent_G
    if need_U is None:
        live_G = np.ones(trie.num_segments, bool)
    else:
        counts_U1 = np.concatenate([[0], np.cumsum(need_U)])
        bound_G1 = np.append(start_G, trie.num_tokens)
        live_G = counts_U1[bound_G1[end_G]] > counts_U1[start_G]
        below_G = counts_U1[bound_G1[end_G]] > counts_U1[stop_G]  # something needed under the segment
        needed_U = np.flatnonzero(need_U)
        last_G = np.searchsorted(needed_U, stop_G) - 1  # last needed token before the segment's end
        trimmed_G = np.where(last_G >= 0, needed_U[np.maximum(last_G, 0)] + 1, 0) if len(needed_U) else stop_G
        stop_G = np.where(below_G, stop_G, trimmed_G)
    kept = np.flatnonzero(live_G)
    number_G = np.cumsum(live_G) - 1
    start, stop = start_G[kept].tolist(), stop_G[kept].tolist()
    parent = np.where(parent_G[kept] >= 0, number_G[np.maximum(parent_G[kept], 0)], -1).tolist()
    tokens = [b - a for a, b in zip(start, stop, strict=True)]
    children: list[list[int]] = [[] for _ in kept]
    roots: list[int] = []
    for v in range(len(parent) - 1, -1, -1):
        if parent[v] >= 0:
            tokens[parent[v]] += tokens[v]
    for v, above in enumerate(parent):
        (children[above] if above >= 0 else roots).append(v)
    if order != "lexicographic":
        for siblings in (roots, *children):
            siblings.sort(key=tokens.__getitem__, reverse=order == "heavy_first")
    depth = trie.depth_U[start_G[kept]].tolist() if len(kept) else []
    return Forest(start, stop, depth, tokens, children, roots)


class ChainBuilder:
    """Collects chains of one block, in depth-first order."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.parts: list[np.ndarray] = []  # trie tokens in row order
        self.num_rows = 0
        self.start: list[int] = []
        self.parent: list[int] = []
        self.cut: list[int] = []
        self.depth: list[int] = []

    def open_chain(self, parent: int, cut: int, depth: int) -> int:
        """Begin a chain; `add_tokens` fills the one opened last."""
        self.start.append(self.num_rows)
        self.parent.append(parent)
        self.cut.append(cut)
        self.depth.append(depth)
        return len(self.start) - 1

    def add_tokens(self, tokens: np.ndarray) -> None:
        self.parts.append(tokens)
        self.num_rows += len(tokens)

    def add_subtree(self, segment: int, parent: int, cut: int) -> None:
        """All live tokens of a segment's subtree: its heavy path as one chain, light subtrees hanging on it."""
        forest = self.forest
        pending = [(segment, parent, cut)]
        while pending:
            segment, parent, cut = pending.pop()
            chain = self.open_chain(parent, cut, forest.depth[segment])
            length, light = 0, []
            while segment >= 0:
                self.add_tokens(np.arange(forest.start[segment], forest.stop[segment]))
                length += forest.length(segment)
                heavy = forest.heaviest(segment)
                light += [(child, chain, length) for child in forest.children[segment] if child != heavy]
                segment = heavy
            pending += reversed(light)

    def build(self) -> Block:
        arrays = (np.asarray(x, np.int64) for x in (self.start, self.parent, self.cut, self.depth))
        return Block(np.concatenate(self.parts), *arrays)

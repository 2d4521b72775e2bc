"""Attention of a block as a list of tiles: what each of its rows may see, in pieces that dense kernels run.

A chain sees its own earlier tokens (a causal triangle). All rows of the subtree of a chain see what the chain hangs on:
the first ``cut`` tokens of its parent chain or of the path, a rectangle without mask. Every row's attention is the
merge of its tiles by log-sum-exp. A tile costs a fixed overhead, so a group of small neighbouring subtrees becomes one
square with a mask as long as the pairs computed in vain cost less than the tiles saved.

Legend: S rows of the block, C chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from areal_dta.tree.plan import Block

__all__ = ["TILE_OVERHEAD_PAIRS", "Tile", "TileKind", "block_tiles", "euler_mask", "tile_pairs"]

TILE_OVERHEAD_PAIRS = 3000  # query-key pairs that take as long as the fixed cost of a tile
_MASKED_PAIR_COST = 1.3  # against a pair of a rectangle
_CAUSAL_PAIR_COST = 1.5  # per visible pair; the blocks along the diagonal are computed in full


class TileKind(Enum):
    FULL = "full"  # rectangle, all visible
    CAUSAL = "causal"  # square, lower triangle
    MASKED = "masked"  # square, visibility by the tree


@dataclass(frozen=True)
class Tile:
    """Rows ``q_start .. q_end-1`` of the block against keys ``k_start .. k_end-1`` of the path or of the block."""

    kind: TileKind
    on_path: bool
    q_start: int
    q_end: int
    k_start: int
    k_end: int


def tile_pairs(tile: Tile) -> int:
    """Query-key pairs a tile computes (a triangle counts its visible half)."""
    queries, keys = tile.q_end - tile.q_start, tile.k_end - tile.k_start
    return queries * (queries + 1) // 2 if tile.kind is TileKind.CAUSAL else queries * keys


@dataclass
class _Group:
    """Neighbouring subtrees with one parent chain, candidates for one masked square."""

    start: int
    end: int
    split_cost: float  # of their own tiles
    tiles: list[Tile]


def block_tiles(block: Block) -> list[Tile]:
    """Tiles of a block. Triangles and masked squares cover each row exactly once and come first; rectangles follow."""
    num_chains, num_rows = block.num_chains, block.num_tokens
    start = [*block.start_C.tolist(), num_rows]
    parent, cut = block.parent_C.tolist(), block.cut_C.tolist()
    subtree_end = list(range(1, num_chains + 1))
    children: list[list[int]] = [[] for _ in range(num_chains + 1)]  # the last entry: chains on the path
    for c in range(num_chains - 1, -1, -1):
        if parent[c] >= 0:
            subtree_end[parent[c]] = max(subtree_end[parent[c]], subtree_end[c])
    for c in range(num_chains):
        children[parent[c] if parent[c] >= 0 else num_chains].append(c)
    inner: list[_Group | None] = [None] * num_chains
    for c in range(num_chains - 1, -1, -1):
        inner[c] = _subtree(c, start, start[subtree_end[c]], _grouped(children[c], inner, cut, start[c]))
    roots = _grouped(children[num_chains], inner, cut, None)
    tiles = [tile for group in roots for tile in group.tiles]
    tiles.sort(key=lambda tile: tile.kind is TileKind.FULL)
    return tiles


def _subtree(chain: int, start: list[int], end: int, groups: list[_Group]) -> _Group:
    """A chain and its subtree: one masked square, or the chain's triangle and its children's tiles."""
    first, stop = start[chain], start[chain + 1]
    rows = stop - first
    cost = TILE_OVERHEAD_PAIRS + _CAUSAL_PAIR_COST * rows * (rows + 1) / 2 + sum(group.split_cost for group in groups)
    square = TILE_OVERHEAD_PAIRS + _MASKED_PAIR_COST * (end - first) ** 2
    if groups and square < cost:
        return _Group(first, end, square, [Tile(TileKind.MASKED, False, first, end, first, end)])
    own = Tile(TileKind.CAUSAL, False, first, stop, first, stop)
    return _Group(first, end, cost, [own, *(tile for group in groups for tile in group.tiles)])


def _grouped(chains: list[int], inner: list[_Group | None], cut: list[int], base: int | None) -> list[_Group]:
    """Tiles of neighbouring subtrees: small ones joined in masked squares, rectangles joined where the cut is equal.

    ``base`` is the first row of the chain they hang on; None: they hang on the path.
    """
    groups: list[_Group] = []
    for c in chains:
        group = inner[c]
        assert group is not None
        if groups and _worth_joining(groups[-1], group):
            last = groups[-1]
            square = Tile(TileKind.MASKED, False, last.start, group.end, last.start, group.end)
            cost = TILE_OVERHEAD_PAIRS + _MASKED_PAIR_COST * (group.end - last.start) ** 2
            groups[-1] = _Group(last.start, group.end, cost, [square])
        else:
            groups.append(group)
    key_start = 0 if base is None else base
    rectangles: list[Tile] = []
    for c in chains:
        group = inner[c]
        assert group is not None
        keys = cut[c]
        above = rectangles[-1] if rectangles else None
        if above is not None and above.q_end == group.start and above.k_end == key_start + keys:
            rectangles[-1] = Tile(TileKind.FULL, base is None, above.q_start, group.end, key_start, key_start + keys)
        elif keys:
            rectangles.append(Tile(TileKind.FULL, base is None, group.start, group.end, key_start, key_start + keys))
    if not rectangles:
        return groups
    cost = sum(TILE_OVERHEAD_PAIRS + tile_pairs(tile) for tile in rectangles)
    return [*groups, _Group(groups[-1].end, groups[-1].end, cost, rectangles)]


def _worth_joining(a: _Group, b: _Group) -> bool:
    joined = TILE_OVERHEAD_PAIRS + _MASKED_PAIR_COST * (b.end - a.start) ** 2
    return joined < a.split_cost + b.split_cost


def euler_mask(token_S: np.ndarray, subtree_end_U: np.ndarray, start: int, end: int) -> np.ndarray:
    """Visibility [rows, rows] (bool) of rows start .. end-1: row i sees row j when j is i or an ancestor of it.

    Trie tokens are numbered depth-first, so that means ``U_j <= U_i < subtree_end(U_j)`` (Euler tour).
    """
    tokens = token_S[start:end]
    ends = subtree_end_U[tokens]
    return (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :])

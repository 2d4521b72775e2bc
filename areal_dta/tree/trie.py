"""The prefix tree of a set of token rows as flat arrays, built by sorting; numpy only.

Rows are ragged: ``ids_T`` holds them end to end, ``offsets_S1`` their bounds. After a lexicographic sort, the number of
tokens a row shares with all rows before it is its longest common prefix (LCP) with its neighbour, so everything about
the tree follows from (order, LCP), without building nodes. Work is a loop over rows with whole-row numpy operations,
never over tokens.

Legend: S rows, T tokens of all rows, R rows by rank (sorted position), U tokens of the trie (distinct prefixes), in
depth-first order, G segments (maximal unbranched runs of trie tokens), in depth-first order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

__all__ = ["SortedRows", "Trie", "build_trie", "sort_rows", "unshared_trie"]


@dataclass(frozen=True)
class SortedRows:
    """Rows in lexicographic order (a prefix before its extensions, equal rows in input order).

    ``order_R[r]`` is the input row of rank r, ``lens_R`` its length, ``lcp_R[r]`` the tokens it shares with rank r-1 (0
    for r=0).
    """

    order_R: np.ndarray
    lens_R: np.ndarray
    lcp_R: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.order_R)

    @property
    def row_tokens(self) -> int:
        return int(self.lens_R.sum())

    @property
    def tree_tokens(self) -> int:
        """Distinct tokens: sum of lengths minus sum of LCPs."""
        return int(self.lens_R.sum() - self.lcp_R.sum())

    def subset(self, positions: np.ndarray) -> SortedRows:
        """The rows at these ascending positions; what two of them share is the smallest LCP on the way from one to the
        other.
        """
        lcp = np.zeros(len(positions), np.int64)
        if len(positions) > 1:
            lcp[1:] = np.minimum.reduceat(self.lcp_R[: positions[-1] + 1], positions[:-1] + 1)
        return SortedRows(self.order_R[positions], self.lens_R[positions], lcp)


@dataclass(frozen=True)
class Trie:
    """The tree of S rows. All index arrays are int64.

    By rank (sorted position): ``order_S[r]`` input row of rank r; ``lcp_S[r]`` tokens shared with rank r-1.
    By input row: ``is_leaf_S`` false when the row equals a later-ranked row or is a strict prefix of one;
    ``leaf_of_row_S`` the row whose path contains it (itself for a leaf).
    By row token, in the input's layout: ``token_index_T`` the trie token, so ``x_U[token_index_T]`` gathers rows from
    the trie and ``np.add.at(x_U, token_index_T, y_T)`` scatters them back.
    By trie token, in depth-first order (a node before its children, children by token id): ``ids_U``; ``parent_U`` the
    trie token before it (-1 at the roots; the trie is a forest when first tokens differ); ``depth_U`` its position,
    from 0. By segment: ``segment_start_G`` first trie token, ``segment_len_G``, ``segment_parent_G`` (-1 for roots),
    ``segment_end_G`` one past the last segment of its subtree. Tokens of a segment are consecutive trie tokens, each
    the parent of the next; segment a is an ancestor of b, or b itself, exactly when ``a <= b < segment_end_G[a]``.
    ``leaf_segment_S`` is the segment in which each row ends (for a leaf: a segment without children, and the row is its
    end).
    """

    order_S: np.ndarray
    lcp_S: np.ndarray
    is_leaf_S: np.ndarray
    leaf_of_row_S: np.ndarray
    token_index_T: np.ndarray
    offsets_S1: np.ndarray
    ids_U: np.ndarray
    parent_U: np.ndarray
    depth_U: np.ndarray
    segment_start_G: np.ndarray
    segment_len_G: np.ndarray
    segment_parent_G: np.ndarray
    segment_end_G: np.ndarray
    leaf_segment_S: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.order_S)

    @property
    def num_tokens(self) -> int:
        """Trie tokens, ``tree_tokens`` of the batch."""
        return len(self.ids_U)

    @property
    def num_segments(self) -> int:
        return len(self.segment_start_G)

    @property
    def leaf_rows(self) -> np.ndarray:
        """Input rows that are leaves, in depth-first order."""
        return self.order_S[self.is_leaf_S[self.order_S]]

    def path(self, row: int) -> np.ndarray:
        """Trie tokens of one row, root first."""
        return self.token_index_T[self.offsets_S1[row] : self.offsets_S1[row + 1]]


def sort_rows(ids_T: np.ndarray, offsets_S1: np.ndarray) -> SortedRows:
    """Lexicographic order and neighbour LCPs of ragged rows of non-negative token ids.

    Rows are compared as big-endian bytes, where memcmp order equals token order. Raises ValueError for negative ids,
    or offsets that do not cover `ids_T` or give an empty row.
    """
    ids_T, offsets_S1 = _checked(ids_T, offsets_S1)
    bounds = offsets_S1.tolist()
    key_dtype = np.dtype(">u2" if not len(ids_T) or int(ids_T.max()) < 1 << 16 else ">u4")
    raw, width = ids_T.astype(key_dtype).view(np.uint8).data, key_dtype.itemsize
    keys = [bytes(raw[a * width : b * width]) for a, b in itertools.pairwise(bounds)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    del keys
    order_R = np.asarray(order, np.int64)
    return SortedRows(order_R, np.diff(offsets_S1)[order_R], _neighbour_lcp(ids_T, bounds, order))


def _neighbour_lcp(ids_T: np.ndarray, bounds: list[int], order: list[int]) -> np.ndarray:
    lcp_R = np.zeros(len(order), np.int64)
    previous = ids_T[:0]
    for rank, row in enumerate(order):
        current = ids_T[bounds[row] : bounds[row + 1]]
        shorter = min(len(previous), len(current))
        differs = previous[:shorter] != current[:shorter]
        first = int(differs.argmax()) if shorter else 0
        lcp_R[rank] = first if shorter and differs[first] else shorter
        previous = current
    return lcp_R


def build_trie(ids_T: np.ndarray, offsets_S1: np.ndarray) -> Trie:
    """The trie of ragged rows; no row at all gives an empty trie. Raises ValueError as `sort_rows`."""
    ids_T, offsets_S1 = _checked(ids_T, offsets_S1)
    rows = sort_rows(ids_T, offsets_S1)
    token_index_T, new_start_R = _index_tokens(rows, offsets_S1)
    num_tokens = rows.tree_tokens

    ids_U = np.empty(num_tokens, np.int32)
    ids_U[token_index_T] = ids_T
    depth_U = np.empty(num_tokens, np.int64)
    depth_U[token_index_T] = np.arange(len(ids_T)) - np.repeat(offsets_S1[:-1], np.diff(offsets_S1))
    parent_U = np.arange(num_tokens) - 1
    grows_R = rows.lens_R > rows.lcp_R
    row_start_R = offsets_S1[:-1][rows.order_R]
    parent_U[new_start_R[grows_R & (rows.lcp_R == 0)]] = -1
    branch_R = grows_R & (rows.lcp_R > 0)
    parent_U[new_start_R[branch_R]] = token_index_T[(row_start_R + rows.lcp_R - 1)[branch_R]]

    start_G, len_G, segment_parent_G, end_G, segment_U = _segments(parent_U)
    is_leaf_R = np.ones(rows.num_rows, bool)
    is_leaf_R[:-1] = rows.lcp_R[1:] != rows.lens_R[:-1]
    leaf_ranks = np.flatnonzero(is_leaf_R)
    is_leaf_S, leaf_of_row_S = np.empty(rows.num_rows, bool), np.empty(rows.num_rows, np.int64)
    is_leaf_S[rows.order_R] = is_leaf_R
    leaf_of_row_S[rows.order_R] = rows.order_R[leaf_ranks[np.searchsorted(leaf_ranks, np.arange(rows.num_rows))]]
    return Trie(
        order_S=rows.order_R,
        lcp_S=rows.lcp_R,
        is_leaf_S=is_leaf_S,
        leaf_of_row_S=leaf_of_row_S,
        token_index_T=token_index_T,
        offsets_S1=offsets_S1,
        ids_U=ids_U,
        parent_U=parent_U,
        depth_U=depth_U,
        segment_start_G=start_G,
        segment_len_G=len_G,
        segment_parent_G=segment_parent_G,
        segment_end_G=end_G,
        leaf_segment_S=segment_U[token_index_T[offsets_S1[1:] - 1]],
    )


def unshared_trie(ids_T: np.ndarray, offsets_S1: np.ndarray, leaf_merge: bool) -> Trie:
    """A forest without sharing: every row a root of its own, in input order.

    With ``leaf_merge`` rows that equal another or are a strict prefix of one lie on that row's path, as in a trie.
    Raises ValueError as `sort_rows`.
    """
    ids_T, offsets_S1 = _checked(ids_T, offsets_S1)
    num_rows, lens_S = len(offsets_S1) - 1, np.diff(offsets_S1)
    leaf_of_row_S = build_trie(ids_T, offsets_S1).leaf_of_row_S if leaf_merge else np.arange(num_rows)
    is_leaf_S = leaf_of_row_S == np.arange(num_rows)
    start_S = np.cumsum(lens_S * is_leaf_S) - lens_S * is_leaf_S
    position_T = np.arange(len(ids_T)) - np.repeat(offsets_S1[:-1], lens_S)
    token_index_T = np.repeat(start_S[leaf_of_row_S], lens_S) + position_T
    num_tokens = int(lens_S[is_leaf_S].sum())
    ids_U, depth_U = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int64)
    ids_U[token_index_T], depth_U[token_index_T] = ids_T, position_T
    num_segments = int(is_leaf_S.sum())
    return Trie(
        order_S=np.arange(num_rows),
        lcp_S=np.zeros(num_rows, np.int64),
        is_leaf_S=is_leaf_S,
        leaf_of_row_S=leaf_of_row_S,
        token_index_T=token_index_T,
        offsets_S1=offsets_S1,
        ids_U=ids_U,
        parent_U=np.where(depth_U == 0, -1, np.arange(num_tokens) - 1),
        depth_U=depth_U,
        segment_start_G=start_S[is_leaf_S],
        segment_len_G=lens_S[is_leaf_S],
        segment_parent_G=np.full(num_segments, -1),
        segment_end_G=np.arange(1, num_segments + 1),
        leaf_segment_S=(np.cumsum(is_leaf_S) - 1)[leaf_of_row_S],
    )


def _index_tokens(rows: SortedRows, offsets_S1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(trie token of every row token, first new trie token of every rank): shared tokens are copied from the rank
    before.
    """
    new_R = rows.lens_R - rows.lcp_R
    new_start_R = np.cumsum(new_R) - new_R
    token_index_T = np.empty(int(offsets_S1[-1]), np.int64)
    counting_U = np.arange(int(new_R.sum()))
    bounds, previous = offsets_S1.tolist(), 0
    columns = (rows.order_R.tolist(), rows.lcp_R.tolist(), new_start_R.tolist(), new_R.tolist())
    for row, lcp, new_start, new in zip(*columns, strict=True):
        start = bounds[row]
        token_index_T[start : start + lcp] = token_index_T[previous : previous + lcp]
        token_index_T[start + lcp : bounds[row + 1]] = counting_U[new_start : new_start + new]
        previous = start
    return token_index_T, new_start_R


def _segments(parent_U: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the trie at branching tokens: (start_G, len_G, parent_G, end_G, segment_U)."""
    num_tokens = len(parent_U)
    is_start_U = parent_U != np.arange(num_tokens) - 1
    branching = parent_U[is_start_U]
    is_start_U[branching[branching >= 0] + 1] = True  # depth-first: the first child follows its parent
    is_start_U[:1] = True
    start_G = np.flatnonzero(is_start_U)
    len_G = np.diff(start_G, append=num_tokens)
    segment_U = np.cumsum(is_start_U) - 1
    above_G = parent_U[start_G]
    parent_G = np.where(above_G >= 0, segment_U[np.maximum(above_G, 0)], -1) if num_tokens else above_G
    end, parents = list(range(1, len(start_G) + 1)), parent_G.tolist()
    for segment in range(len(start_G) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and end[parent] < end[segment]:
            end[parent] = end[segment]
    return start_G, len_G, parent_G, np.asarray(end, np.int64), segment_U


def _checked(ids_T: np.ndarray, offsets_S1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids_T, offsets_S1 = np.ascontiguousarray(ids_T), np.asarray(offsets_S1, np.int64)
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
        raise ValueError(f"ids must be a flat integer array, got {ids_T.dtype} of shape {ids_T.shape}")
    if offsets_S1.ndim != 1 or not len(offsets_S1) or offsets_S1[0] != 0 or offsets_S1[-1] != len(ids_T):
        raise ValueError(f"offsets must run from 0 to {len(ids_T)}, got {offsets_S1[:8].tolist()}")
    if (np.diff(offsets_S1) <= 0).any():
        raise ValueError(f"row {int((np.diff(offsets_S1) <= 0).argmax())} is empty; drop rows without tokens")
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < 1 << 31:
        raise ValueError(f"token ids run from {int(ids_T.min())} to {int(ids_T.max())}, expected 0 to {(1 << 31) - 1}")
    return ids_T, offsets_S1

"""Greedy baselines, first-fit-decreasing style: longest row first, each to the bin that is then lightest.

`ffd_tree` needs, for every row, what it shares with every bin. A bit mask of bins on each branching node of the trie
gives that by walking up from the row: bins met first share most. The walk ends as soon as no lighter bin can make up
for sharing less, so it rarely climbs far.

Legend: R rows by rank in the sorted list, N branching nodes of the trie (node 0 is the empty prefix).
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np

from areal_dta.tree.cost import CostModel
from areal_dta.tree.trie import SortedRows

__all__ = ["ffd_tokens", "ffd_tree", "ffd_tree_below"]

_Load = tuple[float, int, int]  # cost, rows, bin: bins compare by cost, then by the number of rows
_NO_BIN: _Load = (float("inf"), 0, -1)


def ffd_tokens(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Ignores prefixes, and the model with them: to the bin with the fewest row tokens."""
    heap = [(0, b) for b in range(num_bins)]
    members: list[list[int]] = [[] for _ in range(num_bins)]
    lens = rows.lens_R.tolist()
    for position in _longest_first(rows):
        load, lightest = heap[0]
        heapq.heapreplace(heap, (load + lens[position], lightest))
        members[lightest].append(position)
    return [np.asarray(sorted(m), np.int64) for m in members]


def ffd_tree(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Knows prefixes: to the bin whose trie cost is then smallest (fewest rows on ties, so empty bins first)."""
    bins = ffd_tree_below(rows, num_bins, model, float("inf"))
    assert bins is not None  # nothing exceeds infinity
    return bins


def ffd_tree_below(rows: SortedRows, num_bins: int, model: CostModel, limit: float) -> list[np.ndarray] | None:
    """`ffd_tree`, or None as soon as a bin costs more than `limit`."""
    node_of_row, parent_N, depth_N = _branching_nodes(rows.lcp_R)
    shared_N = model.span(0, np.asarray(depth_N)).tolist()
    row_cost = model.span(0, rows.lens_R).tolist()
    everyone = (1 << num_bins) - 1
    mask_N = [0] * len(parent_N)
    mask_N[0] = everyone
    members: list[list[int]] = [[] for _ in range(num_bins)]
    load_of: list[_Load] = [(0.0, 0, b) for b in range(num_bins)]
    order = list(load_of)  # ascending
    for position in _longest_first(rows):
        node = node_of_row[position]
        best, shared, unseen = _NO_BIN, 0.0, everyone
        while unseen:
            new = mask_N[node] & unseen
            if new:
                if new & (new - 1):  # several bins: the lightest of them
                    for load in order:
                        if new >> load[2] & 1:
                            break
                else:
                    load = load_of[new.bit_length() - 1]
                candidate = (load[0] - shared_N[node], load[1], load[2])
                if candidate < best:
                    best, shared = candidate, shared_N[node]
                unseen &= ~new
            node = parent_N[node]
            if best[0] < order[0][0] - shared_N[node]:  # (past the root nothing is unseen: the loop ends anyway)
                break
        chosen = best[2]
        old = load_of[chosen]
        cost = old[0] + (row_cost[position] - shared)
        if cost > limit:
            return None
        load_of[chosen] = (cost, old[1] + 1, chosen)
        del order[bisect.bisect_left(order, old)]
        bisect.insort(order, load_of[chosen])
        members[chosen].append(position)
        node, bit = node_of_row[position], 1 << chosen
        while not mask_N[node] & bit:
            mask_N[node] |= bit
            node = parent_N[node]
    return [np.asarray(sorted(m), np.int64) for m in members]


def _longest_first(rows: SortedRows) -> list[int]:
    return np.argsort(-rows.lens_R, kind="stable").tolist()


def _branching_nodes(lcp_R: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """(deepest branching node on each row's path, parent of each node or -1, its depth in tokens).

    A node is where two rows part, so its depth is one of the neighbour LCPs.
    """
    node_of_row: list[int] = []
    parent_N, depth_N, path = [-1], [0], [0]
    for shared in np.append(lcp_R[1:], 0).tolist() if len(lcp_R) else []:
        if shared > depth_N[path[-1]]:
            path.append(_add(parent_N, depth_N, path[-1], shared))
            node_of_row.append(path[-1])
            continue
        node_of_row.append(path[-1])
        below = path[-1]
        while depth_N[path[-1]] > shared:
            below = path.pop()
        if depth_N[path[-1]] < shared:  # a branch above `below` that no row has shown yet
            parent_N[below] = _add(parent_N, depth_N, path[-1], shared)
            path.append(parent_N[below])
    return node_of_row, parent_N, depth_N


def _add(parent_N: list[int], depth_N: list[int], parent: int, depth: int) -> int:
    parent_N.append(parent)
    depth_N.append(depth)
    return len(parent_N) - 1

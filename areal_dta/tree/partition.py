"""Cuts a sorted batch over data-parallel ranks so that the costliest rank is as light as possible.

Every method returns one array of sorted positions per rank, ascending. The trie cost of a set never falls when rows are
added, which makes the greedy feasibility check of `contiguous` exact.

Legend: R rows by rank in the sorted list, K data-parallel ranks (called bins here, to avoid two meanings of rank).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

import numpy as np

from areal_dta.tree.cost import CostModel, RunCosts
from areal_dta.tree.trie import SortedRows

__all__ = ["METHODS", "bin_cost", "contiguous", "ffd_tokens", "ffd_tree", "partition"]


def partition(method: str, rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Cut by the named method; raises ValueError for an unknown one or `num_bins` < 1."""
    if method not in METHODS:
        raise ValueError(f"unknown partition {method!r}; choose one of {', '.join(METHODS)}")
    if num_bins < 1:
        raise ValueError(f"cannot cut over {num_bins} ranks; give at least 1")
    return METHODS[method](rows, num_bins, model)


def bin_cost(rows: SortedRows, members: np.ndarray, model: CostModel) -> float:
    """Trie cost of any ascending subset of sorted positions."""
    return model.tree(rows.subset(np.asarray(members, np.int64)))


def contiguous(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Runs of the sorted list with the smallest possible maximum cost, found by binary search over that maximum.

    No bin is empty unless there are fewer rows than bins. Duplicated tokens are at most (K-1) x the longest row.
    """
    costs = RunCosts.of(rows, model)
    low, high = 0.0, costs.run(0, rows.num_rows)
    best = [0, rows.num_rows]
    while low < high:
        cut, maximum, next_candidate = _greedy(costs, num_bins, (low + high) / 2)
        if cut is not None and maximum < high:
            best, high = cut, maximum
        elif cut is not None:  # rounding: the middle is no smaller than the maximum already reached
            break
        else:
            low = next_candidate  # no cut below it exists: every greedy run would need at least this much to grow
            if low >= high:
                break
            cut, maximum, _ = _greedy(costs, num_bins, low)
            if cut is not None:
                best = cut
                break
    bounds = _fill(costs, best, num_bins)
    runs = [np.arange(i, j) for i, j in itertools.pairwise(bounds)]
    return runs + [np.arange(0)] * (num_bins - len(runs))


def _greedy(costs: RunCosts, num_bins: int, limit: float) -> tuple[list[int] | None, float, float]:
    """Longest runs under `limit`: (bounds or None if more than num_bins are needed, their maximum, the smallest limit
    at which any of the runs would grow).
    """
    bounds, maximum, grow = [0], 0.0, np.inf
    while bounds[-1] < costs.num_rows:
        i = bounds[-1]
        j = costs.furthest(i, limit)
        if j < costs.num_rows:
            grow = min(grow, costs.run(i, j + 1))
        if j == i or len(bounds) > num_bins:
            return None, np.inf, grow
        maximum = max(maximum, costs.run(i, j))
        bounds.append(j)
    return bounds, maximum, grow


def _fill(costs: RunCosts, bounds: list[int], num_bins: int) -> list[int]:
    """Split the costliest splittable run until no bin is empty; parts never cost more than the whole."""
    bounds = list(bounds)
    while len(bounds) - 1 < min(num_bins, costs.num_rows):
        runs = [(costs.run(i, j), i, j) for i, j in itertools.pairwise(bounds) if j - i > 1]
        _, i, j = max(runs)
        middle = min(range(i + 1, j), key=lambda m: max(costs.run(i, m), costs.run(m, j)))
        bounds = sorted([*bounds, middle])
    return bounds


def ffd_tokens(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Baseline that ignores prefixes: longest row first, to the bin with the fewest row tokens."""
    loads = [0] * num_bins
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for position in np.argsort(-rows.lens_R, kind="stable").tolist():
        lightest = loads.index(min(loads))
        loads[lightest] += int(rows.lens_R[position])
        members[lightest].append(position)
    return [np.asarray(sorted(m), np.int64) for m in members]


def ffd_tree(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Baseline that knows prefixes: longest row first, to the bin whose trie cost is then smallest (empty bins first on
    ties).
    """
    loads = [0.0] * num_bins
    members: list[list[int]] = [[] for _ in range(num_bins)]
    shared = _RangeMinimum(rows.lcp_R)
    for position in np.argsort(-rows.lens_R, kind="stable").tolist():
        totals = []
        for b in range(num_bins):
            at = bisect.bisect(members[b], position)
            left = shared.over(members[b][at - 1], position) if at else 0
            right = shared.over(position, members[b][at]) if at < len(members[b]) else 0
            totals.append(loads[b] + float(model.span(max(left, right), rows.lens_R[position])))
        chosen = min(range(num_bins), key=lambda b: (totals[b], len(members[b])))
        loads[chosen] = totals[chosen]
        bisect.insort(members[chosen], position)
    return [np.asarray(m, np.int64) for m in members]


class _RangeMinimum:
    """Minimum of a window of LCPs in constant time: the tokens that two sorted positions share."""

    def __init__(self, lcp_R: np.ndarray) -> None:
        self._levels = [lcp_R]
        while 2 << (len(self._levels) - 1) <= len(lcp_R):
            below, half = self._levels[-1], 1 << (len(self._levels) - 1)
            self._levels.append(np.minimum(below[:-half], below[half:]))

    def over(self, a: int, b: int) -> int:
        """Shared tokens of sorted positions a < b: the minimum over (a, b]."""
        level = (b - a).bit_length() - 1
        table = self._levels[level]
        return int(min(table[a + 1], table[b + 1 - (1 << level)]))


METHODS: dict[str, Callable[[SortedRows, int, CostModel], list[np.ndarray]]] = {
    "contiguous": contiguous,
    "ffd_tokens": ffd_tokens,
    "ffd_tree": ffd_tree,
}

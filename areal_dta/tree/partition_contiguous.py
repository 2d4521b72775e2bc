"""The published cut: runs of the lexicographically sorted list with the smallest possible maximum cost.

The trie cost of a set never falls when rows are added, which makes a greedy feasibility check exact; costs of runs are
differences of prefix sums, so a check of one limit is K binary searches.

Legend: R rows by rank in the sorted list, K bins (data-parallel ranks).
"""

from __future__ import annotations

import itertools

import numpy as np

from areal_dta.tree.cost import CostModel, RunCosts
from areal_dta.tree.trie import SortedRows

__all__ = ["contiguous"]


def contiguous(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Optimal among contiguous cuts, found by binary search over the maximum.

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

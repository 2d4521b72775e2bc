"""Exact costs of taking runs of leaves out of a bin and putting them into another one, all runs at once.

Legend: L leaves by rank among the leaves, M members of a bin (leaves, ascending), U units of a bin: its single leaves
and its subtrees, all of them runs of its members.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_dta.tree.cost import CostModel
from areal_dta.tree.lcp import RangeMinimum
from areal_dta.tree.trie import SortedRows

__all__ = ["LeafCosts", "Units", "merged", "without"]


@dataclass(frozen=True)
class Units:
    """Runs ``start_U <= i < end_U`` of a bin's members: ``first_U``, ``last_U`` the leaves at their ends, ``gain_U``
    how much lighter the bin is without the run, ``alone_U`` what the run costs in an empty bin.
    """

    start_U: np.ndarray
    end_U: np.ndarray
    first_U: np.ndarray
    last_U: np.ndarray
    gain_U: np.ndarray
    alone_U: np.ndarray

    @property
    def num_units(self) -> int:
        return len(self.start_U)

    def take(self, chosen: np.ndarray) -> Units:
        return Units(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def without(members_M: np.ndarray, units: Units, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """(the other members, the unit's members)."""
    start, end = int(units.start_U[unit]), int(units.end_U[unit])
    return np.concatenate([members_M[:start], members_M[end:]]), members_M[start:end]


def merged(members_M: np.ndarray, run: np.ndarray) -> np.ndarray:
    return np.sort(np.concatenate([members_M, run]))


class LeafCosts:
    """Costs under one model of sets of the leaves of one batch."""

    def __init__(self, leaves: SortedRows, model: CostModel) -> None:
        self._lens_L, self._shared = leaves.lens_R, RangeMinimum(leaves.lcp_R)
        longest = int(leaves.lens_R.max(initial=0))
        self._of_depth = model.span(0, np.arange(longest + 1))  # of a path with so many tokens

    def bin(self, members_M: np.ndarray) -> float:
        """Trie cost of a set of leaves."""
        own = self._of_depth[self._lens_L[members_M]]
        return float(own.sum() - self._of_depth[self._shared.between(members_M)].sum())

    def units(self, members_M: np.ndarray) -> Units:
        """All units of a bin; the bin as a whole is none, unless it has one member."""
        num_members = len(members_M)
        shared = np.zeros(num_members + 1, np.int64)  # with the member before; 0 before the first and after the last
        shared[1:-1] = self._shared.between(members_M)
        start, end = _subtrees(shared.tolist())
        shared_cost = self._of_depth[shared]
        marginal = self._of_depth[self._lens_L[members_M]] - shared_cost[:-1]
        prefix = np.concatenate([[0.0], np.cumsum(marginal)])
        inside = prefix[end] - prefix[start]
        outer = self._of_depth[np.minimum(shared[start], shared[end])]  # what the members around it will share
        return Units(
            start_U=start,
            end_U=end,
            first_U=members_M[start],
            last_U=members_M[end - 1],
            gain_U=inside - shared_cost[end] + outer,
            alone_U=inside + shared_cost[start],
        )

    def added(self, members_M: np.ndarray, units: Units) -> np.ndarray:
        """``[U]``: what each unit of another bin adds to this one; infinite where their leaves alternate."""
        if not len(members_M):
            return units.alone_U
        first, last = units.first_U, units.last_U
        at = np.searchsorted(members_M, first)
        apart = np.searchsorted(members_M, last) == at
        has_before, has_after = at > 0, apart & (at < len(members_M))
        before = np.where(has_before, members_M[at - 1], first)
        after = np.where(has_after, members_M[np.minimum(at, len(members_M) - 1)], last)
        shared_before = np.where(has_before, self._shared.over(before, first), 0)
        shared_after = np.where(has_after, self._shared.over(last, after), 0)
        across = np.minimum(shared_before, shared_after)  # of the two members that the unit comes between
        wide = has_before & has_after & (last > first)
        across[wide] = np.minimum(across[wide], self._shared.over(first[wide], last[wide]))
        cost = self._of_depth
        added = units.alone_U - cost[shared_before] - cost[shared_after] + cost[across]
        return np.where(apart, added, np.inf)


def _subtrees(shared: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of all single members and of all runs of members that make up a subtree, the whole bin left out.

    ``shared[i]`` is what member i shares with the one before.
    """
    num_members = len(shared) - 1
    starts, ends = list(range(num_members)), list(range(1, num_members + 1))
    open_runs: list[tuple[int, int]] = []  # (tokens shared by all its members, its first member), ever deeper
    for i in range(1, num_members + 1):
        first = i - 1
        depth = shared[i] if i < num_members else -1
        while open_runs and open_runs[-1][0] > depth:
            first = open_runs.pop()[1]
            if i - first < num_members:
                starts.append(first)
                ends.append(i)
        if not open_runs or open_runs[-1][0] < depth:
            open_runs.append((depth, first))
    return np.asarray(starts, np.int64), np.asarray(ends, np.int64)

"""The default cut: the contiguous one, improved by moving leaves and subtrees between ranks.

A contiguous cut duplicates little, but can only balance by whole neighbours; with few rows per rank that leaves several
per cent. From there the costliest bin gives a leaf or a subtree away, or exchanges one, while this makes the costlier
of the two bins lighter than it was. When nothing helps it any more, other bins bring together what they compute twice,
which makes room. Rows that are prefixes of others follow their leaf, where they cost nothing.

Legend: L leaves by rank among the leaves, R rows by rank in the sorted list, K bins (data-parallel ranks), U units of a
bin: its single leaves and its subtrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from areal_dta.tree.cost import CostModel, lower_bound
from areal_dta.tree.lcp import leaf_positions
from areal_dta.tree.partition_contiguous import contiguous
from areal_dta.tree.partition_greedy import ffd_tokens, ffd_tree_below
from areal_dta.tree.partition_units import LeafCosts, Units, merged, without
from areal_dta.tree.trie import SortedRows

__all__ = ["refined"]

_MIN_GAIN = 1e-7  # relative; a smaller gain is not worth a change
_WORK = 2_000_000  # leaf-to-bin evaluations of one search, about 0.1 s
_CALL_WORK = 1_000  # what one vectorised evaluation costs however short it is, in the same unit
_PAIR_WORK = 0.1  # of one pair of an exchange
_WIDE = 20_000  # evaluations for one source at most, before only the lightest bins and the neighbours are asked
_MIN_ASKED = 4
_EXCHANGE_UNITS = 256  # units of a bin that are tried in an exchange
_TRIED = 4  # exchanges with one bin whose exact cost is computed: the estimate leaves out what the two units share


def refined(rows: SortedRows, num_bins: int, model: CostModel) -> list[np.ndarray]:
    """Never costlier, in the maximum, than `contiguous`, `ffd_tree` and `ffd_tokens`; no bin is empty unless there are
    fewer rows than bins.
    """
    leaf_R = leaf_positions(rows)
    leaves = rows.subset(leaf_R)
    costs, bound = LeafCosts(leaves, model), lower_bound(leaves, num_bins, model)[0]
    best, best_cost = _improve(contiguous(leaves, num_bins, model), costs, bound)
    for greedy in (ffd_tree_below(rows, num_bins, model, best_cost), ffd_tokens(rows, num_bins, model)):
        start = _leaf_bins(greedy, leaf_R) if greedy is not None else None
        if start is not None and max(costs.bin(b) for b in start) < best_cost:
            rival, rival_cost = _improve(start, costs, bound)
            if rival_cost < best_cost:
                best, best_cost = rival, rival_cost
    bin_L = np.zeros(leaves.num_rows, np.int64)
    for k, members in enumerate(best):
        bin_L[members] = k
    bin_R = bin_L[np.searchsorted(leaf_R, np.arange(rows.num_rows))]
    by_bin = np.argsort(bin_R, kind="stable")
    bins = np.split(by_bin, np.cumsum(np.bincount(bin_R, minlength=num_bins))[:-1])
    return _fill(bins, rows, leaf_R)


def _leaf_bins(bins: Sequence[np.ndarray], leaf_R: np.ndarray) -> list[np.ndarray]:
    """The leaves of every bin, as ranks among the leaves. No bin gets costlier."""
    return [np.searchsorted(leaf_R, members[np.isin(members, leaf_R, assume_unique=True)]) for members in bins]


def _fill(bins: list[np.ndarray], rows: SortedRows, leaf_R: np.ndarray) -> list[np.ndarray]:
    """Give each empty bin a row of a bin with several. The shortest that is no leaf first: least is computed twice."""
    filled = list(bins)
    empty = [k for k, members in enumerate(bins) if not len(members)]
    if not empty:
        return filled
    bin_R = np.empty(rows.num_rows, np.int64)
    for k, members in enumerate(bins):
        bin_R[members] = k
    is_leaf_R = np.zeros(rows.num_rows, bool)
    is_leaf_R[leaf_R] = True
    for row in np.lexsort((rows.lens_R, is_leaf_R)).tolist():
        source = bin_R[row]
        if empty and len(filled[source]) > 1:
            filled[source] = filled[source][filled[source] != row]
            filled[empty.pop(0)] = np.asarray([row], np.int64)
    return filled


def _improve(start: Sequence[np.ndarray], costs: LeafCosts, bound: float) -> tuple[list[np.ndarray], float]:
    """(bins, cost of the costliest) at which no change helps, the bound or the work limit is reached."""
    search = _Search(start, costs)
    while search.loads_K.max() > bound * (1 + _MIN_GAIN) and search.work > 0:
        if not search.lighten() and not search.gather():
            break
    return search.bins, float(search.loads_K.max())


class _Goal(Enum):
    """What a change of two bins must do, measured by the smaller the better."""

    LIGHTEN = 0  # the costlier of the two gets lighter
    GATHER = 1  # the two together get lighter, and stay lighter than the costliest bin


class _Search:
    """Local search over bins of leaves. Its work limit is in evaluations and not in seconds, so that the result does
    not depend on the machine.
    """

    def __init__(self, start: Sequence[np.ndarray], costs: LeafCosts) -> None:
        self.bins = [np.asarray(b, np.int64) for b in start]
        self.loads_K = np.asarray([costs.bin(b) for b in self.bins])
        self.work = float(_WORK)
        self._costs = costs
        self._units_K: list[Units | None] = [None] * len(self.bins)

    def lighten(self) -> bool:
        """The best single move, or else an exchange, of the costliest bin; False if none makes it lighter."""
        costliest = int(self.loads_K.argmax())
        return self._move(costliest, _Goal.LIGHTEN) or self._exchange(costliest, _Goal.LIGHTEN)

    def gather(self) -> bool:
        """One change that lowers the sum of all loads and leaves the costliest bin alone or lighter; costliest bins
        first. No bin gives its only leaf away.
        """
        for source in np.argsort(-self.loads_K, kind="stable").tolist():
            if self.work <= 0:
                break
            if len(self.bins[source]) > 1 and (
                self._move(source, _Goal.GATHER) or self._exchange(source, _Goal.GATHER)
            ):
                return True
        return False

    def _move(self, source: int, goal: _Goal) -> bool:
        units = self._units(source)
        best, found = self._threshold(goal), None
        for k in self._asked(source):
            if goal is _Goal.LIGHTEN and self.loads_K[k] >= best:
                continue  # it would get heavier still
            added = self._added(k, units)
            value = self._value(goal, source, k, self.loads_K[source] - units.gain_U, self.loads_K[k] + added)
            unit = int(value.argmin())
            if value[unit] < best:
                best, found = value[unit], (k, unit)
        if found is None:
            return False
        k, unit = found
        rest, run = without(self.bins[source], units, unit)
        return self._change(goal, source, k, rest, merged(self.bins[k], run))

    def _exchange(self, source: int, goal: _Goal) -> bool:
        """A unit of one bin against a unit of another: the first bin with which one helps."""
        mine = self._units(source)
        given = _spread(mine.gain_U)
        mine = mine.take(given)
        for k in self._asked(source):
            theirs = self._units(k)
            if not theirs.num_units:
                continue
            theirs = theirs.take(_spread(theirs.gain_U))
            after_mine = (self.loads_K[source] - mine.gain_U)[:, None] + self._added(source, theirs)
            after_theirs = (self.loads_K[k] + self._added(k, mine))[:, None] - theirs.gain_U
            value = self._value(goal, source, k, after_mine, after_theirs)
            self.work -= _PAIR_WORK * value.size
            partner = value.argmin(axis=1)
            best_U = value[np.arange(len(partner)), partner]
            for u in np.argsort(best_U, kind="stable")[:_TRIED].tolist():
                if best_U[u] >= self._threshold(goal):
                    break
                rest, run = without(self.bins[source], mine, u)
                their_rest, their_run = without(self.bins[k], theirs, int(partner[u]))
                if self._change(goal, source, k, merged(rest, their_run), merged(their_rest, run)):
                    return True
        return False

    def _threshold(self, goal: _Goal) -> float:
        costliest = float(self.loads_K.max())
        return costliest * (1 - _MIN_GAIN) if goal is _Goal.LIGHTEN else -costliest * _MIN_GAIN

    def _value(self, goal: _Goal, source: int, k: int, after_mine: np.ndarray, after_theirs: np.ndarray) -> np.ndarray:
        worse = np.maximum(after_mine, after_theirs)
        if goal is _Goal.LIGHTEN:
            return worse
        saved = after_mine + after_theirs - (self.loads_K[source] + self.loads_K[k])
        return np.where(worse < self._threshold(_Goal.LIGHTEN), saved, np.inf)

    def _change(self, goal: _Goal, source: int, k: int, mine: np.ndarray, theirs: np.ndarray) -> bool:
        """Make the change if it does what it should by exact costs."""
        loads = np.asarray([self._costs.bin(mine), self._costs.bin(theirs)])
        if self._value(goal, source, k, loads[:1], loads[1:])[0] >= self._threshold(goal):
            return False
        for index, members, load in ((source, mine, loads[0]), (k, theirs, loads[1])):
            self.bins[index], self.loads_K[index], self._units_K[index] = members, load, None
        return True

    def _asked(self, source: int) -> Iterator[int]:
        """Bins to deal with: all, lightest first; of many the lightest ones, after those that hold the leaves next to
        the source's ends.
        """
        order = [k for k in np.argsort(self.loads_K, kind="stable").tolist() if k != source]
        most = max(_MIN_ASKED, _WIDE // self._units(source).num_units)
        if len(order) <= most:
            return iter(order)
        ends = self.bins[source][[0, -1]] + [-1, 1]
        beside = [k for k in order if np.isin(ends, self.bins[k], assume_unique=True).any()]
        return iter(beside + [k for k in order[:most] if k not in beside])

    def _units(self, k: int) -> Units:
        known = self._units_K[k]
        if known is None:
            known = self._units_K[k] = self._costs.units(self.bins[k])
            self.work -= _CALL_WORK + 5 * len(self.bins[k])
        return known

    def _added(self, k: int, units: Units) -> np.ndarray:
        self.work -= _CALL_WORK + units.num_units
        return self._costs.added(self.bins[k], units)


def _spread(gain_U: np.ndarray) -> np.ndarray:
    """Units of all sizes: at most `_EXCHANGE_UNITS` of them, evenly along the list sorted by size."""
    if len(gain_U) <= _EXCHANGE_UNITS:
        return np.arange(len(gain_U))
    by_size = np.argsort(gain_U, kind="stable")
    return by_size[np.linspace(0, len(gain_U) - 1, _EXCHANGE_UNITS).astype(np.int64)]

"""What any two rows of a sorted list share, and which rows are leaves, from the LCPs of neighbours.

Legend: R rows by rank in the sorted list, A pairs of ranks.
"""

from __future__ import annotations

import numpy as np

from areal_dta.tree.trie import SortedRows

__all__ = ["RangeMinimum", "leaf_positions"]


def leaf_positions(rows: SortedRows) -> np.ndarray:
    """Ranks of the rows that are neither a strict prefix of another row nor equal to a later one. The leaf that
    contains rank r is the first of them at r or after.
    """
    is_leaf_R = np.ones(rows.num_rows, bool)
    is_leaf_R[:-1] = rows.lcp_R[1:] != rows.lens_R[:-1]
    return np.flatnonzero(is_leaf_R)


class RangeMinimum:
    """Minima of windows of LCPs in constant time: a table of the minima of all windows of 1, 2, 4, ... entries."""

    def __init__(self, lcp_R: np.ndarray) -> None:
        levels = [np.asarray(lcp_R, np.int64)]
        while 2 << (len(levels) - 1) <= len(lcp_R):
            below, half = levels[-1], 1 << (len(levels) - 1)
            levels.append(np.minimum(below[:-half], below[half:]))
        self._offset_of_level = np.cumsum([0, *(len(level) for level in levels[:-1])])
        self._table = np.concatenate(levels)

    def over(self, a_A: np.ndarray, b_A: np.ndarray) -> np.ndarray:
        """Tokens that the rows of ranks a < b share: the minimum over (a, b]. Any value where a == b."""
        level = np.maximum(np.frexp((b_A - a_A).astype(np.float64))[1] - 1, 0)
        offset = self._offset_of_level[level]
        return np.minimum(self._table[offset + np.minimum(a_A + 1, b_A)], self._table[offset + b_A + 1 - (1 << level)])

    def between(self, ranks: np.ndarray) -> np.ndarray:
        """Tokens that each of these ascending ranks shares with the one before, without the first."""
        return self.over(ranks[:-1], ranks[1:])

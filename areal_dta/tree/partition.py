"""Cuts a sorted batch over data-parallel ranks so that the costliest rank is as light as possible.

Every method returns one array of sorted positions per rank, ascending; together they are all positions. No rank is
empty while there are at least as many rows as ranks: taking a row away never makes a rank costlier, and a row alone is
never costlier than a set it came from. All of them are deterministic, ties go to the lower index.

`refined` is the one to use. `contiguous` is the published method, `ffd_tokens` and `ffd_tree` are greedy baselines.

Legend: K data-parallel ranks (called bins in this package: a row has a rank in the sorted list, too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.partition_contiguous import contiguous
from areal_dta.tree.partition_greedy import ffd_tokens, ffd_tree
from areal_dta.tree.partition_refined import refined
from areal_dta.tree.trie import SortedRows

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "bin_cost",
    "bin_costs",
    "contiguous",
    "duplicated_tokens",
    "ffd_tokens",
    "ffd_tree",
    "partition",
    "refined",
]

METHODS: dict[str, Callable[[SortedRows, int, CostModel], list[np.ndarray]]] = {
    "refined": refined,
    "contiguous": contiguous,
    "ffd_tokens": ffd_tokens,
    "ffd_tree": ffd_tree,
}
DEFAULT_METHOD = "refined"


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


def bin_costs(rows: SortedRows, bins: Sequence[np.ndarray], model: CostModel) -> np.ndarray:
    """``[K]`` float64: the trie cost of every bin."""
    return np.asarray([bin_cost(rows, members, model) for members in bins])


def duplicated_tokens(rows: SortedRows, bins: Sequence[np.ndarray]) -> int:
    """Tokens computed by more than one bin: what the cut costs over one machine with all rows."""
    return int(bin_costs(rows, bins, TREE_TOKENS).sum()) - rows.tree_tokens

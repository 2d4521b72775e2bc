"""Minibatches of a batch and their cuts over data-parallel ranks. Pure and deterministic.

Every optimizer step is a barrier, so a batch of M minibatches takes the sum over them of the heaviest rank's cost, and
each is cut on its own. Groups are dealt to minibatches by a seeded shuffle first: neighbours of the sorted list in one
minibatch would duplicate least, but each step would then see few tasks.

Legend: R rows by rank in the sorted list, M minibatches, K ranks (bins).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.partition import bin_costs, partition
from areal_dta.tree.trie import SortedRows

__all__ = ["MinibatchCuts", "cut_minibatches", "deal_groups"]


@dataclass(frozen=True, eq=False)
class MinibatchCuts:
    """``bins[m][k]`` holds the sorted positions, ascending, that rank k trains in minibatch m; ``costs_MK`` and
    ``tree_tokens_MK`` are what they cost there.
    """

    bins: tuple[tuple[np.ndarray, ...], ...]
    costs_MK: np.ndarray
    tree_tokens_MK: np.ndarray

    @property
    def step_cost(self) -> float:
        """The objective: the heaviest rank of each minibatch, summed."""
        return float(self.costs_MK.max(axis=1, initial=0.0).sum())

    def of_rank(self, k: int) -> np.ndarray:
        """All positions of rank k, ascending."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(bins[k] for bins in self.bins)]))


def deal_groups(num_groups: int, num_minibatches: int, seed: int, step: int) -> np.ndarray:
    """The minibatch of each group, int32: a deal by seed and step, group counts differ by at most one. Raises
    ValueError for fewer than one minibatch.
    """
    if num_minibatches < 1:
        raise ValueError(f"cannot deal {num_groups} groups to {num_minibatches} minibatches; give at least 1")
    minibatch = np.empty(num_groups, np.int32)
    minibatch[np.random.default_rng([seed, step]).permutation(num_groups)] = np.arange(num_groups) % num_minibatches
    return minibatch


def cut_minibatches(
    rows: SortedRows, minibatch_R: np.ndarray, num_minibatches: int, num_bins: int, method: str, model: CostModel
) -> MinibatchCuts:
    """Cut each minibatch over all ranks. Raises ValueError as `partition`, or for a minibatch out of range."""
    minibatch_R = np.asarray(minibatch_R, np.int64)
    if len(minibatch_R) != rows.num_rows or ((minibatch_R < 0) | (minibatch_R >= num_minibatches)).any():
        raise ValueError(
            f"each of the {rows.num_rows} rows needs a minibatch from 0 to {num_minibatches - 1}, got "
            f"{len(minibatch_R)} values: {minibatch_R[:8].tolist()}..."
        )
    cuts, costs, tree_tokens = [], [], []
    for m in range(num_minibatches):
        positions = np.flatnonzero(minibatch_R == m)
        part = rows.subset(positions)
        bins = partition(method, part, num_bins, model)
        cuts.append(tuple(positions[members] for members in bins))
        costs.append(bin_costs(part, bins, model))
        tree_tokens.append(bin_costs(part, bins, TREE_TOKENS).astype(np.int64))
    shape = (num_minibatches, num_bins)
    return MinibatchCuts(tuple(cuts), np.reshape(costs, shape), np.reshape(tree_tokens, shape))

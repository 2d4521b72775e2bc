"""What a set of rows costs to train on as a trie: computed tokens and attention pairs.

A trie token at depth d costs one pass through the dense layers and d+1 query-key pairs. Both are additive over the
sorted list: the row of rank r adds its tokens from its LCP on. A run of ranks that starts at r pays the first row in
full.

Legend: R rows by rank (sorted position), R1 that plus one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from areal_dta.tree.trie import SortedRows

__all__ = ["TREE_TOKENS", "CostModel", "RunCosts", "flop_model", "lower_bound"]


@dataclass(frozen=True)
class CostModel:
    """``cost = per_token * tokens + per_pair * pairs``; the unit is the model's (FLOP, or tokens for `TREE_TOKENS`)."""

    per_token: float
    per_pair: float

    def span(self, start: ArrayLike, end: ArrayLike) -> np.ndarray:
        """Cost of the path positions start <= d < end, elementwise, as float64."""
        start, end = np.asarray(start, np.float64), np.asarray(end, np.float64)
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.per_token * (end - start) + self.per_pair * pairs

    def tree(self, rows: SortedRows) -> float:
        """Cost of all rows as one trie."""
        return float(self.span(rows.lcp_R, rows.lens_R).sum())


TREE_TOKENS = CostModel(1.0, 0.0)


def lower_bound(rows: SortedRows, num_bins: int, model: CostModel) -> tuple[float, bool]:
    """(no cut over `num_bins` ranks has a lighter heaviest rank than this, whether the costliest row sets it).

    The costliest row must go somewhere, and every rank that has work computes the prefix common to all rows: the mean
    is at least that prefix plus an equal part of the rest.
    """
    if not rows.num_rows:
        return 0.0, False
    costliest = float(model.span(0, rows.lens_R).max())
    common_tokens = rows.lcp_R[1:].min() if rows.num_rows > 1 else rows.lens_R[0]
    mean = (model.tree(rows) + (num_bins - 1) * float(model.span(0, common_tokens))) / num_bins
    return max(costliest, mean), costliest >= mean


def flop_model(
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    vocab_size: int,
) -> CostModel:
    """FLOP of forward and backward (3 x forward) of a dense gated-FFN decoder: 2 per weight and token, 4 per head
    dimension, head and pair (scores and values). The embedding look-up is free, the head is not; norms are left out.
    """
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    weights = num_layers * (attention + 3 * hidden_size * ffn_size) + hidden_size * vocab_size
    return CostModel(per_token=3.0 * 2 * weights, per_pair=3.0 * 4 * num_layers * num_heads * head_dim)


@dataclass(frozen=True)
class RunCosts:
    """Costs of contiguous runs of ranks in constant time: ``run(i, j)`` is the trie cost of ranks i..j-1.

    ``prefix_R1`` is the prefix sum of marginal costs; ``start_extra_R`` what a run that starts at rank r pays on top,
    the prefix it would have shared with rank r-1.
    """

    prefix_R1: np.ndarray
    start_extra_R: np.ndarray

    @classmethod
    def of(cls, rows: SortedRows, model: CostModel) -> RunCosts:
        prefix_R1 = np.zeros(rows.num_rows + 1)
        np.cumsum(model.span(rows.lcp_R, rows.lens_R), out=prefix_R1[1:])
        return cls(prefix_R1, model.span(np.zeros_like(rows.lcp_R), rows.lcp_R))

    @property
    def num_rows(self) -> int:
        return len(self.start_extra_R)

    def run(self, i: int, j: int) -> float:
        if i >= j:
            return 0.0
        return float(self.start_extra_R[i] + self.prefix_R1[j] - self.prefix_R1[i])

    def furthest(self, i: int, limit: float) -> int:
        """The largest j with ``run(i, j) <= limit``, at least i."""
        j = int(np.searchsorted(self.prefix_R1, limit - self.start_extra_R[i] + self.prefix_R1[i], side="right")) - 1
        while j < self.num_rows and self.run(i, j + 1) <= limit:  # the sum was rounded differently
            j += 1
        while j > i and self.run(i, j) > limit:
            j -= 1
        return max(j, i)

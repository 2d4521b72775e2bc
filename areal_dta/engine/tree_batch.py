"""Rows as a trie, with everything a walk looks up per block: predicting pairs, gathers and scatters.

Legend: U trie tokens, E predicting pairs (source, target) sorted by source, S rows of a block, T row tokens,
t predicting positions of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from areal_dta.engine.rows import Rows, predicting_positions
from areal_dta.tree.plan import Block, PlanSettings
from areal_dta.tree.trie import Trie, build_trie, unshared_trie

__all__ = ["TreeBatch"]


def _sharing(settings: PlanSettings) -> str:
    if settings.kind != "dense":
        return "tree"
    return "leaves" if settings.leaf_merge else "none"


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """A batch of rows and its trie (for a dense plan a forest without sharing)."""

    rows: Rows
    trie: Trie
    sharing: str  # "tree", or for a dense plan "none" or "leaves"

    @classmethod
    def of(cls, rows: Rows, settings: PlanSettings) -> TreeBatch:
        sharing = _sharing(settings)
        if sharing == "tree":
            return cls(rows, build_trie(rows.ids_T, rows.offsets_S1), sharing)
        return cls(rows, unshared_trie(rows.ids_T, rows.offsets_S1, settings.leaf_merge), sharing)

    def suits(self, settings: PlanSettings) -> bool:
        """Whether a plan of these settings walks this trie."""
        return self.sharing == _sharing(settings)

    @property
    def num_tokens(self) -> int:
        return self.trie.num_tokens

    @cached_property
    def subtree_end_U(self) -> np.ndarray:
        """Per trie token one past the last token of its subtree."""
        bounds_G1 = np.append(self.trie.segment_start_G, self.trie.num_tokens)
        return np.repeat(bounds_G1[self.trie.segment_end_G], self.trie.segment_len_G)

    @cached_property
    def target_E(self) -> np.ndarray:
        """Target token of every pair, sorted by its source (``parent_U[target_E]``)."""
        targets = np.flatnonzero(self.trie.parent_U >= 0)
        return targets[np.argsort(self.trie.parent_U[targets], kind="stable")]

    @cached_property
    def pair_start_U1(self) -> np.ndarray:
        """Pairs of source u are ``pair_start_U1[u] .. pair_start_U1[u+1]-1``: one per child of u."""
        return np.searchsorted(self.trie.parent_U[self.target_E], np.arange(self.num_tokens + 1))

    @cached_property
    def position_t(self) -> np.ndarray:
        return predicting_positions(self.rows)

    @cached_property
    def source_t(self) -> np.ndarray:
        """Trie token at each predicting position of the rows."""
        return self.trie.token_index_T[self.position_t]

    @cached_property
    def target_t(self) -> np.ndarray:
        """Trie token predicted there."""
        return self.trie.token_index_T[self.position_t + 1]

    def sum_to(self, index_t: np.ndarray, values_T: np.ndarray) -> np.ndarray:
        """Scatter-add row values of predicting positions onto trie tokens [U], float64."""
        return np.bincount(index_t, weights=values_T[self.position_t], minlength=self.num_tokens)

    def block_pairs(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """(row of the block, target trie token) of every pair whose source is in the block, by row."""
        starts_S = self.pair_start_U1[block.tokens_S]
        counts_S = self.pair_start_U1[block.tokens_S + 1] - starts_S
        row_E = np.repeat(np.arange(block.num_tokens), counts_S)
        first_E = np.repeat(starts_S - (np.cumsum(counts_S) - counts_S), counts_S)
        return row_E, self.target_E[first_E + np.arange(len(row_E))]

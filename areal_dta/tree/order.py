"""Orders of the children of every trie segment: which subtree a depth-first walk enters first.

Any order gives the same gradients; it decides what is on the stack when, and what must be recomputed.

Legend: G segments of the trie, in depth-first order; C child links (one per segment, roots included).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_dta.tree.trie import Trie

__all__ = ["RULES", "Children", "order_children", "subtree_tokens"]

RULES = ("lexicographic", "heavy_first", "heavy_last")


@dataclass(frozen=True)
class Children:
    """Ordered children in compressed form: those of segment g are ``child_C[start_G2[g] : start_G2[g + 1]]``; the roots
    of the forest come last, as the children of a virtual segment G.
    """

    child_C: np.ndarray
    start_G2: np.ndarray

    def of(self, segment: int) -> np.ndarray:
        return self.child_C[self.start_G2[segment] : self.start_G2[segment + 1]]

    @property
    def roots(self) -> np.ndarray:
        return self.child_C[self.start_G2[-2] :]

    def walk(self) -> list[int]:
        """All segments in the depth-first order these children define (parents first)."""
        order, stack = [], self.roots[::-1].tolist()
        while stack:
            segment = stack.pop()
            order.append(segment)
            stack.extend(self.of(segment)[::-1].tolist())
        return order


def subtree_tokens(trie: Trie) -> np.ndarray:
    """Trie tokens in the subtree of each segment, itself included."""
    token_end_G1 = np.append(trie.segment_start_G, trie.num_tokens)
    return token_end_G1[trie.segment_end_G] - trie.segment_start_G


def order_children(trie: Trie, rule: str = "lexicographic") -> Children:
    """Children by token id (``lexicographic``: the trie's own order), or by subtree tokens, largest first or last.

    ``heavy_last`` visits the small subtrees while little is on the stack. Raises ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"unknown child order {rule!r}; choose one of {', '.join(RULES)}")
    num_segments = trie.num_segments
    parent = np.where(trie.segment_parent_G < 0, num_segments, trie.segment_parent_G)
    weight = np.zeros(num_segments, np.int64) if rule == "lexicographic" else subtree_tokens(trie)
    key = -weight if rule == "heavy_first" else weight
    child_C = np.lexsort((np.arange(num_segments), key, parent))
    start_G2 = np.zeros(num_segments + 2, np.int64)
    np.cumsum(np.bincount(parent, minlength=num_segments + 1), out=start_G2[1:])
    return Children(child_C, start_G2)

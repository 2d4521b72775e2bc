"""The draft vocabulary: the tokens worth drafting, since the head is most of a small drafter's cost. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["count_tokens", "covered_share", "frequent_tokens"]


def count_tokens(sequences: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each token of the vocabulary occurs in ``sequences`` of ids: counts (V,), int64."""
    counts_V = np.zeros(vocab_size, np.int64)
    for ids in sequences:
        counts_V += np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
    return counts_V


def frequent_tokens(counts_V: np.ndarray, size: int, always: Iterable[int] = ()) -> np.ndarray:
    """Ids (size,) in ascending order: ``always`` (end of sequence, say), then the most frequent; ties to smaller ids.

    Tokens never seen fill the rest, smaller ids (in most tokenizers the more common ones) first.
    """
    kept = np.unique(np.fromiter(always, np.int64))
    if not len(kept) <= size <= len(counts_V):
        raise ValueError(
            f"draft vocabulary of {size} tokens, {len(kept)} of them always kept, from a vocabulary of "
            f"{len(counts_V)}; choose a size between the two"
        )
    rank = np.array(counts_V, np.int64)
    rank[kept] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank, kind="stable")[:size])


def covered_share(counts_V: np.ndarray, draft_ids_Vd: np.ndarray) -> float:
    """Share of the counted tokens that the draft vocabulary holds: an upper bound of top-1 accuracy."""
    total = int(counts_V.sum())
    return float(counts_V[draft_ids_Vd].sum()) / total if total else 0.0

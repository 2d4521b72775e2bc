"""Rows, cost models and slow twins that the tests of the partition share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.trie import sort_rows

MODELS = st.sampled_from([TREE_TOKENS, CostModel(3.0, 1.0), CostModel(0.7, 0.01), CostModel(0.0, 1.0)])


def sort(rows):
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    return sort_rows(np.asarray([t for r in rows for t in r], np.int32), offsets)


def naive_cost(rows, model):
    depths = [len(p) for p in {tuple(r[: n + 1]) for r in rows for n in range(len(r))}]
    return model.per_token * len(depths) + model.per_pair * sum(depths)

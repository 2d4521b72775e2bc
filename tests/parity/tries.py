"""Random row sets that cover the shapes a prefix tree can take."""

from __future__ import annotations

import numpy as np

from areal_dta.engine import Rows

VOCAB = 1024  # enough for a thousand children of one token
_ALPHABET = 96  # of random tokens: siblings meet by chance


def _tokens(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(0, _ALPHABET, int(rng.integers(low, high))).tolist()


def three_levels(rng: np.random.Generator) -> list[list[int]]:
    rows = []
    root = _tokens(rng, 5, 12)
    for _ in range(3):
        middle = root + _tokens(rng, 1, 8)
        for _ in range(2):
            inner = middle + _tokens(rng, 1, 6)
            rows += [inner + _tokens(rng, 1, 9) for _ in range(3)]
    return rows


def duplicates_and_prefixes(rng: np.random.Generator) -> list[list[int]]:
    rows = three_levels(rng)[:8]
    rows += [list(rows[0]), list(rows[0]), rows[1][:7], rows[2][:3], rows[3][:-1], rows[4] + _tokens(rng, 1, 4)]
    return [rows[i] for i in rng.permutation(len(rows))]


def one_token_rows(rng: np.random.Generator) -> list[list[int]]:
    rows = three_levels(rng)[:4]
    return [[3], [3], [5], *rows, rows[0][:1]]


def one_leaf(rng: np.random.Generator) -> list[list[int]]:
    return [_tokens(rng, 25, 30)]


def chain(rng: np.random.Generator) -> list[list[int]]:
    """Every row extends the one before: one leaf, all others end inside it."""
    row, rows = _tokens(rng, 2, 4), []
    for _ in range(7):
        rows.append(list(row))
        row = row + _tokens(rng, 1, 5)
    return rows


def comb(rng: np.random.Generator) -> list[list[int]]:
    """A trunk with a short branch at many depths, as stripped thinking leaves."""
    trunk, rows = _tokens(rng, 6, 9), []
    for _ in range(9):
        rows.append(trunk + _tokens(rng, 2, 6))
        trunk = trunk + _tokens(rng, 1, 4)
    return [*rows, trunk]


def forest(rng: np.random.Generator) -> list[list[int]]:
    """Several roots of different sizes."""
    return [[root] + _tokens(rng, 0, 9) for root in (1, 1, 2, 7, 7, 7, 9)]


def many_siblings(rng: np.random.Generator) -> list[list[int]]:
    prefix = _tokens(rng, 6, 9)
    return [prefix + _tokens(rng, 1, 5) for _ in range(40)]


def thousand_siblings() -> Rows:
    """A thousand children of one token, each with one more token; all rows of the same length."""
    return Rows.from_lists([[1, 2, 3, 4, sibling, 5] for sibling in range(1000)])


def deep_chain() -> Rows:
    """Sixty branching tokens below each other, and a row that ends at each of them."""
    trunk = np.random.default_rng(0).integers(0, _ALPHABET, 64).tolist()
    branches = [trunk[:length] + [_ALPHABET + length] for length in range(4, 64)]
    return Rows.from_lists([*branches, *(trunk[:length] for length in range(4, 65))])


SHAPES = (three_levels, duplicates_and_prefixes, one_token_rows, one_leaf, chain, comb, forest, many_siblings)


def random_rows(shape: str, seed: int) -> Rows:
    """Rows of one of the shapes above."""
    make = next(f for f in SHAPES if f.__name__ == shape)
    return Rows.from_lists(make(np.random.default_rng(seed)))


def subset(rows: Rows, keep: list[int]) -> tuple[Rows, np.ndarray]:
    """(rows ``keep``, flat token indices of them)."""
    spans = [np.arange(rows.offsets_S1[i], rows.offsets_S1[i + 1]) for i in keep]
    index = np.concatenate([*spans, np.zeros(0, np.int64)]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64)
    return Rows(rows.ids_T[index], offsets), index

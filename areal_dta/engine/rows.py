"""Training rows, the per-token values the engines give back, and the checks on what they are given.

Row layout is AReaL's rolled one: index t of a row speaks about token t+1. ``logprobs_T[t]`` is log p(ids[t+1] |
ids[..t]) with the temperature applied, ``entropy_T[t]`` the entropy of that distribution. A row's last position
predicts nothing: it holds 0 in both, and whatever coefficient is given there is ignored. A critic's values speak about
the position itself, so a row's last one is like any other.

Legend: S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

__all__ = ["Engine", "GradientSync", "RowValues", "Rows", "WalkStats", "checked_coefficients", "predicting_positions"]

GradientSync = Literal["sharded", "full", "none"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Ragged token rows: ``ids_T`` int32, ``offsets_S1`` from 0 to T, increasing; an empty shard has no row."""

    ids_T: np.ndarray
    offsets_S1: np.ndarray

    def __post_init__(self) -> None:
        ids, offsets = np.asarray(self.ids_T), np.asarray(self.offsets_S1)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"ids_T must be a flat integer array, got {ids.dtype} of shape {ids.shape}")
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids):
            raise ValueError(f"offsets_S1 must run from 0 to {len(ids)}, got {offsets[:8].tolist()}")
        if (np.diff(offsets) <= 0).any():
            raise ValueError(f"row {int((np.diff(offsets) <= 0).argmax())} is empty; leave rows without tokens out")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
            raise ValueError(f"token ids run from {ids.min()} to {ids.max()}, expected 0 to {(1 << 31) - 1}")
        object.__setattr__(self, "ids_T", np.ascontiguousarray(ids, np.int32))
        object.__setattr__(self, "offsets_S1", np.ascontiguousarray(offsets, np.int64))

    @classmethod
    def from_lists(cls, rows: list[list[int]]) -> Rows:
        """Rows from token lists."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.asarray([token for row in rows for token in row], np.int32), offsets)

    @property
    def num_rows(self) -> int:
        return len(self.offsets_S1) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id lies outside 0 .. vocab_size-1."""
        if len(self.ids_T) and not 0 <= int(self.ids_T.min()) <= int(self.ids_T.max()) < vocab_size:
            low, high = int(self.ids_T.min()), int(self.ids_T.max())
            raise ValueError(
                f"token ids run from {low} to {high}, the model's vocabulary has {vocab_size}; check tokenizer_path"
            )


@dataclass(frozen=True)
class RowValues:
    """Per-token values in row layout, fp32 (fp64 for an fp64 model), on the policy's device, without graph."""

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor | None


@dataclass(frozen=True)
class WalkStats:
    """What the last call did.

    Tokens of all rows, distinct tokens of the tree, blocks, attention tiles per layer, tokens computed twice; seconds
    of sorting and planning, and of the whole call; predicted seconds (0: no time model) and peak bytes.
    """

    row_tokens: int = 0
    tree_tokens: int = 0
    num_blocks: int = 0
    num_tiles: int = 0
    recomputed_tokens: int = 0
    plan_s: float = 0.0
    seconds: float = 0.0
    predicted_s: float = 0.0
    predicted_peak_bytes: int = 0


class Engine(Protocol):
    """The two ways to compute the same numbers: the tree walk and the dense loop."""

    stats: WalkStats

    def forward(
        self, rows: Rows, temperature: float = 1.0, want_entropy: bool = False, need_T: np.ndarray | None = None
    ) -> RowValues: ...

    def backward(
        self, rows: Rows, dlogp_T: torch.Tensor, dentropy_T: torch.Tensor | None = None, temperature: float = 1.0, *,
        mask_T: np.ndarray | torch.Tensor | None = None, sync: GradientSync = "sharded",
    ) -> None: ...  # fmt: skip

    def forward_values(self, rows: Rows, need_T: np.ndarray | None = None) -> torch.Tensor: ...

    def backward_values(
        self, rows: Rows, dvalue_T: torch.Tensor, *,
        mask_T: np.ndarray | torch.Tensor | None = None, sync: GradientSync = "sharded",
    ) -> None: ...  # fmt: skip


def predicting_positions(rows: Rows) -> np.ndarray:
    """Flat indices t of all positions that predict a token (t+1): every position but each row's last."""
    keep = np.ones(rows.num_tokens, bool)
    keep[rows.offsets_S1[1:] - 1] = False
    return np.flatnonzero(keep)


def checked_coefficients(
    name: str, coefficients_T: torch.Tensor | None, rows: Rows, mask_T: np.ndarray | torch.Tensor | None, *,
    with_last: bool = False,
) -> np.ndarray | None:  # fmt: skip
    """Coefficients as float64 of row layout, zero where masked and, unless ``with_last``, at each row's last position,
    whatever stood there.

    Raises ValueError for a wrong length, and for a NaN or infinity where it would count.
    """
    if coefficients_T is None:
        return None
    values = coefficients_T.detach().to("cpu", torch.float64).numpy().copy()
    if values.shape != (rows.num_tokens,):
        raise ValueError(f"{name} has shape {values.shape}, the rows have {rows.num_tokens} tokens")
    keep = np.ones(rows.num_tokens, bool)
    if not with_last:
        keep[rows.offsets_S1[1:] - 1] = False
    if mask_T is not None:
        mask = np.asarray(mask_T.cpu() if isinstance(mask_T, torch.Tensor) else mask_T).astype(bool)
        if mask.shape != keep.shape:
            raise ValueError(f"mask_T has shape {mask.shape}, the rows have {rows.num_tokens} tokens")
        keep &= mask
    values[~keep] = 0.0
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = int(np.searchsorted(rows.offsets_S1, bad[0], side="right")) - 1
        where = f"row {row}, position {int(bad[0] - rows.offsets_S1[row])}"
        raise ValueError(
            f"{len(bad)} coefficients in {name} are not finite, the first {values[bad[0]]} at {where}; "
            "fix the loss, or pass mask_T if these positions carry none"
        )
    return values

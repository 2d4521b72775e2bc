"""The linearised training step between a padded batch and the engine; no AReaL in here.

A loss needs only small per-token arrays, so one step is: forward log-probs of all rows (part 1), the loss on them as
leaves (part 2), and a backward walk of the model with dL/dlogp and dL/dentropy as given coefficients (part 3). The
chain rule makes that the exact gradient.

Legend of shape suffixes: S rows, L longest row, T tokens of all rows laid end to end. Row layout is AReaL's: position t
holds the log-prob of token t+1; a row's last position predicts nothing, holds 0 and gets no gradient.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_dta.engine import Engine, GradientSync, MegatronPolicy, Rows, RowValues

__all__ = [
    "Coefficients",
    "ForwardMemo",
    "LinearStep",
    "flat_mask",
    "loss_coefficients",
    "pad_values",
    "rows_of_batch",
]

LossFn = Callable[..., torch.Tensor]
WeightFn = Callable[[dict[str, Any]], torch.Tensor]


def rows_of_batch(batch: dict[str, Any]) -> Rows:
    """Token ids of a padded batch as ragged rows. Raises ValueError for left padding, gaps and empty rows."""
    mask_SL = batch["attention_mask"].bool().cpu().numpy()
    lengths_S = mask_SL.sum(-1)
    if (lengths_S == 0).any():
        raise ValueError(f"row {int(np.argmin(lengths_S))} of the batch has no token; leave empty rows out")
    if not (mask_SL == (np.arange(mask_SL.shape[1])[None, :] < lengths_S[:, None])).all():
        raise ValueError("attention_mask has gaps or left padding; rows must be padded on the right")
    offsets_S1 = np.zeros(len(lengths_S) + 1, np.int64)
    np.cumsum(lengths_S, out=offsets_S1[1:])
    return Rows(ids_T=batch["input_ids"].cpu().numpy()[mask_SL].astype(np.int32), offsets_S1=offsets_S1)


def pad_values(values_T: torch.Tensor, attention_mask_SL: torch.Tensor) -> torch.Tensor:
    """Per-token values as ``[S, L]``, 0 at padding."""
    out_SL = values_T.new_zeros(attention_mask_SL.shape)
    out_SL[attention_mask_SL.bool().to(values_T.device)] = values_T
    return out_SL


def flat_mask(mask_SL: torch.Tensor, attention_mask_SL: torch.Tensor) -> np.ndarray:
    """A padded mask as bool per token."""
    return mask_SL.bool()[attention_mask_SL.bool()].cpu().numpy()


class ForwardMemo:
    """Log-probs and entropies of the last forward pass, valid for one state of the weights (``generation``).

    Proximal log-probs are computed right before the first minibatch is trained, with the same weights: its part 1 is a
    look-up here.
    """

    def __init__(self) -> None:
        self._key: tuple[int, float] | None = None
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._has_T = np.zeros(0, bool)
        self._values: RowValues | None = None

    def store(
        self, generation: int, temperature: float, rows: Rows, values: RowValues, need_T: np.ndarray | None = None
    ) -> None:
        self._key = (generation, temperature)
        self._has_T = np.ones(rows.num_tokens, bool) if need_T is None else need_T
        self._values = values
        self._spans = dict(zip(_row_digests(rows), _spans(rows), strict=True))

    def fetch(
        self, generation: int, temperature: float, rows: Rows, need_T: np.ndarray | None = None
    ) -> RowValues | None:
        """The values of ``rows`` if the stored pass had them all (where needed), same weights and temperature."""
        if self._values is None or self._key != (generation, temperature):
            return None
        found = [self._spans.get(digest) for digest in _row_digests(rows)]
        spans = [span for span in found if span is not None]
        if len(spans) != len(found) or not spans:
            return None
        where_T = np.concatenate([np.arange(lo, hi) for lo, hi in spans])
        has_T = self._has_T[where_T]
        if not (has_T if need_T is None else has_T | ~need_T).all():
            return None
        index_T = torch.from_numpy(where_T).to(self._values.logprobs_T.device)
        entropy_T = self._values.entropy_T
        return RowValues(
            logprobs_T=self._values.logprobs_T[index_T], entropy_T=None if entropy_T is None else entropy_T[index_T]
        )

    def clear(self) -> None:
        self._key, self._values, self._spans = None, None, {}


@dataclass(frozen=True)
class Coefficients:
    """Part 2's outcome: the loss as the loss function returned it, and d(scale * loss)/d(row values)."""

    loss: float
    dlogp_T: torch.Tensor
    dentropy_T: torch.Tensor | None  # None: the loss does not depend on entropy

    @property
    def num_not_finite(self) -> int:
        parts = (self.dlogp_T, self.dentropy_T)
        return sum(int((~torch.isfinite(part)).sum()) for part in parts if part is not None)


def loss_coefficients(
    values: RowValues,
    rows: Rows,
    packed: dict[str, Any],
    loss_fn: LossFn,
    scale: float,
    need_T: np.ndarray | None = None,
) -> Coefficients:
    """Call ``loss_fn(logprobs_T, entropy_T, packed)`` once and differentiate ``scale * loss`` with respect to both.

    ``scale`` 0 (no loss token on this rank) still calls it, because the statistics it records are reduced over all
    ranks. Positions whose coefficient is exactly 0 stay exactly 0. A row's last position gets none, nor does any
    outside ``need_T``.
    """
    entropy_T = torch.zeros_like(values.logprobs_T) if values.entropy_T is None else values.entropy_T
    with torch.enable_grad():
        logp_T = values.logprobs_T.detach().float().clone().requires_grad_()
        ent_T = entropy_T.detach().float().clone().requires_grad_()
        loss = loss_fn(logp_T, ent_T, packed)
        if scale == 0 or not loss.requires_grad:
            return Coefficients(float(loss.detach()), torch.zeros_like(logp_T), None)
        dlogp_T, dent_T = torch.autograd.grad(loss * scale, (logp_T, ent_T), allow_unused=True)
    excluded_T = np.zeros(rows.num_tokens, bool) if need_T is None else ~need_T
    excluded_T[rows.offsets_S1[1:] - 1] = True
    exclude_T = torch.from_numpy(excluded_T).to(logp_T.device)
    dlogp_T = torch.zeros_like(logp_T) if dlogp_T is None else dlogp_T.masked_fill(exclude_T, 0.0)
    dent_T = None if dent_T is None else dent_T.masked_fill(exclude_T, 0.0)
    return Coefficients(float(loss.detach()), dlogp_T, dent_T if dent_T is not None and dent_T.any() else None)


class LinearStep:
    """The three parts on one rank. With ``reuse_forward`` part 1 may be a look-up in the forward pass just done.

    This is a policy's step; `areal_dta.value_step` is a critic's.
    """

    def __init__(self, policy: MegatronPolicy, engine: Engine, temperature: float, reuse_forward: bool) -> None:
        self.policy, self.engine = policy, engine
        self.temperature, self.reuse_forward = temperature, reuse_forward
        self.gradient_sync: GradientSync = "sharded"
        self.num_reused = 0  # parts 1 that were a look-up
        self._rows: Rows | None = None
        self.last: tuple[Rows, Coefficients] | None = None  # of the last `accumulate`, for replays and tests
        self._generation = 0  # counts changes of the weights
        self._memo = ForwardMemo()

    def weights_changed(self) -> None:
        """Forget values of older weights; to be called after every step and load."""
        self._generation += 1
        self._memo.clear()

    def rows_of(self, batch: dict[str, Any]) -> Rows:
        """`rows_of_batch`; equal rows get the last object again, so that the engine keeps its tree of them."""
        rows, last = rows_of_batch(batch), self._rows
        if last is not None and all(map(np.array_equal, (last.offsets_S1, last.ids_T), (rows.offsets_S1, rows.ids_T))):
            return last
        self._rows = rows
        return rows

    def forward(self, rows: Rows, remember: bool, need_T: np.ndarray | None = None) -> RowValues:
        """Log-probs, and with `remember` entropies too, kept for a `part1` of the same rows with the same weights.

        ``need_T`` (bool) limits the work to these positions; the others hold 0.
        """
        remember = remember and self.reuse_forward
        values = self._compute(rows, remember, need_T)
        if remember:
            self._memo.store(self._generation, self.temperature, rows, values, need_T)
        return values

    def part1(self, rows: Rows, need_T: np.ndarray | None = None) -> RowValues:
        """Log-probs and entropies of `rows` under the current weights, at least where ``need_T`` asks for them."""
        if self.reuse_forward:
            known = self._memo.fetch(self._generation, self.temperature, rows, need_T)
            if known is not None:
                self.num_reused += 1
                return known
        return self._compute(rows, True, need_T)

    def _compute(self, rows: Rows, want_entropy: bool, need_T: np.ndarray | None) -> RowValues:
        """Part 1 without a memory."""
        return self.engine.forward(rows, temperature=self.temperature, want_entropy=want_entropy, need_T=need_T)

    def _loss(self, values: RowValues, packed: dict[str, Any], loss_fn: LossFn) -> torch.Tensor:
        entropy_T = torch.zeros_like(values.logprobs_T) if values.entropy_T is None else values.entropy_T
        return loss_fn(values.logprobs_T.float(), entropy_T.float(), packed)

    def _differentiate(
        self, values: RowValues, rows: Rows, packed: dict[str, Any], loss_fn: LossFn, scale: float,
        need_T: np.ndarray | None,
    ) -> Coefficients:  # fmt: skip
        """Part 2."""
        return loss_coefficients(values, rows, packed, loss_fn, scale, need_T)

    def _walk_back(self, rows: Rows, coefficients: Coefficients) -> None:
        """Part 3."""
        self.engine.backward(
            rows,
            coefficients.dlogp_T,
            coefficients.dentropy_T,
            temperature=self.temperature,
            sync=self.gradient_sync,
        )

    def accumulate(
        self,
        rows: Rows,
        packed: dict[str, Any],
        loss_fn: LossFn,
        loss_weight_fn: WeightFn,
        need_T: np.ndarray | None = None,
    ) -> float | None:
        """All three parts: gradients of the minibatch's loss, over all data-parallel ranks, replace the old ones.

        The loss (returned, the same on all ranks) is AReaL's: the ranks' means weighted by local over total weight.
        None, and no gradients, when no rank has any weight; NaN, and no gradients, when a coefficient on any rank is
        not finite. A rank without weight walks with zero coefficients. With ``need_T`` no other position counts,
        whatever the loss function does there.
        """
        self.policy.zero_grad()
        local, total = self.weights(packed, loss_weight_fn)
        scale = local / total if total > 0 else 0.0
        coefficients = self._differentiate(self.part1(rows, need_T), rows, packed, loss_fn, scale, need_T)
        self.last = (rows, coefficients)
        if total <= 0:
            return None
        if self.sum_over_ranks(coefficients.num_not_finite) > 0:
            return math.nan
        self._walk_back(rows, coefficients)
        return self.sum_over_ranks(coefficients.loss * scale if scale else 0.0)

    @torch.no_grad()
    def evaluate(
        self,
        rows: Rows,
        packed: dict[str, Any],
        loss_fn: LossFn,
        loss_weight_fn: WeightFn,
        need_T: np.ndarray | None = None,
    ) -> float | None:
        """The loss of `accumulate` without gradients; None when no rank has any weight."""
        local, total = self.weights(packed, loss_weight_fn)
        loss = self._loss(self.part1(rows, need_T), packed, loss_fn)
        return self.sum_over_ranks(float(loss) * local / total if local else 0.0) if total > 0 else None

    def weights(self, packed: dict[str, Any], loss_weight_fn: WeightFn) -> tuple[float, float]:
        """(this rank's loss weight, that of all data-parallel ranks)."""
        local = float(loss_weight_fn(packed))
        return local, self.sum_over_ranks(local)

    def sum_over_ranks(self, value: float) -> float:
        """Sum over data-parallel ranks, in fp64 where the device has it."""
        total = torch.tensor(value, dtype=torch.float64, device=self.policy.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total)


def _spans(rows: Rows) -> list[tuple[int, int]]:
    bounds = np.asarray(rows.offsets_S1).tolist()
    return list(itertools.pairwise(bounds))


def _row_digests(rows: Rows) -> list[bytes]:
    ids_T = np.ascontiguousarray(rows.ids_T, np.int32)
    return [hashlib.blake2b(ids_T[lo:hi].tobytes(), digest_size=16).digest() for lo, hi in _spans(rows)]

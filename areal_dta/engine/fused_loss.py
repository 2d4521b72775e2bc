"""Token-level losses inside the backward walk: a block's own forward gives the log-probs that its coefficients need, so
no forward-only walk comes before (part 1 of the linearised step).

This works for losses that are sums over row tokens of a function of that token's log-prob and of given arrays. A trie
token is shared by rows with different advantages, so its coefficient is the sum over the row positions that map to it.
Whatever couples tokens (sequence-level ratios, a normaliser that depends on log-probs, entropy terms) is refused.

Legend: T row tokens (layout of `areal_dta.engine.rows`), t positions of T, U trie tokens, E predicting pairs, S rows of
a block, M projected rows of it, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch

from areal_dta.engine.head import HeadPairs, VocabHead
from areal_dta.engine.rows import RowValues
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.tree.plan import Block

__all__ = [
    "FusedGradient",
    "FusedOutcome",
    "PPOSettings",
    "PPOSums",
    "PPOTokenLoss",
    "Rejection",
    "SFTTokenLoss",
    "TokenLoss",
]

RejectionMetric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3"]


class TokenLoss(Protocol):
    """``scale * sum over t of f_t(logp_t)``, the scale and everything else known beforehand."""

    @property
    def needed_T(self) -> np.ndarray:
        """bool: positions whose log-prob counts, in the loss or in a statistic."""
        ...

    def coefficients(self, logp_t: torch.Tensor, position_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss of these positions, its derivative by each log-prob), scaled; ``position_t`` indexes row tokens."""
        ...


@dataclass(frozen=True)
class Rejection:
    """What becomes of tokens whose proximal policy strayed from the behaviour policy (AReaL's rejection sampling).

    ``mask`` drops tokens whose metric is outside ``lower .. upper``; ``clamp`` bounds their weight p_prox / p_behave.
    """

    action: Literal["mask", "clamp"] = "mask"
    metric: RejectionMetric = "ratio"
    upper: float = 5.0
    lower: float | None = None
    level: str = "token"

    def __post_init__(self) -> None:
        if self.level != "token":
            raise ValueError(
                f"actor.rejection_sampling.level={self.level}: a fused loss sums over tokens; set dta.fused_loss=false"
            )
        if self.metric not in get_args(RejectionMetric):
            raise ValueError(
                f"actor.rejection_sampling.metric={self.metric!r} is not one of {', '.join(get_args(RejectionMetric))}"
            )

    def weights(
        self, prox_logp_T: torch.Tensor, old_logp_T: torch.Tensor, mask_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens that stay, bool; behaviour weight of each, 0 where dropped)."""
        log_ratio_T = prox_logp_T - old_logp_T
        log_ratio_T = log_ratio_T.where(log_ratio_T.isfinite(), 0.0)
        weight_T = log_ratio_T.exp()
        stays_T = mask_T
        if self.action == "clamp":
            weight_T = weight_T.clamp(min=self.lower or 0.0, max=self.upper)
        else:
            metric_T = self._metric(log_ratio_T)
            stays_T = mask_T & (metric_T <= self.upper)
            if self.lower is not None:
                stays_T = stays_T & (metric_T >= self.lower)
        return stays_T, weight_T.where(stays_T, 0.0)

    def _metric(self, log_ratio_T: torch.Tensor) -> torch.Tensor:
        if self.metric == "ratio":
            return log_ratio_T.exp()
        if self.metric == "kl_k1":
            return log_ratio_T
        if self.metric == "kl_k2":
            return log_ratio_T.square() / 2
        return (-log_ratio_T).exp() - 1 + log_ratio_T


@dataclass(frozen=True)
class PPOSettings:
    """Names and meaning as AReaL's actor keys. Raises ValueError for what is no sum over tokens."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    rejection: Rejection | None = None
    importance_sampling_level: str = "token"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"actor.importance_sampling_level={self.importance_sampling_level}: a fused loss sums over tokens; "
                "set dta.fused_loss=false"
            )
        if self.entropy_coef:
            raise ValueError(
                f"actor.entropy_coef={self.entropy_coef}: a fused loss has no entropy term; set dta.fused_loss=false"
            )
        if self.c_clip is not None and self.c_clip <= 1.0:
            raise ValueError(f"actor.c_clip={self.c_clip} must exceed 1; null switches dual clipping off")


@dataclass(frozen=True)
class PPOSums:
    """Sums over tokens; divided by ``num_tokens`` they are the means AReaL reports of a minibatch.

    ``behave_*`` are over tokens with a behaviour weight (0 without rejection), ``num_filtered`` counts dropped or
    clamped ones.
    """

    num_tokens: int
    loss: float
    importance_weight: float
    approx_kl: float
    clipped: int
    dual_clipped: int
    new_logp: float
    old_logp: float
    num_behave: int
    behave_imp_weight: float
    behave_approx_kl: float
    num_filtered: int


@dataclass(frozen=True)
class _PPOTerms:
    """Per token: loss without scale, ratio to the proximal policy, where clipping decides."""

    loss_t: torch.Tensor
    ratio_t: torch.Tensor
    clipped_t: torch.Tensor
    dual_clipped_t: torch.Tensor


class PPOTokenLoss:
    """Clipped policy loss with decoupled proximal policy, token level.

    Arrays are in row layout; ``mask_T`` marks loss tokens. ``scale`` is 1 / (loss tokens of the whole minibatch, over
    all data-parallel ranks) for a mean.
    """

    def __init__(
        self, settings: PPOSettings, old_logp_T: torch.Tensor, prox_logp_T: torch.Tensor, advantage_T: torch.Tensor,
        mask_T: torch.Tensor, scale: float,
    ) -> None:  # fmt: skip
        self._settings, self._scale = settings, scale
        self._old_T, self._prox_T, self._advantage_T = old_logp_T, prox_logp_T, advantage_T
        self._mask_T = self._stays_T = mask_T.bool()
        self._weight_T: torch.Tensor | None = None
        if settings.rejection is not None:
            self._stays_T, self._weight_T = settings.rejection.weights(prox_logp_T, old_logp_T, self._mask_T)

    @property
    def needed_T(self) -> np.ndarray:
        return self._mask_T.cpu().numpy()

    def coefficients(self, logp_t: torch.Tensor, position_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scaled loss, its derivative); 0 at tokens without loss."""
        with torch.enable_grad():
            leaf_t = logp_t.detach().requires_grad_()
            loss = self._terms(leaf_t, position_t).loss_t.sum() * self._scale
            (dlogp_t,) = torch.autograd.grad(loss, leaf_t)
        return loss.detach(), dlogp_t

    def _terms(self, logp_t: torch.Tensor, at: torch.Tensor | slice) -> _PPOTerms:
        settings, stays_t, advantage_t = self._settings, self._stays_T[at], self._advantage_T[at].to(logp_t.dtype)
        log_ratio_t = (logp_t - self._prox_T[at]).where(stays_t, 0.0)  # before exp: an overflow there has no gradient
        ratio_t = log_ratio_t.exp().where(stays_t, 0.0)
        higher = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
        free_t = -advantage_t * ratio_t
        bounded_t = -advantage_t * ratio_t.clamp(1.0 - settings.eps_clip, 1.0 + higher)
        loss_t = torch.maximum(free_t, bounded_t)
        dual_clipped_t = torch.zeros_like(stays_t)
        if settings.c_clip is not None:
            ceiling_t = settings.c_clip * advantage_t.abs()
            dual_clipped_t = (ceiling_t < loss_t) & stays_t
            loss_t = torch.minimum(loss_t, ceiling_t)
        if self._weight_T is not None:
            loss_t = loss_t * self._weight_T[at]
        return _PPOTerms(loss_t.where(stays_t, 0.0), ratio_t, (free_t < bounded_t) & stays_t, dual_clipped_t)

    @torch.no_grad()
    def sums(self, logprobs_T: torch.Tensor) -> PPOSums:
        """Statistics of this rank's tokens, from the log-probs that the walk collected."""
        mask_T = self._mask_T
        terms = self._terms(logprobs_T, slice(None))
        behave_T = torch.zeros_like(mask_T) if self._weight_T is None else (self._weight_T > 0) & self._stays_T
        weight_T = self._old_T if self._weight_T is None else self._weight_T

        def total(values_T: torch.Tensor, where_T: torch.Tensor) -> float:
            return float(values_T.double().where(where_T, 0.0).sum())

        return PPOSums(
            num_tokens=int(mask_T.sum()),
            loss=total(terms.loss_t, mask_T),
            importance_weight=total(terms.ratio_t, mask_T),
            approx_kl=total(logprobs_T - self._prox_T, mask_T),
            clipped=int(terms.clipped_t.sum()),
            dual_clipped=int(terms.dual_clipped_t.sum()),
            new_logp=total(logprobs_T, mask_T),
            old_logp=total(self._old_T, mask_T),
            num_behave=int(behave_T.sum()),
            behave_imp_weight=total(weight_T, behave_T),
            behave_approx_kl=total(self._prox_T - self._old_T, behave_T),
            num_filtered=self._num_filtered(),
        )

    def _num_filtered(self) -> int:
        rejection = self._settings.rejection
        if rejection is None or self._weight_T is None:
            return 0
        if rejection.action == "mask":
            return int((self._mask_T & ~self._stays_T).sum())
        log_ratio_T = self._prox_T - self._old_T
        return int((self._mask_T & (log_ratio_T.where(log_ratio_T.isfinite(), 0.0).exp() != self._weight_T)).sum())


class SFTTokenLoss:
    """Negative log-likelihood of the tokens of ``mask_T`` (row layout), times ``scale``."""

    def __init__(self, mask_T: torch.Tensor, scale: float) -> None:
        self._mask_T, self._scale = mask_T.bool(), scale

    @property
    def needed_T(self) -> np.ndarray:
        return self._mask_T.cpu().numpy()

    def coefficients(self, logp_t: torch.Tensor, position_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scaled loss, its derivative)."""
        dlogp_t = self._mask_T[position_t].to(logp_t.dtype) * -self._scale
        return (dlogp_t * logp_t).sum(), dlogp_t


@dataclass(frozen=True)
class FusedOutcome:
    """This rank's share of the loss, the values it was computed from and its derivative by each log-prob.

    All row arrays hold 0 where the loss needs no log-prob.
    """

    loss: float
    values: RowValues
    dlogp_T: torch.Tensor


class FusedGradient:
    """dL/dhidden of each block of a backward walk, from the log-probs of the block itself.

    Entropies are collected as a statistic, if wanted.
    """

    def __init__(
        self, batch: TreeBatch, head: VocabHead | None, temperature: float, token_loss: TokenLoss, want_entropy: bool,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._batch, self._head, self._temperature, self._token_loss = batch, head, temperature, token_loss
        keep_t = token_loss.needed_T[batch.position_t]
        target_t = batch.target_t[keep_t]
        order_t = np.argsort(target_t, kind="stable")
        self._position_t = batch.position_t[keep_t][order_t]  # by target token
        self._first_U1 = np.searchsorted(target_t[order_t], np.arange(batch.num_tokens + 1))
        self.needed_U = np.zeros(batch.num_tokens, bool)
        self.needed_U[batch.source_t[keep_t]] = True
        pattern = np.packbits(np.diff(self._first_U1) > 0).tobytes()
        self.signature = repr(("fused", temperature, want_entropy)).encode() + pattern
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)
        self._logprobs_T, self._dlogp_T, self._entropy_T = (
            torch.zeros(batch.rows.num_tokens, dtype=dtype, device=device) for _ in range(3)
        )
        self._want_entropy = want_entropy

    def results(self) -> tuple[torch.Tensor, ...]:
        """Everything collected; in a pipeline the last stage has it, the others get it by broadcast."""
        return self._loss, self._logprobs_T, self._dlogp_T, self._entropy_T

    def outcome(self) -> FusedOutcome:
        """Loss and values of a finished walk."""
        values = RowValues(self._logprobs_T, self._entropy_T if self._want_entropy else None)
        return FusedOutcome(float(self._loss), values, self._dlogp_T)

    def gradient(self, block: Block, hidden_SD: torch.Tensor) -> torch.Tensor:
        """dL/dhidden [S, D]; zero where no loss token is predicted."""
        assert self._head is not None, "only the last pipeline stage projects hidden states"
        row_E, target_E = self._batch.block_pairs(block)
        wanted_E = self._first_U1[target_E + 1] > self._first_U1[target_E]
        row_E, target_E = row_E[wanted_E], target_E[wanted_E]
        grad_SD = torch.zeros_like(hidden_SD)
        if not len(row_E):
            return grad_SD
        row_M, index_E = np.unique(row_E, return_inverse=True)
        at_M = torch.from_numpy(row_M).to(hidden_SD.device)
        pairs = HeadPairs(index_E, self._batch.trie.ids_U[target_E])
        shared = _SharedPairs.of(self._first_U1[target_E], self._first_U1[target_E + 1], self._position_t)
        entropy_M = self._logprobs_T.new_empty(len(row_M)) if self._want_entropy else None

        def coefficients(logp_E: torch.Tensor, pair_lo: int, pair_hi: int) -> torch.Tensor:
            return self._coefficients(shared, logp_E, pair_lo, pair_hi)

        grad_MD = self._head.gradient(hidden_SD[at_M], pairs, coefficients, None, self._temperature, entropy_M)
        if entropy_M is not None:
            row_t = torch.from_numpy(index_E[shared.pair_t]).to(entropy_M.device)
            self._entropy_T[torch.from_numpy(shared.position_t).to(entropy_M.device)] = entropy_M[row_t]
        return grad_SD.index_copy_(0, at_M, grad_MD)

    def _coefficients(self, shared: _SharedPairs, logp_E: torch.Tensor, pair_lo: int, pair_hi: int) -> torch.Tensor:
        """Coefficients of pairs pair_lo .. pair_hi-1, each the sum over the row positions that share it."""
        span = slice(shared.first_E1[pair_lo], shared.first_E1[pair_hi])
        pair_t = torch.from_numpy(shared.pair_t[span] - pair_lo).to(logp_E.device)
        position_t = torch.from_numpy(shared.position_t[span]).to(logp_E.device)
        logp_t = logp_E[pair_t]
        loss, dlogp_t = self._token_loss.coefficients(logp_t, position_t)
        self._loss += loss
        self._logprobs_T[position_t], self._dlogp_T[position_t] = logp_t, dlogp_t
        return torch.zeros_like(logp_E).index_add_(0, pair_t, dlogp_t.to(logp_E.dtype))


@dataclass(frozen=True)
class _SharedPairs:
    """Row positions of a block's pairs: those of pair e are ``position_t[first_E1[e] : first_E1[e+1]]``."""

    first_E1: np.ndarray
    pair_t: np.ndarray
    position_t: np.ndarray

    @classmethod
    def of(cls, low_E: np.ndarray, high_E: np.ndarray, position_t: np.ndarray) -> _SharedPairs:
        """From ranges low_E .. high_E-1 of positions sorted by target."""
        count_E = high_E - low_E
        first_E1 = np.concatenate([[0], np.cumsum(count_E)])
        pair_t = np.repeat(np.arange(len(count_E)), count_E)
        return cls(first_E1, pair_t, position_t[np.arange(len(pair_t)) + (low_E - first_E1[:-1])[pair_t]])

"""What a drafter is trained on: the target's distribution, and for eagle and hass the target's features.

Token loss at position t: cross-entropy between ``softmax(target head(hidden_t))`` over the draft vocabulary,
renormalised there, and the drafter's softmax; positions whose actual next token is outside the draft vocabulary are
left out. As that token was drawn from the target, this equals on average the unnormalised ``-sum_v p_v log q_v``
over the draft vocabulary (what the drafter cannot say is ignored, not pushed onto other tokens) without ever computing
the whole vocabulary.

Unrolled step j reads the features the drafter gave in step j-1 (gradients flow through them), with the context of
`eagle_attention`. Sums, not means, are returned, so that data-parallel workers and accumulated batches add up exactly.

Legend of shape suffixes: T tokens, D hidden, R rows with a loss, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from areal_dta.drafter.eagle import (
    EagleWeights,
    draft_hidden,
    draft_inputs,
    head_input,
    head_rows,
    rms_norm,
    target_features,
    to_target_ids,
)
from areal_dta.drafter.eagle_attention import UnrolledAttention
from areal_dta.drafter.packing import PackedBatch
from areal_dta.nn.decoder import CosSin, DecoderWeights

__all__ = ["DraftLoss", "DraftScores", "LossSettings", "draft_loss"]

CHUNK_ROWS = 512  # student logits of this many rows exist at a time
SCORED_TOP = 3


@dataclass(frozen=True)
class LossSettings:
    """Step j counts ``step_decay ** (j - 1)``."""

    num_steps: int
    feature_weight: float
    token_weight: float
    step_decay: float = 0.8

    @classmethod
    def for_kind(cls, kind: str) -> LossSettings:
        """The settings a kind is trained with unless told otherwise."""
        if kind == "eagle3":
            return cls(num_steps=3, feature_weight=0.0, token_weight=1.0)
        return cls(num_steps=3 if kind == "hass" else 1, feature_weight=1.0, token_weight=0.1)


@dataclass(frozen=True)
class DraftScores:
    """Counts over all rows with a loss; add them up, then read the rates. Index j - 1 is unrolled step j.

    Accuracy is against the token that follows in the sample; one outside the draft vocabulary is a miss.
    """

    num_rows: tuple[float, ...] = ()
    num_top1: tuple[float, ...] = ()
    num_top3: tuple[float, ...] = ()
    feature_loss: tuple[float, ...] = ()
    token_loss: tuple[float, ...] = ()
    num_roots: float = 0.0
    num_accepted: float = 0.0

    def __add__(self, other: DraftScores) -> DraftScores:
        def total(a: Any, b: Any) -> Any:
            if not isinstance(a, tuple):
                return a + b
            return tuple(x + y for x, y in zip(a, b, strict=True)) if a and b else a or b

        fields = self.to_dict()
        return DraftScores(**{name: total(value, getattr(other, name)) for name, value in fields.items()})

    def rates(self) -> dict[str, float]:
        """``top1``, ``top3`` of the first step, ``top1_step<j>`` of later ones, mean losses, and ``accept_length``:
        tokens per verification if a chain of as many tokens as steps were drafted greedily from every root."""
        rows = [max(1.0, n) for n in self.num_rows]
        rates: dict[str, float] = {}
        for j, n in enumerate(rows):
            suffix = f"_step{j + 1}" if j else ""
            rates[f"top1{suffix}"] = self.num_top1[j] / n
            rates[f"top3{suffix}"] = self.num_top3[j] / n
            rates[f"feature_loss{suffix}"] = self.feature_loss[j] / n
            rates[f"token_loss{suffix}"] = self.token_loss[j] / n
        rates["accept_length"] = 1 + self.num_accepted / max(1.0, self.num_roots)
        return rates

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftScores:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list | tuple) else v for name, v in raw.items()}
        return cls(**fields)


@dataclass(frozen=True)
class DraftLoss:
    """``loss`` is summed over rows; divide gradients by the number of rows of all batches that take part."""

    loss: torch.Tensor
    num_rows: int
    scores: DraftScores = field(default_factory=DraftScores)


class _SoftCrossEntropy(torch.autograd.Function):
    """``sum_r w_r * CE(teacher_r, softmax(h_r head^T))`` whose gradients are made in the forward pass, chunk by chunk,
    so that logits of all rows never exist; also the drafter's likeliest tokens."""

    @staticmethod
    def forward(
        ctx: Any, h_RD: torch.Tensor, head_VD: torch.Tensor, teacher_RV: torch.Tensor, weight_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_h = torch.empty_like(h_RD) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_VD) if ctx.needs_input_grad[1] else None
        total = teacher_RV.new_zeros(())
        best = []
        for lo in range(0, len(h_RD), CHUNK_ROWS):
            rows = slice(lo, lo + CHUNK_ROWS)
            logits = F.linear(h_RD[rows], head_VD).to(teacher_RV.dtype)
            best.append(logits.topk(min(SCORED_TOP, logits.shape[-1]), -1).indices)
            log_q = logits.log_softmax(-1)
            total += -((teacher_RV[rows] * log_q).sum(-1) * weight_R[rows]).sum()
            if grad_h is not None or grad_head is not None:
                grad = log_q.exp_().sub_(teacher_RV[rows]).mul_(weight_R[rows].unsqueeze(-1)).to(h_RD.dtype)
                if grad_h is not None:
                    grad_h[rows] = grad @ head_VD
                if grad_head is not None:
                    grad_head.addmm_(grad.T, h_RD[rows])
        ctx.grads = (grad_h, grad_head)
        top_RK = torch.cat(best) if best else teacher_RV.new_zeros((0, 1), dtype=torch.int64)
        ctx.mark_non_differentiable(top_RK)
        return total, top_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_h, grad_head = ctx.grads
        return (
            None if grad_h is None else grad_h * grad.to(grad_h.dtype),
            None if grad_head is None else grad_head * grad.to(grad_head.dtype),
            None,
            None,
        )


def draft_loss(
    weights: EagleWeights,
    target: DecoderWeights,
    batch: PackedBatch,
    settings: LossSettings,
    cos_sin: CosSin,
    attend: Any = None,
) -> DraftLoss:
    """Loss and scores of one batch; ``cos_sin`` is for ``batch.positions_T``, ``attend`` replaces the attention."""
    attend = attend or UnrolledAttention(batch.bounds)
    rows_R = batch.loss_T.nonzero().squeeze(1)
    goal_TD, teacher_RV, drafted_R = _teacher(weights, target, batch, rows_R)
    next_R, position_R = batch.next_ids_T[rows_R], batch.positions_T[rows_R]
    features_TD = target_features(weights, target, batch.features_TF.to(weights.dtype))
    loss = teacher_RV.new_zeros(())
    tallies: list[tuple[torch.Tensor, ...]] = []
    correct: list[torch.Tensor] = []
    for step in range(settings.num_steps):
        x_TX = draft_inputs(weights, target.embed_VD, batch.ids_T, _previous(features_TD, batch.positions_T))
        features_TD = draft_hidden(weights, x_TX, cos_sin, attend)
        reached_R = position_R >= step  # the chain must begin inside the sample
        f_RD = features_TD[rows_R]
        feature_loss = loss.new_zeros(())
        if settings.feature_weight:
            distance_R = F.smooth_l1_loss(f_RD, goal_TD[rows_R], reduction="none").mean(-1)
            feature_loss = (distance_R * reached_R).sum().to(loss.dtype)
        token_loss, top_RK = _SoftCrossEntropy.apply(
            head_input(weights, f_RD), head_rows(weights, target), teacher_RV, (reached_R & drafted_R).to(loss.dtype)
        )
        share = settings.step_decay**step
        loss = loss + share * (settings.feature_weight * feature_loss + settings.token_weight * token_loss)
        hit_RK = (to_target_ids(weights, top_RK) == next_R.unsqueeze(-1)) & reached_R.unsqueeze(-1)
        tallies.append((reached_R.sum(), hit_RK[:, :1].sum(), hit_RK.sum(), feature_loss.detach(), token_loss.detach()))
        correct.append(hit_RK[:, 0])
    roots, accepted = _simulated_chains(batch, rows_R, correct)
    rows, top1, top3, feature, token = zip(*[[float(value) for value in tally] for tally in tallies])
    return DraftLoss(loss, len(rows_R), DraftScores(rows, top1, top3, feature, token, roots, accepted))


@torch.no_grad()
def _teacher(
    weights: EagleWeights, target: DecoderWeights, batch: PackedBatch, rows_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's features, its distribution over the draft vocabulary, and whether the next token is in there."""
    goal_TD = rms_norm(batch.hidden_TD.to(target.dtype), target.final_norm_D, target.config.norm_eps)
    next_R = batch.next_ids_T[rows_R]
    if weights.draft_ids_Vd is None:
        rows_VD, drafted_R = target.head_VD, torch.ones_like(next_R, dtype=torch.bool)
    else:
        rows_VD = target.head_VD[weights.draft_ids_Vd]
        place_R = torch.searchsorted(weights.draft_ids_Vd, next_R).clamp(max=len(weights.draft_ids_Vd) - 1)
        drafted_R = weights.draft_ids_Vd[place_R] == next_R
    logits_RV = F.linear(goal_TD[rows_R], rows_VD)
    logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    return goal_TD, logits_RV.softmax(-1), drafted_R


def _previous(features_TD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Every position's predecessor's feature; zeros where a sample begins."""
    shifted = F.pad(features_TD[:-1], (0, 0, 1, 0))
    return shifted.masked_fill((positions_T == 0).unsqueeze(-1), 0)


def _simulated_chains(batch: PackedBatch, rows_R: torch.Tensor, correct: list[torch.Tensor]) -> tuple[float, float]:
    """Roots whose whole chain lies in the loss span, and how many drafted tokens would have been accepted from them.

    Drafting greedily, the chain's next input is the drafted token, which is the sample's as long as all were right.
    """
    num_steps, T = len(correct), batch.num_tokens
    inside = torch.zeros(T + num_steps, dtype=torch.bool, device=rows_R.device)
    inside[rows_R] = True
    root = torch.ones(T, dtype=torch.bool, device=rows_R.device)
    for step in range(num_steps):
        root &= inside[step : T + step]
        same = batch.positions_T.new_full((T,), -1)
        same[: T - step] = batch.positions_T[step:] - step
        root &= same == batch.positions_T
    alive, accepted = root, 0.0
    for step, correct_R in enumerate(correct):
        hit = torch.zeros(T + num_steps, dtype=torch.bool, device=rows_R.device)
        hit[rows_R] = correct_R
        alive = alive & hit[step : T + step]
        accepted += float(alive.sum())
    return float(root.sum()), accepted

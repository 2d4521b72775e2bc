"""One optimisation step of a drafter: gradients and update apart, so that data-parallel workers can add up in between.

All trained tensors live in one flat vector, which is what travels between workers and into checkpoints.

Legend of shape suffixes: T tokens, V vocabulary, D hidden, P elements of all trained tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from areal_dta.drafter.eagle import EagleWeights, follow_target, trained_tensors, with_tensors
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.losses import DraftLoss, DraftScores, LossSettings, draft_loss
from areal_dta.drafter.packing import PackedBatch
from areal_dta.nn.decoder import DecoderWeights, Rotary

__all__ = ["DraftGradients", "DrafterTrainer", "NonFiniteGradient", "StepReport"]


class NonFiniteGradient(ValueError):
    """A gradient holds NaN or infinity; the step was not taken and the drafter is unchanged."""


@dataclass(frozen=True)
class DraftGradients:
    """Mean over ``num_rows`` positions with a loss; several workers' are averaged with these as weights."""

    mean_P: torch.Tensor
    loss: float
    num_rows: int
    scores: DraftScores


@dataclass(frozen=True)
class StepReport:
    """What one update did."""

    step: int
    gradient_norm: float  # before clipping
    learning_rate: float


class DrafterTrainer:
    """AdamW on the drafter's own tensors; the target's embedding, norm and head stay frozen. Not thread-safe."""

    def __init__(
        self,
        weights: EagleWeights,
        target: DecoderWeights,
        learning_rate: float = 1e-3,
        *,
        settings: LossSettings | None = None,
        max_gradient_norm: float = 1.0,
        warmup_steps: int = 20,
        weight_decay: float = 0.0,
    ) -> None:
        weights = follow_target(weights, target)
        self.settings = settings or LossSettings.for_kind(weights.config.kind)
        self.learning_rate = learning_rate  # after the warm-up; may be changed between steps
        self.num_steps = 0
        self._base = weights
        self._target = target
        self._max_gradient_norm = max_gradient_norm
        self._warmup_steps = warmup_steps
        self._layout = {name: tensor.shape for name, tensor in trained_tensors(weights).items()}
        flat_P = torch.cat([t.detach().flatten() for t in trained_tensors(weights).values()])
        self._flat_P = flat_P.requires_grad_()
        self._optimizer = torch.optim.AdamW(
            [self._flat_P], lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, foreach=False
        )
        self._rotary = Rotary(target.config, weights.dtype, weights.device)

    @property
    def num_trained(self) -> int:
        return self._flat_P.numel()

    def set_target(self, target: DecoderWeights) -> None:
        """Train against a new version of the target from now on; copied head rows follow it."""
        self._base = follow_target(self._base, target)
        self._target = target

    def gradients(self, batches: Sequence[PackedBatch]) -> DraftGradients:
        """Gradients of all ``batches`` together, computed one after the other."""
        num_rows, loss, scores = 0, 0.0, DraftScores()
        self._flat_P.grad = torch.zeros_like(self._flat_P)
        for batch in batches:
            result = self._loss(batch, self.settings, self._weights())
            result.loss.backward()
            num_rows, loss, scores = (
                num_rows + result.num_rows,
                loss + float(result.loss.detach()),
                scores + result.scores,
            )
        sum_P, self._flat_P.grad = self._flat_P.grad, None
        if not num_rows:
            raise ValueError(f"{len(batches)} batches without a position to learn from; collect more samples first")
        return DraftGradients(sum_P / num_rows, loss / num_rows, num_rows, scores)

    def apply(self, mean_P: torch.Tensor) -> StepReport:
        """Take one step; raises NonFiniteGradient and changes nothing when the gradient is not finite."""
        if mean_P.shape != self._flat_P.shape:
            raise DrafterMismatch(
                f"gradient of {mean_P.numel()} elements for a drafter of {self.num_trained}; "
                "all workers must train the same drafter"
            )
        norm = float(mean_P.norm())
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm} at step {self.num_steps}; the batch is dropped")
        rate = self.learning_rate * min(1.0, (self.num_steps + 1) / max(1, self._warmup_steps))
        self._optimizer.param_groups[0]["lr"] = rate
        self._flat_P.grad = mean_P.to(self._flat_P) * min(1.0, self._max_gradient_norm / max(norm, 1e-12))
        self._optimizer.step()
        self._flat_P.grad = None
        self.num_steps += 1
        return StepReport(self.num_steps, norm, rate)

    def step(self, batches: Sequence[PackedBatch]) -> DraftGradients:
        """`gradients` and `apply` in one, for a single worker; the scores are those before the update."""
        gradients = self.gradients(batches)
        self.apply(gradients.mean_P)
        return gradients

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedBatch], num_steps: int = 4) -> DraftScores:
        """Scores over chains of ``num_steps`` drafted tokens, without training."""
        settings = replace(self.settings, num_steps=num_steps)
        total, weights = DraftScores(), self._weights()
        for batch in batches:
            total = total + self._loss(batch, settings, weights).scores
        return total

    def weights(self) -> EagleWeights:
        """A copy of the present weights, for publishing."""
        flat_P = self._flat_P.detach().clone()
        return with_tensors(self._base, self._tensors(flat_P))

    def state_dict(self, copy: bool = True) -> dict[str, torch.Tensor]:
        """What a restart needs besides the config: trained tensors, optimizer moments, step.

        Without ``copy`` they are those in use, which the next step changes.
        """
        moments = self._optimizer.state.get(self._flat_P, {})
        empty_P = torch.zeros_like(self._flat_P)
        state = {
            "trained_P": self._flat_P.detach(),
            "first_moment_P": moments.get("exp_avg", empty_P).detach(),
            "second_moment_P": moments.get("exp_avg_sq", empty_P).detach(),
            "num_steps": torch.tensor(self.num_steps),
        }
        return {name: tensor.clone() for name, tensor in state.items()} if copy else state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict`; DrafterMismatch when it is another drafter's."""
        names = ("trained_P", "first_moment_P", "second_moment_P")
        sizes = {name: tuple(state[name].shape) if name in state else None for name in names}
        if "num_steps" not in state or any(size != tuple(self._flat_P.shape) for size in sizes.values()):
            raise DrafterMismatch(
                f"checkpoint holds {sizes} and {'a' if 'num_steps' in state else 'no'} step count; "
                f"this drafter trains {self.num_trained} elements"
            )
        self.num_steps = int(state["num_steps"])
        with torch.no_grad():
            self._flat_P.copy_(state["trained_P"])
        self._optimizer.state[self._flat_P] = {
            "step": torch.tensor(float(self.num_steps)),
            "exp_avg": state["first_moment_P"].to(self._flat_P).clone(),
            "exp_avg_sq": state["second_moment_P"].to(self._flat_P).clone(),
        }

    def _loss(self, batch: PackedBatch, settings: LossSettings, weights: EagleWeights) -> DraftLoss:
        cos_sin = self._rotary(batch.positions_T, batch.max_length)
        return draft_loss(weights, self._target, batch, settings, cos_sin)

    def _weights(self) -> EagleWeights:
        return with_tensors(self._base, self._tensors(self._flat_P))

    def _tensors(self, flat_P: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = flat_P.split([shape.numel() for shape in self._layout.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._layout.items(), parts, strict=True)}

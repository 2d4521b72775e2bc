"""The training step with AReaL's token-level PPO loss fused into the backward walk (``dta.fused_loss``): no part 1.

AReaL hands its loss over as a function with bound settings. They are read off it, the walk derives its coefficients
itself, and then AReaL's function is called once on the log-probs the walk collected: it records its statistics as ever,
and its own derivative must equal the coefficients that were used.

Legend of shape suffixes: T tokens of all rows laid end to end.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from areal_dta.engine import Rows, TreeEngine
from areal_dta.engine.fused_loss import PPOSettings, PPOTokenLoss, Rejection
from areal_dta.linear_step import LinearStep, LossFn, WeightFn, loss_coefficients

__all__ = ["FusedStep", "ppo_settings", "ppo_token_loss"]

_LOSS_NAME = "grpo_loss_fn"
_TOLERANCE = 1e-4  # of the largest coefficient
# Bound settings that change the loss, with the only values under which it is the one computed here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "m2_threshold": (None,),
    "use_sapo_loss": (False,),
    "prox_logp_method": ("recompute", "metrics"),
}
_REMEDY = "set dta.fused_loss=false"


def ppo_settings(loss_fn: LossFn) -> PPOSettings:
    """Settings bound to AReaL's ``grpo_loss_fn``. Raises ValueError for another function or what cannot be fused."""
    if not isinstance(loss_fn, functools.partial) or getattr(loss_fn.func, "__name__", "") != _LOSS_NAME:
        raise ValueError(f"dta.fused_loss=true knows AReaL's {_LOSS_NAME} only, not {loss_fn!r}; {_REMEDY}")
    bound = loss_fn.keywords
    for name, accepted in _PLAIN.items():
        if bound.get(name, accepted[0]) not in accepted:
            raise ValueError(f"actor.{name}={bound[name]} cannot be fused into the walk; {_REMEDY}")
    rejection = bound.get("rejection_sampling")
    return PPOSettings(
        eps_clip=bound["eps_clip"],
        eps_clip_higher=bound.get("eps_clip_higher"),
        c_clip=bound.get("c_clip"),
        rejection=None if rejection is None else _rejection(rejection),
        importance_sampling_level=bound.get("importance_sampling_level", "token"),
    )


def _rejection(config: Any) -> Rejection:
    return Rejection(
        action=config.action, metric=config.metric, upper=config.upper, lower=config.lower, level=config.level
    )


def ppo_token_loss(loss_fn: LossFn, packed: dict[str, Any], scale: float, device: torch.device) -> PPOTokenLoss:
    """The token-level loss of a packed minibatch; ``scale`` is 1 / loss tokens of all data-parallel ranks."""
    if "teacher_logp" in packed:
        raise ValueError(f"a loss with teacher_logp (distillation) cannot be fused into the walk; {_REMEDY}")
    old_T, prox_T, advantage_T = (packed[key].to(device).float() for key in ("logprobs", "prox_logp", "advantages"))
    return PPOTokenLoss(ppo_settings(loss_fn), old_T, prox_T, advantage_T, packed["loss_mask"].to(device), scale)


class FusedStep(LinearStep):
    """`LinearStep` whose minibatches skip part 1 where it would be a walk of its own (not a look-up)."""

    def accumulate(
        self,
        rows: Rows,
        packed: dict[str, Any],
        loss_fn: LossFn,
        loss_weight_fn: WeightFn,
        need_T: np.ndarray | None = None,
    ) -> float | None:
        """As `LinearStep.accumulate`, which also serves the dense engine.

        Raises RuntimeError if the loss function's derivative is not what was used.
        """
        if not isinstance(self.engine, TreeEngine):
            return super().accumulate(rows, packed, loss_fn, loss_weight_fn, need_T)
        local, total = self.weights(packed, loss_weight_fn)
        known = self.reuse_forward and self._memo.fetch(self._generation, self.temperature, rows, need_T) is not None
        if total <= 0 or self.sum_over_ranks(float(not known)) == 0:
            return super().accumulate(rows, packed, loss_fn, loss_weight_fn, need_T)
        self.policy.zero_grad()
        token_loss = ppo_token_loss(loss_fn, packed, 1.0 / total, self.policy.device)
        outcome = self.engine.backward_fused(
            rows, token_loss, self.temperature, want_entropy=True, sync=self.gradient_sync
        )
        scale = local / total
        coefficients = loss_coefficients(outcome.values, rows, packed, loss_fn, scale, need_T)
        self.last = (rows, coefficients)
        used_T = outcome.dlogp_T.float()
        if self.sum_over_ranks(coefficients.num_not_finite + int((~torch.isfinite(used_T)).sum())) > 0:
            return math.nan
        error = float((coefficients.dlogp_T - used_T).abs().max()) if rows.num_tokens else 0.0
        largest = float(used_T.abs().max()) if rows.num_tokens else 0.0
        if self.sum_over_ranks(float(error > _TOLERANCE * largest or coefficients.dentropy_T is not None)) > 0:
            raise RuntimeError(
                f"the fused loss is not the loss function's: derivatives differ by up to {error:.3e} (largest "
                f"{largest:.3e}), entropy terms: {coefficients.dentropy_T is not None}; {_REMEDY}"
            )
        return self.sum_over_ranks(coefficients.loss * scale)

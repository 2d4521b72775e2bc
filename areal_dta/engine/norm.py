"""RMSNorm for Megatron's local layer spec.

The stock local spec refuses sequence parallelism (torch's norm does not mark its weight, so its gradient would stay
partial on each tensor-parallel rank). This one marks the weight, and its backward is a single autograd node: on the
CPU small blocks are bound by the number of operations.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RMSNorm"]


class _RMSNormFunction(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dimension; the mean in fp32 or wider, as in transformers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        inv_rms = (x_wide * x_wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inv_rms)
        return (x_wide * inv_rms).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inv_rms = ctx.saved_tensors
        normed = x.to(inv_rms.dtype) * inv_rms
        grad_wide = grad.to(inv_rms.dtype)
        grad_weight = (grad_wide * normed).flatten(0, -2).sum(0)
        grad_normed = grad_wide * weight
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(projection)).mul_(inv_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with Megatron's constructor (config, hidden_size, eps); its other keywords are ignored."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_spec_keywords: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x``; same shape and dtype."""
        return _RMSNormFunction.apply(x, self.weight, self.eps)

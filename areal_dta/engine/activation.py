"""SwiGLU as one autograd node that saves its input only.

Megatron's eager path keeps the gate's activation and a copy of the linear half as well: two fifths more feed-forward
memory per token, and three more passes over it.

Legend: F feed-forward size of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SwiGLU"]


class _SwiGLUFunction(torch.autograd.Function):
    """y = silu(gate) * up for an input of gate and up side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


class SwiGLU(torch.nn.Module):
    """Activation of Megatron's MLP (constructor keyword ``config``): ``[..., 2F]`` -> ``[..., F]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :F]) * x[..., F:]``, in the dtype of ``x``."""
        return _SwiGLUFunction.apply(x)

    def sharded_state_dict(self, *_args: Any, **_keywords: Any) -> dict[str, Any]:
        """Nothing: there are no parameters, but Megatron's MLP asks every part of it."""
        return {}

"""The scalar head of critics and reward models: V = w . h + b at every position, instead of a distribution over tokens.

As with the vocabulary, a walk knows its coefficients dL/dV before it reaches a position and the objective is linear in
the values, so no graph is kept: the gradient of ``sum(coef * V)`` is two products per block. The weight is replicated
over tensor-parallel ranks; all of them see the same hidden states and compute the same gradient, so nothing is reduced.

Legend: M positions, D hidden.
"""

from __future__ import annotations

import torch

__all__ = ["ValueHead", "value_projection"]


def value_projection(hidden: int, init_std: float, dtype: torch.dtype, seed: int) -> torch.nn.Linear:
    """The head's module, started as transformers starts a classifier: normal weights, zero bias; equal on all ranks."""
    layer = torch.nn.Linear(hidden, 1, bias=True, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(1, hidden, generator=generator) * init_std)
        layer.bias.zero_()
    return layer


def _gradient_buffer(param: torch.nn.Parameter) -> torch.Tensor | None:
    return getattr(param, "main_grad", None)


class ValueHead:
    """Values of selected positions and their gradient; ``layer`` is the policy's `value_projection`.

    A forward-only policy has no gradient buffers (``main_grad``) on its parameters, and no `gradient`.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight_1D, self._bias_1 = layer.weight.detach(), layer.bias.detach()
        self._grad_1D, self._grad_1 = _gradient_buffer(layer.weight), _gradient_buffer(layer.bias)

    @torch.no_grad()
    def values(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Values ``[M]``, fp32 or wider."""
        wide = torch.promote_types(hidden_MD.dtype, torch.float32)
        return (hidden_MD.to(wide) @ self._weight_1D[0].to(wide)).add_(self._bias_1.to(wide))

    @torch.no_grad()
    def gradient(self, hidden_MD: torch.Tensor, coef_M: torch.Tensor) -> torch.Tensor:
        """dL/dhidden ``[M, D]`` of ``sum(coef * values)``; adds the weight's and the bias's gradient to their buffers.

        ``coef_M`` is fp32 or wider.
        """
        assert self._grad_1D is not None and self._grad_1 is not None, (
            "a forward-only policy has no gradients; build it with trainable=True"
        )
        self._grad_1D[0].add_(coef_M @ hidden_MD.to(coef_M.dtype))
        self._grad_1.add_(coef_M.sum())
        return (coef_M[:, None] * self._weight_1D.to(coef_M.dtype)).to(hidden_MD.dtype)

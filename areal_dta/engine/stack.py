"""Keys and values of the current root-to-leaf path, and the gradients its descendants leave on them.

One buffer per layer, rows appended in place. Autograd nodes keep row ranges, never tensors of it: a row holds the same
values from the push of its block to the pop, because a walk is last in, first out. Memory is that of the longest path.

Legend: L layers, G key/value heads of this rank, C capacity in rows, H head dim, P rows of the path, S rows of a block.
"""

from __future__ import annotations

import torch

__all__ = ["KVStack"]


class KVStack:
    """Row storage ``k, v`` of shape ``[L, G, C, H]`` in the model's dtype, gradients alike in fp32 or wider.

    ``with_grad=False`` (a forward-only walk) allocates no gradients.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        device: torch.device, with_grad: bool,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.k_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self.v_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self.grad_k_LGCH = torch.zeros(shape, dtype=grad_dtype, device=device) if with_grad else None
        self.grad_v_LGCH = torch.zeros(shape, dtype=grad_dtype, device=device) if with_grad else None

    def write(self, layer: int, start: int, k_GSH: torch.Tensor, v_GSH: torch.Tensor) -> None:
        """Store rows ``start ..`` of one layer."""
        end = start + k_GSH.shape[1]
        self.k_LGCH[layer, :, start:end] = k_GSH
        self.v_LGCH[layer, :, start:end] = v_GSH

    def rows(self, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[G, end, H]`` of keys and values of rows 0 .. end-1."""
        return self.k_LGCH[layer, :, :end], self.v_LGCH[layer, :, :end]

    def add_grad(self, layer: int, end: int, grad_k_GPH: torch.Tensor, grad_v_GPH: torch.Tensor) -> None:
        """Accumulate gradients of rows 0 .. end-1."""
        assert self.grad_k_LGCH is not None and self.grad_v_LGCH is not None
        self.grad_k_LGCH[layer, :, :end] += grad_k_GPH
        self.grad_v_LGCH[layer, :, :end] += grad_v_GPH

    def take_grad(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return and clear the gradients ``[G, S, H]`` of rows start .. end-1, in the model's dtype."""
        assert self.grad_k_LGCH is not None and self.grad_v_LGCH is not None
        taken = []
        for grads in (self.grad_k_LGCH, self.grad_v_LGCH):
            view = grads[layer, :, start:end]
            taken.append(view.to(self.k_LGCH.dtype, copy=True))
            view.zero_()
        return taken[0], taken[1]

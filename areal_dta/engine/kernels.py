"""Attention of one block against the path's rows and its own, with the log-sum-exp kept for the backward pass.

Two kernels with one contract: the CPU flash kernel of PyTorch, and plain products for every other device (also the
slow twin of the first).

Legend: G key/value heads, R query heads per key/value head, S query rows, K key rows (path, then the block's own), H
head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["AttentionKernel", "FlashCPUKernel", "ProductKernel", "kernel_for"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionKernel(Protocol):
    """``mask_SK`` is additive (0 or -inf) in the query's dtype; None means plain causal with S == K."""

    def forward(
        self, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor, mask_SK: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output GRSH, log-sum-exp GRS in fp32 or wider)."""
        ...

    def backward(
        self, grad_GRSH: torch.Tensor, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GRSH: torch.Tensor, lse_GRS: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients (GRSH, GKH, GKH) of query, keys and values, given the forward's output and log-sum-exp."""
        ...


def _shared_heads(x_GKH: torch.Tensor, num_repeats: int) -> torch.Tensor:
    """View ``[G, R, K, H]`` of one key/value head per group (stride 0, no copy)."""
    return x_GKH.unsqueeze(1).expand(-1, num_repeats, -1, -1)


class FlashCPUKernel:
    """PyTorch's blocked CPU kernel: memory linear in S and K."""

    def forward(
        self, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor, mask_SK: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r = q_GRSH.shape[1]
        k, v = _shared_heads(k_GKH, r), _shared_heads(v_GKH, r)
        out, lse = _flash_forward(q_GRSH, k, v, 0.0, mask_SK is None, attn_mask=mask_SK, scale=scale)
        return out, lse

    def backward(
        self, grad_GRSH: torch.Tensor, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GRSH: torch.Tensor, lse_GRS: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        r = q_GRSH.shape[1]
        k, v = _shared_heads(k_GKH, r), _shared_heads(v_GKH, r)
        grad_q, grad_k, grad_v = _flash_backward(
            grad_GRSH, q_GRSH, k, v, out_GRSH, lse_GRS, 0.0, mask_SK is None, attn_mask=mask_SK, scale=scale
        )
        return grad_q, grad_k.sum(1), grad_v.sum(1)


class ProductKernel:
    """Plain matrix products in fp32 or wider; memory S * K per head. Runs on any device."""

    def _scores(
        self, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, mask_SK: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        wide = torch.float64 if q_GRSH.dtype == torch.float64 else torch.float32
        scores = q_GRSH.to(wide) @ k_GKH.to(wide).unsqueeze(1).transpose(-1, -2) * scale
        if mask_SK is None:
            s, k = scores.shape[-2:]
            mask_SK = torch.full((s, k), float("-inf"), dtype=wide, device=scores.device).triu_(1)
        return scores + mask_SK

    def forward(
        self, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor, mask_SK: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(q_GRSH, k_GKH, mask_SK, scale)
        lse_GRS = scores.logsumexp(-1)
        weights = (scores - lse_GRS.unsqueeze(-1)).exp()
        return (weights @ v_GKH.to(weights.dtype).unsqueeze(1)).to(q_GRSH.dtype), lse_GRS

    def backward(
        self, grad_GRSH: torch.Tensor, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GRSH: torch.Tensor, lse_GRS: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        weights = (self._scores(q_GRSH, k_GKH, mask_SK, scale) - lse_GRS.unsqueeze(-1)).exp()
        grad = grad_GRSH.to(weights.dtype)
        grad_v = (weights.transpose(-1, -2) @ grad).sum(1)
        grad_weights = grad @ v_GKH.to(weights.dtype).unsqueeze(1).transpose(-1, -2)
        delta = (grad * out_GRSH.to(weights.dtype)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta) * scale
        grad_q = grad_scores @ k_GKH.to(weights.dtype).unsqueeze(1)
        grad_k = (grad_scores.transpose(-1, -2) @ q_GRSH.to(weights.dtype)).sum(1)
        return grad_q.to(q_GRSH.dtype), grad_k, grad_v


def kernel_for(device: torch.device) -> AttentionKernel:
    """The kernel for a device."""
    return FlashCPUKernel() if device.type == "cpu" else ProductKernel()

"""Attention kernels on tiles, with the log-sum-exp kept so that tiles can be merged.

The backward of a tile is exact with the output and log-sum-exp of the whole merged row: with P = exp(scores - lse) over
all keys, each tile's part of the gradient needs its own scores and the row's delta = <grad, out> only.

Layout: queries ``[G, S, R, H]``, keys and values ``[G, K, H]``. Legend: G key/value heads, R query heads per key/value
head, S query rows, K key rows, H head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from areal_dta.engine.kernels_cuda import cuda_kernel
from areal_dta.tree.tiles import TileKind

__all__ = ["AttentionKernel", "FlashCPUKernel", "ProductKernel", "kernel_for", "merge_tile", "wide_dtype"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionKernel(Protocol):
    """``mask_SK`` (MASKED tiles) is additive, 0 or -inf, in the query's dtype; CAUSAL tiles have S == K."""

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        """(output GSRH in the query's dtype or wider, log-sum-exp GSR in fp32 or wider) of one tile."""
        ...

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        """This tile's gradients (GSRH, GKH, GKH) of query, keys and values, given the merged output and log-sum-exp."""
        ...


def merge_tile(out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
    """Merge a tile's output and log-sum-exp into those of the same rows, in place."""
    merged = torch.logaddexp(lse_GSR, tile_lse)
    out_GSRH.mul_((lse_GSR - merged).exp_().unsqueeze(-1)).addcmul_(tile_out, (tile_lse - merged).exp_().unsqueeze(-1))
    lse_GSR.copy_(merged)


class FlashCPUKernel:
    """PyTorch's blocked CPU kernel: memory linear in S and K.

    Rectangles fold the R query heads into rows, so that keys and values are read once for all of them.
    """

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        g, s, r, h = q_GSRH.shape
        if kind is TileKind.FULL:
            folded = q_GSRH.reshape(g, 1, s * r, h)
            out, lse = _flash_forward(folded, k_GKH.unsqueeze(1), v_GKH.unsqueeze(1), 0.0, False, scale=scale)
            return out.view(g, s, r, h), lse.view(g, s, r)
        k, v = (x.unsqueeze(1).expand(-1, r, -1, -1) for x in (k_GKH, v_GKH))
        causal = kind is TileKind.CAUSAL
        out, lse = _flash_forward(q_GSRH.transpose(1, 2), k, v, 0.0, causal, attn_mask=mask_SK, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        g, s, r, h = q_GSRH.shape
        if kind is TileKind.FULL:
            grad, q, out = (x.reshape(g, 1, s * r, h) for x in (grad_GSRH, q_GSRH, out_GSRH))
            lse, k, v = lse_GSR.reshape(g, 1, s * r), k_GKH.unsqueeze(1), v_GKH.unsqueeze(1)
            grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, out, lse, 0.0, False, scale=scale)
            return grad_q.view(g, s, r, h), grad_k.squeeze(1), grad_v.squeeze(1)
        grad, q, out, lse = (x.transpose(1, 2) for x in (grad_GSRH, q_GSRH, out_GSRH, lse_GSR))
        k, v = (x.unsqueeze(1).expand(-1, r, -1, -1) for x in (k_GKH, v_GKH))
        causal = kind is TileKind.CAUSAL
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask_SK, scale=scale)
        return grad_q.transpose(1, 2), grad_k.sum(1), grad_v.sum(1)


class ProductKernel:
    """Plain matrix products in fp32 or wider; memory S * K per head. Runs on any device; the slow twin."""

    def _scores(
        self, kind: TileKind, q_GRSH: torch.Tensor, k_GKH: torch.Tensor, mask_SK: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        scores = q_GRSH @ k_GKH.to(q_GRSH.dtype).unsqueeze(1).transpose(-1, -2) * scale
        if kind is TileKind.CAUSAL:
            s, k = scores.shape[-2:]
            mask_SK = torch.full((s, k), float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
        return scores if mask_SK is None else scores + mask_SK

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        scores = self._scores(kind, _wide(q_GSRH).transpose(1, 2), k_GKH, mask_SK, scale)
        lse_GRS = scores.logsumexp(-1)
        weights = (scores - lse_GRS.unsqueeze(-1)).exp()
        out = weights @ v_GKH.to(weights.dtype).unsqueeze(1)
        return out.transpose(1, 2), lse_GRS.transpose(1, 2)

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        q, grad, out = (_wide(x).transpose(1, 2) for x in (q_GSRH, grad_GSRH, out_GSRH))
        weights = (self._scores(kind, q, k_GKH, mask_SK, scale) - lse_GSR.transpose(1, 2).unsqueeze(-1)).exp()
        grad_v = (weights.transpose(-1, -2) @ grad).sum(1)
        grad_weights = grad @ v_GKH.to(weights.dtype).unsqueeze(1).transpose(-1, -2)
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        grad_q = grad_scores @ k_GKH.to(weights.dtype).unsqueeze(1)
        grad_k = (grad_scores.transpose(-1, -2) @ q).sum(1)
        return grad_q.transpose(1, 2), grad_k, grad_v


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64: what sums, log-probs and gradients on their way are held in."""
    return torch.promote_types(dtype, torch.float32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x.dtype))


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """The kernel for a device; on CUDA plain products where no fused kernel fits (the log says so)."""
    if device.type == "cpu":
        return FlashCPUKernel()
    return cuda_kernel(dtype, head_dim, device) or ProductKernel()

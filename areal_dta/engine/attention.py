"""The core-attention module of every layer: a block of trie tokens attends to the current path and to itself.

Megatron's layers hand their ``attention_mask`` argument through unread, so a `BlockContext` travels in it: no global
state. Without one, the module is plain causal attention on whole rows (the dense reference). In the tree case rotary
embedding happens here, by the positions of the block's rows (siblings repeat positions), so that embedding, stack and
kernel are one autograd node.

Exactness: the block's keys and values are rows of the stack. Later blocks add their gradients to these rows; the
node's backward runs after all of them (last in, first out) and returns what they left plus its own part.

Legend: S rows of the block, P rows of the path above it, K = P + S, N query heads, G key/value heads, R = N / G, H
head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from areal_dta.engine.kernels import AttentionKernel
from areal_dta.engine.stack import KVStack

__all__ = ["BlockContext", "TreeAttention", "chain_mask", "forest_mask"]


@dataclass(frozen=True)
class BlockContext:
    """Where a block sits: ``depth`` rows of ``stack`` lie above its ``num_rows`` rows.

    ``mask_SK`` is additive; None means causal without a path.
    """

    stack: KVStack
    kernel: AttentionKernel
    depth: int
    num_rows: int
    cos_S1J: torch.Tensor  # J = H / 2
    sin_S1J: torch.Tensor
    mask_SK: torch.Tensor | None


def chain_mask(num_rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Additive bottom-right causal mask of an unbranched block; None when the path is empty (plain causal)."""
    if depth == 0:
        return None
    return torch.full((num_rows, depth + num_rows), float("-inf"), dtype=dtype, device=device).triu_(depth + 1)


def forest_mask(subtree_end_S: torch.Tensor, depth: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask of a block that branches: row i sees the path and its own ancestors.

    Rows are in depth-first order; ``subtree_end_S[j]`` is one past the last row of j's subtree, relative to the block
    (it may exceed S). j is i or its ancestor exactly when ``j <= i < subtree_end_S[j]`` (Euler tour).
    """
    row_S = torch.arange(len(subtree_end_S), device=device)
    hidden_SS = (row_S[None, :] > row_S[:, None]) | (row_S[:, None] >= subtree_end_S.to(device)[None, :])
    own = torch.zeros(hidden_SS.shape, dtype=dtype, device=device).masked_fill_(hidden_SS, float("-inf"))
    return F.pad(own, (depth, 0)) if depth else own


def _rotate(x_SNH: torch.Tensor, cos_S1J: torch.Tensor, sin_S1J: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves convention (the one of Qwen and Llama)."""
    first, second = x_SNH.chunk(2, -1)
    out_first = (first * cos_S1J).addcmul_(second, sin_S1J, value=-1)
    out_second = (second * cos_S1J).addcmul_(first, sin_S1J)
    return torch.cat((out_first, out_second), -1)


class _TreeAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGH: torch.Tensor,
        block: BlockContext,
        layer: int,
        scale: float,
    ) -> torch.Tensor:
        s, n, h = q_SNH.shape
        g = k_SGH.shape[1]
        q_GRSH = _rotate(q_SNH, block.cos_S1J, block.sin_S1J).view(s, g, n // g, h).permute(1, 2, 0, 3)
        k_GSH = _rotate(k_SGH, block.cos_S1J, block.sin_S1J).transpose(0, 1)
        block.stack.write(layer, block.depth, k_GSH, v_SGH.transpose(0, 1))
        k_GKH, v_GKH = block.stack.rows(layer, block.depth + s)
        out_GRSH, lse_GRS = block.kernel.forward(q_GRSH, k_GKH, v_GKH, block.mask_SK, scale)
        ctx.save_for_backward(q_GRSH, out_GRSH, lse_GRS)
        ctx.block, ctx.layer, ctx.scale = block, layer, scale
        return out_GRSH.permute(2, 0, 1, 3).reshape(s, n * h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        q_GRSH, out_GRSH, lse_GRS = ctx.saved_tensors
        block: BlockContext = ctx.block
        g, r, s, h = q_GRSH.shape
        start, end = block.depth, block.depth + s
        k_GKH, v_GKH = block.stack.rows(ctx.layer, end)
        grad_GRSH = grad.view(s, g, r, h).permute(1, 2, 0, 3)
        grad_q, grad_k, grad_v = block.kernel.backward(
            grad_GRSH, q_GRSH, k_GKH, v_GKH, out_GRSH, lse_GRS, block.mask_SK, ctx.scale
        )
        block.stack.add_grad(ctx.layer, end, grad_k, grad_v)
        own_k_GSH, own_v_GSH = block.stack.take_grad(ctx.layer, start, end)
        unrotate = (block.cos_S1J, -block.sin_S1J)
        grad_q_SNH = _rotate(grad_q.permute(2, 0, 1, 3).reshape(s, g * r, h), *unrotate)
        grad_k_SGH = _rotate(own_k_GSH.transpose(0, 1), *unrotate)
        return grad_q_SNH, grad_k_SGH, own_v_GSH.transpose(0, 1), None, None, None


class TreeAttention(torch.nn.Module):
    """Core attention for Megatron's layer spec; heads are those of this tensor-parallel rank. No parameters."""

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_spec_keywords: Any
    ) -> None:
        super().__init__()
        self.layer = layer_number - 1  # Megatron counts from 1
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_unused: Any
    ) -> torch.Tensor:
        """query ``[s, b, N, H]``, key and value ``[s, b, G, H]`` -> ``[s, b, N * H]``; b is 1 with a BlockContext.

        Rows beyond the block's (padding to a multiple of the tensor-parallel size) give zeros.
        """
        if not isinstance(attention_mask, BlockContext):
            return self._whole_rows(query, key, value)
        s = attention_mask.num_rows
        out = _TreeAttentionFunction.apply(
            query[:s, 0], key[:s, 0], value[:s, 0], attention_mask, self.layer, self.scale
        )
        return F.pad(out, (0, 0, 0, query.shape[0] - s)).unsqueeze(1) if query.shape[0] > s else out.unsqueeze(1)

    def _whole_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        s, b, n, h = query.shape
        repeats = n // key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).reshape(s, b, n * h)

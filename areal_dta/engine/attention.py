"""The core-attention module of every layer: a block of trie tokens attends to the current path and to itself.

Megatron's layers hand their ``attention_mask`` argument through unread, so a `BlockContext` travels in it: no global
state. Without one, the module is plain causal attention on whole rows (the dense reference). In the tree case rotary
embedding happens here, by the positions of the block's rows (siblings repeat positions), so that embedding, stack and
kernels are one autograd node.

Exactness: a pushed block's keys and values are rows of the path. Later blocks add their gradients to these rows' frame;
the node's backward runs after all of them and returns what they left plus its own part.

Legend: S rows of the block, N query heads, G key/value heads, R = N / G, H head dim, J = H / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from areal_dta.engine.kernels import AttentionKernel, merge_tile, wide_dtype
from areal_dta.engine.stack import Frame, PathView
from areal_dta.tree.tiles import Tile, TileKind

__all__ = ["BlockContext", "TreeAttention", "keys_and_values_only"]


@dataclass(frozen=True)
class BlockContext:
    """Where a block sits: its ``num_rows`` rows start at position ``depth`` of the path if it is pushed.

    ``tiles`` carry a mask each (additive, for MASKED ones). ``writes``: keys and values become rows of the path.
    ``frames``: pushed rows that this block computes with its graph, whose gradients it takes.
    """

    path: PathView
    kernel: AttentionKernel
    depth: int
    num_rows: int
    cos_S1J: torch.Tensor
    sin_S1J: torch.Tensor
    tiles: tuple[tuple[Tile, torch.Tensor | None], ...]
    writes: bool
    frames: tuple[Frame, ...]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves convention (the one of Qwen and Llama); contiguous in the given order of dimensions."""
    first, second = x.chunk(2, -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def _attend(
    block: BlockContext, layer: int, scale: float, q_GSRH: torch.Tensor, k_GSH: torch.Tensor, v_GSH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output GSRH, log-sum-exp GSR) over all tiles, fp32 or wider where tiles were merged."""
    first, wide = block.tiles[0][0], wide_dtype(q_GSRH.dtype)
    whole = first.q_start == 0 and first.q_end == block.num_rows
    out_GSRH = lse_GSR = None
    for tile, mask in block.tiles:
        span = slice(tile.q_start, tile.q_end)
        if tile.on_path:
            k, v = block.path.rows(layer, tile.k_start, tile.k_end)
        else:
            k, v = k_GSH[:, tile.k_start : tile.k_end], v_GSH[:, tile.k_start : tile.k_end]
        tile_out, tile_lse = block.kernel.forward(tile.kind, q_GSRH[:, span], k, v, mask, scale)
        if out_GSRH is None or lse_GSR is None:
            if whole:
                out_GSRH, lse_GSR = tile_out.to(wide), tile_lse
                continue
            out_GSRH = torch.empty(q_GSRH.shape, dtype=wide, device=q_GSRH.device)
            lse_GSR = torch.empty(q_GSRH.shape[:3], dtype=tile_lse.dtype, device=q_GSRH.device)
        if tile.kind is TileKind.FULL:
            merge_tile(out_GSRH[:, span], lse_GSR[:, span], tile_out, tile_lse)
        else:
            out_GSRH[:, span], lse_GSR[:, span] = tile_out, tile_lse
    assert out_GSRH is not None and lse_GSR is not None
    return out_GSRH.to(q_GSRH.dtype), lse_GSR


class _TreeAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SNH: torch.Tensor, k_SGH: torch.Tensor, v_SGH: torch.Tensor, block: BlockContext, layer: int,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        s, n, h = q_SNH.shape
        g = k_SGH.shape[1]
        k_GSH, v_GSH = _own_rows(block, layer, k_SGH, v_SGH)
        cos, sin = block.cos_S1J, block.sin_S1J
        q_GSRH = _rotate(q_SNH.view(s, g, n // g, h).transpose(0, 1), cos, sin)
        out_GSRH, lse_GSR = _attend(block, layer, scale, q_GSRH, k_GSH, v_GSH)
        ctx.save_for_backward(q_GSRH, out_GSRH, lse_GSR, *(() if block.writes else (k_GSH, v_GSH)))
        ctx.block, ctx.layer, ctx.scale = block, layer, scale
        return out_GSRH.transpose(0, 1).reshape(s, n * h)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        q_GSRH, out_GSRH, lse_GSR, *own = ctx.saved_tensors
        block: BlockContext = ctx.block
        g, s, r, h = q_GSRH.shape
        k_GSH, v_GSH = own or block.path.rows(ctx.layer, block.depth, block.depth + s)
        grad_GSRH = grad.view(s, g, r, h).transpose(0, 1).contiguous()
        wide = wide_dtype(grad.dtype)
        grad_q = torch.zeros((g, s, r, h), dtype=wide, device=grad.device)
        grad_k, grad_v = (torch.zeros((g, s, h), dtype=wide, device=grad.device) for _ in range(2))
        for tile, mask in block.tiles:
            span, keys = slice(tile.q_start, tile.q_end), slice(tile.k_start, tile.k_end)
            k, v = (
                block.path.rows(ctx.layer, tile.k_start, tile.k_end)
                if tile.on_path
                else (k_GSH[:, keys], v_GSH[:, keys])
            )
            tile_q, tile_k, tile_v = block.kernel.backward(
                tile.kind,
                grad_GSRH[:, span],
                q_GSRH[:, span],
                k,
                v,
                out_GSRH[:, span],
                lse_GSR[:, span],
                mask,
                ctx.scale,
            )
            grad_q[:, span] += tile_q
            if tile.on_path:
                block.path.add_grad(ctx.layer, tile_k, tile_v)
            else:
                grad_k[:, keys] += tile_k
                grad_v[:, keys] += tile_v
            del tile_q, tile_k, tile_v  # a long path's gradients are large: not two tiles' at once
        _take_descendants(block, ctx.layer, grad_k, grad_v)
        cos, sin = block.cos_S1J, -block.sin_S1J
        grad_q_SGRH = _rotate(grad_q.to(grad.dtype).transpose(0, 1), cos.unsqueeze(1), sin.unsqueeze(1))
        grad_k_SGH = _rotate(grad_k.to(grad.dtype).transpose(0, 1), cos, sin)
        return grad_q_SGRH.view(s, g * r, h), grad_k_SGH, grad_v.to(grad.dtype).transpose(0, 1), None, None, None


class _KeysAndValuesFunction(torch.autograd.Function):
    """Keys and values of rows whose output nobody reads: a graph whose gradient is what descendants left."""

    @staticmethod
    def forward(ctx: Any, k_SGH: torch.Tensor, v_SGH: torch.Tensor, block: BlockContext, layer: int) -> torch.Tensor:
        _own_rows(block, layer, k_SGH, v_SGH)
        ctx.block, ctx.layer, ctx.shape, ctx.dtype = block, layer, k_SGH.shape, k_SGH.dtype
        return k_SGH.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        block: BlockContext = ctx.block
        s, g, h = ctx.shape
        wide = wide_dtype(ctx.dtype)
        grad_k, grad_v = (torch.zeros((g, s, h), dtype=wide, device=grad.device) for _ in range(2))
        _take_descendants(block, ctx.layer, grad_k, grad_v)
        grad_k_SGH = _rotate(grad_k.to(ctx.dtype).transpose(0, 1), block.cos_S1J, -block.sin_S1J)
        return grad_k_SGH, grad_v.to(ctx.dtype).transpose(0, 1), None, None


def _own_rows(
    block: BlockContext, layer: int, k_SGH: torch.Tensor, v_SGH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys and values ``[G, S, H]`` of the block; of a pushed one written to the path, and views of it."""
    k_GSH = _rotate(k_SGH.transpose(0, 1), block.cos_S1J.squeeze(1), block.sin_S1J.squeeze(1))
    v_GSH = v_SGH.transpose(0, 1)
    if not block.writes:
        return k_GSH, v_GSH
    block.path.write(layer, block.depth, k_GSH, v_GSH)
    return block.path.rows(layer, block.depth, block.depth + k_SGH.shape[0])


def _take_descendants(block: BlockContext, layer: int, grad_k_GSH: torch.Tensor, grad_v_GSH: torch.Tensor) -> None:
    """Add what descendants left on the block's pushed rows."""
    end = block.depth + block.num_rows
    for frame in block.frames:
        low, high = max(frame.depth, block.depth), min(frame.end, end)
        if low < high:
            for start, left_k_GSH, left_v_GSH in frame.grads(layer, low, high):
                own = slice(start - block.depth, start - block.depth + left_k_GSH.shape[1])
                grad_k_GSH[:, own] += left_k_GSH
                grad_v_GSH[:, own] += left_v_GSH


def keys_and_values_only(key: torch.Tensor, value: torch.Tensor, block: BlockContext, layer: int) -> torch.Tensor:
    """Put keys and values ``[s, 1, G, H]`` of a last layer on the path; returns the root of their graph (a zero)."""
    return _KeysAndValuesFunction.apply(key[: block.num_rows, 0], value[: block.num_rows, 0], block, layer)


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

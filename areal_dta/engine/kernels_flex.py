"""Tree-masked attention through FlexAttention: blocks of the mask without a visible pair are never computed.

The mask comes from the Euler tour: rows lie in depth-first order, so the rows that see key k (its own row and its
descendants) are consecutive, ``first_K[k] .. end_K[k] - 1``. A block mask follows from these intervals alone.

Backward. FlexAttention offers autograd through its output and log-sum-exp, no explicit backward. For a tile with own
output o_t and log-sum-exp l_t, and the merged o and l of its row, o = sum_t w_t o_t with w_t = exp(l_t - l), so

    do/do_t = w_t        do/dl_t = w_t (o_t - o)

and the tile's share of the gradient is autograd's with grad_o_t = w_t g and grad_l_t = w_t (g . o_t - g . o). The
kernel's backward of these two is w_t p_t (g . v - g . o_t + g . o_t - g . o) = p (g . v - g . o): exact. Its price is
one more forward of the tile.

Compiled on the first use on CUDA, once per bucket of shapes: rows and keys are padded to a power of two of at least
128. Elsewhere FlexAttention runs as plain products.

Legend: G key/value heads, S query rows, R query heads per key/value head, K key rows, H head dim, B mask blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from areal_dta.tree.tiles import TileKind

__all__ = ["FlexMasked", "RowIntervals", "bucket", "tile_gradients"]

_BLOCK = 128  # FlexAttention's sparse block
_RECOMPILE_LIMIT = 64  # every bucket is a compilation of its own, dynamo gives up after 8 by default

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def bucket(num_rows: int) -> int:
    """The padded size: the next power of two, at least 128."""
    return max(_BLOCK, 1 << (num_rows - 1).bit_length())


def tile_gradients(
    out_t: torch.Tensor, lse_t: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a tile's own output [..., H] and log-sum-exp [...] from those of the merged row."""
    weight = (lse_t - lse).exp().unsqueeze(-1)
    grad_wide, out_wide = grad.to(lse.dtype), out.to(lse.dtype)
    grad_lse = (grad_wide * (out_t.to(lse.dtype) - out_wide)).sum(-1) * weight.squeeze(-1)
    return (grad_wide * weight).to(out_t.dtype), grad_lse.to(lse_t.dtype)


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """Key k is seen by query rows ``first_K[k] .. end_K[k]-1`` (int32) of ``num_rows``; none where both are equal."""

    first_K: torch.Tensor
    end_K: torch.Tensor
    num_rows: int

    @classmethod
    def of_subtrees(cls, subtree_end_S: torch.Tensor, depth: int) -> RowIntervals:
        """``depth`` path rows that all S rows see, then the block's own rows; ``subtree_end_S`` may exceed S."""
        s = len(subtree_end_S)
        own = torch.arange(s, dtype=torch.int32, device=subtree_end_S.device)
        return cls(
            first_K=F.pad(own, (depth, 0)),
            end_K=F.pad(subtree_end_S.to(torch.int32).clamp(max=s), (depth, 0), value=s),
            num_rows=s,
        )

    @classmethod
    def of_mask(cls, mask_SK: torch.Tensor) -> RowIntervals:
        """From an additive mask. Raises ValueError where the rows that see a key are not consecutive."""
        visible_SK = ~mask_SK.isneginf()
        first_K = visible_SK.int().argmax(0).int()
        intervals = cls(first_K, first_K + visible_SK.sum(0, dtype=torch.int32), len(mask_SK))
        if not torch.equal(intervals.visible_SK(), visible_SK):
            raise ValueError("the mask has a key whose rows are not consecutive; use the bias kernel for masked tiles")
        return intervals

    def visible_SK(self) -> torch.Tensor:
        """The dense mask, bool."""
        row_S1 = torch.arange(self.num_rows, device=self.first_K.device)[:, None]
        return (row_S1 >= self.first_K) & (row_S1 < self.end_K)

    @cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask of the padded problem; padded rows and keys see and are seen by nothing."""
        size_q, size_k = bucket(self.num_rows), bucket(len(self.first_K))
        first_K, end_K = (F.pad(x, (0, size_k - len(x))) for x in (self.first_K, self.end_K))
        low_B1 = torch.arange(0, size_q, _BLOCK, device=first_K.device)[:, None]
        seen_BK = (first_K < low_B1 + _BLOCK) & (end_K > low_B1) & (first_K < end_K)
        whole_BK = (first_K <= low_B1) & (end_K >= low_B1 + _BLOCK)
        some_BB = seen_BK.unflatten(1, (-1, _BLOCK)).any(-1)
        whole_BB = whole_BK.unflatten(1, (-1, _BLOCK)).all(-1)

        def mask_mod(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= first_K[k]) & (q < end_K[k])

        return BlockMask.from_kv_blocks(
            *_listed(some_BB & ~whole_BB),
            *_listed(whole_BB),
            BLOCK_SIZE=_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(size_q, size_k),
        )


def _listed(present_BB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(counts [1, 1, B], indices [1, 1, B, B] of the true entries first): FlexAttention's form of a block matrix."""
    counts = present_BB.sum(-1, dtype=torch.int32)
    indices = present_BB.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()


class FlexMasked:
    """Masked tiles by FlexAttention. ``attend`` (q, k, v, intervals, scale) replaces it in tests."""

    def __init__(self, attend: Attend | None = None) -> None:
        self._attend = attend or self._flex
        self._compiled: Any = None
        self._intervals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # all layers of a block share a mask

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(output GSRH, log-sum-exp GSR); rows that see no key give 0 and -inf."""
        assert kind is TileKind.MASKED and mask_SK is not None
        return self._attend(q_GSRH, k_GKH, v_GKH, self._of(mask_SK), scale)

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Computes the tile's forward again, under autograd."""
        assert kind is TileKind.MASKED and mask_SK is not None
        q, k, v = (x.detach().requires_grad_() for x in (q_GSRH, k_GKH, v_GKH))
        with torch.enable_grad():
            out_t, lse_t = self._attend(q, k, v, self._of(mask_SK), scale)
        grads = tile_gradients(out_t.detach(), lse_t.detach(), grad_GSRH, out_GSRH, lse_GSR)
        grad_q, grad_k, grad_v = torch.autograd.grad((out_t, lse_t), (q, k, v), grads)
        return grad_q, grad_k, grad_v

    def _of(self, mask_SK: torch.Tensor) -> RowIntervals:
        intervals = self._intervals.get(mask_SK)
        if intervals is None:
            intervals = self._intervals[mask_SK] = RowIntervals.of_mask(mask_SK)
        return intervals

    def _flex(
        self, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor, intervals: RowIntervals, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FlexAttention's layout is (batch, heads, rows, head dim); the heads of a group share its key/value head."""
        s, k = q_GSRH.shape[1], k_GKH.shape[1]
        size_q, size_k = bucket(s), bucket(k)
        q_1NSH = F.pad(q_GSRH.permute(0, 2, 1, 3), (0, 0, 0, size_q - s)).flatten(0, 1)[None]
        k_1GKH, v_1GKH = (F.pad(x, (0, 0, 0, size_k - k))[None] for x in (k_GKH, v_GKH))
        out_1NSH, aux = self._function(q_GSRH.device)(
            q_1NSH, k_1GKH, v_1GKH, block_mask=intervals.block_mask, scale=scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        heads = q_GSRH.shape[0], q_GSRH.shape[2]
        out_GSRH = out_1NSH[0, :, :s].unflatten(0, heads).permute(0, 2, 1, 3)
        return out_GSRH, aux.lse[0, :, :s].unflatten(0, heads).transpose(1, 2)

    def _function(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return flex_attention
        if self._compiled is None:
            self._compiled = torch.compile(flex_attention, dynamic=False)
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
        return self._compiled

"""Attention of one tile on CUDA: the flash and the memory-efficient kernels that PyTorch ships.

Both keep the log-sum-exp, and both have a backward that takes output and log-sum-exp as arguments. Given the values
*merged* over all tiles of a row, such a backward returns exactly this tile's share of the row's gradient: it rebuilds
p = exp(scores - lse) and uses the output only in delta = sum(grad * out). Nothing is recomputed.

Query heads that share a key/value head are handled without repeating keys or values. The group index G takes the
kernels' batch dimension, so ``q_GSRH`` is their (batch, sequence, heads, head dim) as it lies in memory. A full tile
folds its R query heads into rows: one (S * R) x K problem per group. A causal or masked tile gives flash one key head
for R query heads, and the memory-efficient kernel a view with stride 0.

Importing this module touches no device. `choose_cuda` is the pure choice, `cuda_kernel` builds what it chose.

Legend: G key/value heads, S query rows, R query heads per key/value head, K key rows, H head dim.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from areal_dta.engine.kernels_flex import FlexMasked
from areal_dta.tree.tiles import TileKind

if TYPE_CHECKING:
    from areal_dta.engine.kernels import AttentionKernel

__all__ = [
    "CudaChoice",
    "CudaKernel",
    "EfficientTiles",
    "FlashTiles",
    "aligned_bias",
    "choose_cuda",
    "cuda_kernel",
    "padded_lse",
]

log = logging.getLogger(__name__)

MaskedKind = Literal["bias", "flex"]
Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_BIAS_ROW_ELEMENTS = 16  # the memory-efficient kernel loads bias rows in vectors of at most 16 elements
_LSE_ROW_ELEMENTS = 32  # and log-sum-exp rows in blocks of 32
_BIAS_POINTER_BYTES = 16
_NO_MASK, _CAUSAL_FROM_TOP_LEFT = 0, 1
_FLASH_MAX_HEAD_DIM = 256
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CudaChoice:
    """``dense`` serves full and causal tiles; ``product`` means plain matrix products for everything."""

    dense: Literal["flash", "efficient", "product"]
    masked: Literal["bias", "flex", "product"]
    reason: str


def choose_cuda(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], masked: MaskedKind = "bias"
) -> CudaChoice:
    """Which kernels a device of ``capability`` (8.0 Ampere, 9.0 Hopper) runs for this dtype and head dim."""
    vector = 4 if dtype == torch.float32 else 8
    if dtype not in (torch.float32, *_FLASH_DTYPES):
        return CudaChoice("product", "product", f"no fused kernel takes {dtype}")
    if head_dim % vector:
        return CudaChoice("product", "product", f"head dim {head_dim} is not a multiple of {vector} for {dtype}")
    if dtype == torch.bfloat16 and capability < (8, 0):
        return CudaChoice("product", "product", f"bfloat16 needs compute capability 8.0, this device has {capability}")
    if dtype == torch.float32:
        return CudaChoice("efficient", masked, "flash has no float32")
    if capability < (8, 0):
        return CudaChoice("efficient", masked, f"flash needs compute capability 8.0, this device has {capability}")
    if head_dim > _FLASH_MAX_HEAD_DIM:
        return CudaChoice("efficient", masked, f"head dim {head_dim} exceeds flash's {_FLASH_MAX_HEAD_DIM}")
    return CudaChoice("flash", masked, f"{dtype} with head dim {head_dim}")


def cuda_kernel(
    dtype: torch.dtype, head_dim: int, device: torch.device | None = None, masked: MaskedKind = "bias"
) -> AttentionKernel | None:
    """The kernel for the current (or given) CUDA device; None where only plain products will do."""
    choice = choose_cuda(dtype, head_dim, torch.cuda.get_device_capability(device), masked)
    log.info("attention on CUDA: dense tiles %s, masked tiles %s (%s)", choice.dense, choice.masked, choice.reason)
    if choice.dense == "product":
        return None
    efficient = EfficientTiles()
    return CudaKernel(
        dense=FlashTiles() if choice.dense == "flash" else efficient,
        masked=FlexMasked() if choice.masked == "flex" else efficient,
    )


class FlashTiles:
    """FULL and CAUSAL tiles in bf16 or fp16. ``ops`` is PyTorch's operator namespace (a test may give another)."""

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self.ops = ops

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        """Causal is aligned at the bottom right: with K > S, row 0 sees the first K - S + 1 keys."""
        is_causal = _is_causal(kind, mask_SK)
        q = q_GSRH if is_causal else _folded(q_GSRH)
        out, lse_GNL, *_ = self.ops._flash_attention_forward(
            q, k_GKH.unsqueeze(2), v_GKH.unsqueeze(2), None, None, q.shape[1], k_GKH.shape[1], 0.0, is_causal, False,
            scale=scale,
        )  # fmt: skip
        lse_GSR = lse_GNL.transpose(1, 2) if is_causal else lse_GNL.view(q_GSRH.shape[:3])
        return out.view(q_GSRH.shape), lse_GSR

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        is_causal = _is_causal(kind, mask_SK)
        grad, q, out = (x.to(q_GSRH.dtype) for x in (grad_GSRH, q_GSRH, out_GSRH))
        if is_causal:
            lse = lse_GSR.transpose(1, 2)
        else:
            grad, q, out = _folded(grad), _folded(q), _folded(out)
            lse = lse_GSR.reshape(lse_GSR.shape[0], 1, -1)
        rng_state = torch.empty(0, dtype=torch.uint64, device=q.device)  # read with dropout only
        grad_q, grad_k, grad_v = self.ops._flash_attention_backward(
            grad, q, k_GKH.unsqueeze(2), v_GKH.unsqueeze(2), out, lse.contiguous(), None, None, q.shape[1],
            k_GKH.shape[1], 0.0, is_causal, rng_state, rng_state, scale=scale,
        )  # fmt: skip
        return grad_q.view(q_GSRH.shape), grad_k.squeeze(2), grad_v.squeeze(2)


class EfficientTiles:
    """All tiles in fp32, bf16 or fp16; ``mask_SK`` is an additive bias, padded as the kernel's vector loads want it.

    The padded bias of a mask is kept as long as the mask lives: all layers of a block use the same one.
    """

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self.ops = ops
        self._biases: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        """Causal is aligned at the top left, so S must equal K. A row that sees no key gives 0 and -inf."""
        q = _folded(q_GSRH) if kind is TileKind.FULL else q_GSRH
        s, n = q.shape[1:3]
        out, lse_GNL, *_ = self.ops._efficient_attention_forward(
            q, _repeated(k_GKH, n), _repeated(v_GKH, n), self._bias(mask_SK, q), None, None, None, None, 0.0,
            _mask_type(kind), True, scale=scale,
        )  # fmt: skip
        lse_GSN = lse_GNL[..., :s].transpose(1, 2)
        if kind is TileKind.FULL:
            return out.view(q_GSRH.shape), lse_GSN[..., 0].unflatten(1, q_GSRH.shape[1:3])
        if mask_SK is not None:
            out.masked_fill_(lse_GSN.isneginf().unsqueeze(-1), 0.0)
        return out, lse_GSN

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        grad, q, out, lse = grad_GSRH.to(q_GSRH.dtype), q_GSRH, out_GSRH.to(q_GSRH.dtype), lse_GSR
        if kind is TileKind.FULL:
            grad, q, out = _folded(grad), _folded(q), _folded(out)
            lse = lse_GSR.reshape(lse_GSR.shape[0], -1, 1)
        s, n = q.shape[1:3]
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # read with dropout only
        grad_q, grad_k, grad_v, _ = self.ops._efficient_attention_backward(
            grad, q, _repeated(k_GKH, n), _repeated(v_GKH, n), self._bias(mask_SK, q), out.contiguous(), None, None,
            s, k_GKH.shape[1], padded_lse(lse), 0.0, seed, seed, _mask_type(kind), False, scale=scale,
        )  # fmt: skip
        if n == 1:
            return grad_q.view(q_GSRH.shape), grad_k.squeeze(2), grad_v.squeeze(2)
        wide = torch.promote_types(grad_k.dtype, torch.float32)
        return grad_q, grad_k.sum(2, dtype=wide), grad_v.sum(2, dtype=wide)

    def _bias(self, mask_SK: torch.Tensor | None, q_GSNH: torch.Tensor) -> torch.Tensor | None:
        if mask_SK is None:
            return None
        bias_SK = self._biases.get(mask_SK)
        if bias_SK is None or bias_SK.dtype != q_GSNH.dtype:
            bias_SK = aligned_bias(mask_SK, q_GSNH.dtype)
            if bias_SK is not mask_SK:  # a value that is its own key would never be freed
                self._biases[mask_SK] = bias_SK
        return bias_SK.expand(q_GSNH.shape[0], q_GSNH.shape[2], -1, -1)


class CudaKernel:
    """The engine's kernel on CUDA (`areal_dta.engine.kernels.AttentionKernel`): ``dense`` for FULL and CAUSAL tiles,
    ``masked`` for MASKED ones, whose mask must not change while it lives.
    """

    def __init__(self, dense: FlashTiles | EfficientTiles, masked: EfficientTiles | FlexMasked) -> None:
        self._dense, self._masked = dense, masked

    def forward(
        self, kind: TileKind, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        mask_SK: torch.Tensor | None, scale: float,
    ) -> Pair:  # fmt: skip
        """(output GSRH in the query's dtype, log-sum-exp GSR in fp32) of one tile."""
        tiles = self._masked if kind is TileKind.MASKED else self._dense
        return tiles.forward(kind, q_GSRH, k_GKH, v_GKH, mask_SK, scale)

    def backward(
        self, kind: TileKind, grad_GSRH: torch.Tensor, q_GSRH: torch.Tensor, k_GKH: torch.Tensor, v_GKH: torch.Tensor,
        out_GSRH: torch.Tensor, lse_GSR: torch.Tensor, mask_SK: torch.Tensor | None, scale: float,
    ) -> Triple:  # fmt: skip
        """This tile's gradients (GSRH, GKH, GKH), given the merged output and log-sum-exp."""
        tiles = self._masked if kind is TileKind.MASKED else self._dense
        return tiles.backward(kind, grad_GSRH, q_GSRH, k_GKH, v_GKH, out_GSRH, lse_GSR, mask_SK, scale)


def _is_causal(kind: TileKind, mask_SK: torch.Tensor | None) -> bool:
    if kind is TileKind.MASKED or mask_SK is not None:
        raise ValueError(f"flash attention takes no mask, got a {kind.value} tile; use CudaKernel")
    return kind is TileKind.CAUSAL


def _mask_type(kind: TileKind) -> int:
    return _CAUSAL_FROM_TOP_LEFT if kind is TileKind.CAUSAL else _NO_MASK


def _folded(x_GSRH: torch.Tensor) -> torch.Tensor:
    """``[G, S * R, 1, H]``: the query heads of a group as further rows; a view where S and R lie together."""
    g, s, r, h = x_GSRH.shape
    return x_GSRH.reshape(g, s * r, 1, h)


def _repeated(x_GKH: torch.Tensor, num_repeats: int) -> torch.Tensor:
    """View ``[G, K, N, H]`` of one key/value head for N query heads (stride 0, no copy)."""
    return x_GKH.unsqueeze(2).expand(-1, -1, num_repeats, -1)


def aligned_bias(mask_SK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``mask_SK`` in ``dtype`` with rows that start at vector boundaries; a copy only where it is not so already."""
    s, k = mask_SK.shape
    is_aligned = (
        mask_SK.dtype == dtype
        and mask_SK.stride(1) == 1
        and mask_SK.stride(0) % _BIAS_ROW_ELEMENTS == 0
        and mask_SK.storage_offset() * mask_SK.element_size() % _BIAS_POINTER_BYTES == 0
    )
    if is_aligned:
        return mask_SK
    width = math.ceil(k / _BIAS_ROW_ELEMENTS) * _BIAS_ROW_ELEMENTS
    padded_SK = torch.zeros(s, width, dtype=dtype, device=mask_SK.device)[:, :k]
    return padded_SK.copy_(mask_SK)


def padded_lse(lse_GSN: torch.Tensor) -> torch.Tensor:
    """``[G, N, L]`` with L the next multiple of 32 and +inf beyond S, so that rows there weigh nothing."""
    pad = -lse_GSN.shape[1] % _LSE_ROW_ELEMENTS
    return F.pad(lse_GSN.transpose(1, 2), (0, pad), value=math.inf).contiguous()

"""Matrices reordered for oneDNN, which multiplies few rows two to three times as fast as the plain layout on CPUs.

A packed matrix is a tensor that only `linear` can read. Packing copies: the plain weights stay what everything else
uses. Legend of shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from areal_dta.nn.decoder import DecoderWeights, LayerWeights

EXACT_ROWS = 32

__all__ = ["linear", "pack", "pack_decoder", "pack_layer"]


def linear(x_TI: torch.Tensor, matrix_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ matrix.T + bias`` (T, O) for a plain or a packed matrix."""
    if not matrix_OI.is_mkldnn:
        return F.linear(x_TI, matrix_OI, bias_O)
    num_rows = len(x_TI)
    padding = _rows_computed(num_rows) - num_rows
    if padding:
        x_TI = F.pad(x_TI, (0, 0, 0, padding))
    out_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, matrix_OI, bias_O, "none", [], "")
    return out_TO[:num_rows] if padding else out_TO


def _rows_computed(num_rows: int) -> int:
    """oneDNN compiles and keeps code for every number of rows, about 0.4 MB each: many rows are rounded up."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = max(8, 1 << (num_rows - 1).bit_length() - 4)  # at most a quarter more
    return -(-num_rows // step) * step


def pack(matrix_OI: torch.Tensor) -> torch.Tensor:
    """The matrix reordered; itself where that is of no use: another device or dtype, a build without oneDNN."""
    packable = matrix_OI.device.type == "cpu" and matrix_OI.dtype == torch.float32 and not matrix_OI.is_mkldnn
    if not packable or not torch.backends.mkldnn.is_available():
        return matrix_OI
    takes_plain = torch._C._dispatch_has_kernel_for_dispatch_key("mkldnn::_reorder_linear_weight", "CPU")
    source = matrix_OI.detach() if takes_plain else matrix_OI.detach().to_mkldnn()  # older torch wants the latter
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(source)
    return packed


def pack_layer(layer: LayerWeights) -> LayerWeights:
    return replace(layer, qkv=pack(layer.qkv), out=pack(layer.out), gate_up=pack(layer.gate_up), down=pack(layer.down))


def pack_decoder(weights: DecoderWeights) -> DecoderWeights:
    """All matrices packed but the embedding, which is looked up by row."""
    return replace(weights, layers=tuple(map(pack_layer, weights.layers)), head_VD=pack(weights.head_VD))

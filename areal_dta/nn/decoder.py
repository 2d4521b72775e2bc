"""The decoder as functions over weights; where keys and values live is the caller's business (`Attend`).

Legend of shape suffixes: T tokens (of any number of sequences, laid end to end), D hidden, N query heads, K key/value
heads, H head dim, F feed-forward, V vocabulary, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from areal_dta.nn.model_config import DecoderConfig, RopeSpec
from areal_dta.nn.packed import linear

__all__ = [
    "Attend",
    "CosSin",
    "DecoderWeights",
    "LayerWeights",
    "Rotary",
    "decode_features",
    "decode_hidden",
    "decode_layer",
    "project_logits",
    "rotate",
]

CosSin = tuple[torch.Tensor, torch.Tensor]  # what `Rotary` gives and `rotate` takes


class Attend(Protocol):
    """Stores one layer's new keys and values and returns the attention output of the new queries."""

    def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        """Return o_TNH; keys arrive after norm and rotary embedding."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; query, key and value rows are one matrix, gate and up rows another."""

    attn_norm_D: torch.Tensor
    qkv: torch.Tensor  # ((N + 2K) H, D)
    qkv_bias: torch.Tensor | None
    q_norm_H: torch.Tensor | None
    k_norm_H: torch.Tensor | None
    out: torch.Tensor  # (D, N H)
    out_bias: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    gate_up: torch.Tensor  # (2F, D)
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # (D, F)
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of one version. Immutable: an update builds a new object and swaps the reference."""

    config: DecoderConfig
    embed_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: torch.Tensor
    head_VD: torch.Tensor  # the embedding itself when tied

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_VD.device


class Rotary:
    """Cosines and sines by position, computed in fp32 as the reference implementations do, extended on demand."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq = _inverse_frequencies(config.rope, config.head_dim).to(device)
        self._dtype = dtype
        self._cos_PH = self._sin_PH = torch.empty(0, config.head_dim, dtype=dtype, device=device)

    def __call__(self, positions_T: torch.Tensor, num_positions: int) -> CosSin:
        """For `rotate` at ``positions_T`` (all below ``num_positions``): two tensors of shape (T, 1, H)."""
        if num_positions > len(self._cos_PH):
            size = max(1024, 1 << (num_positions - 1).bit_length())
            angle = torch.arange(size, dtype=torch.float32, device=self._inv_freq.device)[:, None] * self._inv_freq
            cos, sin = angle.cos().to(self._dtype), angle.sin().to(self._dtype)
            self._cos_PH, self._sin_PH = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos_PH[positions_T].unsqueeze(1), self._sin_PH[positions_T].unsqueeze(1)


def _inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones left alone, those between blended linearly.
        wavelength = 2 * math.pi / freq
        turns = rope.original_max_positions / wavelength
        blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - blend) * freq / rope.factor + blend * freq
    return freq


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return torch.rms_norm(x, weight.shape, weight, eps)
    return weight * torch.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def rotate(x_TNH: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotary embedding, halves convention: component i turns with component i + H/2."""
    cos, sin = cos_sin
    half = x_TNH.shape[-1] // 2
    swapped = torch.cat((x_TNH[..., half:], x_TNH[..., :half]), -1)
    return torch.addcmul(x_TNH * cos, swapped, sin)


def decode_hidden(weights: DecoderWeights, ids_T: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
    """Run the layers over T new tokens, whose history ``attend`` owns; hidden states (T, D) before the last norm."""
    return decode_features(weights, ids_T, cos_sin, attend, ())[0]


def decode_features(
    weights: DecoderWeights, ids_T: torch.Tensor, cos_sin: CosSin, attend: Attend, hidden_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode_hidden`, and beside it the outputs of ``hidden_layers`` side by side, (T, len * D), in the order given;
    without any the hidden states themselves."""
    x_TD = F.embedding(ids_T, weights.embed_VD)
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(weights.layers):
        x_TD = decode_layer(weights.config, layer, index, x_TD, cos_sin, attend)
        if index in hidden_layers:
            outputs[index] = x_TD
    return x_TD, torch.cat([outputs[i] for i in hidden_layers], -1) if hidden_layers else x_TD


def decode_layer(
    config: DecoderConfig, layer: LayerWeights, index: int, x_TD: torch.Tensor, cos_sin: CosSin, attend: Attend
) -> torch.Tensor:
    """One layer's output (T, D); ``index`` is what ``attend`` knows the layer by."""
    x_TD = x_TD + _attention(config, layer, index, x_TD, cos_sin, attend)
    h_TD = rms_norm(x_TD, layer.mlp_norm_D, config.norm_eps)
    gate_TF, up_TF = linear(h_TD, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return x_TD + linear(F.silu(gate_TF) * up_TF, layer.down, layer.down_bias)


def _attention(
    config: DecoderConfig, layer: LayerWeights, index: int, x_TD: torch.Tensor, cos_sin: CosSin, attend: Attend
) -> torch.Tensor:
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    h_TD = rms_norm(x_TD, layer.attn_norm_D, config.norm_eps)
    qkv = linear(h_TD, layer.qkv, layer.qkv_bias).view(len(x_TD), N + 2 * K, H)
    if layer.q_norm_H is not None and layer.k_norm_H is not None:
        q_TNH = rotate(rms_norm(qkv[:, :N], layer.q_norm_H, config.norm_eps), cos_sin)
        k_TKH = rotate(rms_norm(qkv[:, N : N + K], layer.k_norm_H, config.norm_eps), cos_sin)
    else:
        q_TNH, k_TKH = rotate(qkv[:, : N + K], cos_sin).split((N, K), 1)
    o_TNH = attend(index, q_TNH, k_TKH, qkv[:, N + K :])
    return linear(o_TNH.reshape(len(x_TD), N * H), layer.out, layer.out_bias)


def project_logits(weights: DecoderWeights, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Final norm and vocabulary head: logits (T, V) in the model's dtype."""
    return linear(rms_norm(hidden_TD, weights.final_norm_D, weights.config.norm_eps), weights.head_VD)


def sequence_logits(weights: DecoderWeights, ids: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) of one whole sequence with plain dense causal attention: the slow twin of every cached path."""
    config = weights.config
    positions_T = torch.arange(len(ids), device=weights.device)
    rotary = Rotary(config, weights.dtype, weights.device)

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(config.group_size, 1).transpose(0, 1) for t in (k_TKH, v_TKH))
        return F.scaled_dot_product_attention(q_TNH.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    ids_T = torch.tensor(list(ids), device=weights.device)
    return project_logits(weights, decode_hidden(weights, ids_T, rotary(positions_T, len(ids)), attend))

"""The one-layer drafter as functions over weights; where keys and values live is the caller's business (`Attend`).

At position t the input is [embedding of token t ; feature of position t-1] (a zero feature at t = 0) and the output
feature f_t predicts token t+1. Features have width D in one space per kind: eagle and hass use the target's hidden
state *after* its final norm, so f_t stands in for it directly and the target's head applies to it without a norm;
eagle3 uses ``fc`` of three layers' outputs, f_t is the layer's output, and its own final norm comes before the head.
`target_features` maps what the target computed into that space, the drafter's own outputs are in it already.

Legend of shape suffixes: T tokens (of any number of sequences, end to end), D hidden, F target feature (D or 3D), X
layer input (D or 2D), G feed-forward, N query heads, K key/value heads, H head dim, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.nn.decoder import Attend, CosSin, DecoderWeights, LayerWeights, rms_norm, rotate
from areal_dta.nn.packed import linear, pack, pack_layer

__all__ = [
    "EagleWeights",
    "draft_hidden",
    "draft_inputs",
    "draft_keys_values",
    "draft_logits",
    "follow_target",
    "init_weights",
    "packed",
    "target_features",
    "to_target_ids",
    "trained_tensors",
    "with_tensors",
]


START_SHARE = 0.05  # of the feature's scale, in the residual
START_BRANCH = 0.1
START_NOISE = 0.02


@dataclass(frozen=True)
class EagleWeights:
    """All weights of one drafter version; the embedding, and without a head of its own the head, are the target's."""

    config: EagleConfig
    fc: torch.Tensor  # (D, 2D) on [embedding; feature]; eagle3: (D, 3D) on the three layers' outputs
    fc_bias_D: torch.Tensor | None  # eagle, hass
    layer: LayerWeights  # eagle3: qkv takes 2D and attn_norm_D norms the embedding; else attn_norm_D is not applied
    feature_norm_D: torch.Tensor | None  # eagle3
    final_norm_D: torch.Tensor | None  # eagle3
    head: torch.Tensor | None  # (Vd, D)
    draft_ids_Vd: torch.Tensor | None  # ascending target ids of the draft tokens; None for the full vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.device

    def to(self, dtype: torch.dtype, device: torch.device | str) -> EagleWeights:
        """The same weights elsewhere or in another precision."""
        moved = {name: t.to(device=device, dtype=dtype) for name, t in all_tensors(self).items()}
        ids = None if self.draft_ids_Vd is None else self.draft_ids_Vd.to(device)
        return replace(with_tensors(self, moved), draft_ids_Vd=ids)


def target_features(weights: EagleWeights, target: DecoderWeights, hidden_TF: torch.Tensor) -> torch.Tensor:
    """Features (T, D) from what the target computed: its hidden states before the final norm (T, D), or for eagle3 the
    outputs of ``config.hidden_layers`` side by side (T, 3D)."""
    if hidden_TF.shape[-1] != weights.config.feature_size:
        raise DrafterMismatch(
            f"target features of width {hidden_TF.shape[-1]}, a {weights.config.kind} drafter of hidden size "
            f"{weights.config.hidden_size} takes {weights.config.feature_size}"
        )
    if weights.config.is_eagle3:
        return linear(hidden_TF, weights.fc)
    return rms_norm(hidden_TF, target.final_norm_D, target.config.norm_eps)


def draft_inputs(
    weights: EagleWeights, embed_VD: torch.Tensor, ids_T: torch.Tensor, features_TD: torch.Tensor
) -> torch.Tensor:
    """Layer inputs (T, X) of tokens ``ids_T``, given the features of the positions before them (zeros if none is).

    ``features_TD``: from `target_features` where the target has been, from `draft_hidden` where only the drafter has.
    """
    pair = torch.cat((F.embedding(ids_T, embed_VD), features_TD), -1)
    return pair if weights.config.is_eagle3 else linear(pair, weights.fc, weights.fc_bias_D)


def _normed(weights: EagleWeights, x_TX: torch.Tensor) -> torch.Tensor:
    """What the q, k, v projections read."""
    if weights.feature_norm_D is None:
        return x_TX
    embed_TD, feature_TD = x_TX.chunk(2, -1)
    eps = weights.config.norm_eps
    return torch.cat(
        (rms_norm(embed_TD, weights.layer.attn_norm_D, eps), rms_norm(feature_TD, weights.feature_norm_D, eps)), -1
    )


def draft_keys_values(weights: EagleWeights, x_TX: torch.Tensor, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (after norm and rotary embedding) and values, both (T, K, H): all that known tokens need, no attention."""
    config, layer = weights.config, weights.layer
    start = config.num_heads * config.head_dim
    bias = None if layer.qkv_bias is None else layer.qkv_bias[start:]
    kv = F.linear(_normed(weights, x_TX), layer.qkv[start:], bias).view(len(x_TX), 2, config.num_kv_heads, -1)
    return _key(weights, kv[:, 0], cos_sin), kv[:, 1]


def _key(weights: EagleWeights, k_TKH: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    if weights.layer.k_norm_H is not None:
        k_TKH = rms_norm(k_TKH, weights.layer.k_norm_H, weights.config.norm_eps)
    return rotate(k_TKH, cos_sin)


def draft_hidden(
    weights: EagleWeights, x_TX: torch.Tensor, cos_sin: CosSin, attend: Attend, layer_index: int = 0
) -> torch.Tensor:
    """Features f (T, D) of the tokens' positions; ``attend`` is called once, with ``layer_index``."""
    config, layer = weights.config, weights.layer
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = linear(_normed(weights, x_TX), layer.qkv, layer.qkv_bias).view(len(x_TX), N + 2 * K, H)
    q_TNH, k_TKH, v_TKH = qkv.split((N, K, K), 1)
    if layer.q_norm_H is not None:
        q_TNH = rms_norm(q_TNH, layer.q_norm_H, config.norm_eps)
    o_TNH = attend(layer_index, rotate(q_TNH, cos_sin), _key(weights, k_TKH, cos_sin), v_TKH)
    residual_TD = x_TX[:, -config.hidden_size :]
    x_TD = residual_TD + linear(o_TNH.reshape(len(x_TX), N * H), layer.out, layer.out_bias)
    h_TD = rms_norm(x_TD, layer.mlp_norm_D, config.norm_eps)
    gate_TG, up_TG = linear(h_TD, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return x_TD + linear(F.silu(gate_TG) * up_TG, layer.down, layer.down_bias)


def packed(weights: EagleWeights) -> EagleWeights:
    """The same drafter with its matrices reordered where that is faster; not for `draft_keys_values`."""
    head = None if weights.head is None else pack(weights.head)
    return replace(weights, fc=pack(weights.fc), layer=pack_layer(weights.layer), head=head)


def head_input(weights: EagleWeights, f_TD: torch.Tensor) -> torch.Tensor:
    """What the vocabulary head reads: eagle3's final norm, the features themselves otherwise."""
    return f_TD if weights.final_norm_D is None else rms_norm(f_TD, weights.final_norm_D, weights.config.norm_eps)


def head_rows(weights: EagleWeights, target: DecoderWeights) -> torch.Tensor:
    """The drafter's head (Vd, D): its own rows, else the target's."""
    return target.head_VD if weights.head is None else weights.head


def draft_logits(weights: EagleWeights, f_TD: torch.Tensor, target: DecoderWeights) -> torch.Tensor:
    """Logits (T, Vd) of the next token over the draft vocabulary, in fp32 (fp64 weights: fp64)."""
    logits = linear(head_input(weights, f_TD), head_rows(weights, target))
    return logits if logits.dtype == torch.float64 else logits.float()


def to_target_ids(weights: EagleWeights, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Target ids of draft tokens, any shape."""
    return draft_tokens if weights.draft_ids_Vd is None else weights.draft_ids_Vd[draft_tokens]


def follow_target(weights: EagleWeights, target: DecoderWeights) -> EagleWeights:
    """After an update of the target: copied head rows are taken from its new head; trained tensors stay as they are."""
    weights.config.check_target(target.config)
    if weights.config.trains_head or weights.draft_ids_Vd is None:
        return weights
    return replace(weights, head=target.head_VD[weights.draft_ids_Vd].to(weights.dtype))


_OWN = ("fc", "fc_bias_D", "feature_norm_D", "final_norm_D", "head")


def all_tensors(weights: EagleWeights) -> dict[str, torch.Tensor]:
    """Every floating-point tensor by name, in a fixed order."""
    named: dict[str, torch.Tensor | None] = {name: getattr(weights, name) for name in _OWN}
    named.update({f"layer.{f.name}": getattr(weights.layer, f.name) for f in fields(LayerWeights)})
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def trained_tensors(weights: EagleWeights) -> dict[str, torch.Tensor]:
    """The drafter's own tensors, which training changes; the target's embedding and head rows are not among them."""
    frozen = set() if weights.config.is_eagle3 else {"layer.attn_norm_D"}
    if not weights.config.trains_head:
        frozen.add("head")
    return {name: tensor for name, tensor in all_tensors(weights).items() if name not in frozen}


def with_tensors(weights: EagleWeights, tensors: Mapping[str, torch.Tensor]) -> EagleWeights:
    """The same drafter with the named tensors replaced."""
    layer = {name.removeprefix("layer."): t for name, t in tensors.items() if name.startswith("layer.")}
    own = {name: t for name, t in tensors.items() if not name.startswith("layer.")}
    return replace(replace(weights, **own), layer=replace(weights.layer, **layer))


def init_weights(
    config: EagleConfig,
    target: DecoderWeights,
    generator: torch.Generator,
    draft_ids_Vd: torch.Tensor | None = None,
) -> EagleWeights:
    """An untrained drafter in the target's dtype and place; of the target only both ends are looked at.

    The residual starts as the token's embedding (eagle3: the lowest layer's output) at a small share of the feature's
    scale, everything else as noise with small branches into the residual. Compared with starts from the target's last
    layer or from the identity on the feature, this one is calm on targets of any scale (a large residual is a confident
    wrong answer, a layer made for hidden states overshoots features) and learns as fast or faster. A reduced vocabulary
    needs ``draft_ids_Vd``, distinct ids in ascending order (see `draft_vocab`).
    """
    config.check_target(target.config)
    if config.draft_vocab_size:
        check_draft_ids(config, draft_ids_Vd)
    D, X, G = config.hidden_size, config.layer_input_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def noise(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device=generator.device)
        return (values * scale * columns**-0.5).to(dtype=target.dtype, device=target.device)

    def constant(size: int, value: float, present: bool = True) -> Any:  # Tensor or, where not present, None
        return torch.full((size,), value, dtype=target.dtype, device=target.device) if present else None

    eye = torch.eye(D, dtype=target.dtype, device=target.device)
    if config.is_eagle3:
        fc = torch.cat((eye, torch.zeros_like(eye), torch.zeros_like(eye)), 1) * START_SHARE
        fc = fc + noise(D, 3 * D, START_NOISE)
    else:
        feature_scale = (target.final_norm_D.square().mean() / target.embed_VD.square().mean()).sqrt()
        fc = torch.cat((eye * feature_scale * START_SHARE, noise(D, D, START_NOISE)), 1)
    layer = LayerWeights(
        attn_norm_D=constant(D, 1.0),
        qkv=noise(q_size + 2 * kv_size, X),
        qkv_bias=constant(q_size + 2 * kv_size, 0.0, config.qkv_bias),
        q_norm_H=constant(config.head_dim, 1.0, config.qk_norm),
        k_norm_H=constant(config.head_dim, 1.0, config.qk_norm),
        out=noise(D, q_size, START_BRANCH),
        out_bias=constant(D, 0.0, config.out_bias),
        mlp_norm_D=constant(D, 1.0),
        gate_up=noise(2 * G, D),
        gate_up_bias=constant(2 * G, 0.0, config.mlp_bias),
        down=noise(D, G, START_BRANCH),
        down_bias=constant(D, 0.0, config.mlp_bias),
    )
    ids_Vd = draft_ids_Vd.to(target.device) if draft_ids_Vd is not None and config.draft_vocab_size else None
    rows = target.head_VD if ids_Vd is None else target.head_VD[ids_Vd]
    return EagleWeights(
        config=config,
        fc=fc,
        fc_bias_D=constant(D, 0.0, not config.is_eagle3),
        layer=layer,
        feature_norm_D=constant(D, 1.0, config.is_eagle3),
        final_norm_D=target.final_norm_D.detach().clone() if config.is_eagle3 else None,
        head=rows.detach().clone() if config.has_own_head else None,
        draft_ids_Vd=ids_Vd,
    )


def check_draft_ids(config: EagleConfig, draft_ids_Vd: torch.Tensor | None) -> None:
    """Raise DrafterMismatch unless these are as many distinct, ascending ids of the target as the config says."""
    size = config.draft_vocab_size
    if draft_ids_Vd is None or tuple(draft_ids_Vd.shape) != (size,):
        got = "none" if draft_ids_Vd is None else str(tuple(draft_ids_Vd.shape))
        raise DrafterMismatch(f"draft vocabulary of {size} tokens needs that many ids, got {got}")
    inside = int(draft_ids_Vd[0]) >= 0 and int(draft_ids_Vd[-1]) < config.target_vocab_size
    if not inside or not bool((draft_ids_Vd.diff() > 0).all()):
        raise DrafterMismatch(f"draft ids must be distinct, ascending and below {config.target_vocab_size}")

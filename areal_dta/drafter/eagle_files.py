"""Drafter folders: the layout that SGLang's EAGLE loaders read, sealed and verified like every version of weights.

- ``config.json`` is a Llama config with architecture ``LlamaForCausalLMEagle`` or ``LlamaForCausalLMEagle3``.
- ``model.safetensors`` holds the loaders' tensor names; ``d2t`` is target id minus draft id per draft token.
- ``drafter.json`` is our own description, ``version.json`` the manifest (see `areal_dta.weights`).
- ``token_map.pt``, with a reduced vocabulary and the target's head rows, is for SGLang's ``--speculative-token-map``.

What those classes have no place for (see `sglang_obstacles`) is written all the same, under a different architecture
name, so that SGLang refuses the folder instead of drafting badly from part of it; `EagleConfig.for_target` with
``portable=True`` avoids it. Our drafter's first cache slot (token 0, no feature) has no counterpart in SGLang.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from areal_dta.drafter.eagle import EagleWeights, check_draft_ids
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig, sglang_obstacles
from areal_dta.nn.decoder import DecoderWeights, LayerWeights
from areal_dta.nn.loading import WeightsMismatch, read_tensors
from areal_dta.weights import TornWeights, VersionManifest, read_manifest, replaced_folder, seal_version, verify

__all__ = ["expected_tensors", "read_drafter", "sglang_obstacles", "write_drafter"]

Shape = tuple[int, ...]
TOKEN_MAP = "token_map.pt"


def expected_tensors(config: EagleConfig) -> dict[str, Shape]:
    """Name and shape of every tensor in the file."""
    D, G, H, X = config.hidden_size, config.ffn_size, config.head_dim, config.layer_input_size
    q, kv = config.num_heads * H, config.num_kv_heads * H
    layer = _layer_name(config)
    shapes: dict[str, Shape] = {"fc.weight": (D, 3 * D if config.is_eagle3 else 2 * D)}
    out_bias = config.out_bias or (config.qkv_bias and not config.is_eagle3)  # SGLang has both or neither
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, X, config.qkv_bias),
        ("self_attn.k_proj", kv, X, config.qkv_bias),
        ("self_attn.v_proj", kv, X, config.qkv_bias),
        ("self_attn.o_proj", D, q, out_bias),
        ("mlp.gate_proj", G, D, config.mlp_bias),
        ("mlp.up_proj", G, D, config.mlp_bias),
        ("mlp.down_proj", D, G, config.mlp_bias),
    ):
        shapes[f"{layer}.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{layer}.{name}.bias"] = (rows,)
    shapes[f"{layer}.post_attention_layernorm.weight"] = (D,)
    if config.qk_norm:
        shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (H,)
    if config.is_eagle3:
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.hidden_norm.weight"] = (D,)
        shapes["norm.weight"] = (D,)
    else:
        shapes["fc.bias"] = (D,)
    if config.trains_head:
        shapes["lm_head.weight"] = (config.num_draft_tokens, D)
    if config.draft_vocab_size:
        shapes["d2t"], shapes["t2d"] = (config.draft_vocab_size,), (config.target_vocab_size,)
    return shapes


def _layer_name(config: EagleConfig) -> str:
    return "midlayer" if config.is_eagle3 else "layers.0"


def write_drafter(
    folder: Path, weights: EagleWeights, weight_version: str, dtype: torch.dtype | None = None
) -> VersionManifest:
    """Write one version of the drafter to ``folder`` (replaced if it exists), in ``dtype`` or as it is.

    The folder appears by one rename after everything is on disk: a reader sees a complete version or none.
    """
    tensors = _to_files(weights, dtype or weights.dtype)
    with replaced_folder(folder) as tmp:
        save_file(tensors, tmp / "model.safetensors", metadata={"format": "pt"})
        with (tmp / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        (tmp / "config.json").write_text(json.dumps(_llama_config(weights.config, dtype or weights.dtype), indent=1))
        weights.config.write(tmp)
        if weights.draft_ids_Vd is not None and not weights.config.trains_head:
            torch.save(weights.draft_ids_Vd.tolist(), tmp / TOKEN_MAP)
        return seal_version(tmp, weight_version)


def _to_files(weights: EagleWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, layer = weights.config, weights.layer
    name, H = _layer_name(config), config.head_dim
    heads = (config.num_heads * H, config.num_kv_heads * H, config.num_kv_heads * H)
    out_bias = layer.out_bias
    if out_bias is None and f"{name}.self_attn.o_proj.bias" in expected_tensors(config):
        out_bias = torch.zeros_like(layer.out[:, 0])
    named: dict[str, torch.Tensor | None] = {
        "fc.weight": weights.fc,
        "fc.bias": weights.fc_bias_D,
        "norm.weight": weights.final_norm_D,
        "lm_head.weight": weights.head if config.trains_head else None,
        f"{name}.hidden_norm.weight": weights.feature_norm_D,
        f"{name}.input_layernorm.weight": layer.attn_norm_D if config.is_eagle3 else None,
        f"{name}.post_attention_layernorm.weight": layer.mlp_norm_D,
        f"{name}.self_attn.q_norm.weight": layer.q_norm_H,
        f"{name}.self_attn.k_norm.weight": layer.k_norm_H,
        f"{name}.self_attn.o_proj.weight": layer.out,
        f"{name}.self_attn.o_proj.bias": out_bias,
        f"{name}.mlp.down_proj.weight": layer.down,
        f"{name}.mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            parts = zip(("q", "k", "v"), qkv.split(heads), strict=True)
            named.update({f"{name}.self_attn.{p}_proj.{kind}": t for p, t in parts})
        if gate_up is not None:
            named.update({f"{name}.mlp.{p}_proj.{kind}": t for p, t in zip(("gate", "up"), gate_up.chunk(2))})
    # Copies, because the file format refuses tensors that share memory.
    tensors = {n: t.detach().to("cpu", dtype).clone() for n, t in named.items() if t is not None}
    if weights.draft_ids_Vd is not None:
        ids_Vd = weights.draft_ids_Vd.cpu()
        tensors["d2t"] = ids_Vd - torch.arange(len(ids_Vd))
        tensors["t2d"] = torch.zeros(config.target_vocab_size, dtype=torch.bool)
        tensors["t2d"][ids_Vd] = True
    return tensors


def _llama_config(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` as SGLang and transformers read it, with the rope forms of transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        rope.update({name: value for name, value in asdict(config.rope).items() if name in names})
        rope["original_max_position_embeddings"] = config.rope.original_max_positions
    architecture = "LlamaForCausalLMEagle3" if config.is_eagle3 else "LlamaForCausalLMEagle"
    llama: dict[str, Any] = {
        "architectures": ["ArealDtaDrafter" if sglang_obstacles(config) else architecture],
        "model_type": "llama",
        "vocab_size": config.target_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "rope_parameters": rope,
        "attention_bias": config.qkv_bias or config.out_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.is_eagle3:
        llama["draft_vocab_size"] = config.num_draft_tokens if config.trains_head else None
        llama["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.hidden_layers),
            "use_aux_hidden_state": True,
        }
    return llama


def read_drafter(
    folder: Path, target: DecoderWeights, dtype: torch.dtype | None = None, expected_digest: str | None = None
) -> tuple[EagleWeights, VersionManifest]:
    """Read, verify and fuse a drafter for ``target``, on its device and in ``dtype`` or the target's own.

    DrafterMismatch for a torn folder, wrong names or shapes, non-finite values, or the drafter of another model.
    """
    try:
        manifest = verify(folder, expected_digest)
        tensors = read_tensors(folder)
        config = EagleConfig.read(folder)
        if read_manifest(folder) != manifest:
            raise TornWeights("it was replaced while it was read; ask for the new version again")
    except (TornWeights, WeightsMismatch, OSError) as error:
        raise DrafterMismatch(f"{folder} holds no drafter that can be loaded: {error}") from error
    config.check_target(target.config)
    _check(folder, tensors, config)
    return _from_files(tensors, config, target, dtype or target.dtype), manifest


def _check(folder: Path, tensors: dict[str, torch.Tensor], config: EagleConfig) -> None:
    shapes = expected_tensors(config)
    missing, unknown = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or unknown:
        raise DrafterMismatch(f"{folder}: missing tensors {missing[:3]}, unknown {unknown[:3]}; export it again")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise DrafterMismatch(f"{folder}: {name} has shape {tuple(tensors[name].shape)}, not {shape}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise DrafterMismatch(f"{folder}: {name} holds NaN or infinity; the training that wrote it diverged")


def _from_files(
    tensors: dict[str, torch.Tensor], config: EagleConfig, target: DecoderWeights, dtype: torch.dtype
) -> EagleWeights:
    name, device = _layer_name(config), target.device

    def get(tensor_name: str, present: bool = True) -> Any:  # Tensor or, where not present, None
        return tensors[tensor_name].to(device=device, dtype=dtype).contiguous() if present else None

    def join(part: str, projections: tuple[str, ...], kind: str, present: bool = True) -> Any:
        return torch.cat([get(f"{name}.{part}.{p}_proj.{kind}") for p in projections]) if present else None

    layer = LayerWeights(
        attn_norm_D=get(f"{name}.input_layernorm.weight")
        if config.is_eagle3
        else target.final_norm_D.new_ones(config.hidden_size, dtype=dtype),
        qkv=join("self_attn", ("q", "k", "v"), "weight"),
        qkv_bias=join("self_attn", ("q", "k", "v"), "bias", config.qkv_bias),
        q_norm_H=get(f"{name}.self_attn.q_norm.weight", config.qk_norm),
        k_norm_H=get(f"{name}.self_attn.k_norm.weight", config.qk_norm),
        out=get(f"{name}.self_attn.o_proj.weight"),
        out_bias=get(f"{name}.self_attn.o_proj.bias", config.out_bias),
        mlp_norm_D=get(f"{name}.post_attention_layernorm.weight"),
        gate_up=join("mlp", ("gate", "up"), "weight"),
        gate_up_bias=join("mlp", ("gate", "up"), "bias", config.mlp_bias),
        down=get(f"{name}.mlp.down_proj.weight"),
        down_bias=get(f"{name}.mlp.down_proj.bias", config.mlp_bias),
    )
    ids_Vd = None
    if config.draft_vocab_size:
        ids_Vd = (tensors["d2t"].long() + torch.arange(config.draft_vocab_size)).to(device)
        check_draft_ids(config, ids_Vd)
    head = get("lm_head.weight", config.trains_head)
    if head is None and ids_Vd is not None:
        head = target.head_VD[ids_Vd].to(dtype)
    return EagleWeights(
        config=config,
        fc=get("fc.weight"),
        fc_bias_D=get("fc.bias", not config.is_eagle3),
        layer=layer,
        feature_norm_D=get(f"{name}.hidden_norm.weight", config.is_eagle3),
        final_norm_D=get("norm.weight", config.is_eagle3),
        head=head,
        draft_ids_Vd=ids_Vd,
    )

"""Load a Hugging Face safetensors folder into `DecoderWeights`, names and shapes checked beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from areal_dta.nn.decoder import DecoderWeights, LayerWeights
from areal_dta.nn.model_config import DecoderConfig

__all__ = ["WeightsMismatch", "decoder_from", "expected_shapes", "load_decoder", "read_tensors"]

Shape = tuple[int, ...]


class WeightsMismatch(ValueError):
    """The files do not hold exactly the tensors the config asks for; nothing was loaded."""


def expected_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, in Hugging Face's naming."""
    D, F, H = config.hidden_size, config.ffn_size, config.head_dim
    q_size, kv_size = config.num_heads * H, config.num_kv_heads * H
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for i in range(config.num_layers):
        layer: dict[str, Shape] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        for name, rows, cols, bias in (
            ("self_attn.q_proj", q_size, D, config.qkv_bias),
            ("self_attn.k_proj", kv_size, D, config.qkv_bias),
            ("self_attn.v_proj", kv_size, D, config.qkv_bias),
            ("self_attn.o_proj", D, q_size, config.out_bias),
            ("mlp.gate_proj", F, D, config.mlp_bias),
            ("mlp.up_proj", F, D, config.mlp_bias),
            ("mlp.down_proj", D, F, config.mlp_bias),
        ):
            layer[f"{name}.weight"] = (rows, cols)
            if bias:
                layer[f"{name}.bias"] = (rows,)
        if config.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (H,)
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's ``*.safetensors`` files, on the CPU, in their stored dtype; never a pickle."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsMismatch(f"no *.safetensors in {folder}")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                twice = sorted(set(file.keys()) & set(tensors))
                if twice:
                    raise WeightsMismatch(f"{twice[0]} is in {path} and in another file of the folder; write it again")
                # Copied out of the memory map: a file replaced later must not change weights in use.
                tensors.update({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise WeightsMismatch(f"{path} is not a readable safetensors file ({error}); write it again") from error
    return tensors


def _check(tensors: Mapping[str, torch.Tensor], config: DecoderConfig) -> None:
    shapes = expected_shapes(config)
    ignorable = {"lm_head.weight"} if config.tied_embeddings else set()
    missing = sorted(set(shapes) - set(tensors))
    unknown = sorted(n for n in set(tensors) - set(shapes) - ignorable if not n.endswith("rotary_emb.inv_freq"))
    if missing or unknown:
        raise WeightsMismatch(f"tensor names differ from the config: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsMismatch(f"{name} has shape {tuple(tensors[name].shape)}, the config asks for {shape}")
        if not tensors[name].dtype.is_floating_point:
            raise WeightsMismatch(f"{name} has dtype {tensors[name].dtype}; quantised weights are not supported")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise WeightsMismatch(f"{name} holds NaN or infinity; the training step that wrote it diverged")


def load_decoder(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Read, check and fuse the weights of ``folder``.

    ``config`` is the serving model's: an update with other names or shapes raises WeightsMismatch and loads nothing.
    """
    return decoder_from(read_tensors(folder), config, dtype, device)


def decoder_from(
    tensors: Mapping[str, torch.Tensor], config: DecoderConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """`load_decoder` for tensors that came another way."""
    _check(tensors, config)
    return build_decoder(tensors, config, dtype, device)


def build_decoder(
    tensors: Mapping[str, torch.Tensor], config: DecoderConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Fuse checked Hugging Face tensors into the layout of `decoder.py`."""

    def get(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=dtype).contiguous()

    def join(prefix: str, names: tuple[str, ...], kind: str, present: bool = True) -> torch.Tensor | None:
        return torch.cat([get(f"{prefix}.{n}.{kind}") for n in names]) if present else None

    def layer(i: int) -> LayerWeights:
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        return LayerWeights(
            attn_norm_D=get(f"model.layers.{i}.input_layernorm.weight"),
            qkv=torch.cat([get(f"{attn}.{n}.weight") for n in qkv]),
            qkv_bias=join(attn, qkv, "bias", config.qkv_bias),
            q_norm_H=get(f"{attn}.q_norm.weight") if config.qk_norm else None,
            k_norm_H=get(f"{attn}.k_norm.weight") if config.qk_norm else None,
            out=get(f"{attn}.o_proj.weight"),
            out_bias=get(f"{attn}.o_proj.bias") if config.out_bias else None,
            mlp_norm_D=get(f"model.layers.{i}.post_attention_layernorm.weight"),
            gate_up=torch.cat([get(f"{mlp}.{n}.weight") for n in gate_up]),
            gate_up_bias=join(mlp, gate_up, "bias", config.mlp_bias),
            down=get(f"{mlp}.down_proj.weight"),
            down_bias=get(f"{mlp}.down_proj.bias") if config.mlp_bias else None,
        )

    embed_VD = get("model.embed_tokens.weight")
    return DecoderWeights(
        config=config,
        embed_VD=embed_VD,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm_D=get("model.norm.weight"),
        head_VD=embed_VD if config.tied_embeddings else get("lm_head.weight"),
    )

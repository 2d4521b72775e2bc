"""The shape of a decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DecoderConfig", "RopeSpec", "UnsupportedModel"]

FAMILIES = ("qwen3", "qwen2", "llama")


class UnsupportedModel(ValueError):
    """The folder describes a model outside the supported families, or a variant of one that is not implemented."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: plain, linearly stretched, or Llama 3's frequency-dependent stretch."""

    theta: float
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the layers need to know about a model; tensor shapes follow from it."""

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # as stored: float32, bfloat16, ...
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read ``config.json`` and, for the end-of-sequence ids, ``generation_config.json``.

        Raises FileNotFoundError when there is no config, UnsupportedModel when the model is not one of ours.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a model folder needs config.json and *.safetensors")
        raw = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        return cls.from_dict(raw, eos_override=eos)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], eos_override: Any = None) -> DecoderConfig:
        """The same from the parsed JSON; both the rope forms of transformers 4 and 5 are read."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModel(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
        _refuse_variants(raw)
        num_heads = int(raw["num_attention_heads"])
        bias = bool(raw.get("attention_bias", False))
        num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
        return cls(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            ffn_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=_rope(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else bias,
            out_bias=False if family == "qwen2" else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family == "qwen3",
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_token_ids=_ids(eos_override if eos_override is not None else raw.get("eos_token_id")),
        )


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise UnsupportedModel("sliding-window attention is not supported; set use_sliding_window to false")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")


def _rope(raw: Mapping[str, Any]) -> RopeSpec:
    spec: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(spec.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = str(spec.get("rope_type", spec.get("type", "default")))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, kind, factor=float(spec["factor"]))
    if kind == "llama3":
        return RopeSpec(
            theta,
            kind,
            factor=float(spec["factor"]),
            low_freq_factor=float(spec["low_freq_factor"]),
            high_freq_factor=float(spec["high_freq_factor"]),
            original_max_positions=int(spec["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"rope type {kind!r} is not supported; supported are default, linear, llama3")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)

"""Hugging Face folders: the model's shape, its tensors by Megatron's names for any tensor-parallel size, and writing
them back.

Supported: Qwen3, Qwen2 (2.5) and Llama, as causal models or, with a value head of one label (``score``), as token
classifiers, which is how critics and reward models are kept. Megatron interleaves query, key and value rows per
key/value group and stacks gate and up projections; a tensor-parallel rank holds whole groups and its part of each of
the two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = [
    "ModelShape",
    "TensorReader",
    "copy_side_files",
    "from_megatron",
    "read_shape",
    "shifted",
    "to_megatron",
    "write_tensors",
    "write_value_config",
]

_FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
_CAUSAL = {f"{name}ForCausalLM": family for family, name in _FAMILIES.items()}
_CLASSIFIER = {f"{name}ForTokenClassification": family for family, name in _FAMILIES.items()}
_SHARD_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".tmp")


@dataclass(frozen=True)
class ModelShape:
    """What a Megatron model needs to know, read from config.json."""

    family: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None  # Llama 3's scaling; None for plain rotary embedding
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    init_std: float
    value_head: bool = False  # one value per position in the vocabulary's place (never tied)


def read_shape(path: str | Path, value_head: bool = False) -> ModelShape:
    """Read ``config.json`` of a folder; ``value_head`` accepts causal models too, whose vocabulary head is left out.

    Raises FileNotFoundError, or ValueError naming the unsupported field.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; actor.path must be a Hugging Face model folder")
    raw = json.loads(file.read_text())
    names = raw.get("architectures") or []
    family = next((known[name] for known in (_CAUSAL, _CLASSIFIER) for name in names if name in known), None)
    if family is None:
        known = ", ".join([*_CAUSAL, *_CLASSIFIER])
        raise ValueError(f"{file}: architectures={names} is not supported; use one of {known}")
    if not value_head and not any(name in _CAUSAL for name in names):
        raise ValueError(f"{file}: {names[0]} has no vocabulary head; it can only be a critic (value_head=True)")
    num_labels = len(raw.get("id2label") or ("LABEL_0", "LABEL_1"))  # transformers leaves out its default, two
    if value_head and any(name in _CLASSIFIER for name in names) and num_labels != 1:
        raise ValueError(f"{file}: a critic has one label, this classifier has {num_labels} (id2label)")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act={raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{file}: use_sliding_window is not supported; set it to false")
    if family != "qwen2" and raw.get("attention_bias"):
        raise ValueError(f"{file}: attention_bias is not supported for {family}")
    heads = raw["num_attention_heads"]
    theta, factor = _rope(raw, file)
    return ModelShape(
        family=family,
        num_layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        ffn=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab=raw["vocab_size"],
        tied=bool(raw.get("tie_word_embeddings", False)) and not value_head,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=raw.get("max_position_embeddings", 32768),
        init_std=raw.get("initializer_range", 0.02),
        value_head=value_head,
    )


def _rope(raw: dict[str, Any], file: Path) -> tuple[float, float | None]:
    """(theta, Llama 3 factor or None) from the new ``rope_parameters`` or the older two fields."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    if kind == "default":
        return float(theta), None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(float(scaling.get(k, v)) == v for k, v in fixed.items()):
        return float(theta), float(scaling["factor"])
    raise ValueError(
        f"{file}: rope type {kind!r} with {scaling} is not supported; use 'default', or 'llama3' with {fixed}"
    )


class TensorReader:
    """Lazy access by name to the safetensors of a folder, one file or an index of several."""

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._files = {name: folder / file for name, file in weight_map.items()}
        else:
            self._files = {}
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as handle:
                    self._files.update(dict.fromkeys(handle.keys(), file))
        self._open: dict[Path, Any] = {}
        self._folder = folder

    def __bool__(self) -> bool:
        return bool(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor; raises KeyError naming the folder."""
        if name not in self._files:
            raise KeyError(f"{self._folder} has no tensor {name!r}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_tensor(name)


def _layer(name: str) -> tuple[str, str]:
    """Split ``decoder.layers.3.mlp.linear_fc1.weight`` into ("model.layers.3.", "mlp.linear_fc1.weight")."""
    index, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"model.layers.{index}.", rest


def shifted(name: str, num_layers: int) -> str:
    """The parameter's name with its layer counted ``num_layers`` higher; other names stay."""
    head, mark, rest = name.partition(".layers.")
    if not mark:
        return name
    index, _, tail = rest.partition(".")
    return f"{head}{mark}{int(index) + num_layers}.{tail}"


_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_PER_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # norm fused into the projection (TE spec)
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_COLUMN_SPLIT = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
_VALUE_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}


def to_megatron(name: str, read: TensorReader, shape: ModelShape, tp_rank: int, tp_size: int) -> torch.Tensor | None:
    """This rank's part of parameter ``name`` (Megatron's), from Hugging Face tensors.

    None for the value head when the folder is a causal model's; the bias is 0 where a folder has the weight alone.
    """
    if shape.value_head and name in _VALUE_HEAD:
        if _VALUE_HEAD[name] in read:
            return read(_VALUE_HEAD[name])
        return torch.zeros(1) if "score.weight" in read else None
    if name in _TOP:
        full = read(_TOP[name])
        return full if "layernorm" in name else full.chunk(tp_size, 0)[tp_rank]
    prefix, rest = _layer(name)
    if rest.startswith("self_attention.linear_qkv.") and rest.rsplit(".", 1)[1] in ("weight", "bias"):
        kind = rest.rsplit(".", 1)[1]
        groups = [
            read(f"{prefix}self_attn.{x}_proj.{kind}").unflatten(0, (shape.num_kv_heads, -1)) for x in ("q", "k", "v")
        ]
        return torch.cat(groups, 1).flatten(0, 1).chunk(tp_size, 0)[tp_rank]
    if rest == "mlp.linear_fc1.weight":
        parts = [read(f"{prefix}mlp.{x}_proj.weight").chunk(tp_size, 0)[tp_rank] for x in ("gate", "up")]
        return torch.cat(parts, 0)
    full = read(prefix + _PER_LAYER[rest])
    return full.chunk(tp_size, 1)[tp_rank] if rest in _COLUMN_SPLIT else full


def from_megatron(name: str, parts: list[torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of one parameter, from its parts on all tensor-parallel ranks; inverse of `to_megatron`."""
    if shape.value_head and name in _VALUE_HEAD:
        return {_VALUE_HEAD[name]: parts[0]}
    if name in _TOP:
        return {_TOP[name]: parts[0] if "layernorm" in name else torch.cat(parts, 0)}
    prefix, rest = _layer(name)
    if rest.startswith("self_attention.linear_qkv.") and rest.rsplit(".", 1)[1] in ("weight", "bias"):
        kind = rest.rsplit(".", 1)[1]
        groups = torch.cat(parts, 0).unflatten(0, (shape.num_kv_heads, -1))
        query_rows = shape.num_heads // shape.num_kv_heads * shape.head_dim
        split = groups.split([query_rows, shape.head_dim, shape.head_dim], 1)
        return {
            f"{prefix}self_attn.{x}_proj.{kind}": part.flatten(0, 1).contiguous()
            for x, part in zip(("q", "k", "v"), split, strict=True)
        }
    if rest == "mlp.linear_fc1.weight":
        halves = zip(*(part.chunk(2, 0) for part in parts), strict=True)
        return {f"{prefix}mlp.{x}_proj.weight": torch.cat(h, 0) for x, h in zip(("gate", "up"), halves, strict=True)}
    full = torch.cat(parts, 1) if rest in _COLUMN_SPLIT else parts[0]
    return {prefix + _PER_LAYER[rest]: full}


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write tensors as safetensors, several files with an index above 4 GiB; each file is replaced atomically."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    pending_bytes = 0
    names: dict[str, int] = {}
    total_bytes = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and pending_bytes + num_bytes > _SHARD_BYTES:
            _write_shard(folder / f"shard-{len(shards):05d}.tmp", shards[-1])
            shards[-1] = {}
            shards.append({})
            pending_bytes = 0
        shards[-1][name] = tensor.detach().to("cpu").contiguous()
        names[name] = len(shards)
        pending_bytes += num_bytes
        total_bytes += num_bytes
    _write_shard(folder / f"shard-{len(shards):05d}.tmp", shards[-1])
    count = len(shards)
    files = {
        i: "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    }
    for i, file in files.items():
        (folder / f"shard-{i:05d}.tmp").replace(folder / file)
    if count > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: files[i] for name, i in names.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def copy_side_files(source: str | Path, target: Path) -> None:
    """Copy config.json and tokenizer files: every plain file of ``source`` but weights and version marks."""
    for file in sorted(Path(source).iterdir()):
        wanted = file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name != "version.json"
        if wanted and file.resolve() != (target / file.name).resolve():
            shutil.copyfile(file, target / file.name)


def write_value_config(folder: Path, family: str) -> None:
    """Make the copied ``config.json`` that of a token classifier with one label; nothing changes if it is one."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    name = f"{_FAMILIES[family]}ForTokenClassification"
    if raw["architectures"] == [name] and len(raw.get("id2label", {})) == 1:
        return
    raw |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")

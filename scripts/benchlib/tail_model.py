"""What `bench.py tail` decodes with: a folder of target weights, a folder of drafter weights, and prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.nn import DecoderConfig, DecoderWeights
from areal_dta.nn.loading import read_tensors
from areal_dta.weights import MANIFEST, seal_version, write_version
from scripts.benchlib.report import UsageError
from scripts.benchlib.spec_model import tiny_model

__all__ = ["TailModel", "folder_model", "named_tensors", "write_next", "write_tiny"]

VERSION = "0:0"


@dataclass(frozen=True)
class TailModel:
    """``drafter`` None: only n-gram drafts until training has published one."""

    folder: Path
    drafter: Path | None
    prompts: list[tuple[int, ...]]
    note: str


def write_tiny(root: Path, num_prompts: int, seed: int) -> TailModel:
    """`spec_model.tiny_model` and its drafter as folders below ``root``."""
    model = tiny_model(num_prompts, seed)
    folder, drafter = root / "model", root / "drafter"
    target = model.target
    write_version(folder, named_tensors(target), VERSION)
    (folder / "config.json").write_text(json.dumps(_llama_config(target.config)))
    assert model.drafter is not None
    write_drafter(drafter, model.drafter, "start")
    return TailModel(folder, drafter, model.prompts, model.note)


def folder_model(
    root: Path, folder: Path, drafter: Path | None, num_prompts: int, max_prompt: int, domains: tuple[str, ...]
) -> TailModel:
    """A Hugging Face folder, linked into ``root`` and sealed there as the version that training looks for, and tau2
    prompts, held-out tasks first. Raises UsageError."""
    # Here, because tau2 takes seconds to import and the tiny model needs none of it.
    from experiments.drafter.prompts import PromptError, make_prompts, split_tasks
    from experiments.tau2.chat import load_tokenizer

    if not (folder / "config.json").is_file():
        raise UsageError(f"--folder {folder} holds no model; give a Hugging Face folder with its tokenizer")
    split, tokenizer = split_tasks(domains), load_tokenizer(str(folder))
    prompts: list[tuple[int, ...]] = []
    try:
        for tasks, variant in ((split.held_out, 1), (split.held_out, 2), (split.train, 1), (split.train, 2)):
            missing = num_prompts - len(prompts)
            prompts += [p.ids for p in make_prompts(tokenizer, tasks[:missing], max_prompt, variant)]
    except PromptError as error:
        raise UsageError(str(error)) from error
    note = f"{folder.name}, {len(prompts)} tau2 prompts of {', '.join(domains)}"
    if len(prompts) < num_prompts:
        note += ", used again in later steps"
    repeats = -(-num_prompts // max(1, len(prompts)))
    sealed = root / "model"
    _link_files(folder, sealed)
    seal_version(sealed, VERSION)
    return TailModel(sealed, drafter, (prompts * repeats)[:num_prompts], note)


def write_next(folder: Path, next_folder: Path, version: str, noise: float, seed: int) -> None:
    """A version of the target a little away from the one in ``folder``: every matrix has noise of ``noise`` times its
    standard deviation added. No learning step, but drafts age by it as they do by one."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in read_tensors(folder).items():
        old = tensor.float()
        step = torch.randn(old.shape, generator=generator) * (noise * old.std()) if old.dim() > 1 else 0.0
        moved[name] = (old + step).numpy()
    write_version(next_folder, moved, version, folder)


def _link_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != MANIFEST:
            try:
                (target / path.name).hardlink_to(path.resolve())
            except OSError:  # another file system
                shutil.copy2(path, target / path.name)


def named_tensors(weights: DecoderWeights) -> dict[str, np.ndarray]:
    """Hugging Face names and arrays of fused weights without biases: the inverse of loading them."""
    config = weights.config
    heads = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": weights.embed_VD,
        "model.norm.weight": weights.final_norm_D,
    }
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights.head_VD
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split(heads)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.attn_norm_D,
            "post_attention_layernorm": layer.mlp_norm_D,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors.update({f"model.layers.{i}.{name}.weight": tensor for name, tensor in parts.items()})
    return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}


def _llama_config(config: DecoderConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": config.dtype,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "eos_token_id": list(config.eos_token_ids),
    }

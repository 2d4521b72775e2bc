"""The small policy of the laptop run: a Qwen3 of two million parameters, written as a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_dta.nn.loading import expected_shapes
from areal_dta.nn.model_config import DecoderConfig
from experiments.tau2.tokenizer import build_tokenizer

__all__ = ["PolicySize", "build_policy", "write_policy"]


@dataclass(frozen=True)
class PolicySize:
    """Sizes of the model; the embedding is tied."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 32768  # rotary: costs nothing, and the other domains' prompts need 10 k


def write_policy(
    folder: Path, *, vocab_size: int, eos_id: int, pad_id: int, seed: int, size: PolicySize | None = None
) -> None:
    """Write config.json, generation_config.json and model.safetensors with weights drawn from ``seed`` (normal,
    std 0.02).
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(size or PolicySize()),
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": eos_id, "pad_token_id": pad_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * config["initializer_range"]
        for name, shape in sorted(expected_shapes(DecoderConfig.from_folder(folder)).items())
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def build_policy(folder: Path, *, seed: int, vocab_size: int = 2048, focus: str = "mock") -> None:
    """The untrained policy with its tokenizer: everything a Hugging Face folder needs; ``focus`` as in
    `build_tokenizer`.
    """
    tokenizer = build_tokenizer(folder, vocab_size=vocab_size, focus=focus)
    write_policy(
        folder, vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, seed=seed
    )

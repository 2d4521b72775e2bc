"""Tiny random models of every supported family in Hugging Face folders, built by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FAMILIES = ("qwen3", "qwen2", "llama")
EOS = 1


def build_hf_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model of ``family`` with random weights large enough for varied greedy output."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=family == "qwen3",
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    )
    if family != "qwen2":
        settings["head_dim"] = 16
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **overrides})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.12)
            else:
                p.add_(torch.randn_like(p) * (0.1 if name.endswith("norm.weight") else 0.05))
    return model


def save_tiny_model(folder: Path, family: str = "qwen3", seed: int = 0, **overrides: Any) -> Any:
    """Write such a model to ``folder``; returns it."""
    model = build_hf_model(family, seed, **overrides)
    model.save_pretrained(folder)
    return model

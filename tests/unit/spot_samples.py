"""A tiny random target in a published folder, and training samples with its true hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_dta.drafter.buffer_files import Sample
from areal_dta.nn import DecoderConfig, DecoderWeights, Rotary, decode_hidden, load_decoder
from areal_dta.nn.loading import expected_shapes
from areal_dta.weights import write_version

TARGET = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_target(folder: Path, version: str, seed: int = 0, **changes: Any) -> Path:
    """A random model in a published folder."""
    raw = {**TARGET, **changes}
    rng = np.random.default_rng(seed)
    shapes = expected_shapes(DecoderConfig.from_dict(raw))
    tensors = {n: (np.ones(s) if len(s) == 1 else rng.normal(0, 0.15, s)).astype(np.float32) for n, s in shapes.items()}
    write_version(folder, tensors, version)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load_target(folder: Path) -> DecoderWeights:
    return load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)


def make_sample(
    target: DecoderWeights, version: str, step: int, length: int, rng: np.random.Generator, finished: bool = True
) -> Sample:
    """A sequence that counts upwards from anywhere, with the target's true hidden states."""
    config = target.config
    ids_T = torch.from_numpy((rng.integers(2, 90) + np.arange(length)) % (config.vocab_size - 2) + 2).to(torch.int32)

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(config.group_size, 1).transpose(0, 1) for t in (k_TKH, v_TKH))
        out = torch.nn.functional.scaled_dot_product_attention(q_TNH.transpose(0, 1), k, v, is_causal=True)
        return out.transpose(0, 1)

    cos_sin = Rotary(config, torch.float32, target.device)(torch.arange(length), length)
    features_TF = decode_hidden(target, ids_T.long(), cos_sin, attend)
    prompt = length // 4
    return Sample(ids_T, features_TF.half(), prompt, length, version, prompt, length - prompt, finished, step)

"""Small targets without transformers: random ones of every family, and one taught a grammar that can be predicted.

Legend of shape suffixes: T tokens end to end, B sequences, L their length, V vocabulary, F target feature, D hidden.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from areal_dta.drafter.packing import DraftSample
from areal_dta.nn.decoder import DecoderWeights, Rotary, decode_features, project_logits
from areal_dta.nn.loading import build_decoder, expected_shapes
from areal_dta.nn.model_config import DecoderConfig, RopeSpec


def tiny_config(family: str = "llama", num_layers: int = 3, vocab_size: int = 64) -> DecoderConfig:
    return DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=48,
        ffn_size=96,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_positions=1024,
        rope=RopeSpec(10_000.0),
        tied_embeddings=family == "qwen3",
        qkv_bias=family == "qwen2",
        out_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        dtype="float32",
        eos_token_ids=(1,),
    )


def _random_tensors(config: DecoderConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (1 + 0.1 * values if name.endswith("norm.weight") else 0.12 * values).to(dtype)
    return tensors


def random_target(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64) -> DecoderWeights:
    """A target of random weights."""
    config = tiny_config(family)
    return build_decoder(_random_tensors(config, seed, dtype), config, dtype)


def run_target(
    target: DecoderWeights, ids_BL: torch.Tensor, hidden_layers: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (B L, D) before the last norm and features (B L, F) of sequences of equal length."""
    B, L = ids_BL.shape
    cos_sin = Rotary(target.config, target.dtype, target.device)(torch.arange(L).repeat(B), L)

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (B, L)).transpose(1, 2) for t in (q_TNH, k_TKH, v_TKH))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2).flatten(0, 1)

    return decode_features(target, ids_BL.flatten(), cos_sin, attend, hidden_layers)


def phrases(num_sequences: int, length: int, seed: int, num_phrases: int = 24) -> torch.Tensor:
    """Sequences (B, L) of phrases in random order: tokens inside a phrase follow from the ones before them, the next
    phrase does not. Phrases share tokens, so the last token alone does not tell."""
    fixed = torch.Generator().manual_seed(7)
    book = [
        torch.randint(2, 40, (int(n),), generator=fixed) for n in torch.randint(4, 9, (num_phrases,), generator=fixed)
    ]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_sequences):
        picks = torch.randint(num_phrases, (length // 4 + 1,), generator=generator).tolist()
        rows.append(torch.cat([book[i] for i in picks])[:length])
    return torch.stack(rows)


@cache
def taught_target(family: str = "llama", num_steps: int = 100) -> DecoderWeights:
    """A target of three layers that has learnt `phrases` (fp32)."""
    config = tiny_config(family)
    tensors = {name: t.requires_grad_() for name, t in _random_tensors(config, 1, torch.float32).items()}
    optimizer = torch.optim.AdamW(tensors.values(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    for step in range(num_steps):
        target = build_decoder(tensors, config, torch.float32)
        ids_BL = phrases(16, 48, seed=1000 + step)
        hidden_TD, _ = run_target(target, ids_BL)
        logits = project_logits(target, hidden_TD).unflatten(0, ids_BL.shape)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return build_decoder({name: t.detach() for name, t in tensors.items()}, config, torch.float32)


@torch.no_grad()
def phrase_samples(
    target: DecoderWeights, num_samples: int, length: int, seed: int, hidden_layers: tuple[int, ...] = ()
) -> list[DraftSample]:
    """Samples of `phrases` with what ``target`` computes for them; the loss leaves out the first quarter."""
    ids_BL = phrases(num_samples, length, seed)
    hidden_TD, features_TF = run_target(target, ids_BL, hidden_layers)
    rows = zip(ids_BL, features_TF.split(length), hidden_TD.split(length))
    return [DraftSample(ids, f, length // 4, length, h if hidden_layers else None) for ids, f, h in rows]


def random_samples(
    target: DecoderWeights, lengths: tuple[int, ...], seed: int = 0, hidden_layers: tuple[int, ...] = ()
) -> list[DraftSample]:
    """Samples of random tokens with what ``target`` computes for them, the loss from the second token on."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids_T = torch.randint(target.config.vocab_size, (length,), generator=generator)
        hidden_TD, features_TF = run_target(target, ids_T[None], hidden_layers)
        samples.append(DraftSample(ids_T, features_TF, min(1, length), length, hidden_TD if hidden_layers else None))
    return samples

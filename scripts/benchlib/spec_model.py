"""What `bench.py spec` decodes with: a target, its drafter, and prompts that neither was trained on.

Legend of shape suffixes: B sequences, L their length, T tokens end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.drafter.packing import DraftSample, PackedBatch
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderConfig, DecoderWeights, Rotary, load_decoder, project_logits
from areal_dta.nn.decoder import decode_features
from areal_dta.nn.loading import build_decoder, expected_shapes
from areal_dta.nn.model_config import RopeSpec
from scripts.benchlib.report import UsageError, progress

__all__ = ["SpecModel", "folder_model", "random_start", "tiny_config", "tiny_model"]

VOCAB, HIDDEN, LAYERS = 512, 96, 4  # of the tiny model
TARGET_STEPS, DRAFTER_STEPS, ROWS, LENGTH = 90, 60, 16, 48
NUM_PHRASES = 48
SHARED, OWN = 48, 24  # prompt tokens


@dataclass(frozen=True)
class SpecModel:
    """``drafter`` None: only the n-gram arms play."""

    target: DecoderWeights
    drafter: EagleWeights | None
    prompts: list[tuple[int, ...]]
    note: str


def folder_model(folder: Path, drafter: Path | None, num_prompts: int, max_prompt: int) -> SpecModel:
    """A Hugging Face folder, a drafter folder and held-out tau2 prompts. Raises UsageError."""
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"--folder {folder} holds no model; make one with python -m experiments.models.smollm2 {folder}"
        )
    # Here, because tau2 takes seconds to import and the tiny model needs none of it.
    from experiments.drafter.prompts import make_prompts, split_tasks
    from experiments.tau2.chat import load_tokenizer

    target = load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)
    weights = None
    if drafter is not None:
        try:
            weights, _ = read_drafter(drafter, target)
        except (DrafterMismatch, OSError) as error:
            raise UsageError(f"--drafter {drafter}: {error}; train one with python -m experiments.drafter") from error
    tasks = split_tasks().held_out
    tokenizer = load_tokenizer(str(folder))
    prompts: list[tuple[int, ...]] = []
    for variant in (1, 2):  # who has more to tell comes when the tasks are used up
        if len(prompts) < num_prompts:
            prompts += [p.ids for p in make_prompts(tokenizer, tasks, max_prompt, variant)]
    if len(prompts) < num_prompts:
        raise UsageError(f"{num_prompts} prompts are needed, there are {len(prompts)}; lower --batch or --rounds")
    return SpecModel(target, weights, prompts[:num_prompts], f"{folder.name}, held-out tau2 prompts")


def tiny_model(num_prompts: int, seed: int) -> SpecModel:
    """A model of 0.5 million parameters and its drafter, trained on the spot on sentences of fixed phrases: inside a
    phrase the next token is certain, at its end it is not."""
    generator = torch.Generator().manual_seed(seed)
    target = _taught(tiny_config(VOCAB, HIDDEN, LAYERS, 4096), generator)
    drafter = _taught_drafter(target, generator)
    shared = _sentences(1, SHARED, generator)[0].tolist()
    prompts = [(*shared, *own) for own in _sentences(num_prompts, OWN, generator).tolist()]
    return SpecModel(target, drafter, prompts, "tiny model taught a grammar of fixed phrases, drafter taught by it")


def tiny_config(vocab_size: int, hidden_size: int, num_layers: int, max_positions: int) -> DecoderConfig:
    """A llama that trains in seconds on one core."""
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
        norm_eps=1e-6,
        max_positions=max_positions,
        rope=RopeSpec(10_000.0),
        tied_embeddings=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype="float32",
        eos_token_ids=(1,),
    )


def random_start(config: DecoderConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors to be trained."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        start = torch.randn(shape, generator=generator) * 0.08
        tensors[name] = (1 + start if name.endswith("norm.weight") else start).requires_grad_()
    return tensors


def _sentences(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Token ids (B, L) of phrases in random order."""
    fixed = torch.Generator().manual_seed(7)
    sizes = torch.randint(4, 9, (NUM_PHRASES,), generator=fixed).tolist()
    book = [torch.randint(2, VOCAB, (n,), generator=fixed) for n in sizes]
    rows = []
    for _ in range(count):
        picks = torch.randint(NUM_PHRASES, (length // 4 + 1,), generator=generator).tolist()
        rows.append(torch.cat([book[i] for i in picks])[:length])
    return torch.stack(rows)


def _hidden(target: DecoderWeights, ids_BL: torch.Tensor) -> torch.Tensor:
    B, L = ids_BL.shape
    cos_sin = Rotary(target.config, target.dtype, target.device)(torch.arange(L).repeat(B), L)

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (B, L)).transpose(1, 2) for t in (q_TNH, k_TKH, v_TKH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return decode_features(target, ids_BL.flatten(), cos_sin, attend, ())[0]


def _taught(config: DecoderConfig, generator: torch.Generator) -> DecoderWeights:
    tensors = random_start(config, generator)
    optimizer = torch.optim.AdamW(tensors.values(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, TARGET_STEPS)
    for _ in range(TARGET_STEPS):
        target = build_decoder(tensors, config, torch.float32)
        ids_BL = _sentences(ROWS, LENGTH, generator)
        logits = project_logits(target, _hidden(target, ids_BL)).unflatten(0, ids_BL.shape)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    progress(f"tiny target taught, loss {float(loss):.2f}")
    return build_decoder({name: t.detach() for name, t in tensors.items()}, config, torch.float32)


def _taught_drafter(target: DecoderWeights, generator: torch.Generator) -> EagleWeights:
    config = EagleConfig.for_target(target.config, "eagle", 0)
    trainer = DrafterTrainer(init_weights(config, target, generator), target, 3e-3)
    for _ in range(DRAFTER_STEPS):
        scores = trainer.step([PackedBatch.of(_samples(target, _sentences(ROWS, LENGTH, generator)))]).scores
    progress(f"tiny drafter taught, top-1 {scores.rates()['top1']:.2f}")
    return trainer.weights()


@torch.no_grad()
def _samples(target: DecoderWeights, ids_BL: torch.Tensor) -> Sequence[DraftSample]:
    length = ids_BL.shape[1]
    return [DraftSample(ids, f, 1, length) for ids, f in zip(ids_BL, _hidden(target, ids_BL).split(length))]

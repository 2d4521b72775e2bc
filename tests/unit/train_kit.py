"""What the tests of the training side share: shards, a tiny policy, an engine, and the same loss in plain torch.

The reference knows nothing of trees, Megatron or AReaL: transformers' model, one row at a time, autograd, torch's
AdamW.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from areal_dta.bridge import actor_config, batch_of_shard, finetune_spec, make_actor, minibatches
from areal_dta.records import Shard
from areal_dta.train_engine import DtaTrainEngine, EngineSettings
from tests.unit.tiny_models import build_hf_model, save_tiny_model

ACTOR: dict[str, Any] = {
    "dtype": "float32",
    "temperature": 0.8,
    "kl_ctl": 0.0,
    "use_decoupled_loss": True,
    "adv_norm": {"mean_level": "batch", "std_level": "batch"},
    "optimizer": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0, "warmup_steps_proportion": 0.0},
}
VOCAB = 320


def make_shard(rows: list[list[int]], loss_from: list[int], **fields: Any) -> Shard:
    """Rows of ids; tokens from ``loss_from`` on carry loss, log-prob -0.01 x position and version 3."""
    lens = np.array([len(r) for r in rows], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    within = np.concatenate([np.arange(n) for n in lens]) if rows else np.zeros(0, np.int64)
    loss = within >= np.repeat(loss_from, lens) if rows else np.zeros(0, bool)
    values: dict[str, Any] = {
        "step": 0,
        "rank": 0,
        "world_size": 1,
        "epoch": 0,
        "input_ids_T": np.array([t for r in rows for t in r], np.int32),
        "offsets_S1": offsets,
        "loss_mask_T": loss.astype(np.uint8),
        "logprobs_T": np.where(loss, -0.01 * within, 0).astype(np.float32),
        "versions_T": np.where(loss, 3, -1).astype(np.int32),
        "rewards_S": np.arange(len(rows), dtype=np.float32),
        "raw_rewards_S": np.arange(len(rows), dtype=np.float32),
        "group_ids_S": np.zeros(len(rows), np.int64),
        "samples_S": np.arange(len(rows), dtype=np.int32),
        "launches_S": np.zeros(len(rows), np.int32),
        "minibatch_S": np.zeros(len(rows), np.int32),
    }
    return Shard(**{**values, **fields})


def random_shard(seed: int, num_groups: int = 3, turns: int = 3, num_minibatches: int = 1) -> Shard:
    """Agent-like rows, sorted: two samples per group, each a chain of turns; loss on a row's last turn."""
    rng = np.random.default_rng(seed)
    system = rng.integers(2, VOCAB, 6).tolist()
    rows = []
    for group in range(num_groups):
        task = system + rng.integers(2, VOCAB, 3).tolist()
        for sample in range(2):
            ids = list(task)
            reward = float(rng.normal())
            for _ in range(turns):
                start = len(ids)
                ids = ids + rng.integers(2, VOCAB, int(rng.integers(2, 5))).tolist()
                rows.append((list(ids), start, group, sample, reward))
                ids = ids + rng.integers(2, VOCAB, 2).tolist()
    rows.sort(key=lambda r: r[0])
    return make_shard(
        [r[0] for r in rows],
        [r[1] for r in rows],
        logprobs_T=rng.normal(-5.0, 0.5, sum(len(r[0]) for r in rows)).astype(np.float32),
        group_ids_S=np.array([r[2] for r in rows], np.int64),
        samples_S=np.array([r[3] for r in rows], np.int32),
        rewards_S=np.array([r[4] for r in rows], np.float32),
        minibatch_S=np.array([r[2] % num_minibatches for r in rows], np.int32),
    )


def subset(shard: Shard, rows: list[int]) -> Shard:
    """Some rows of a shard as another rank's shard."""
    spans = [(int(shard.offsets_S1[r]), int(shard.offsets_S1[r + 1])) for r in rows]
    take = np.concatenate([np.arange(lo, hi) for lo, hi in spans] or [np.zeros(0, np.int64)])
    arrays: dict[str, Any] = {
        n: getattr(shard, n)[take] for n in ("input_ids_T", "loss_mask_T", "logprobs_T", "versions_T")
    }
    for name in ("rewards_S", "raw_rewards_S", "group_ids_S", "samples_S", "launches_S", "minibatch_S"):
        arrays[name] = getattr(shard, name)[rows]
    offsets = np.concatenate([[0], np.cumsum([hi - lo for lo, hi in spans])]).astype(np.int64)
    return Shard(step=0, rank=0, world_size=1, epoch=0, offsets_S1=offsets, **arrays)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tiny_policy(folder: Path) -> Path:
    """A two-layer random Qwen3 in `folder`."""
    save_tiny_model(folder, "qwen3", seed=0)
    return folder


def build_engine(
    model: Path, settings: EngineSettings | None = None, backend: str = "megatron:d1", steps: int = 10, **actor: Any
) -> DtaTrainEngine:
    """An initialised engine; without `settings` alone in its world."""
    config = actor_config({"actor": {**ACTOR, "path": str(model), "backend": backend, **actor}})
    if settings is None:
        settings = local_settings()
    engine = DtaTrainEngine(config, settings)
    engine.create_process_group()
    engine.initialize(None, finetune_spec(steps))
    return engine


def local_settings(**fields: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "rank": 0,
            "world_size": 1,
            "master_addr": "127.0.0.1",
            "master_port": free_port(),
            "timeout_s": 60,
            **fields,
        }
    )


def ppo_step(engine: DtaTrainEngine, shard: Shard, num_minibatches: int = 1) -> dict[str, float]:
    """What the trainer does with a shard: log-probs, advantages, an update per minibatch; AReaL's statistics."""
    actor = make_actor(engine.config, engine)
    batch = batch_of_shard(shard)
    batch["prox_logp"] = actor.compute_logp([batch])[0]
    batch = actor.compute_advantages([batch])[0]
    for minibatch in minibatches(batch, shard.minibatch_S, num_minibatches):
        actor.ppo_update([minibatch])
    engine.step_lr_scheduler()
    return engine.export_stats()


class Reference:
    """Decoupled PPO (no rejection) on transformers' model."""

    def __init__(
        self, lr: float = 1e-3, eps: float = 1e-4, weight_decay: float = 0.0, temperature: float = 0.8
    ) -> None:
        self.model = build_hf_model("qwen3", seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, eps=eps, weight_decay=0.0)
        self.temperature = temperature

    def logp(self, ids: np.ndarray) -> torch.Tensor:
        """Log-probs of tokens 1.. of one row."""
        row = torch.from_numpy(ids.astype(np.int64))[None]
        logp = torch.log_softmax(self.model(row).logits[0].float() / self.temperature, -1)
        return logp[:-1].gather(-1, row[0, 1:, None])[:, 0]

    def step(self, shard: Shard, num_minibatches: int = 1, eps_clip: float = 0.2) -> list[tuple[float, float]]:
        """(loss, gradient norm before clipping to 1) of each minibatch."""
        spans = [(int(a), int(b)) for a, b in zip(shard.offsets_S1[:-1], shard.offsets_S1[1:], strict=True)]
        masks = [torch.from_numpy(shard.loss_mask_T[lo:hi].astype(bool))[1:] for lo, hi in spans]
        with torch.no_grad():
            prox = [self.logp(shard.input_ids_T[lo:hi]) for lo, hi in spans]
        scores = torch.cat([torch.full((int(m.sum()),), float(r)) for m, r in zip(masks, shard.rewards_S, strict=True)])
        mean, std = scores.double().mean(), scores.double().std(correction=1)
        out = []
        for minibatch in range(num_minibatches):
            rows = np.flatnonzero(shard.minibatch_S == minibatch)
            count = sum(int(masks[r].sum()) for r in rows)
            if count == 0:
                continue
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for r in rows:
                ratio = torch.exp(self.logp(shard.input_ids_T[slice(*spans[r])]) - prox[r])[masks[r]]
                advantage = float((float(shard.rewards_S[r]) - mean) / (std + 1e-5))
                clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip)
                loss = loss + torch.max(-advantage * ratio, -advantage * clipped).sum() / count
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            out.append((float(loss.detach()), float(norm)))
        return out


def parameter_error(model: torch.nn.Module, folder: Path) -> float:
    """Largest absolute difference between a transformers model and the weights in an HF folder."""
    return _error({name: p.detach() for name, p in model.named_parameters()}, load_file(folder / "model.safetensors"))


def folder_error(a: Path, b: Path) -> float:
    """Largest absolute difference between the weights of two HF folders."""
    return _error(load_file(a / "model.safetensors"), load_file(b / "model.safetensors"))


def _error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)

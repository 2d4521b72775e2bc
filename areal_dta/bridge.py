"""Between this project's records and AReaL's: configs one way, batches both ways, and PPOActor on our engine.

Legend of shape suffixes: S rows (training sequences), L longest row, T tokens of all rows laid end to end.

AReaL's padded batch is a dict of tensors ``[S, L]`` (right-padded, ``attention_mask`` True on tokens) and ``[S]``.
Per-token arrays align with the token itself; AReaL's ``compute_advantages`` rolls them to the predecessor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import areal_dta.areal_env  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from areal.api.cli_args import NormConfig, OptimizerConfig, PPOActorConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec
from areal.trainer.ppo.actor import PPOActor
from areal.utils.data import Normalization
from omegaconf import OmegaConf

from areal_dta.engine import OptimizerSettings
from areal_dta.lr_schedule import LrSchedule
from areal_dta.records import Shard

__all__ = [
    "Batch",
    "BridgeError",
    "DataParallelNormalization",
    "actor_config",
    "batch_of_shard",
    "finetune_spec",
    "flat_of_padded",
    "lr_schedule",
    "make_actor",
    "minibatches",
    "optimizer_settings",
    "select_rows",
]

Batch = dict[str, Any]
PLACEHOLDER_TOKENS = 2  # the smallest row with one (source, target) pair
REFUSED_ACTOR_KEYS = {
    "use_lora": "LoRA is not supported; set actor.use_lora=false",
    "is_critic": "the actor cannot be a critic; set actor.is_critic=false",
    "offload": "offloading is not supported; set actor.offload=false",
    "overlong_reward_penalty": "rewards are normalised in the batcher, before such a penalty could be applied; "
    "set actor.overlong_reward_penalty=false and give the penalty in the workflow's reward",
    "log_agent_stats": "set actor.log_agent_stats=false; the batcher and the workers publish agent statistics",
}


class BridgeError(ValueError):
    """A configuration or shard that AReaL's side cannot take; the message names the value and the remedy."""


def actor_config(raw: Mapping[str, Any], section: str = "actor") -> PPOActorConfig:
    """AReaL's PPOActorConfig of ``raw[section]``, the resolved configuration mapping (``Config.raw``).

    Rewards reach the trainer final (scaled, clipped and normalised by group in the batcher, because a partition may
    split a group over ranks), so the reward stages of PPOActor are switched off here. One ``ppo_update`` is one
    optimizer step here (`minibatches` says why), hence ``ppo_n_minibatches=1``. Raises BridgeError for settings that
    cannot work.
    """
    given = dict(raw.get(section) or {})
    for key, remedy in REFUSED_ACTOR_KEYS.items():
        if given.get(key):
            raise BridgeError(f"{section}.{key}={given[key]!r}: {remedy}")
    adv_norm = given.get("adv_norm") or {}
    for level in ("mean_level", "std_level"):
        if adv_norm.get(level) == "group":
            raise BridgeError(
                f"{section}.adv_norm.{level}='group': a partition may split a group over ranks; "
                f"normalise rewards by group ({section}.reward_norm) and advantages by batch"
            )
    known = {f.name for f in dataclasses.fields(PPOActorConfig)}
    # AReaL sizes micro-batches and packs them with these; here the tree plan does.
    values = {k: v for k, v in given.items() if k in known and k not in ("mb_spec", "scheduling_spec")}
    values |= {
        "experiment_name": str(raw.get("experiment_name") or "experiment"),
        "trial_name": str(raw.get("trial_name") or "trial"),
        "reward_scaling": 1.0,
        "reward_bias": 0.0,
        "reward_clip": float("inf"),
        "reward_norm": None,
        "ppo_n_minibatches": 1,
        "enable_tree_training": False,
    }
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PPOActorConfig), OmegaConf.create(values)))
    assert isinstance(config, PPOActorConfig)
    return config


def optimizer_settings(optimizer: OptimizerConfig) -> OptimizerSettings:
    """The engine's optimizer record of AReaL's optimizer section."""
    return OptimizerSettings(
        type=optimizer.type,
        lr=optimizer.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        gradient_clipping=optimizer.gradient_clipping,
    )


def lr_schedule(optimizer: OptimizerConfig, total_steps: int) -> LrSchedule:
    """The learning-rate schedule of AReaL's optimizer section over `total_steps` training steps."""
    return LrSchedule(
        lr=optimizer.lr,
        total_steps=total_steps,
        kind=optimizer.lr_scheduler_type,
        warmup_share=optimizer.warmup_steps_proportion,
        min_ratio=optimizer.min_lr_ratio,
    )


def finetune_spec(total_steps: int) -> FinetuneSpec:
    """AReaL's way to tell an engine the length of training."""
    return FinetuneSpec(total_train_epochs=1, dataset_size=total_steps, train_batch_size=1)


def batch_of_shard(shard: Shard, device: torch.device | str = "cpu") -> Batch:
    """The shard as AReaL's padded batch; rows keep their order.

    ``input_ids`` int64, ``attention_mask`` bool, ``loss_mask`` int32, ``logprobs`` float32, ``versions`` int32, all
    ``[S, L]``; ``rewards`` float32 ``[S]``. What the loss mask excludes carries log-prob 0, whatever the shard says
    there (NaN included). A shard without rows becomes one `PLACEHOLDER_TOKENS`-token row without loss tokens, so that
    its rank takes part in every collective. Raises BridgeError when a row's first token carries loss: it has no
    predecessor to be predicted from.
    """
    if shard.num_rows == 0:
        return _placeholder_batch(torch.device(device))
    offsets_S1 = np.asarray(shard.offsets_S1, np.int64)
    loss_T = np.asarray(shard.loss_mask_T).astype(bool)
    first = np.flatnonzero(loss_T[offsets_S1[:-1]])
    if len(first):
        raise BridgeError(
            f"row {int(first[0])} of the shard of step {shard.step} has loss on its first token: nothing predicts it; "
            "a workflow must put at least one prompt token before generated ones"
        )
    mask_SL = _attention_mask(offsets_S1)
    logprobs_T = np.where(loss_T, np.asarray(shard.logprobs_T, np.float32), np.float32(0))
    padded = {
        "input_ids": _pad(np.asarray(shard.input_ids_T, np.int64), mask_SL),
        "loss_mask": _pad(loss_T.astype(np.int32), mask_SL),
        "logprobs": _pad(logprobs_T, mask_SL),
        "versions": _pad(np.asarray(shard.versions_T, np.int32), mask_SL, fill=-1),
    }
    batch: Batch = {name: torch.from_numpy(array).to(device) for name, array in padded.items()}
    batch["attention_mask"] = torch.from_numpy(mask_SL).to(device)
    batch["rewards"] = torch.from_numpy(np.asarray(shard.rewards_S, np.float32).copy()).to(device)
    return batch


def flat_of_padded(values_SL: torch.Tensor, attention_mask_SL: torch.Tensor) -> np.ndarray:
    """Per-token values of a padded batch laid end to end ``[T]``: the way back from `batch_of_shard`."""
    return values_SL[attention_mask_SL.bool()].detach().cpu().numpy()


def minibatches(batch: Batch, minibatch_S: Sequence[int] | np.ndarray, num_minibatches: int) -> list[Batch]:
    """Deal the rows of ``batch`` to optimizer steps as ``minibatch_S`` says; every rank gets ``num_minibatches``.

    PPOActor's own splitter balances minibatches by length on each rank alone: rows that the batcher dealt to the same
    step on different ranks would meet in different steps, and ranks with few rows would run fewer steps than the others
    and hang them. So one ``ppo_update`` with ``ppo_n_minibatches=1`` is called per minibatch. Advantages are computed
    before, over the whole batch. A minibatch without a row on this rank is a placeholder row without loss tokens.
    """
    dealt_S = np.asarray(minibatch_S)
    num_rows = int(batch["input_ids"].shape[0])
    if len(dealt_S) == 0:  # an empty shard: its batch is the placeholder row
        dealt_S = np.full(num_rows, -1)
    if len(dealt_S) != num_rows:
        raise BridgeError(f"{len(dealt_S)} minibatch numbers for {num_rows} rows")
    if len(dealt_S) and int(dealt_S.max()) >= num_minibatches:
        raise BridgeError(
            f"a row is dealt to minibatch {int(dealt_S.max())}, but actor.ppo_n_minibatches={num_minibatches}; "
            "trainer and batcher must read the same configuration"
        )
    return [select_rows(batch, np.flatnonzero(dealt_S == m)) for m in range(num_minibatches)]


def select_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """The given rows of a padded batch, cut to the longest of them; none: a placeholder row of the same keys."""
    num_rows, width = batch["attention_mask"].shape
    index = torch.as_tensor(rows, dtype=torch.long, device=batch["attention_mask"].device)
    longest = int(batch["attention_mask"][index].sum(-1).max()) if len(rows) else PLACEHOLDER_TOKENS
    out: Batch = {}
    for name, value in batch.items():
        if not torch.is_tensor(value) or value.ndim == 0 or value.shape[0] != num_rows:
            out[name] = value
        elif len(rows) == 0:
            shape = [1, *([PLACEHOLDER_TOKENS] if value.ndim > 1 else []), *value.shape[2:]]
            out[name] = torch.zeros(shape, dtype=value.dtype, device=value.device)
        else:
            picked = value[index]
            out[name] = picked[:, :longest] if value.ndim > 1 and value.shape[1] == width else picked
    if len(rows) == 0:
        out["attention_mask"] = torch.ones_like(out["attention_mask"])
        if "versions" in out:
            out["versions"] = torch.full_like(out["versions"], -1)
    return out


def _placeholder_batch(device: torch.device) -> Batch:
    shape = (1, PLACEHOLDER_TOKENS)
    return {
        "input_ids": torch.zeros(shape, dtype=torch.long, device=device),
        "attention_mask": torch.ones(shape, dtype=torch.bool, device=device),
        "loss_mask": torch.zeros(shape, dtype=torch.int32, device=device),
        "logprobs": torch.zeros(shape, dtype=torch.float32, device=device),
        "versions": torch.full(shape, -1, dtype=torch.int32, device=device),
        "rewards": torch.zeros(1, dtype=torch.float32, device=device),
    }


def _attention_mask(offsets_S1: np.ndarray) -> np.ndarray:
    lengths_S = np.diff(offsets_S1)
    return np.arange(int(lengths_S.max()))[None, :] < lengths_S[:, None]


def _pad(values_T: np.ndarray, mask_SL: np.ndarray, fill: int = 0) -> np.ndarray:
    out_SL = np.full(mask_SL.shape, fill, values_T.dtype)
    out_SL[mask_SL] = values_T
    return out_SL


class DataParallelNormalization(Normalization):
    """AReaL's normalisation over the data-parallel group, in which a rank without valid tokens takes part too.

    AReaL's own returns early on such a rank, which leaves the others waiting in the all-reduce, and reduces over the
    world group, which counts every token once per model-parallel rank.
    """

    def __init__(self, config: NormConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self._group = group

    @torch.no_grad()
    def __call__(
        self,
        x: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        high_precision: bool = True,
        reduce_group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Normalise ``x`` [S, L] where ``loss_mask`` is not 0; every rank of the group must call it."""
        group = reduce_group or self._group
        if loss_mask is None or loss_mask.any():
            return super().__call__(x, loss_mask, high_precision, reduce_group=group)
        mean = torch.zeros_like(x)
        if self.mean_level == "batch":
            mean = self._compute_mean(x, loss_mask, high_precision, self.mean_leave1out, True, group).expand_as(x)
        if self.std_level == "batch":
            self._compute_std(x, loss_mask, mean, self.std_unbiased, high_precision, True, group)
        return x.float()


def make_actor(config: PPOActorConfig, engine: TrainEngine) -> PPOActor:
    """AReaL's PPOActor on an initialised `engine`, with advantage moments over the engine's data-parallel group."""
    actor = PPOActor(config, engine)
    if config.adv_norm is not None:
        actor.adv_norm = DataParallelNormalization(config.adv_norm, engine.data_parallel_group)
    return actor

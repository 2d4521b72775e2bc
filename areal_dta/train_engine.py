"""AReaL's ``TrainEngine`` on the Megatron tree engine: AReaL's ``PPOActor`` runs unmodified on prefix trees.

Legend of shape suffixes: S rows, L longest row, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import areal_dta.areal_env  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from areal.api.alloc_mode import ModelAllocation, ParallelStrategy
from areal.api.cli_args import TrainEngineConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import DeviceRuntimeInfo, FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from areal.utils import stats_tracker
from areal.utils.data import concat_batch, pack_tensor_dict, split_batch
from megatron.core import parallel_state

from areal_dta.bridge import lr_schedule, optimizer_settings
from areal_dta.engine import MegatronPolicy, ParallelSizes, PlanSettings, init_process_group, make_engine
from areal_dta.engine.calibrate import calibrated
from areal_dta.fused_step import FusedStep
from areal_dta.linear_step import LinearStep, LossFn, WeightFn, flat_mask, pad_values
from areal_dta.lr_schedule import LrSchedule
from areal_dta.publish import PublishError, finish_version, publish_until, staging_folder
from areal_dta.train_settings import EngineSettings
from areal_dta.value_step import ValueStep

__all__ = ["DtaTrainEngine", "EngineSettings"]

FED_BY_BATCHER = (
    "the batcher feeds this engine through areal_dta.trainer: start the run with `areal-dta run`, or collect episodes "
    "with AReaL's inference engine and pass the batch to compute_logp and ppo_update"
)
BatchInput = list[dict[str, Any]] | dict[str, Any]


class DtaTrainEngine(TrainEngine):
    """One rank: ``create_process_group``, ``initialize``, then AReaL's calls, the same on all ranks.

    `config` gives path, dtype, temperature, optimizer and ``backend`` (``megatron:d2t1p1``). Batches are AReaL's padded
    dicts (or lists of them). Every data-parallel rank needs at least one row per call; a placeholder without loss
    tokens will do (`areal_dta.bridge`). With ``is_critic`` values take the place of log-probs (AReaL's ``PPOCritic``,
    reward models); there is no dropout before the value head.
    """

    def __init__(self, config: TrainEngineConfig, settings: EngineSettings | None = None) -> None:
        self.config = config
        self.settings = settings or EngineSettings()
        self._sizes = ParallelSizes()
        self._step: LinearStep | None = None
        self._schedule: LrSchedule | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._own_group = False
        self._version = 0
        self._lr_step = 0

    # ---- life cycle ----

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the process group. Raises ValueError when sizes and world size disagree, and for CP and EP."""
        strategy = parallel_strategy or ModelAllocation.from_str(self.config.backend).parallel
        if strategy.cp_size > 1 or strategy.ep_size > 1:
            raise ValueError(
                f"{self.config.backend}: context and expert parallelism are not supported on a tree; use d, t and p"
            )
        s = self.settings
        rank = int(os.environ["RANK"]) if s.rank is None else s.rank
        world_size = int(os.environ["WORLD_SIZE"]) if s.world_size is None else s.world_size
        self._sizes = ParallelSizes(dp=strategy.dp_size, tp=strategy.tp_size, pp=strategy.pp_size)
        if self._sizes.dp * self._sizes.tp * self._sizes.pp != world_size:
            raise ValueError(
                f"{self.config.backend} needs {strategy.world_size} ranks, the process group has {world_size}"
            )
        if not dist.is_initialized():
            addr = s.master_addr or os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"]) if s.master_port is None else s.master_port
            init_process_group(rank, world_size, addr, port, s.timeout_s)
            self._own_group = True
        self._cpu_group = dist.new_group(backend="gloo")

    def initialize(
        self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Build the model from ``config.path``; `ft_spec` gives the learning-rate schedule its length."""
        if addr is not None:
            raise ValueError(f"initialize(addr={addr!r}): this engine lives in the trainer's own process; pass None")
        optimizer = self.config.optimizer
        if optimizer is not None and ft_spec is None:
            raise ValueError("initialize needs ft_spec (total steps) to build the learning-rate schedule")
        policy = MegatronPolicy(
            self.config.path,
            sizes=self._sizes,
            optimizer=None if optimizer is None else optimizer_settings(optimizer),
            dtype=getattr(torch, self.config.dtype),
            seed=self.settings.seed,
            trainable=optimizer is not None,
            value_head=self.config.is_critic,
            timeout_s=self.settings.timeout_s,
        )
        s, costs = self.settings, None
        if s.calibration is not None and s.mode == "dta" and optimizer is not None:
            costs = calibrated(policy, s.plan or PlanSettings(), s.calibration)
        engine = make_engine(s.mode, policy, s.plan, costs)
        step = ValueStep if self.config.is_critic else FusedStep if self.settings.fused_loss else LinearStep
        self._step = step(policy, engine, self.config.temperature, self.settings.reuse_forward)
        if optimizer is not None and ft_spec is not None:
            self._schedule = lr_schedule(optimizer, ft_spec.total_train_steps)

    def destroy(self) -> None:
        """Release the model; leave the process group if this engine created it."""
        self._step = None
        gc.collect()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False

    @property
    def initialized(self) -> bool:
        return self._step is not None

    # ---- groups and ranks ----

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    @property
    def data_parallel_rank(self) -> int:
        return self.policy.dp_rank

    @property
    def data_parallel_world_size(self) -> int:
        return self._sizes.dp

    def current_data_parallel_head(self) -> int:
        return dist.get_process_group_ranks(self.context_and_model_parallel_group)[0]

    def is_data_parallel_head(self) -> bool:
        return dist.get_rank() == self.current_data_parallel_head()

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        return parallel_state.get_model_parallel_group()

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        if self._cpu_group is None:
            raise RuntimeError("no process group yet; call create_process_group() first")
        return self._cpu_group

    # ---- state ----

    @property
    def policy(self) -> MegatronPolicy:
        return self.step.policy

    @property
    def step(self) -> LinearStep:
        """The linearised step on this rank's model."""
        if self._step is None:
            raise RuntimeError("the engine has no model yet; call create_process_group() and initialize() first")
        return self._step

    @property
    def stats(self) -> Any:
        """The walk's own counters (tokens computed, blocks, bytes)."""
        return self.step.engine.stats

    def train(self, mode: bool = True) -> DtaTrainEngine:
        self.policy.model.train(mode)
        return self

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    # ---- optimizer ----

    @property
    def lr(self) -> float:
        if self._schedule is None:
            raise RuntimeError("this engine has no optimizer; set actor.optimizer")
        return self._schedule.lr_at(self._lr_step)

    def optimizer_zero_grad(self) -> None:
        self.policy.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        """One step with the accumulated gradients; a norm that is not finite changes nothing and reports success 0."""
        lr = self.lr
        result = self.policy.optimizer_step(lr)
        self.step.weights_changed()
        return {"update_successful": float(result.ok), "grad_norm": float(result.grad_norm), "lr": lr}

    def lr_scheduler_step(self) -> None:
        self._lr_step += 1

    def set_lr_step(self, step: int) -> None:
        """Continue the schedule at 0-based `step` (resume)."""
        self._lr_step = step

    # ---- compute ----

    @torch.no_grad()
    def forward_batch(
        self,
        input_: BatchInput,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Log-probs ``[S, L]`` of a padded batch, position t holding token t+1's; a list gives a list. Critic: values.

        There are no micro-batches, so `aggregate_fn` has nothing to do; `output_seqlens` may only repeat the batch's
        own lengths.
        """
        batch, meta = _as_batch(input_)
        rows = self.step.rows_of(batch)
        if meta is None and output_seqlens not in (None, np.diff(rows.offsets_S1).tolist()):
            raise ValueError(f"output_seqlens={output_seqlens} differ from the batch's own lengths; leave them out")
        need_T = None
        if self.settings.loss_positions_only and "loss_mask" in batch:  # aligned with the token, or already rolled
            mask_SL = batch["loss_mask"].bool()
            need_T = flat_mask(mask_SL | mask_SL.roll(-1, -1), batch["attention_mask"])
        values = self.step.forward(rows, remember=self.config.optimizer is not None, need_T=need_T)
        padded_SL = pad_values(values.logprobs_T, batch["attention_mask"]).to(batch["input_ids"].device)
        return padded_SL if meta is None else split_batch(padded_SL, meta)

    def train_batch(self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: WeightFn) -> dict[str, float]:
        """One optimizer step on one minibatch: the linearised step (`areal_dta.linear_step`).

        `loss_fn` sees this rank's whole minibatch at once, packed as AReaL packs micro-batches (``cu_seqlens``, 1-D
        token arrays). Without loss weight on any rank statistics are recorded and no step is made
        (``update_successful`` 0). The loss is ``batch_loss``: AReaL's loss functions record a ``loss`` of their own.
        """
        batch, _ = _as_batch(input_)
        rows, packed, need_T = self.step.rows_of(batch), pack_tensor_dict(batch), self._loss_positions(batch)
        loss = self.step.accumulate(rows, packed, loss_fn, loss_weight_fn, need_T)
        if loss is None or not math.isfinite(loss):
            norm = 0.0 if loss is None else math.nan
            return {"update_successful": 0.0, "grad_norm": norm, "lr": self.lr, "batch_loss": norm}
        return {**self.optimizer_step(), "batch_loss": loss}

    @torch.no_grad()
    def eval_batch(self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: WeightFn) -> torch.Tensor | None:
        """The loss of `train_batch` without a step, over all data-parallel ranks; None when no rank has any weight."""
        batch, _ = _as_batch(input_)
        rows, packed, need_T = self.step.rows_of(batch), pack_tensor_dict(batch), self._loss_positions(batch)
        loss = self.step.evaluate(rows, packed, loss_fn, loss_weight_fn, need_T)
        return None if loss is None else torch.tensor(loss)

    def _loss_positions(self, batch: dict[str, Any]) -> np.ndarray | None:
        """Where the (rolled) loss mask is set, if only these positions are to be computed."""
        if not self.settings.loss_positions_only or "loss_mask" not in batch:
            return None
        return flat_mask(batch["loss_mask"], batch["attention_mask"])

    def forward_backward_batch(
        self,
        mb_list: Any,
        process_output_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor | None],
        forward_only: bool = False,
    ) -> NoReturn:
        """Refused: the callback wants the full logits of a micro-batch, which a tree walk never holds."""
        raise RuntimeError(
            "forward_backward_batch hands out full logits, which the tree engine does not hold; use train_batch, "
            "eval_batch or forward_batch, whose loss functions get log-probs and entropies of every row"
        )

    def export_stats(self) -> dict[str, float]:
        """What AReaL's stats tracker recorded, reduced over data-parallel ranks; resets it."""
        return stats_tracker.export_all(reduce_group=self.data_parallel_group)

    # ---- weights ----

    def save(self, meta: SaveLoadMeta) -> None:
        """``hf``: a safetensors folder, the optimizer in ``optimizer/``; ``dcp``: a Megatron checkpoint with both.

        All ranks call it. Raises FileExistsError where a checkpoint exists: they are immutable.
        """
        if _is_hf(meta):
            self.policy.save_hf(meta.path)
            if meta.tokenizer is not None and dist.get_rank() == 0:
                meta.tokenizer.save_pretrained(meta.path)
            if meta.with_optim:
                self.policy.save_checkpoint(Path(meta.path) / "optimizer")
        else:
            self.policy.save_checkpoint(meta.path)
        dist.barrier(group=self.cpu_group)

    def load(self, meta: SaveLoadMeta) -> None:
        """Inverse of `save`, for any data-parallel size."""
        if _is_hf(meta):
            self.policy.load_hf(meta.path)
            if meta.with_optim:
                self.policy.load_checkpoint(Path(meta.path) / "optimizer", model=False)
        else:
            self.policy.load_checkpoint(meta.path, optimizer=meta.with_optim)
        self.step.weights_changed()
        dist.barrier(group=self.cpu_group)

    def connect_engine(self, engine: Any, meta: WeightUpdateMeta) -> None:
        """Publish through the engine's first address, taken for the router, unless the settings name one."""
        if meta.type != "disk":
            raise ValueError(f"weight_update_mode={meta.type!r} is not supported; set actor.weight_update_mode=disk")
        addresses = getattr(engine, "addresses", None)
        if self.settings.router is None and addresses:
            self.settings = replace(self.settings, router=f"http://{addresses[0]}")
        dist.barrier(group=self.cpu_group)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Save HF weights to ``meta.path`` and have the router bring them to all servers; all ranks agree.

        The version is ``meta.version`` (else `get_version`). Raises PublishError on every rank when no server serves
        it.
        """
        if meta.type != "disk" or meta.path is None:
            raise ValueError(f"update_weights needs a disk path, got type={meta.type!r} path={meta.path!r}")
        router = self.settings.router
        if router is None:
            raise RuntimeError("no router to publish to; set EngineSettings.router or call connect_engine first")
        version = f"{self.settings.run_epoch}:{self._version if meta.version is None else meta.version}"
        digest = self.save_version(Path(meta.path), version)
        error: PublishError | None = None
        if dist.get_rank() == 0:
            timeout_s, key = self.settings.publish_timeout_s, self.settings.api_key
            try:
                publish_until(router, str(Path(meta.path).resolve()), version, digest, timeout_s=timeout_s, api_key=key)
            except PublishError as failure:
                error = failure
        failed = torch.tensor(int(error is not None))
        dist.all_reduce(failed, group=self.cpu_group)
        if failed:
            raise PublishError(f"version {version} is not served: {error or 'rank 0 has the cause'}") from error

    def save_version(self, path: Path, weight_version: str) -> str:
        """Write HF weights and ``version.json`` to `path`, whole or not at all; returns the digest on rank 0."""
        staging = staging_folder(path, clean=dist.get_rank() == 0)
        self.policy.save_hf(staging)
        digest = ""
        if dist.get_rank() == 0:
            digest = finish_version(staging, path, weight_version)
        dist.barrier(group=self.cpu_group)
        return digest

    # ---- what other parts of the system do here ----

    def rollout_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"rollout_batch: rollouts run in their own processes; {FED_BY_BATCHER}")

    def prepare_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"prepare_batch: batches are assembled by the batcher's process; {FED_BY_BATCHER}")

    def onload(self) -> None:
        """Nothing is ever offloaded."""

    def offload(self) -> NoReturn:
        raise RuntimeError("this engine keeps its weights in place; set actor.offload=false")

    def get_device_stats(self) -> DeviceRuntimeInfo:
        return DeviceRuntimeInfo.get_current()


def _is_hf(meta: SaveLoadMeta) -> bool:
    if meta.weight_format not in ("hf", "dcp"):
        raise ValueError(f"weight_format={meta.weight_format!r} is neither 'hf' nor 'dcp'")
    return meta.weight_format == "hf"


def _as_batch(input_: BatchInput) -> tuple[dict[str, Any], Any]:
    return concat_batch(input_) if isinstance(input_, list) else (input_, None)

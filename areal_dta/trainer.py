"""One rank of the trainer: ``python -m areal_dta.trainer --run RUN --index RANK``.

Step k trains with weights version k on the batcher's batch k and publishes version k+1. All ranks walk through the same
calls; rank 0 alone talks to the router and reports to the batcher. A rank that fails says why in its last log line and
exits at once, which breaks the others' collectives, so that they end too.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import areal_dta.areal_env  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta

from areal_dta import metrics
from areal_dta.batcher_link import BatcherLink, WaitTimeout
from areal_dta.bridge import actor_config, batch_of_shard, finetune_spec, flat_of_padded, make_actor, minibatches
from areal_dta.checkpoints import STATE, CheckpointSchedule, CheckpointStore, TrainerState
from areal_dta.config import Config, load_run_config
from areal_dta.config_schema import DtaConfig
from areal_dta.engine import PlanSettings
from areal_dta.process_log import set_up_logging
from areal_dta.publish import prune_versions
from areal_dta.records import LaunchPlan, Shard, WeightVersion
from areal_dta.train_engine import DtaTrainEngine, EngineSettings
from areal_dta.trainer_metrics import measure_mismatch, training_metrics

__all__ = ["Trainer", "main"]

log = logging.getLogger("areal_dta.trainer")
KEEP_VERSIONS = 4  # weight folders on disk: the served one, the next, and two for servers that are late
COLLECTIVE_MARGIN_S = 60.0  # a rank that waits for a peer outlasts the peer's own wait, so the cause is named first
EVAL_POLL_S = 2.0
MAX_SKIPPED_STEPS = 8
EXIT_SIGNALLED = 143


class Trainer:
    """The step loop of one rank; `run` does everything between process start and exit."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.config: Config = load_run_config(run_dir)
        self.plan = LaunchPlan.read(run_dir / "launch.json")
        self.timeout_s = self.config.runtime.step_timeout_s
        self.metrics = metrics.init(f"trainer.{rank}", self.plan.metrics)
        self.store = CheckpointStore(run_dir / "checkpoints")
        self.num_items = num_items = _num_items(run_dir / "dataset" / "train.jsonl")
        self.num_eval_items = _num_items(run_dir / "dataset" / "eval.jsonl")
        self.total_steps = self.config.total_steps(num_items)
        if self.total_steps < 1:
            raise ValueError(
                f"{num_items} training items make no batch of train_dataset.batch_size="
                f"{self.config.train_dataset.batch_size}; lower it or add items"
            )
        self.batcher = BatcherLink(self.plan.batcher, f"trainer.{rank}", self.timeout_s)
        self.engine = self._build_engine()
        self.actor = make_actor(self.engine.config, self.engine)
        self._skipped = 0  # training steps in a row without an optimizer step
        self.checkpoint_plan = CheckpointSchedule(*self.config.checkpoint_intervals(num_items))

    def _build_engine(self) -> DtaTrainEngine:
        plan, model = self.plan, self.run_dir / "model"
        config = actor_config(self.config.areal_mapping())
        config.path = str(model)
        config.backend = f"megatron:d{plan.dp}t{plan.tp}p{plan.pp}"
        settings = EngineSettings(
            mode=self.config.tree_training_mode,
            plan=_plan_settings(self.config.dta),
            calibration=self.run_dir / "calibration.json" if self.config.dta.calibrate else None,
            rank=self.rank,
            world_size=plan.trainer_world_size,
            master_addr=plan.trainer_master_addr,
            master_port=plan.trainer_master_port,
            timeout_s=self.timeout_s + COLLECTIVE_MARGIN_S,
            seed=self.config.seed,
            fused_loss=self.config.dta.fused_loss,
            loss_positions_only=True,
            run_epoch=plan.epoch,
            router=plan.router,
            api_key=plan.api_key,
            publish_timeout_s=self.timeout_s,
        )
        if settings.calibration is None and settings.mode == "dta":
            log.info("block costs are estimates from the model's shape; dta.calibrate=true measures them")
        engine = DtaTrainEngine(config, settings)
        engine.create_process_group()
        engine.initialize(None, finetune_spec(self.total_steps))
        return engine

    # ---- the run ----

    def run(self) -> None:
        """Train from the start or the checkpoint to the last step; returns when everything is committed."""
        first = self._load()
        self.batcher.hello()
        log.info("steps %d to %d, epoch %d, rank %d of %s", first, self.total_steps - 1, self.plan.epoch, self.rank,
                 self.engine.config.backend)  # fmt: skip
        self.engine.set_version(first)
        self.engine.set_lr_step(first)
        if self.plan.epoch > 0:  # the servers hold versions of an earlier launch
            self._publish(first, step=first)
        if first == 0 and self.config.evaluator.eval_before_train:
            self._evaluate("before", number=0)
        for step in range(first, self.total_steps):
            with self.metrics.span("time/step", step):
                self._train_step(step)
        self._evaluate("after", number=self.total_steps)
        if self.rank == 0:
            self.batcher.finish()
        self._barrier()
        self.metrics.close()
        self.batcher.close()
        self.engine.destroy()

    def _load(self) -> int:
        """Load the checkpoint to resume from, or the model's start optimizer state; returns the first step."""
        resume = self.plan.resume_step
        if resume is not None:
            state = self.store.read_state(resume)
            self.engine.load(
                SaveLoadMeta(path=str(self.store.folder(resume) / STATE), weight_format="dcp", with_optim=True)
            )
            log.info("resumed after step %d", state.step)
            return state.step + 1
        start = self.run_dir / "model" / "optimizer"
        if start.is_dir():
            self.engine.policy.load_checkpoint(start, model=False, zero_first_moment=True)
            log.info("optimizer starts from the state in %s, first moments zeroed", start.relative_to(self.run_dir))
        return 0

    def _train_step(self, step: int) -> None:
        engine, span = self.engine, self.metrics.span
        began = time.perf_counter()
        with span("time/wait_batch", step):
            shard = self.batcher.next_shard(step, engine.data_parallel_rank, engine.data_parallel_world_size)
        computing = time.perf_counter()
        batch = batch_of_shard(shard, engine.policy.device)
        with span("time/logprob", step):
            logp_SL = self.actor.compute_logp([batch])[0]
        self._report_mismatch(shard, flat_of_padded(logp_SL, batch["attention_mask"]), step)
        if engine.config.should_compute_prox_logp():
            batch["prox_logp"] = logp_SL
        with span("time/advantages", step):
            batch = self.actor.compute_advantages([batch])[0]
        with span("time/update", step):
            for minibatch in minibatches(batch, shard.minibatch_S, self.config.actor.ppo_n_minibatches):
                self.actor.ppo_update([minibatch])
        engine.step_lr_scheduler()
        compute_s = time.perf_counter() - computing
        stats = training_metrics(engine.export_stats())
        self._check_progress(stats, step)
        with span("time/publish", step):
            self._publish(step + 1, step)
        if self._agree(self.checkpoint_plan.due(step)) or step + 1 == self.total_steps:
            with span("time/checkpoint", step):
                self._checkpoint(step)
        self._report(shard, stats, step, compute_s, time.perf_counter() - began)
        if self.config.evaluation_due(step, self.num_items) and step + 1 < self.total_steps:
            self._evaluate(f"step_{step + 1:06d}", number=step + 1)

    def _check_progress(self, stats: dict[str, float], step: int) -> None:
        """Say when a step changed nothing, and end the run when that goes on: its versions would all be the same."""
        if stats.get("train/update_successful", 1.0) > 0:
            self._skipped = 0
            return
        self._skipped += 1
        reason = "a gradient or coefficient was not finite, or no token carried loss"
        log.warning("step %d: an optimizer step was skipped: %s", step, reason)
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise RuntimeError(f"optimizer steps of the last {self._skipped} training steps were skipped: {reason}")

    def _publish(self, number: int, step: int) -> None:
        version = WeightVersion(self.plan.epoch, number)
        folder = self.run_dir / "weights" / f"e{version.epoch}_v{version.number:06d}"
        self.engine.update_weights(WeightUpdateMeta(type="disk", path=str(folder), version=number))
        self.engine.set_version(number)
        if self.rank == 0:
            self.batcher.published(number, self.plan.epoch)
            prune_versions(folder.parent, KEEP_VERSIONS)

    def _checkpoint(self, step: int) -> None:
        if self.rank == 0:
            self.store.prepare(step)
        self._barrier()
        state = self.store.staging(step) / STATE
        self.engine.save(SaveLoadMeta(path=str(state), weight_format="dcp", with_optim=True))
        if self.rank == 0:
            folder = self.store.finish(TrainerState(step=step, number=step + 1, epoch=self.plan.epoch))
            self.batcher.commit(step, folder.name)
            self.store.prune()
        self.checkpoint_plan.written()

    def _evaluate(self, tag: str, number: int) -> None:
        """Have the evaluation set, if there is one, played greedily; rank 0 asks, the others follow its polls."""
        if not self.num_eval_items:
            return
        deadline, done, total = time.monotonic() + self.timeout_s, 0, 1
        if self.rank == 0:
            total = self.batcher.eval_start(tag, number)
        while self._agree(total > 0):
            if self.rank != 0:
                continue
            progress = self.batcher.eval_result(tag, EVAL_POLL_S)
            if progress.done > done:
                deadline, done = time.monotonic() + self.timeout_s, progress.done
            if progress.finished:
                total = 0
                self._report_eval(tag, number, progress.mean_reward, progress.done)
            elif time.monotonic() > deadline:
                raise WaitTimeout(
                    f"waited {self.timeout_s:g} s for the next episode of evaluation {tag!r}: "
                    f"{progress.done} of {progress.total} done; see the workers' logs, or raise runtime.step_timeout_s"
                )

    # ---- agreement and reports ----

    def _barrier(self) -> None:
        dist.barrier(group=self.engine.cpu_group)

    def _agree(self, mine: bool) -> bool:
        """Rank 0's answer, on every rank."""
        flag = torch.tensor(int(mine))
        dist.broadcast(flag, src=0, group=self.engine.cpu_group)
        return bool(flag)

    def _report_eval(self, tag: str, number: int, mean_reward: float | None, episodes: int) -> None:
        if mean_reward is not None:
            self.metrics.emit("eval/reward", mean_reward, number, tag=tag)
        log.info("evaluation %s: mean reward %s over %d episodes", tag, mean_reward, episodes)

    def _report_mismatch(self, shard: Shard, logp_T: np.ndarray, step: int) -> None:
        e = self.engine
        found = measure_mismatch(shard, logp_T, step, e.cpu_group, e.data_parallel_group, e.policy.device)
        if self.rank == 0:
            self.metrics.emit("train/logprob_mismatch_tokens", found.num_tokens, step)
            if found.num_tokens:
                self.metrics.emit("train/logprob_mismatch_max", found.max, step)
                self.metrics.emit("train/logprob_mismatch_mean", found.mean, step)

    def _report(self, shard: Shard, stats: dict[str, float], step: int, compute_s: float, step_s: float) -> None:
        row_tokens, tree_tokens = int(shard.offsets_S1[-1]), int(shard.tree_tokens)
        values = {
            "train/row_tokens": row_tokens,
            "train/tree_tokens": tree_tokens,
            "train/tree_ratio": row_tokens / max(1, tree_tokens),
            "train/load": shard.cost,
            "train/tokens_per_s": row_tokens / max(compute_s, 1e-9),
            **(stats if self.rank == 0 else {}),
        }
        for name, value in values.items():
            self.metrics.emit(name, value, step)
        told = " ".join(f"{name.partition('/')[2]}={value:.4g}" for name, value in sorted({**stats, **values}.items()))
        log.info("step %d/%d rows=%d %s step_s=%.2f", step + 1, self.total_steps, shard.num_rows, told, step_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0 after a finished run, 1 with the cause in the last log line, 143 after SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="areal_dta.trainer", description="One rank of the trainer of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--index", type=int, required=True, help="rank")
    args = parser.parse_args(argv)
    set_up_logging()
    _exit_on_signals()
    try:
        config = load_run_config(args.run)
        torch.set_num_threads(config.runtime.threads_per_process)
        torch.manual_seed(config.seed)
        Trainer(args.run, args.index).run()
    except Exception as error:  # noqa: BLE001  the process boundary: exit code and last line tell every failure
        traceback.print_exc(file=sys.stdout)
        _exit_now(1, f"trainer.{args.index} failed: {type(error).__name__}: {' '.join(str(error).split())}")
    log.info("trainer.%d finished", args.index)
    return 0


def _plan_settings(dta: DtaConfig) -> PlanSettings:
    return PlanSettings(
        kind=dta.plan,
        max_block_tokens=dta.max_block_tokens,
        activation_budget=dta.activation_budget,
        leaf_merge=dta.leaf_merge,
        cut_tail=dta.cut_tail,
        order=dta.order,
    )


def _num_items(path: Path) -> int:
    """Lines of a data set; an absent file has none."""
    if not path.is_file():
        return 0
    with path.open() as file:
        return sum(1 for line in file if line.strip())


def _exit_on_signals() -> None:
    """Leave at once on SIGTERM or SIGINT, even from within a collective, where Python's own handlers would not run."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        number = os.read(read_fd, 1)[0]
        _exit_now(EXIT_SIGNALLED, f"stopped by {signal.Signals(number).name}; the last checkpoint stays valid")

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _exit_now(code: int, last_words: str) -> None:
    """End the process without waiting for peers, threads or destructors."""
    log.error("%s", last_words)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

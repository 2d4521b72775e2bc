"""``python -m areal_dta.batcher --run RUN``: the central batcher of a run, configured by RUN/config.yaml and
RUN/launch.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop

from areal_dta import metrics
from areal_dta.batcher.core import BatcherCore, Refusal
from areal_dta.batcher.costs import cost_from_model, measured_cost
from areal_dta.batcher.ledger import LedgerError
from areal_dta.batcher.service import BatcherService, ServiceSettings
from areal_dta.batcher.settings import BatcherSettings, NormLevel, RewardSettings, SettingsError
from areal_dta.config import Config, ConfigError, load_run_config
from areal_dta.records import LaunchPlan
from areal_dta.tree.cost import CostModel

log = logging.getLogger("areal_dta.batcher")


def settings_from_config(
    config: Config, plan: LaunchPlan, num_items: int, num_eval_items: int, cost: CostModel
) -> BatcherSettings:
    """Map a run's configuration to the batcher's settings; raises SettingsError."""
    norm = config.actor.reward_norm
    rewards = RewardSettings(
        bias=config.actor.reward_bias,
        scaling=config.actor.reward_scaling,
        clip=config.actor.reward_clip,
        mean_level=cast(NormLevel, norm.mean_level if norm else None),
        std_level=cast(NormLevel, norm.std_level if norm else None),
        leave_one_out=norm.mean_leave1out if norm else False,
        unbiased_std=norm.std_unbiased if norm else True,
        eps=norm.eps if norm else 1e-5,
    )
    return BatcherSettings(
        num_items=num_items,
        batch_groups=config.train_dataset.batch_size,
        group_size=config.gconfig.n_samples,
        eta=config.rollout.max_head_offpolicyness,
        num_ranks=plan.dp,
        seed=config.seed,
        shuffle=config.train_dataset.shuffle,
        num_minibatches=config.actor.ppo_n_minibatches,
        total_steps=config.total_steps(num_items),
        max_concurrent=config.rollout.max_concurrent_rollouts,
        num_eval_items=num_eval_items,
        eval_samples=config.eval_gconfig.n_samples if config.eval_gconfig else 1,
        partition=config.batcher.partition,
        cost=cost,
        staleness_policy=config.batcher.staleness_policy,
        lease_timeout_s=config.batcher.lease_timeout_s,
        group_timeout_s=config.group_timeout_s,
        max_attempts=config.batcher.max_attempts,
        intake_limit=config.batcher.intake_limit,
        min_group_size=config.batcher.min_group_size,
        filter_equal_rewards=config.batcher.filter_equal_rewards,
        stale_reissues=config.batcher.stale_reissues,
        rewards=rewards,
    ).check()


def read_items(path: Path, required: bool) -> list[dict[str, Any]]:
    """The lines of a data set; raises SettingsError naming the line that is no JSON object."""
    if not path.is_file():
        if required:
            raise SettingsError(f"{path} does not exist; `prepare` must write the data set before the launch")
        return []
    items = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(item, dict):
            raise SettingsError(f"{path}:{number} is {type(item).__name__}, expected a JSON object")
        items.append(item)
    return items


async def serve(run_dir: Path, config: Config, plan: LaunchPlan) -> None:
    """Run the batcher of a launch until SIGTERM or SIGINT."""
    items = read_items(run_dir / "dataset" / "train.jsonl", required=True)
    eval_items = read_items(run_dir / "dataset" / "eval.jsonl", required=False)
    cost = cost_from_model(config.batcher.cost, run_dir / "model")
    settings = settings_from_config(config, plan, len(items), len(eval_items), cost)
    trace_dir = run_dir / "traces" if config.batcher.dump_traces else None
    if trace_dir is not None:
        trace_dir.mkdir(exist_ok=True)
    timed = partial(measured_cost, run_dir, config.dta.max_block_tokens)
    publisher = metrics.init("batcher", plan.metrics)
    service = BatcherService(
        BatcherCore(settings, items, eval_items, time.monotonic),
        ServiceSettings(
            address=plan.batcher,
            spool_dir=run_dir / "spool",
            epoch=plan.epoch,
            resume_step=plan.resume_step,
            trace_dir=trace_dir,
            domain=config.econfig.domain,
            report_interval_s=config.telemetry.interval_s,
            spool_bytes=config.batcher.spool_bytes,
            measured_cost=timed if config.batcher.cost == "time" else None,
        ),
        publisher,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    try:
        await service.start()
        await service.run()
    finally:
        publisher.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped, 1 failed (the log could not be written or the port is taken), 2 wrong configuration."""
    parser = argparse.ArgumentParser(prog="areal_dta.batcher", description="Central batcher of a run.")
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--index", type=int, default=0, help="ignored: there is one batcher")
    run_dir = parser.parse_args(argv).run
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        uvloop.run(serve(run_dir, load_run_config(run_dir), LaunchPlan.read(run_dir / "launch.json")))
    except (SettingsError, ConfigError, LedgerError, Refusal) as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The rollout worker process: ``python -m areal_dta.rollout.worker --run RUN --index i``.

It builds the workflow and AReaL's client from the run directory and hands them to `worker_loop.Worker`.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import uvloop
from areal.api import RolloutWorkflow

from areal_dta import metrics
from areal_dta.channel import AsyncRpcClient, RpcError
from areal_dta.config import load_run_config
from areal_dta.process_log import set_up_logging
from areal_dta.records import LaunchPlan
from areal_dta.rollout.worker_agent import install_tool_call_parser
from areal_dta.rollout.worker_engine import RouterEngine
from areal_dta.rollout.worker_loop import Worker, WorkerError
from areal_dta.rollout.worker_setup import WorkerSettings, areal_config, load_workflow, settings_of

__all__ = ["main"]

log = logging.getLogger("areal_dta.rollout.worker")  # this module is __main__ in its process


async def _work(settings: WorkerSettings, plan: LaunchPlan, engine: RouterEngine, workflow: RolloutWorkflow) -> None:
    publisher = metrics.init(settings.name, plan.metrics)
    rpc = AsyncRpcClient(plan.batcher, settings.name)
    worker = Worker(settings, rpc, engine, workflow, publisher)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    try:
        await worker.run()
    finally:
        await rpc.close()
        publisher.close()


def _connect(engine: RouterEngine, name: str, router: str) -> None:
    """Wait until the router is healthy and start AReaL's executor."""
    try:
        engine.initialize(engine_id=name, addr=router.removeprefix("http://"), train_data_parallel_size=1)
    except TimeoutError as error:
        raise WorkerError(f"router {router} was not healthy within {engine.config.setup_timeout:g} s") from error


def _shut_down(engine: RouterEngine, timeout_s: float) -> None:
    """Stop AReaL's threads, which closes requests of cancelled episodes; one that does not end is left behind."""
    thread = threading.Thread(target=engine.destroy, name="destroy-engine", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        log.warning("AReaL's executor did not end within %g s", timeout_s)


def _run(run_dir: Path, index: int) -> None:
    config, plan = load_run_config(run_dir), LaunchPlan.read(run_dir / "launch.json")
    torch.set_num_threads(config.runtime.threads_per_process)
    settings = settings_of(config, plan, index)
    install_tool_call_parser()
    workflow = load_workflow(config, run_dir)
    engine = RouterEngine(areal_config(config, settings), plan.api_key, patience_s=config.runtime.start_timeout_s)
    _connect(engine, settings.name, plan.router)
    set_up_logging()  # once more: the workflow brought modules of its own
    try:
        uvloop.run(_work(settings, plan, engine, workflow))
    finally:
        _shut_down(engine, settings.stop_timeout_s / 4)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code is 0 after draining or SIGTERM, 1 with the cause in the last log line otherwise."""
    parser = argparse.ArgumentParser(prog="areal_dta.rollout.worker", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--index", type=int, required=True, help="which worker of the run this is")
    args = parser.parse_args(argv)
    set_up_logging()
    try:
        _run(args.run, args.index)
    except (WorkerError, OSError, RpcError, ValueError) as error:
        log.error("worker ends: %s: %s", type(error).__name__, error)
        return 1
    except Exception:  # a workflow's constructor may raise anything
        log.exception("worker ends")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of workflows that could not be cancelled must not keep a stopped worker alive; all results are delivered.
    os._exit(code)

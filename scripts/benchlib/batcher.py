"""``bench.py batcher``: trajectories per second through a real batcher process on loopback, log on disk included.

Worker processes deliver made-up trajectories as fast as they are acknowledged: one step's worth with nothing else going
on (the rate), then a second one while a trainer asks for the first step's shards (latency of an acknowledgement while a
batch is assembled). Workers, batcher and trainer share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from areal_dta.channel import RpcClient
from areal_dta.records import LaunchPlan
from scripts.benchlib.report import UsageError, end, free_port, progress

__all__ = ["add_arguments", "run"]

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300.0
_BYTES_PER_TOKEN = 13  # ids, log-prob, version, loss mask
_CONFIG = """
experiment_name: bench
trial_name: bench
total_train_epochs: 1
total_train_steps: 2
workflow: none.Workflow
tokenizer_path: ""
rollout: {{backend: "embedded:d1", max_head_offpolicyness: 1}}
gconfig: {{n_samples: {group_size}, max_new_tokens: 8}}
actor: {{backend: "megatron:d{ranks}t1p1", path: "", ppo_n_minibatches: 1}}
train_dataset: {{batch_size: {groups}}}
batcher: {{lease_timeout_s: 300, cost: tree_tokens, intake_limit: {intake_limit}}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trajectories", type=int, default=8192, help="of one step")
    parser.add_argument("--length", type=int, default=4000, help="tokens of a trajectory")
    parser.add_argument("--group", type=int, default=16, help="trajectories of a prompt")
    parser.add_argument("--workers", type=int, default=2, help="processes that deliver")
    parser.add_argument("--concurrency", type=int, default=64, help="deliveries in flight of each")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--dir", type=Path, help="where the log is written (default: a temporary folder)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.trajectories % args.group or args.trajectories < args.group:
        raise UsageError(f"--trajectories {args.trajectories} is no multiple of --group {args.group}")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run_dir = Path(folder)
        address = _prepare(run_dir, args)
        with (run_dir / "batcher.log").open("w") as log:
            batcher = subprocess.Popen(
                [sys.executable, "-m", "areal_dta.batcher", "--run", str(run_dir)], cwd=_ROOT, stderr=log
            )
        workers: list[subprocess.Popen[bytes]] = []
        try:
            return _measure(args, run_dir, address, batcher, workers)
        except TimeoutError as error:
            raise UsageError(f"{error}\n{(run_dir / 'batcher.log').read_text()[-2000:]}") from error
        finally:
            for worker in workers:
                worker.kill()
            end(batcher)


def _measure(
    args: argparse.Namespace,
    run_dir: Path,
    address: str,
    batcher: subprocess.Popen[bytes],
    workers: list[subprocess.Popen[bytes]],
) -> dict[str, Any]:
    with RpcClient(address, "trainer", connect_timeout_s=60) as trainer:
        cpu_before_s = _cpu_s(batcher.pid)
        workers += [_worker(args, run_dir, address, i) for i in range(args.workers)]
        status = _wait(trainer, args.trajectories)
        cpu_after_s = _cpu_s(batcher.pid)
        progress(f"{status['acknowledged']} trajectories acknowledged, asking for shards")
        asked_s = time.monotonic()
        trainer.call("published", {"number": 1, "epoch": 0}, timeout_s=_TIMEOUT_S)
        while trainer.call("shard", _ask(args, 0), timeout_s=_TIMEOUT_S).body["status"] != "ready":
            if time.monotonic() - asked_s > _TIMEOUT_S:
                raise TimeoutError(f"no shard within {_TIMEOUT_S:g} s")
        got_s = time.monotonic()
        for rank in range(1, args.ranks):
            trainer.call("shard", _ask(args, rank), timeout_s=_TIMEOUT_S)
        status = _wait(trainer, 2 * args.trajectories)
        trainer.call("finish", {}, timeout_s=_TIMEOUT_S)
        for worker in workers:
            worker.wait(_TIMEOUT_S)
        reports = [json.loads(_report(run_dir, i).read_text()) for i in range(args.workers)]
    acks = sorted((when_s, latency_s) for report in reports for when_s, latency_s in report["acks"])
    first_s, last_s = acks[0][0] - acks[0][1], acks[args.trajectories - 1][0]
    rate = args.trajectories / (last_s - first_s)
    return {
        "trajectories_per_s": rate,
        "mb_per_s": rate * args.length * _BYTES_PER_TOKEN / 1e6,
        "trajectories": args.trajectories,
        "length": args.length,
        "workers": args.workers,
        "in_flight": args.workers * args.concurrency,
        "ack_ms": _quantiles([latency for when, latency in acks if when <= asked_s]),
        "batcher_cpu_ms_per_trajectory": 1e3 * (cpu_after_s - cpu_before_s) / args.trajectories,
        "assemble_s": got_s - asked_s,
        "ack_ms_while_assembling": _quantiles([latency for when, latency in acks if asked_s <= when <= got_s]),
        "acknowledged_while_assembling": sum(asked_s <= when <= got_s for when, _ in acks),
        "worker_cpu_s": sum(report["cpu_s"] for report in reports),
        "spool_mb": status["spool_bytes"] / 1e6,
        "batcher_peak_mb": _peak_mb(batcher.pid),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }


def _worker(args: argparse.Namespace, run_dir: Path, address: str, index: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scripts.benchlib.batcher_load", address, f"worker{index}"]
    report = str(_report(run_dir, index))
    return subprocess.Popen([*command, str(args.length), str(args.concurrency), report], cwd=_ROOT)


def _report(run_dir: Path, index: int) -> Path:
    return run_dir / f"worker{index}.json"


def _ask(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    return {"rank": rank, "world_size": args.ranks, "step": 0, "wait_s": 60.0}


def _wait(trainer: RpcClient, acknowledged: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = trainer.call("status", timeout_s=_TIMEOUT_S).body
        if status["acknowledged"] >= acknowledged:
            return status
        time.sleep(0.02)
    raise TimeoutError(f"{status['acknowledged']} of {acknowledged} trajectories after {_TIMEOUT_S:g} s")


def _prepare(run_dir: Path, args: argparse.Namespace) -> str:
    groups = args.trajectories // args.group
    (run_dir / "dataset").mkdir()
    lines = [json.dumps({"task_id": f"task{i}"}) for i in range(2 * groups)]
    (run_dir / "dataset" / "train.jsonl").write_text("\n".join(lines))
    (run_dir / "config.yaml").write_text(
        _CONFIG.format(group_size=args.group, groups=groups, ranks=args.ranks, intake_limit=4 * args.trajectories)
    )
    address = f"tcp://127.0.0.1:{free_port()}"
    LaunchPlan(
        str(run_dir), 0, address, "tcp://127.0.0.1:9", "", (), "127.0.0.1", 1, args.ranks, 1, 1, args.workers
    ).write(run_dir / "launch.json")
    return address


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _quantiles(latencies_s: list[float]) -> dict[str, float] | None:
    if not latencies_s:
        return None
    p50, p99 = np.quantile(latencies_s, [0.5, 0.99]) * 1e3
    return {"p50": float(p50), "p99": float(p99), "max": 1e3 * max(latencies_s)}

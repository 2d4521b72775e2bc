"""What the batcher's fault tests share: the process on a run directory, toy workers, a toy trainer's questions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from areal_dta.channel import RpcClient
from areal_dta.records import LaunchPlan, Lease, Shard, Trajectory, pack, unpack
from tests.unit.batcher_kit import trajectory

TIMEOUT_S = 60
ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
experiment_name: toy
trial_name: toy
seed: 1
total_train_epochs: 100
total_train_steps: 12
workflow: toy.Workflow
tokenizer_path: ""
rollout: {backend: "embedded:d1", max_head_offpolicyness: 1, max_concurrent_rollouts: 64}
gconfig: {n_samples: 2, max_new_tokens: 8}
actor: {backend: "megatron:d2t1p1", path: "", ppo_n_minibatches: 1, reward_norm: {mean_level: group, std_level: group}}
train_dataset: {batch_size: 2}
valid_dataset: {batch_size: 2}
batcher: {lease_timeout_s: 2, max_attempts: 50, cost: tree_tokens, dump_traces: true}
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class BatcherProcess:
    """A run directory and the batcher on it, started and killed at will."""

    def __init__(self, run_dir: Path, num_items: int = 5):
        self.run_dir = run_dir
        self.address = f"tcp://127.0.0.1:{free_port()}"
        (run_dir / "dataset").mkdir(parents=True)
        for name in ("train", "eval"):
            lines = [json.dumps({"task_id": f"{name}{i}"}) for i in range(num_items if name == "train" else 2)]
            (run_dir / "dataset" / f"{name}.jsonl").write_text("\n".join(lines))
        (run_dir / "config.yaml").write_text(CONFIG)
        self.process = None
        self.plan()

    def plan(self, epoch: int = 0, resume_step: int | None = None):
        metrics = f"tcp://127.0.0.1:{free_port()}"  # nobody listens: publishing must not care
        LaunchPlan(
            str(self.run_dir), epoch, self.address, metrics, "", (), "127.0.0.1", 1, 2, 1, 1, 1, resume_step
        ).write(self.run_dir / "launch.json")

    def start(self):
        with (self.run_dir / "batcher.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "areal_dta.batcher", "--run", str(self.run_dir)], cwd=ROOT, stderr=log
            )

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def restart(self):
        self.kill()
        self.start()

    def log(self) -> str:
        return (self.run_dir / "batcher.log").read_text()

    def client(self, name: str) -> RpcClient:
        return RpcClient(self.address, name)


class ToyWorker(threading.Thread):
    """Leases, makes episodes up, delivers each; some twice, some refused, some with a reward that is no number."""

    def __init__(self, batcher: BatcherProcess, name: str):
        super().__init__(name=name, daemon=True)
        self.batcher, self.acknowledged, self.failure = batcher, set(), None
        self.halt = threading.Event()  # stops without finishing what was leased

    def run(self):
        rng = np.random.default_rng(len(self.name))
        try:
            with self.batcher.client(self.name) as link:
                link.call("hello", {"name": self.name, "role": "worker", "pid": os.getpid()}, timeout_s=TIMEOUT_S)
                while not self.halt.is_set():
                    reply = link.call(
                        "lease", {"worker": self.name, "capacity": 3, "wait_s": 1.0}, timeout_s=TIMEOUT_S
                    ).body
                    for plain in reply["leases"]:
                        self.episode(link, rng, unpack(Lease, plain))
                    if reply["draining"]:
                        return
        except BaseException as error:
            self.failure = error
            raise

    def episode(self, link: RpcClient, rng: np.random.Generator, lease: Lease):
        if self.halt.is_set():
            return
        lot = rng.random()
        traj = trajectory(lease, reward=float(rng.random()))
        if lot < 0.1:
            link.call(
                "reject", {"lease_id": lease.lease_id, "worker": self.name, "cause": "raised"}, timeout_s=TIMEOUT_S
            )
            return
        if lot < 0.15:
            status = self.deliver(link, replace(traj, reward=float("nan")))
            assert (status["status"], status["cause"]) in {
                ("rejected", "bad_reward"),
                ("duplicate", ""),
                ("rejected", "late"),
            }
            return
        for _ in range(2 if lot < 0.3 else 1):
            status = self.deliver(link, traj)
            if status["status"] in ("accepted", "duplicate"):
                self.acknowledged.add((lease.group_id, lease.sample))

    def deliver(self, link: RpcClient, traj: Trajectory) -> dict:
        body, arrays = pack(traj)
        link.call("heartbeat", {"worker": self.name, "lease_ids": [traj.lease_id]}, timeout_s=TIMEOUT_S)
        return link.call("trajectory", body, arrays, timeout_s=TIMEOUT_S).body


def shards(link: RpcClient, step: int) -> list[Shard]:
    out = []
    for rank in range(2):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            request = {"rank": rank, "world_size": 2, "step": step, "wait_s": 2.0}
            reply = link.call("shard", request, timeout_s=TIMEOUT_S)
            body = dict(reply.body)
            if body.pop("status") == "ready":
                out.append(unpack(Shard, body, reply.arrays))
                break
            assert time.monotonic() < deadline, body
    return out


def keys(step_shards: list[Shard]) -> set[tuple[int, int]]:
    return {(int(g), int(s)) for sh in step_shards for g, s in zip(sh.group_ids_S, sh.samples_S, strict=True)}

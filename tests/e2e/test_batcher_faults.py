"""A real batcher process under kill -9, with toy workers and a toy trainer. Not covered: loss of power, network
partitions.
"""

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
import pytest

from areal_dta.channel import RpcClient, RpcError
from areal_dta.records import LaunchPlan, Lease, Shard, Trajectory, pack, unpack
from tests.unit.batcher_kit import trajectory

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


@pytest.fixture
def batcher(tmp_path):
    process = BatcherProcess(tmp_path / "run")
    yield process
    if process.process is not None and process.process.poll() is None:
        process.process.kill()
        process.process.wait(10)


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
                link.call("hello", {"name": self.name, "role": "worker", "pid": os.getpid()}, timeout_s=30)
                while not self.halt.is_set():
                    reply = link.call("lease", {"worker": self.name, "capacity": 3, "wait_s": 1.0}, timeout_s=30).body
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
            link.call("reject", {"lease_id": lease.lease_id, "worker": self.name, "cause": "raised"}, timeout_s=30)
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
        link.call("heartbeat", {"worker": self.name, "lease_ids": [traj.lease_id]}, timeout_s=30)
        return link.call("trajectory", body, arrays, timeout_s=30).body


def shards(link: RpcClient, step: int) -> list[Shard]:
    out = []
    for rank in range(2):
        deadline = time.monotonic() + 30
        while True:
            request = {"rank": rank, "world_size": 2, "step": step, "wait_s": 2.0}
            reply = link.call("shard", request, timeout_s=30)
            body = dict(reply.body)
            if body.pop("status") == "ready":
                out.append(unpack(Shard, body, reply.arrays))
                break
            assert time.monotonic() < deadline, body
    return out


def keys(step_shards: list[Shard]) -> set[tuple[int, int]]:
    return {(int(g), int(s)) for sh in step_shards for g, s in zip(sh.group_ids_S, sh.samples_S, strict=True)}


def test_kill_at_random_points_loses_nothing_acknowledged_and_trains_nothing_twice(batcher):
    batcher.start()
    workers = [ToyWorker(batcher, f"worker{'x' * i}") for i in range(2)]
    for worker in workers:
        worker.start()
    rng = np.random.default_rng(7)
    trained: list[tuple[int, int]] = []
    killer = None
    with batcher.client("trainer") as link:
        for step in range(12):
            if step in (2, 5, 8):
                killer = threading.Timer(float(rng.random() * 0.05), batcher.restart)
                killer.start()
            first = shards(link, step)
            again = shards(link, step)
            for a, b in zip(first, again, strict=True):
                assert pack(a)[0] == pack(b)[0]
                assert all((x == y).all() for x, y in zip(pack(a)[1].values(), pack(b)[1].values(), strict=True))
            trained += keys(first)
            link.call("published", {"number": step + 1, "epoch": 0}, timeout_s=30)
            if step % 4 == 3:
                link.call("commit", {"step": step, "checkpoint": f"step_{step}"}, timeout_s=30)
            if killer is not None:
                killer.join(20)
        link.call("finish", {}, timeout_s=30)
        for worker in workers:
            worker.join(20)
            assert not worker.is_alive() and worker.failure is None
        status = link.call("status", timeout_s=30).body
    assert len(trained) == len(set(trained))
    told = set().union(*[w.acknowledged for w in workers])
    assert set(trained) <= told
    assert (status["lost"], status["duplicated"]) == (0, 0)
    assert status["acknowledged"] == len(told) == status["trained"] + status["pooled"] + sum(status["dropped"].values())
    assert status["trained"] == len(trained)
    assert status["max_staleness"] <= 1
    assert status["rejected"]["bad_reward"] > 0
    assert batcher.log().count("replayed") == 3
    batcher.process.terminate()
    assert batcher.process.wait(20) == 0
    assert len(list((batcher.run_dir / "traces").glob("batch_??????.npz"))) == 12


def test_leases_of_a_dead_worker_are_given_to_another(batcher):
    batcher.start()
    with batcher.client("dead") as link:
        taken = link.call("lease", {"worker": "dead", "capacity": 8, "wait_s": 5.0}, timeout_s=30).body["leases"]
    assert len(taken) == 8
    worker = ToyWorker(batcher, "alive")
    worker.start()
    with batcher.client("trainer") as link:
        assert len(keys(shards(link, 0))) >= 2
        status = link.call("status", timeout_s=30).body
        assert status["rejected"]["expired"] == 8
        link.call("finish", {}, timeout_s=30)
    worker.join(20)
    assert not worker.is_alive()


def test_a_torn_tail_and_a_resume_from_a_checkpoint(batcher):
    batcher.start()
    worker = ToyWorker(batcher, "worker")
    worker.start()
    batches = []
    with batcher.client("trainer") as link:
        for step in range(4):
            batches.append(keys(shards(link, step)))
            link.call("published", {"number": step + 1, "epoch": 0}, timeout_s=30)
            if step == 1:
                link.call("commit", {"step": 1, "checkpoint": "step_1"}, timeout_s=30)
        worker.halt.set()
        worker.join(20)
        before = link.call("status", timeout_s=30).body
    batcher.kill()
    segment = sorted((batcher.run_dir / "spool").glob("*.log"))[-1]
    with segment.open("ab") as file:
        file.write(b"\x99\x00\x00\x00torn")
    batcher.plan(epoch=1, resume_step=1)
    batcher.start()
    with batcher.client("trainer") as link:
        assert link.call("hello", {"name": "trainer.0", "role": "trainer", "pid": 1}, timeout_s=30).body == {
            "epoch": 1,
            "version": 2,
        }
        status = link.call("status", timeout_s=30).body
        assert (status["step"], status["torn_bytes"], status["trained"]) == (2, 8, len(batches[0] | batches[1]))
        assert status["acknowledged"] == before["acknowledged"]
        with pytest.raises(RpcError, match="next step is 2"):
            link.call("shard", {"rank": 0, "world_size": 2, "step": 3, "wait_s": 0}, timeout_s=30)
        for step in (2, 3):
            assert keys(shards(link, step)) == batches[step]
            link.call("published", {"number": step + 1, "epoch": 1}, timeout_s=30)
        status = link.call("status", timeout_s=30).body
    assert (status["lost"], status["duplicated"], status["trained"]) == (0, 0, before["trained"])
    assert "dropped a torn tail of 8 bytes" in batcher.log()


def test_nonsense_configurations_end_within_seconds_with_the_remedy(batcher):
    (batcher.run_dir / "dataset" / "train.jsonl").write_text('{"task_id": "only"}')
    batcher.start()
    assert batcher.process.wait(20) == 2
    assert "1 items, fewer than train_dataset.batch_size=2" in batcher.log()
    (batcher.run_dir / "dataset" / "train.jsonl").write_text('{"task_id": "a"}\n[1]')
    batcher.start()
    assert batcher.process.wait(20) == 2
    assert "train.jsonl:2 is list" in batcher.log()
    (batcher.run_dir / "dataset" / "train.jsonl").write_text('{"task_id": "a"}\n{"task_id": "b"}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(batcher.address.rsplit(":", 1)[1])))
        taken.listen()
        batcher.start()
        assert batcher.process.wait(20) == 1
    assert f"cannot listen on {batcher.address}" in batcher.log()


def test_the_process_stops_on_sigterm_and_keeps_its_promises(batcher):
    batcher.start()
    with batcher.client("w") as link:
        plain = link.call("lease", {"worker": "w", "capacity": 1, "wait_s": 5.0}, timeout_s=30).body["leases"][0]
        body, arrays = pack(trajectory(unpack(Lease, plain)))
        assert link.call("trajectory", body, arrays, timeout_s=30).body["status"] == "accepted"
        with pytest.raises(RpcError, match=r"'lease' needs 'capacity' as int, got 'many'"):
            link.call("lease", {"worker": "w", "capacity": "many"}, timeout_s=30)
        batcher.process.terminate()
        assert batcher.process.wait(20) == 0
        batcher.start()
        assert link.call("trajectory", body, arrays, timeout_s=30).body["status"] == "duplicate"

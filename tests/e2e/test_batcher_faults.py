"""A real batcher process under kill -9, with toy workers and a toy trainer. Not covered: loss of power, network
partitions.
"""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from areal_dta.channel import RpcError
from areal_dta.records import Lease, pack, unpack
from tests.e2e.batcher_toys import CONFIG, BatcherProcess, ToyWorker, keys, shards
from tests.unit.batcher_kit import trajectory, write_calibration


@pytest.fixture
def batcher(tmp_path):
    process = BatcherProcess(tmp_path / "run")
    yield process
    if process.process is not None and process.process.poll() is None:
        process.process.kill()
        process.process.wait(10)


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


def test_measured_time_is_taken_from_the_runs_calibration_or_missed_aloud(batcher):
    config = CONFIG.replace("cost: tree_tokens", "cost: time") + "dta: {calibrate: true, max_block_tokens: 500}\n"
    (batcher.run_dir / "config.yaml").write_text(config)
    batcher.start()
    worker = ToyWorker(batcher, "worker")
    worker.start()
    with batcher.client("trainer") as link:
        with pytest.raises(RpcError, match="calibration.json does not exist; a run with dta.calibrate=true writes it"):
            shards(link, 0)
        write_calibration(batcher.run_dir, token_s=2e-3, pair_s=0.0, block_s=1.0)
        for shard in shards(link, 0):
            assert shard.cost == pytest.approx((6e-3 + 2 * 1.0 / 500) * shard.tree_tokens)
    worker.halt.set()
    worker.join(20)


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

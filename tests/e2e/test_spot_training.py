"""Drafter training in idle time with real processes: a coordinator and three workers, rollout servers faked over HTTP.

Not covered here: what the real server does with its memory and its drafter, and several machines.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.drafter.buffer import BufferWriter
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.spot_state import PHASES
from areal_dta.nn import DecoderConfig
from tests.e2e.spot_kit import (
    API_KEY,
    FakeServer,
    MetricsSink,
    Process,
    free_port,
    until,
)
from tests.unit.spot_samples import load_target, make_sample, write_target

NUM_WORKERS = 3
MICRO_STEP_S = 0.1
NUM_PREEMPTIONS = 20


class Fleet:
    """The processes, and what the tests do to them and ask of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.sink = MetricsSink()
        self.target = write_target(folder / "model", "0:0")
        self.servers = {f"server.{i}": FakeServer(f"server.{i}", self.address) for i in range(NUM_WORKERS)}
        for server in self.servers.values():
            server.reporter.update(1, 0)
        self.fill()
        self.coordinator = self.start_coordinator()
        self.workers = {f"drafter.{i}": self.start_worker(i) for i in range(NUM_WORKERS)}
        self.coordinator.wait_ready()
        for worker in self.workers.values():
            worker.wait_ready()

    def fill(self) -> None:
        target, rng = load_target(self.target), np.random.default_rng(1)
        writer = BufferWriter(self.folder / "buffer" / "server.0", 64 << 20)
        for i in range(48):
            assert writer.append(make_sample(target, "0:0", 1 + i // 24, int(rng.integers(24, 120)), rng))
        writer.flush(10)
        writer.close()

    def start_coordinator(self) -> Process:
        settings = {
            "address": self.address,
            "servers": {name: server.url for name, server in self.servers.items()},
            "api_key": API_KEY,
            "metrics_address": self.sink.address,
            "rules": {"min_idle": 2, "idle_s": 0.2, "release_retry_s": 0.5},
            "report_interval_s": 0.5,
        }
        return Process("areal_dta.drafter.coordinator", settings, self.folder, "coordinator")

    def start_worker(self, index: int, **changes: Any) -> Process:
        settings = {
            "name": f"drafter.{index}",
            "server": f"server.{index}",
            "coordinator": self.address,
            "buffer": str(self.folder / "buffer"),
            "target_folders": [str(self.target)],
            "checkpoints": str(self.folder / "checkpoints"),
            "drafters": str(self.folder / "versions"),
            "servers": {name: server.url for name, server in self.servers.items()},
            "api_key": API_KEY,
            "metrics_address": self.sink.address,
            "learning_rate": 5e-3,
            "learner": {"micro_step_s": MICRO_STEP_S},
            "spot": {
                "step_tokens": 2000,
                "refresh_s": 0.3,
                "publish_steps": 10,
                "checkpoint_steps": 10,
                "publish_tolerance": 1.0,
            },
            **changes,
        }
        return Process("areal_dta.drafter.worker", settings, self.folder, f"drafter.{index}")

    @property
    def mark(self) -> int:
        return len(self.sink.records)

    def set_busy(self, busy: bool, *names: str) -> None:
        for name in names or self.servers:
            self.servers[name].reporter.update(int(busy), 0)

    def steps(self, mark: int) -> list[int]:
        return [r.step or 0 for r in self.sink.since(mark, "drafter/members")]

    def leader(self) -> str:
        """Who took the last step."""
        return self.sink.since(0, "drafter/members")[-1].proc

    def trains(self, name: str) -> bool:
        """By the worker's last word."""
        words = [r.name for r in self.sink.records if r.proc == name and r.kind == "event"]
        return [w for w in words if w in ("drafter/training", "drafter/resting")][-1:] == ["drafter/training"]

    def preempt(self, name: str, after_s: float) -> list[float]:
        """Give the server of ``name`` work for a while, ``after_s`` after it was seen training; the seconds until it
        rested, none if it left by itself at that moment."""
        server = name.replace("drafter", "server")
        until(lambda: self.trains(name), 5, f"{name} to train")
        time.sleep(after_s)
        before, start_s = self.mark, time.time()
        self.set_busy(True, server)
        until(lambda: not self.trains(name), 3, f"the preemption of {name}")
        rested_s = [r.t for r in self.sink.since(before, "drafter/resting", name)]
        others = self.mark
        until(lambda: self.steps(others), 5, "the others to go on")
        self.set_busy(False, server)
        return [t - start_s for t in rested_s[:1]]

    def wait_members(self, count: int, timeout_s: float = 10.0) -> None:
        mark = self.mark
        until(
            lambda: any(r.value == count for r in self.sink.since(mark, "drafter/members")),
            timeout_s,
            f"a step of {count} members",
        )

    def close(self) -> None:
        processes = [p for p in (*self.workers.values(), self.coordinator) if not p.killed]
        for process in processes:
            process.wait_ready()  # one that was started just now has no signal handler yet
        for process in processes:
            process.terminate()
        codes = {p.name: p.stop() for p in processes}
        for server in self.servers.values():
            server.close()
        self.sink.close()
        assert codes == dict.fromkeys(codes, 0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("spot"))
    yield found
    found.close()


@pytest.fixture
def training(fleet: Fleet) -> Fleet:
    """All servers idle, all workers in the round."""
    fleet.set_busy(False)
    fleet.wait_members(NUM_WORKERS)
    return fleet


def test_nothing_trains_below_the_threshold(fleet: Fleet) -> None:
    mark = fleet.mark
    fleet.set_busy(True)
    fleet.set_busy(False, "server.0")
    until(lambda: len(fleet.sink.since(mark, "drafter/servers", "coordinator")) > 6, 5, "coordinator reports")
    assert not fleet.steps(mark)
    assert not fleet.servers["server.0"].posts


def test_idle_servers_release_memory_and_train_together_from_one_state(training: Fleet) -> None:
    for server in training.servers.values():
        path, body, key = server.posts[0]
        assert (path, body) == ("/release_memory_occupation", {"tags": ["kv_cache"], "requests": "resume"})
        assert key == f"Bearer {API_KEY}"
    records = training.sink.since(0, "drafter/members")
    assert len({r.step for r in records}) == len(records)  # every step was taken once, by one leader


def test_work_preempts_a_worker_within_a_second_at_any_moment(training: Fleet) -> None:
    rng = random.Random(5)
    waits_s: list[float] = []
    for _ in range(NUM_PREEMPTIONS):
        waits_s += training.preempt(f"drafter.{rng.randrange(NUM_WORKERS)}", rng.uniform(0, 0.3))
    print(f"preemption: max {max(waits_s):.3f} s, median {np.median(waits_s):.3f} s")
    assert len(waits_s) >= NUM_PREEMPTIONS - 3
    assert max(waits_s) < 1.0


def test_a_killed_coordinator_stops_nobody_but_the_training(training: Fleet) -> None:
    training.coordinator.kill()
    start_s = time.perf_counter()
    for i in range(1000):
        training.servers["server.0"].reporter.update(i % 2, 0)
    assert time.perf_counter() - start_s < 0.5  # the server's own thread notices nothing
    training.set_busy(False)
    until(lambda: not any(training.trains(w) for w in training.workers), 5, "the workers' leases to run out")
    mark, last = training.mark, max(training.steps(0))
    training.coordinator = training.start_coordinator()
    training.coordinator.wait_ready()
    training.wait_members(NUM_WORKERS)
    assert min(training.steps(mark)) == last + 1


def test_torn_samples_are_counted_and_skipped(training: Fleet) -> None:
    folder = training.folder / "buffer" / "server.0"
    for i, path in enumerate(sorted(folder.glob("00000002-*"))[:4]):
        data = path.read_bytes()
        torn = data[: len(data) // 2] if i % 2 else data[:-100] + bytes(100)
        path.with_name(path.name.replace("00000002-0000", "00000003-1000")).write_bytes(torn)
    mark = training.mark

    def torn_counts() -> list[Any]:
        return [r for r in training.sink.since(mark, "drafter/faults") if r.labels["kind"] == "torn"]

    until(torn_counts, 10, "torn samples to be counted")
    training.wait_members(NUM_WORKERS)


def test_a_torn_drafter_and_a_server_that_refuses_do_not_stop_training(training: Fleet) -> None:
    until(lambda: all(s.drafters for s in training.servers.values()), 20, "a drafter on every server")
    newest = sorted((training.folder / "versions").glob("drafter_*"))[-1]
    (newest / "model.safetensors").write_bytes(b"torn")
    training.servers["server.1"].refuse_drafters = True
    mark = training.mark
    refused = until(lambda: training.sink.since(mark, "drafter/refused"), 20, "the refusal to be reported")[0]
    assert refused.labels["server"] == "server.1"
    assert "another model" in (refused.message or "")
    published = until(lambda: training.sink.since(mark, "drafter/published"), 5, "publication")[0]
    assert published.message == "server.0,server.2"
    training.wait_members(NUM_WORKERS)


def test_training_lowers_the_loss_and_coordination_is_cheap(training: Fleet) -> None:
    losses = [r.value or 0.0 for r in training.sink.since(0, "drafter/loss")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])
    shares = [r.value or 0.0 for r in training.sink.since(0, "drafter/coordinator_cpu_share")]
    print(f"coordinator: {np.mean(shares):.4f} of one core; {len(losses)} steps")
    assert np.median(shares) < 0.05
    spent_s = dict.fromkeys(PHASES, 0.0)
    for record in training.sink.since(0, "drafter/phase_s"):
        spent_s[str(record.labels["phase"])] += record.value or 0.0
    print("rounds: " + ", ".join(f"{phase} {spent / sum(spent_s.values()):.1%}" for phase, spent in spent_s.items()))
    assert min(spent_s["learn"], spent_s["rest"], spent_s["exchange"], spent_s["update"]) > 0


def test_a_follower_killed_in_a_round_is_not_waited_for_and_comes_back_even_with_another_models_drafter(
    training: Fleet,
) -> None:
    name = next(w for w in training.workers if w != training.leader())
    mark = training.mark
    training.workers[name].kill()
    training.wait_members(NUM_WORKERS - 1, 5)
    other = write_target(training.folder / "other", "0:0", hidden_size=48)
    EagleConfig.for_target(DecoderConfig.from_folder(other)).write(other)
    training.workers[name] = training.start_worker(int(name[-1]), drafter=str(other))
    until(lambda: training.sink.since(mark, "drafter/start_refused", name), 30, "that drafter to be refused")
    training.wait_members(NUM_WORKERS, 30)


def test_a_killed_leader_is_replaced_and_no_agreed_step_is_lost(training: Fleet) -> None:
    name = training.leader()
    training.workers[name].kill()
    time.sleep(0.2)  # what it still said arrives
    mark, last = training.mark, max(training.steps(0))
    training.wait_members(NUM_WORKERS - 1)
    assert training.leader() != name
    assert min(training.steps(mark)) in (last, last + 1)  # a step that reached nobody is taken again

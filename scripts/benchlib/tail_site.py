"""The processes of `bench.py tail`: groups of pinned servers, and the coordinator and workers that train in idle time.

Groups take turns on the same cores. Only the workers would compute when it is not their turn, so they are halted by
SIGSTOP then; to the coordinator a halted worker is one that went away.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq

from areal_dta.metrics import MetricRecord
from scripts.benchlib.report import end, free_port
from scripts.benchlib.serving import ServerError
from scripts.benchlib.tail_server import TailServer

__all__ = ["Group", "Process", "Sink", "TrainerPlan", "Trainers", "machine_seconds"]

_ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
POLL_S = 0.02
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
IDLE_S = 0.2  # before an idle server's time is lent to training
MICRO_STEP_S = 0.1  # bounds how long a server that has work again shares its core


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) * _TICK_S


def machine_seconds() -> float:
    """Processor time of everything on this machine so far, time lost to its host included."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, soft, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + soft + steal) * _TICK_S


class Process:
    """One of our processes, its output in a file; ready once it has said so."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid
        self._halted = False

    def wait_ready(self) -> str:
        """What it announces; raises ServerError when it ends or is silent too long."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            found = re.search(r"^READY (\S+)\n", self._log.read_text(), re.MULTILINE)
            if found:
                return found[1]
            time.sleep(POLL_S)
        raise ServerError(f"not ready within {START_TIMEOUT_S:g} s: {self._log.read_text()[-2000:]}")

    def halt(self, on: bool) -> None:
        if on != self._halted:
            self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)
            self._halted = on

    def close(self) -> None:
        self.halt(False)
        end(self._process, 15.0)


class Sink:
    """Collects what the processes publish."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.records: list[MetricRecord] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            if self._socket.poll(100):
                self.records.append(MetricRecord.from_wire(msgpack.unpackb(self._socket.recv())))
        self._socket.close(0)

    def values(self, name: str) -> list[float]:
        return [r.value for r in self.records if r.name == name and r.value is not None]

    def count(self, event: str) -> int:
        return sum(r.name == event for r in self.records)

    def close(self) -> None:
        self._stopping = True
        self._thread.join(2.0)


class Group:
    """Servers of one strategy."""

    def __init__(self, servers: Sequence[TailServer], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._processes = []
        for server in servers:
            path = folder / f"{server.name}.json"
            server.write(path)
            log = folder / f"{server.name}.log"
            self._processes.append(Process("scripts.benchlib.tail_server", [str(path)], log))
        self.urls: list[str] = []

    def wait_ready(self) -> None:
        self.urls = [process.wait_ready() for process in self._processes]

    def flush(self) -> None:
        """Forget the KV of earlier prompts, as a weight update would make them."""
        for url in self.urls:
            _request(f"{url}/flush_cache", {})

    def update(self, folder: Path, version: str) -> None:
        """Load the target's next version."""
        for url in self.urls:
            _request(f"{url}/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})

    def info(self) -> list[dict[str, Any]]:
        return [_request(f"{url}/get_server_info", None) for url in self.urls]

    def cpu_s(self) -> list[float]:
        return [cpu_seconds(process.pid) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.close()


@dataclass(frozen=True)
class TrainerPlan:
    """Where the workers find things, and how they train; versions of the target are in ``targets`` or below."""

    targets: tuple[Path, ...]
    drafter: Path | None
    buffers: tuple[Path, ...]
    cores: tuple[int, ...]
    step_tokens: int
    publish_steps: int
    seed: int


class Trainers:
    """A coordinator and one worker per server, halted until `halt` says otherwise."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.sink = Sink()
        self._folder = folder
        self._processes: list[Process] = []

    @property
    def workers(self) -> list[Process]:
        return self._processes[1:]

    def start(self, urls: Sequence[str], plan: TrainerPlan) -> None:
        """Raises ServerError when one of them does not start."""
        servers = {f"server.{i}": url for i, url in enumerate(urls)}
        rules = {"min_idle": 1, "idle_s": IDLE_S}
        common = {"servers": servers, "metrics_address": self.sink.address}
        self._start("coordinator", {**common, "address": self.address, "rules": rules, "report_interval_s": 1.0})
        for i, (buffer, core) in enumerate(zip(plan.buffers, plan.cores, strict=True)):
            buffer.mkdir(parents=True, exist_ok=True)
            worker = {
                **common,
                "name": f"drafter.{i}",
                "server": f"server.{i}",
                "coordinator": self.address,
                "buffer": str(buffer),
                "target_folders": [str(folder) for folder in plan.targets],
                "checkpoints": str(self._folder / "checkpoints"),
                "drafters": str(self._folder / "versions"),
                "drafter": None if plan.drafter is None else str(plan.drafter),
                "seed": plan.seed,
                "cores": [core],
                "learner": {"micro_step_s": MICRO_STEP_S},
                "spot": {
                    "step_tokens": plan.step_tokens,
                    "publish_steps": plan.publish_steps,
                    "min_samples": 4,
                    "refresh_s": 0.5,
                    "publish_tolerance": 0.01,
                },
            }
            self._start("worker", worker, f"worker.{i}")
        for process in self._processes:
            process.wait_ready()
        self.halt(True)

    def _start(self, module: str, settings: dict[str, Any], name: str | None = None) -> None:
        path = self._folder / f"{name or module}.json"
        path.write_text(json.dumps(settings))
        log = path.with_suffix(".log")
        self._processes.append(Process(f"areal_dta.drafter.{module}", ["--settings", str(path)], log))

    def halt(self, on: bool, *indices: int) -> None:
        """Stop or continue the workers named, all without a name."""
        for i, worker in enumerate(self.workers):
            if not indices or i in indices:
                worker.halt(on)

    def cpu_s(self) -> list[float]:
        """Of the workers, then of the coordinator."""
        return [cpu_seconds(p.pid) for p in (*self.workers, self._processes[0])]

    def close(self) -> None:
        for process in self._processes:
            process.halt(False)
        for process in reversed(self._processes):
            process.close()
        self.sink.close()


def _request(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
        answer = json.load(response)
    assert isinstance(answer, dict)
    return answer

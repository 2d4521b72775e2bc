"""Many seeded kills of a batcher at work, each at a random moment: while it starts, takes, assembles, or shortens its
log. Not covered: loss of power.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from areal_dta import channel
from areal_dta.channel import RpcClient
from tests.e2e import batcher_toys
from tests.e2e.batcher_toys import ROOT, ToyWorker, free_port, keys, shards

NUM_KILLS = 50


class LightBatcher:
    """The process of `tests.e2e.batcher_light`."""

    def __init__(self, folder: Path):
        self.folder, self.address = folder, f"tcp://127.0.0.1:{free_port()}"
        self.process = None

    def start(self):
        with (self.folder / "batcher.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.batcher_light", self.address, str(self.folder / "spool")],
                cwd=ROOT,
                stderr=log,
            )

    def kill(self):
        assert self.process.poll() is None, (self.folder / "batcher.log").read_text()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def client(self, name):
        return RpcClient(self.address, name)


class Killer(threading.Thread):
    """Kills and restarts, most often a moment after the process answered for the first time."""

    def __init__(self, batcher: LightBatcher):
        super().__init__(daemon=True)
        self.batcher, self.done, self.failure = batcher, threading.Event(), None

    def run(self):
        rng, pause = np.random.default_rng(11), threading.Event()
        try:
            for _ in range(NUM_KILLS):
                lot, moment_s = rng.random(), float(rng.random())
                if lot < 0.85:
                    self._await_work(int(rng.integers(0, 7)) if lot < 0.6 else 0)
                    pause.wait(moment_s * (0.03 if lot < 0.6 else 0.3))
                else:
                    pause.wait(moment_s * 0.3)
                self.batcher.kill()
                self.batcher.start()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.done.set()

    def _await_work(self, num_acknowledged: int):
        """Return once this process took so many episodes, or could not for some seconds."""
        with self.batcher.client("killer") as link:
            before = link.call("status", timeout_s=180).body["acknowledged"]
            deadline_s = time.monotonic() + 3
            while time.monotonic() < deadline_s:
                if link.call("status", timeout_s=180).body["acknowledged"] >= before + num_acknowledged:
                    return


def test_fifty_kills_lose_nothing_acknowledged_and_train_nothing_twice(tmp_path, monkeypatch, request):
    monkeypatch.setattr(batcher_toys, "TIMEOUT_S", 180)
    monkeypatch.setattr(channel, "_RESEND_FIRST_S", 0.05)
    monkeypatch.setattr(channel, "_RESEND_MAX_S", 0.1)
    batcher = LightBatcher(tmp_path)
    request.addfinalizer(lambda: batcher.process.kill())
    batcher.start()
    workers = [ToyWorker(batcher, f"worker{'x' * i}") for i in range(3)]
    killer = Killer(batcher)
    for thread in (*workers, killer):
        thread.start()
    trained: list[tuple[int, int]] = []
    step = 0
    with batcher.client("trainer") as link:
        while not killer.done.is_set() or step < 10:
            trained += keys(shards(link, step))
            link.call("published", {"number": step + 1, "epoch": 0}, timeout_s=180)
            if step % 3 == 2:
                link.call("commit", {"step": step, "checkpoint": f"step_{step}"}, timeout_s=180)
            step += 1
        assert killer.failure is None
        link.call("finish", {}, timeout_s=180)
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive() and worker.failure is None
        status = link.call("status", timeout_s=180).body
    batcher.process.terminate()
    batcher.process.wait(20)
    assert len(trained) == len(set(trained))
    told = set().union(*[w.acknowledged for w in workers])
    assert set(trained) <= told
    assert (status["lost"], status["duplicated"]) == (0, 0)
    assert status["acknowledged"] == len(told)
    assert (
        status["trained"] == len(trained) == status["acknowledged"] - status["pooled"] - sum(status["dropped"].values())
    )
    assert status["max_staleness"] <= 1

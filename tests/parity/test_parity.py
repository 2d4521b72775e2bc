"""Runs each parallel layout once in its own processes and reports its cases one by one.

Not covered: CUDA, Transformer Engine, more than four ranks, more than two stages.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parity.layouts import LAYOUTS, case_names

ROOT = Path(__file__).resolve().parents[2]
LAYOUT_TIMEOUT_S = 480.0  # of a loaded machine; each needs less than a minute of one core
READS_FILES_OF = {
    "losses": ("single",),  # models
    "dp2": ("single",),  # reference gradients and a checkpoint
    "tp2": ("dp2",),  # a checkpoint
    "tp2sp": ("dp2",),
    "pp2": ("single",),
    "tp2pp2": ("single",),
    "dp2tp2": ("single",),
    "dp2pp2": ("single",),
    "single_again": ("pp2", "tp2pp2"),  # checkpoints
}


@dataclass(frozen=True)
class LayoutRun:
    """Results of all ranks of a layout: per rank {case: "" | traceback}, and the end of their output."""

    results: list[dict[str, str]]
    output: str

    def check(self, case: str) -> None:
        for rank, result in enumerate(self.results):
            assert case in result, f"rank {rank} did not run {case}; output:\n{self.output}"
            assert not result[case], f"rank {rank}:\n{result[case]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(layout: str, world: int, folder: Path) -> LayoutRun:
    port = _free_port()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{layout}.{rank}.log" for rank in range(world)]
    workers = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(ROOT / "tests/parity/worker.py"), layout, str(rank), str(port), str(folder)]
        with log.open("w") as out:
            workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + LAYOUT_TIMEOUT_S
    try:
        for worker in workers:
            worker.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        logs[0].open("a").write(f"\nkilled: layout {layout} was not done after {LAYOUT_TIMEOUT_S} s")
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait(timeout=10)
    files = [folder / f"{layout}.{rank}.json" for rank in range(world)]
    results = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
    return LayoutRun(results, "\n".join(log.read_text()[-2500:] for log in logs))


class Layouts:
    """Runs each layout once, when first asked for, after those whose files it reads. All share one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, LayoutRun] = {}

    def run(self, layout: str) -> LayoutRun:
        if layout not in self._runs:
            for earlier in READS_FILES_OF.get(layout, ()):
                self.run(earlier)
            self._runs[layout] = _run(layout, LAYOUTS[layout][0].world_size, self._folder)
        return self._runs[layout]


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return Layouts(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize(("layout", "case"), [(layout, case) for layout in LAYOUTS for case in case_names(layout)])
def test_every_rank_passes(layouts: Layouts, layout: str, case: str) -> None:
    layouts.run(layout).check(case)

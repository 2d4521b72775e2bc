"""Runs each parallel layout once in its own processes and reports its cases one by one.

Not covered: CUDA, Transformer Engine, pipeline stages, more than two ranks.
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

from tests.parity import cases_dp, cases_single, cases_tp

ROOT = Path(__file__).resolve().parents[2]
LAYOUT_TIMEOUT_S = 240.0


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


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="session")
def single(shared_folder: Path) -> LayoutRun:
    return _run("single", 1, shared_folder)


@pytest.fixture(scope="session")
def dp2(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    """Needs the reference gradients and the checkpoint that the single process wrote."""
    return _run("dp2", 2, shared_folder)


@pytest.fixture(scope="session")
def tp2(shared_folder: Path, dp2: LayoutRun) -> LayoutRun:
    """Needs the checkpoint that two data-parallel ranks wrote."""
    return _run("tp2", 2, shared_folder)


@pytest.fixture(scope="session")
def tp2sp(shared_folder: Path, dp2: LayoutRun) -> LayoutRun:
    return _run("tp2sp", 2, shared_folder)


def _names(cases: tuple) -> list[str]:
    return [case.__name__ for case in cases]


@pytest.mark.parametrize("case", _names(cases_single.CASES))
def test_single_process(single: LayoutRun, case: str) -> None:
    single.check(case)


@pytest.mark.parametrize("case", _names(cases_dp.CASES))
def test_two_data_parallel_ranks(dp2: LayoutRun, case: str) -> None:
    dp2.check(case)


@pytest.mark.parametrize("case", _names(cases_tp.CASES))
def test_two_tensor_parallel_ranks(tp2: LayoutRun, case: str) -> None:
    tp2.check(case)


@pytest.mark.parametrize("case", _names(cases_tp.SP_CASES))
def test_two_sequence_parallel_ranks(tp2sp: LayoutRun, case: str) -> None:
    tp2sp.check(case)

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

from tests.parity.layouts import case_names

ROOT = Path(__file__).resolve().parents[2]
LAYOUT_TIMEOUT_S = 480.0  # of a loaded machine; each needs less than a minute of one core


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
def memory(shared_folder: Path) -> LayoutRun:
    return _run("memory", 1, shared_folder)


@pytest.fixture(scope="session")
def losses(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    """Needs the models that the single process wrote."""
    return _run("losses", 1, shared_folder)


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


@pytest.fixture(scope="session")
def pp2(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    return _run("pp2", 2, shared_folder)


@pytest.fixture(scope="session")
def tp2pp2(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    return _run("tp2pp2", 4, shared_folder)


@pytest.fixture(scope="session")
def dp2tp2(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    return _run("dp2tp2", 4, shared_folder)


@pytest.fixture(scope="session")
def dp2pp2(shared_folder: Path, single: LayoutRun) -> LayoutRun:
    return _run("dp2pp2", 4, shared_folder)


@pytest.fixture(scope="session")
def single_again(shared_folder: Path, pp2: LayoutRun, tp2pp2: LayoutRun) -> LayoutRun:
    """Needs the checkpoints that pipelines wrote."""
    return _run("single_again", 1, shared_folder)


@pytest.mark.parametrize("case", case_names("single"))
def test_single_process(single: LayoutRun, case: str) -> None:
    single.check(case)


@pytest.mark.parametrize("case", case_names("memory"))
def test_memory(memory: LayoutRun, case: str) -> None:
    memory.check(case)


@pytest.mark.parametrize("case", case_names("losses"))
def test_losses_of_areal(losses: LayoutRun, case: str) -> None:
    losses.check(case)


@pytest.mark.parametrize("case", case_names("dp2"))
def test_two_data_parallel_ranks(dp2: LayoutRun, case: str) -> None:
    dp2.check(case)


@pytest.mark.parametrize("case", case_names("tp2"))
def test_two_tensor_parallel_ranks(tp2: LayoutRun, case: str) -> None:
    tp2.check(case)


@pytest.mark.parametrize("case", case_names("tp2sp"))
def test_two_sequence_parallel_ranks(tp2sp: LayoutRun, case: str) -> None:
    tp2sp.check(case)


@pytest.mark.parametrize("case", case_names("pp2"))
def test_two_pipeline_stages(pp2: LayoutRun, case: str) -> None:
    pp2.check(case)


@pytest.mark.parametrize("case", case_names("tp2pp2"))
def test_two_pipeline_stages_of_two_tensor_parallel_ranks(tp2pp2: LayoutRun, case: str) -> None:
    tp2pp2.check(case)


@pytest.mark.parametrize("case", case_names("dp2tp2"))
def test_two_data_parallel_replicas_of_two_tensor_parallel_ranks(dp2tp2: LayoutRun, case: str) -> None:
    dp2tp2.check(case)


@pytest.mark.parametrize("case", case_names("dp2pp2"))
def test_two_data_parallel_replicas_of_two_pipeline_stages(dp2pp2: LayoutRun, case: str) -> None:
    dp2pp2.check(case)


@pytest.mark.parametrize("case", case_names("single_again"))
def test_a_single_process_after_the_pipelines(single_again: LayoutRun, case: str) -> None:
    single_again.check(case)

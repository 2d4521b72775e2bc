"""Measured block costs: what they predict, when they are reused, and that all ranks get the same.

Seconds are only compared coarsely: other processes may have the cores. Not covered: CUDA.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from areal_dta.engine import MegatronPolicy, ParallelSizes, PlanSettings, Rows, TreeEngine, init_process_group
from areal_dta.engine import calibrate as calibrate_module
from areal_dta.engine.calibrate import Shape, calibrate, calibrated, fingerprint, shapes_for
from areal_dta.engine.kernels import kernel_for
from areal_dta.engine.memory_meter import MemoryMeter
from areal_dta.tree.calibration import Calibration
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.trie import build_trie
from tests.unit.train_kit import build_engine, free_port, local_settings, ppo_step, random_shard, tiny_policy

REPO = Path(__file__).resolve().parents[2]
VOCAB = 320
SETTINGS = PlanSettings(max_block_tokens=192)
PATH_ROWS = 384
LAYOUTS = {"tp": ParallelSizes(tp=2), "pp": ParallelSizes(pp=2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def policy(model: Path) -> Iterator[MegatronPolicy]:
    init_process_group(0, 1, "127.0.0.1", free_port(), timeout_s=60)
    yield MegatronPolicy(model, timeout_s=60)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def costs(policy: MegatronPolicy) -> Calibration:
    return calibrate(policy, SETTINGS, path_rows=PATH_ROWS, clock=time.process_time)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Lines of the module's own logger; AReaL may have replaced the root that pytest listens at."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = calibrate_module.log
    level, log.disabled = log.level, False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


# ---- shapes ----


@pytest.mark.parametrize("max_block_tokens", [1, 64, 2048])
def test_shapes_fit_a_block_and_vary_what_is_fitted(max_block_tokens: int) -> None:
    shapes = shapes_for(max_block_tokens, 4096, VOCAB)
    assert all(0 < shape.num_tokens <= max(max_block_tokens, 32) for shape in shapes)
    assert all(0 <= cut <= shape.path_rows for shape in shapes for cut, _ in shape.branches)
    assert {shape.path_rows for shape in shapes} >= {0, 1024, 4096}
    assert max(len(shape.branches) for shape in shapes) > 1
    assert Shape(4096, ((4096, max(max_block_tokens, 32)),)) == shapes[-1]


# ---- predictions ----


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(2, VOCAB, count).tolist()


def grpo(rng: np.random.Generator) -> list[list[int]]:
    prompt = tokens(rng, 150)
    return [prompt + tokens(rng, int(rng.integers(30, 90))) for _ in range(12)]


def turns(rng: np.random.Generator) -> list[list[int]]:
    prompt, rows = tokens(rng, 120), []
    for _ in range(4):
        row = prompt + tokens(rng, 10)
        for _ in range(5):
            row = row + tokens(rng, 40)
            rows.append(row)
    return rows


def comb(rng: np.random.Generator) -> list[list[int]]:
    trunk, rows = tokens(rng, 100), []
    for _ in range(20):
        rows.append(trunk + tokens(rng, 12))
        trunk = trunk + tokens(rng, 25)
    return [*rows, trunk]


def long_row(rng: np.random.Generator) -> list[list[int]]:
    return [tokens(rng, 1500)]


@pytest.mark.parametrize("make", [grpo, turns, comb, long_row])
@pytest.mark.parametrize("kind", ["auto", "classic"])
def test_the_predicted_peak_is_within_a_fifth_of_the_real_one(
    make, kind: str, policy: MegatronPolicy, costs: Calibration
) -> None:  # type: ignore[no-untyped-def]
    rows = Rows.from_lists(make(np.random.default_rng(5)))
    engine = TreeEngine(policy, replace(SETTINGS, kind=kind), memory=costs.memory, timing=costs.time)
    coefficients_T = torch.ones(rows.num_tokens)
    policy.zero_grad()
    with MemoryMeter() as meter:
        engine.backward(rows, coefficients_T, sync="none")
    assert engine.stats.predicted_peak_bytes == pytest.approx(meter.peak_bytes, rel=0.2)


def test_predicted_seconds_are_of_the_right_size(policy: MegatronPolicy, costs: Calibration) -> None:
    rows = Rows.from_lists(grpo(np.random.default_rng(5)))
    engine = TreeEngine(policy, SETTINGS, memory=costs.memory, timing=costs.time)
    best = np.inf
    for _ in range(3):
        policy.zero_grad()
        began = time.process_time()
        engine.backward(rows, torch.ones(rows.num_tokens), sync="none")
        best = min(best, time.process_time() - began)
    assert best / 3 < engine.stats.predicted_s < 3 * best
    backward_s = engine.stats.predicted_s
    engine.forward(rows)
    assert 0 < engine.stats.predicted_s < backward_s


def test_measuring_leaves_no_gradient_and_no_random_numbers_behind(policy: MegatronPolicy) -> None:
    before = torch.get_rng_state()
    calibrate(policy, PlanSettings(max_block_tokens=32), path_rows=32)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(float(gradient.abs().max()) == 0 for gradient in policy.gradients().values())


def test_dear_shapes_are_left_out_when_time_is_short(policy: MegatronPolicy, said: list[str]) -> None:
    found = calibrate(policy, SETTINGS, path_rows=PATH_ROWS, limit_s=0.0)
    assert found.fit["shapes"] == 5 and "left out, over 0 s" in said[-1]


# ---- the file ----


def test_a_calibration_is_reused_until_something_changes(
    policy: MegatronPolicy, tmp_path: Path, said: list[str]
) -> None:
    file, small = tmp_path / "calibration.json", PlanSettings(max_block_tokens=32)
    first = calibrated(policy, small, file, path_rows=32)
    assert "measuring block shapes" in said[0] and Calibration.read(file) == first
    said.clear()
    assert calibrated(policy, small, file, path_rows=32) == first
    assert len(said) == 1 and "measured on" in said[0]
    calibrated(policy, replace(small, max_block_tokens=48), file, path_rows=32)
    assert "does not hold: max_block_tokens was 32, is 48" in said[1]
    file.write_text("{")
    said.clear()
    calibrated(policy, small, file, path_rows=32)
    assert "measuring block shapes anew" in said[0] and Calibration.read(file).fingerprint["max_block_tokens"] == "32"


def test_a_budget_that_limits_the_measured_blocks_is_part_of_the_fingerprint(policy: MegatronPolicy) -> None:
    kernel = kernel_for(policy.device, policy.dtype, policy.shape.head_dim)

    def measured_tokens(budget: int) -> str:
        return fingerprint(policy, replace(SETTINGS, activation_budget=budget), kernel)["measured_block_tokens"]

    per_token = policy.memory_model().bytes_per_working_token
    assert measured_tokens(0) == measured_tokens(1 << 40) == "192"
    assert measured_tokens(math.ceil(64 * per_token)) == "64"


def test_blocks_far_beyond_the_measured_ones_are_told(policy: MegatronPolicy, tmp_path: Path, said: list[str]) -> None:
    file = tmp_path / "calibration.json"
    budget = math.ceil(64 * policy.memory_model().bytes_per_working_token)
    costs = calibrated(policy, replace(SETTINGS, activation_budget=budget), file, path_rows=32)
    assert costs.fit["largest_block"] == 64 and costs.extrapolation(128) is None
    assert said[-1].startswith("blocks of 192 tokens are predicted from measurements up to 64")


def test_the_train_engine_measures_when_asked(policy: MegatronPolicy, model: Path, tmp_path: Path) -> None:
    plan, file = PlanSettings(max_block_tokens=32), tmp_path / "calibration.json"
    engine = build_engine(model, local_settings(plan=plan, calibration=file))
    ppo_step(engine, random_shard(3))
    assert engine.stats.predicted_s > 0 and engine.stats.predicted_peak_bytes > 0
    tree = engine.step.engine
    assert isinstance(tree, TreeEngine) and tree.memory == Calibration.read(file).memory
    assert build_engine(model, local_settings(plan=plan)).step.engine.timing is None  # type: ignore[attr-defined]


def test_the_fingerprint_names_device_model_and_grid(policy: MegatronPolicy) -> None:
    found = fingerprint(policy, SETTINGS, kernel_for(policy.device, policy.dtype, policy.shape.head_dim))
    assert found["dtype"] == "float32" and found["parallel"].startswith("dp 1 tp 1 pp 1")
    assert "qwen3" in found["model"] and found["kernel"] == "FlashCPUKernel" and found["threads"]


# ---- ranks ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_the_same_calibration_and_the_same_plan(layout: str, model: Path, tmp_path: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "tests.unit.test_calibrate", layout]
    ranks = [subprocess.Popen([*command, str(r), port, str(model), str(tmp_path)], cwd=REPO) for r in (0, 1)]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    told = [json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1)]
    assert told[0] == told[1]
    assert Calibration.from_json(told[0]["costs"]) == Calibration.read(tmp_path / "calibration.json")


def _rank(layout: str, rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port, timeout_s=120)
    policy = MegatronPolicy(model, LAYOUTS[layout], timeout_s=120)
    settings = PlanSettings(max_block_tokens=64)
    costs = calibrated(policy, settings, out / "calibration.json", path_rows=64)
    rows = Rows.from_lists(grpo(np.random.default_rng(1)))
    plan = plan_walk(build_trie(rows.ids_T, rows.offsets_S1), settings, costs.memory)
    (out / f"{rank}.json").write_text(json.dumps({"costs": costs.to_json(), "plan": plan.digest()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))

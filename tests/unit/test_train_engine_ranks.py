"""Two data-parallel ranks, or two pipeline stages, do what one rank does with all rows: split, empty and uneven
shards. No tensor parallelism.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_dta.weights import verify
from tests.unit.train_kit import build_engine, folder_error, free_port, ppo_step, random_shard, tiny_policy
from tests.unit.train_ranks import SCENARIOS

REPO = Path(__file__).resolve().parents[2]
SHARED = ("batch_loss", "grad_norm", "entropy/avg", "approx_kl/avg", "importance_weight/avg", "n_valid_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


def run_ranks(backend: str, model: Path, out: Path) -> list[dict[str, Any]]:
    """Both ranks' statistics by scenario; the weights are in `out`."""
    command, port = [sys.executable, "-m", "tests.unit.train_ranks", backend], free_port()
    ranks = [subprocess.Popen([*command, str(r), str(port), str(model), str(out)], cwd=REPO) for r in (0, 1)]
    try:
        assert [r.wait(timeout=240) for r in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((out / f"rank_{r}.json").read_text()) for r in (0, 1)]


@pytest.fixture(scope="module")
def outcome(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    return out, run_ranks("megatron:d2", model, out)


def check_against_one_rank(
    scenario: tuple[int, int, Any, bool], name: str, out: Path, stats: list[dict[str, Any]], model: Path, alone: Path
) -> None:
    seed, num_minibatches, _, _ = scenario
    engine = build_engine(model)
    engine.export_stats()
    expected = ppo_step(engine, random_shard(seed, num_minibatches=num_minibatches), num_minibatches)
    for key in SHARED:
        for rank in (0, 1):
            found = stats[rank][name][f"ppo_actor/update/{key}"]
            assert found == pytest.approx(expected[f"ppo_actor/update/{key}"], rel=2e-5, abs=1e-6), (key, rank)
    engine.policy.save_hf(alone)
    assert folder_error(alone, out / name) < 1e-6  # 0.1% of the learning rate


@pytest.mark.parametrize("name", SCENARIOS["megatron:d2"])
def test_two_ranks_equal_one(
    name: str, outcome: tuple[Path, list[dict[str, Any]]], model: Path, tmp_path: Path
) -> None:
    out, stats = outcome
    check_against_one_rank(SCENARIOS["megatron:d2"][name], name, out, stats, model, tmp_path / "alone")


def test_two_stages_with_the_same_rows_equal_one_rank(model: Path, tmp_path: Path) -> None:
    """Statistics are those of one rank, not twice: loss tokens are counted once per data-parallel rank."""
    backend = "megatron:d1t1p2"
    stats = run_ranks(backend, model, tmp_path)
    scenario = SCENARIOS[backend]["pipeline"]
    check_against_one_rank(scenario, "pipeline", tmp_path, stats, model, tmp_path / "alone")
    assert [rank["pipeline"]["head"] for rank in stats] == [True, False]
    assert "rank 0 has the cause" in stats[1]["publish_error"]


def test_a_failed_publish_fails_on_every_rank_and_leaves_whole_weights(
    outcome: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, stats = outcome
    assert "nobody served the new version within 0.2 s" in stats[0]["publish_error"]
    assert "rank 0 has the cause" in stats[1]["publish_error"]
    assert verify(out / "e0_v000001").weight_version == "0:1"


def test_every_rank_of_a_data_parallel_grid_is_a_head(outcome: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["halves"]["head"] for rank in outcome[1]] == [True, True]

"""Two data-parallel ranks do what one does with all rows: split, empty and uneven shards. No tensor parallelism."""

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
SHARED = ("loss", "grad_norm", "entropy/avg", "approx_kl/avg", "importance_weight/avg", "n_valid_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def outcome(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Both ranks' statistics by scenario, and the folder with the weights."""
    out, port = tmp_path_factory.mktemp("ranks"), free_port()
    command = [sys.executable, "-m", "tests.unit.train_ranks"]
    ranks = [subprocess.Popen([*command, str(r), str(port), str(model), str(out)], cwd=REPO) for r in (0, 1)]
    try:
        assert [r.wait(timeout=240) for r in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return out, [json.loads((out / f"rank_{r}.json").read_text()) for r in (0, 1)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(
    name: str, outcome: tuple[Path, list[dict[str, Any]]], model: Path, tmp_path: Path
) -> None:
    out, stats = outcome
    seed, num_minibatches, _, _ = SCENARIOS[name]
    engine = build_engine(model)
    engine.export_stats()
    alone = ppo_step(engine, random_shard(seed, num_minibatches=num_minibatches), num_minibatches)
    for key in SHARED:
        for rank in (0, 1):
            found = stats[rank][name][f"ppo_actor/update/{key}"]
            assert found == pytest.approx(alone[f"ppo_actor/update/{key}"], rel=2e-5, abs=1e-6), (key, rank)
    engine.policy.save_hf(tmp_path / "alone")
    assert folder_error(tmp_path / "alone", out / name) < 1e-6  # 0.1% of the learning rate


def test_a_failed_publish_fails_on_every_rank_and_leaves_whole_weights(
    outcome: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, stats = outcome
    assert "nobody served the new version within 0.2 s" in stats[0]["publish_error"]
    assert "rank 0 has the cause" in stats[1]["publish_error"]
    assert verify(out / "e0_v000001").weight_version == "0:1"


def test_every_rank_of_a_data_parallel_grid_is_a_head(outcome: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["halves"]["head"] for rank in outcome[1]] == [True, True]

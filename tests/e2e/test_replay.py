"""A dumped batch trained densely and on its prefix tree gives the same loss and gradients, on one and two ranks.

The trace is a small one made here, written by the batcher's own writer; fp32 only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_dta.records import Trajectory, write_trace
from areal_dta.replay import DEFAULT_ACTOR, replay_rank, shard_of_trace
from tests.unit.train_kit import local_settings, tiny_policy

REPO = Path(__file__).resolve().parents[2]
VOCAB = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "batch_000000.npz"
    write_trace(path, [_episode(task, sample) for task in range(3) for sample in range(3)], "mock", step=0)
    return path


def _episode(task: int, sample: int, turns: int = 3) -> Trajectory:
    """Turns that extend each other behind a prompt shared by all and a question shared by the task's samples."""
    shared, rng = np.random.default_rng(task), np.random.default_rng([task, sample])
    ids = [*range(10, 22), *shared.integers(2, VOCAB, 5).tolist()]
    rows, starts = [], []
    for _ in range(turns):
        starts.append(len(ids))
        ids = ids + rng.integers(2, VOCAB, int(rng.integers(3, 8))).tolist()
        rows.append(list(ids))
        ids = ids + rng.integers(2, VOCAB, 3).tolist()
    lens = [len(row) for row in rows]
    loss = np.concatenate([np.arange(n) >= start for n, start in zip(lens, starts, strict=True)])
    return Trajectory(
        lease_id=f"{task}/{sample}",
        group_id=task,
        sample=sample,
        task_id=f"task_{task}",
        reward=float(rng.integers(0, 2)),
        input_ids_T=np.concatenate(rows).astype(np.int32),
        offsets_S1=np.concatenate([[0], np.cumsum(lens)]).astype(np.int64),
        loss_mask_T=loss.astype(np.uint8),
        logprobs_T=np.where(loss, rng.normal(-5.5, 0.3, len(loss)), 0).astype(np.float32),
        versions_T=np.where(loss, 0, -1).astype(np.int32),
        rewards_S=np.zeros(turns, np.float32),
    )


def test_rows_of_a_trace_are_the_turns_and_every_row_has_one_rank(trace: Path) -> None:
    with np.load(trace) as file:
        arrays = dict(file)
    whole = shard_of_trace(arrays, 0, 1)
    parts = [shard_of_trace(arrays, rank, 2) for rank in (0, 1)]
    assert whole.num_rows == 27
    assert sum(p.num_rows for p in parts) == 27
    assert min(p.num_rows for p in parts) > 0
    assert np.array_equal(np.concatenate([p.input_ids_T for p in parts]), whole.input_ids_T)
    ends = whole.offsets_S1[1:] - 1
    assert whole.loss_mask_T[ends].all()  # a row ends with its own turn
    assert int(whole.loss_mask_T.sum()) == whole.num_loss_tokens_total
    assert whole.tree_tokens < len(whole.input_ids_T) / 2


def test_one_rank_dense_and_tree_agree(trace: Path, model: Path) -> None:
    with np.load(trace) as file:
        arrays = dict(file)
    report = replay_rank(arrays, model, ["disabled", "dta", "sparse"], DEFAULT_ACTOR, local_settings(), 1)
    assert report.gradient_error < 1e-5, report
    assert report.loss_error < 1e-5, report
    assert report.clip_flips == 0
    assert report.grad_norms[0] > 1e-3
    assert abs(report.losses[0]) > 1e-4  # behaviour weights make it depend on the forward pass
    assert report.row_tokens > 2 * report.tree_tokens


def test_two_ranks_dense_and_tree_agree_and_equal_one_rank(trace: Path, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "areal_dta.replay", str(trace), "--model", str(model), "--dp", "2"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads(done.stdout.splitlines()[-1])
    assert two["gradient_error"] < 1e-5
    assert two["loss_error"] < 1e-5
    assert (two["rows"], two["clip_flips"]) == (27, 0)
    with np.load(trace) as file:
        one = replay_rank(dict(file), model, ["dta"], DEFAULT_ACTOR, local_settings(loss_positions_only=True), 1)
    assert two["losses"][1] == pytest.approx(one.losses[0], rel=1e-5, abs=1e-7)
    assert two["grad_norms"][1] == pytest.approx(one.grad_norms[0], rel=1e-5)

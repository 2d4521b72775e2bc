"""The trainer's processes among a batcher and a router that only record: a run, its resumption, and how ranks end.

Servers, workers and the real batcher are not here; a whole run is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.records import Shard
from areal_dta.weights import verify
from tests.e2e.train_fakes import FakeBatcher, FakeRouter, MetricsSink, Ranks, relaunch, write_run
from tests.unit.train_kit import Reference, folder_error, free_port, random_shard, subset, tiny_policy

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter(failures=1)
    yield fake
    fake.close()


def _shards(num_ranks: int = 2) -> dict[tuple[int, int], Shard | None]:
    """Three steps for one or two ranks; step 0 carries the start policy's own log-probs and version 0."""
    out: dict[tuple[int, int], Shard | None] = {}
    for step in range(STEPS):
        shard = random_shard(step)
        if step == 0:
            shard = dataclasses.replace(
                shard,
                logprobs_T=_server_logprobs(shard),
                versions_T=np.where(shard.loss_mask_T, 0, -1).astype(np.int32),
            )
        for rank, rows in enumerate(np.array_split(np.arange(shard.num_rows), num_ranks)):
            out[step, rank] = dataclasses.replace(
                subset(shard, rows.tolist()), step=step, rank=rank, world_size=num_ranks, tree_tokens=40, cost=7.0
            )
    return out


@torch.no_grad()
def _server_logprobs(shard: Shard) -> np.ndarray:
    reference, out = Reference(), np.zeros(len(shard.input_ids_T), np.float32)
    for lo, hi in zip(shard.offsets_S1[:-1], shard.offsets_S1[1:], strict=True):
        out[lo + 1 : hi] = reference.logp(shard.input_ids_T[lo:hi]).numpy()
    return out * shard.loss_mask_T


def test_a_run_trains_publishes_checkpoints_evaluates_and_resumes(
    model: Path, router: FakeRouter, tmp_path: Path
) -> None:
    """On two data-parallel ranks; the second resumption is on two pipeline stages, and ends at the same weights."""
    run_dir, sink = tmp_path / "run", MetricsSink()
    batcher = FakeBatcher(_shards())
    plan = write_run(run_dir, model, batcher.address, router.address, free_port(), dp=2, metrics=sink.address)
    with Ranks(run_dir, 2) as ranks:
        assert [ranks.wait(r) for r in (0, 1)] == [0, 0], ranks.log(0)[-3000:]
    records = sink.read()
    _check_calls(batcher, router, run_dir)
    _check_metrics(records)
    _check_files(run_dir)

    batcher.calls.clear()
    router.published.clear()
    relaunch(run_dir, plan, epoch=1, resume_step=1, trainer_master_port=free_port(), metrics=None)
    with Ranks(run_dir, 2) as ranks:
        assert [ranks.wait(r) for r in (0, 1)] == [0, 0], ranks.log(0)[-3000:]
    sink.close()
    assert [p["weight_version"] for p in router.published] == ["1:2", "1:3"]
    assert batcher.of("published", "commit", "eval_start", "finish") == [
        ("published", 2),
        ("published", 3),
        ("commit", 2),
        ("eval_start", 3, "after"),
        ("finish",),
    ]
    weights = run_dir / "weights"
    assert folder_error(weights / "e0_v000003", weights / "e1_v000003") < 1e-7  # as if never interrupted
    assert folder_error(weights / "e0_v000002", weights / "e1_v000002") == 0
    assert folder_error(weights / "e0_v000002", weights / "e0_v000003") > 1e-5

    batcher.calls.clear()
    batcher.shards = _shards(num_ranks=1)
    relaunch(run_dir, plan, epoch=2, resume_step=1, trainer_master_port=free_port(), metrics=None, dp=1, pp=2)
    with Ranks(run_dir, 2) as ranks:
        assert [ranks.wait(r) for r in (0, 1)] == [0, 0], ranks.log(0)[-3000:]
    batcher.close()
    asked = [(b["step"], b["rank"], b["world_size"]) for kind, b in batcher.calls if kind == "shard"]
    assert asked == [(2, 0, 1)] * 2  # both stages of the one pipeline
    assert folder_error(weights / "e1_v000003", weights / "e2_v000003") < 1e-6


def _check_calls(batcher: FakeBatcher, router: FakeRouter, run_dir: Path) -> None:
    assert batcher.of("published", "commit", "eval_start", "finish") == [
        ("eval_start", 0, "before"),
        ("published", 1),
        ("published", 2),
        ("commit", 1),
        ("published", 3),
        ("commit", 2),
        ("eval_start", 3, "after"),
        ("finish",),
    ]
    assert sorted({b["client"] for k, b in batcher.calls if k == "hello"}) == ["trainer.0", "trainer.1"]
    assert router.refused == 1  # no server was up at first: tried again
    assert [p["weight_version"] for p in router.published] == ["0:1", "0:2", "0:3"]
    last = router.published[-1]
    assert (last["path"], last["key"]) == ("/publish", "Bearer secret")
    assert Path(last["model_path"]) == (run_dir / "weights" / "e0_v000003").resolve()
    assert verify(Path(last["model_path"]), last["digest"]).weight_version == "0:3"


def _check_metrics(records: list[dict]) -> None:
    by_rank = {(r["proc"], r["name"], r["step"]): r["value"] for r in records}
    for step in range(STEPS):
        for rank in ("trainer.0", "trainer.1"):
            for name in ("row_tokens", "tree_tokens", "tree_ratio", "load", "tokens_per_s"):
                assert by_rank[rank, f"train/{name}", step] > 0
            for span in ("wait_batch", "logprob", "advantages", "update", "publish", "step"):
                assert by_rank[rank, f"time/{span}", step] >= 0
        for name in ("loss", "grad_norm", "lr", "entropy", "clip_ratio", "approx_kl", "logprob_mismatch_tokens"):
            assert by_rank["trainer.0", f"train/{name}", step] is not None
    assert by_rank["trainer.0", "train/logprob_mismatch_tokens", 0] > 20
    assert by_rank["trainer.0", "train/logprob_mismatch_max", 0] < 1e-4
    assert by_rank["trainer.0", "train/logprob_mismatch_tokens", 1] == 0  # version 3 is not the current one
    assert ("trainer.0", "train/logprob_mismatch_max", 1) not in by_rank
    assert {(r["labels"]["tag"], r["value"]) for r in records if r["name"] == "eval/reward"} == {
        ("before", 0.5),
        ("after", 0.5),
    }


def _check_files(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    assert json.loads((checkpoints / "latest.json").read_text()) == {"step": 2, "path": "step_000002"}
    assert sorted(p.name for p in checkpoints.glob("step_*")) == ["step_000001", "step_000002"]
    assert json.loads((checkpoints / "step_000001" / "trainer.json").read_text()) == {
        "step": 1,
        "number": 2,
        "epoch": 0,
    }


def test_a_stopped_rank_leaves_at_once_and_takes_its_peer_along(
    model: Path, router: FakeRouter, tmp_path: Path
) -> None:
    """Rank 0 waits in a collective for rank 1, which waits for its shard."""
    shards = _shards()
    held = shards.pop((0, 1))
    assert held is not None
    batcher = FakeBatcher(shards)
    write_run(tmp_path / "run", model, batcher.address, router.address, free_port(), dp=2)
    with Ranks(tmp_path / "run", 2) as ranks:
        batcher.wait_for(lambda calls: sum(k == "shard" and b["rank"] == 1 for k, b in calls) >= 3)
        batcher.wait_for(lambda calls: any(k == "shard" and b["rank"] == 0 for k, b in calls))
        began = time.monotonic()
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait(0, 20) == 143
        assert time.monotonic() - began < 10
        assert "stopped by SIGTERM" in ranks.last_line(0)
        batcher.give(0, 1, held)
        assert ranks.wait(1, 60) == 1
        assert "trainer.1 failed" in ranks.last_line(1)
    batcher.close()


def test_a_batch_that_never_comes_is_named(model: Path, router: FakeRouter, tmp_path: Path) -> None:
    batcher = FakeBatcher({})
    write_run(
        tmp_path / "run", model, batcher.address, router.address, free_port(), dp=1, runtime={"step_timeout_s": 2}
    )
    with Ranks(tmp_path / "run", 1) as ranks:
        assert ranks.wait(0) == 1
        line = ranks.last_line(0)
    batcher.close()
    assert (
        "trainer.0 failed: WaitTimeout: waited 2 s for the batch of step 0: 1 of 4 groups ready (workers are slow)"
        in line
    )
    assert "runtime.step_timeout_s" in line

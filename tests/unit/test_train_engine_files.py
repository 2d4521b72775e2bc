"""Around a training step without a model: learning rates, checkpoint folders, publishing, comparable rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from areal.engine.fsdp_utils import get_cosine_schedule_with_warmup
from transformers import get_constant_schedule_with_warmup, get_linear_schedule_with_warmup

from areal_dta.checkpoints import CheckpointError, CheckpointSchedule, CheckpointStore, TrainerState
from areal_dta.lr_schedule import LrSchedule
from areal_dta.publish import PublishError, prune_versions, publish_until, publish_version
from areal_dta.trainer_metrics import current_rows, version_span
from tests.unit.train_kit import make_shard


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_learning_rates_are_those_of_areals_schedulers(kind: str, warmup: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedulers: dict[str, Any] = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, int(warmup * 10)),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, int(warmup * 10), 10),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, int(warmup * 10), 10, min_lr_ratio=0.1),
    }
    scheduler = schedulers[kind]()
    schedule = LrSchedule(0.5, 10, kind, warmup, 0.1)
    for step in range(10):
        assert schedule.lr_at(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("values", "message"),
    [({"kind": "poly"}, "lr_scheduler_type='poly'"), ({"lr": -1.0}, "lr=-1.0"), ({"min_ratio": 2}, "0..1")],
)
def test_nonsense_learning_rates_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LrSchedule(**{"lr": 1.0, "total_steps": 3, **values})


def _write(store: CheckpointStore, step: int) -> None:
    store.prepare(step)
    (store.staging(step) / "data").write_text(str(step))
    store.finish(TrainerState(step=step, number=step + 1, epoch=0))


def test_the_newest_complete_checkpoint_is_named_and_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    for step in (1, 3, 5):
        _write(store, step)
        store.prune()
    assert store.latest() == 5
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000003", "step_000005"]
    assert store.read_state(5) == TrainerState(step=5, number=6, epoch=0)


def test_a_crash_while_writing_leaves_the_last_checkpoint_valid(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1)
    store.prepare(3)
    (store.staging(3) / "data").write_text("half")
    assert store.latest() == 1
    with pytest.raises(CheckpointError, match="no usable checkpoint of step 3"):
        store.read_state(3)
    _write(store, 3)
    store.prune()
    assert store.latest() == 3
    assert not list(tmp_path.glob("*.partial"))


def test_a_resumed_run_replaces_a_later_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 3, 3):
        _write(store, step)
    store.prune()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "step_000001", "step_000003"]


def test_checkpoints_are_due_every_so_many_steps_or_seconds() -> None:
    assert [CheckpointSchedule(2, None).due(step) for step in range(4)] == [False, True, False, True]
    assert CheckpointSchedule(None, 0.0).due(0)
    assert not CheckpointSchedule(None, None).due(99)


def test_old_weight_versions_and_debris_go_newest_stay_across_epochs(tmp_path: Path) -> None:
    for name in ("e0_v000009", "e0_v000010", "e1_v000008", "e1_v000009", "e1_v000010.partial"):
        (tmp_path / name).mkdir()
    prune_versions(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e1_v000008", "e1_v000009"]


@pytest.fixture
def router() -> Iterator[Any]:
    class Handler(BaseHTTPRequestHandler):
        replies: list[tuple[int, bytes]] = []

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            code, body = self.replies.pop(0)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield Handler
    server.shutdown()
    server.server_close()


SERVED = json.dumps({"success": True, "servers": {"http://s": "0:1"}, "pause_s": 0.5, "update_s": 0.25}).encode()


@pytest.mark.parametrize(
    ("code", "body", "message", "retry"),
    [
        (200, b'{"success": false, "message": "digest differs"}', "digest differs", True),
        (400, b"no such folder", "answered 400: no such folder", False),
        (503, b"starting", "answered 503", True),
        (200, b"<html>", "JSONDecodeError", True),
    ],
)
def test_a_refused_publish_says_why(router: Any, code: int, body: bytes, message: str, retry: bool) -> None:
    router.replies = [(code, body)]
    with pytest.raises(PublishError, match=message) as caught:
        publish_version(router.address, "weights/e0_v000001", "0:1", "d", timeout_s=5)
    assert caught.value.retry is retry


def test_publishing_goes_on_until_somebody_serves(router: Any) -> None:
    router.replies = [(503, b"starting"), (200, SERVED)]
    done = publish_until(router.address, "weights/e0_v000001", "0:1", "d", timeout_s=10)
    assert (done.servers, done.pause_s, done.update_s) == ({"http://s": "0:1"}, 0.5, 0.25)
    router.replies = [(400, b"torn"), (200, SERVED)]
    with pytest.raises(PublishError, match="torn"):
        publish_until(router.address, "weights/e0_v000001", "0:1", "d", timeout_s=10)


def test_only_episodes_of_one_current_version_are_comparable() -> None:
    """Group 0 sample 0 has an old turn in another row; sample 1 is current; group 1's row has no generated token."""
    versions = [[-1, 3], [-1, 4], [-1, 4], [-1, -1]]
    shard = make_shard(
        [[5, 6], [5, 7], [5, 8], [5, 9]],
        [1, 1, 1, 2],
        versions_T=np.array(versions, np.int32).ravel(),
        group_ids_S=np.array([0, 0, 0, 1]),
        samples_S=np.array([0, 0, 1, 0], np.int32),
    )
    assert current_rows(shard, version_span(shard), version=4).tolist() == [False, False, True, True]
    resumed = replace(shard, epoch=1, launches_S=np.array([0, 0, 0, 1], np.int32))
    assert current_rows(resumed, version_span(resumed), version=4).tolist() == [False, False, False, True]
    elsewhere = np.array([[0, 1, 5, 5]])  # a newer turn of sample 1 on another rank
    spans = np.concatenate([version_span(shard), elsewhere])
    assert current_rows(shard, spans, version=4).tolist() == [False, False, False, True]

"""One worker alone, in this process: what it publishes and what not, its settings, and learning from what is there.

Not covered: several workers (tests/unit/test_spot_averaging.py, tests/e2e/test_spot_training.py).
"""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from areal_dta.drafter import publish as publish_module
from areal_dta.drafter.averaging import Hub
from areal_dta.drafter.buffer import BufferReader
from areal_dta.drafter.buffer_files import FrozenTarget, write_sample
from areal_dta.drafter.checkpoint import AsyncCheckpoint, latest_step
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle import init_weights
from areal_dta.drafter.eagle_config import EagleConfig, sglang_obstacles
from areal_dta.drafter.eagle_files import read_drafter, write_drafter
from areal_dta.drafter.learner import Learner, LearnerSettings
from areal_dta.drafter.publish import DrafterPublisher, newest_drafter
from areal_dta.drafter.spot_state import SpotSettings
from areal_dta.drafter.spot_trainer import SpotTrainer
from areal_dta.drafter.states import Assignment
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.drafter.worker import WorkerSettings, build, settings_from_run
from areal_dta.metrics import NullPublisher
from areal_dta.records import LaunchPlan
from tests.unit.spot_samples import load_target, make_sample, write_target

REST = Assignment(reason="over")
ALONE = Assignment("round", "w", "tcp://127.0.0.1:1", ("w",))


class Recorder(NullPublisher):
    """Keeps events and values by name."""

    def __init__(self) -> None:
        super().__init__("w")
        self.said: list[tuple[str, Any]] = []

    def emit(self, name: str, /, value: Any, step: int | None = None, **labels: Any) -> None:
        self.said.append((name, value))

    def event(self, name: str, /, message: str = "", step: int | None = None, **fields: Any) -> None:
        self.said.append((name, message))

    def of(self, name: str) -> list[Any]:
        return [value for said, value in self.said if said == name]


class Control:
    """Assigned alone for a number of looks."""

    name = "w"

    def __init__(self) -> None:
        self.looks = 0
        self.num_samples = -1

    def current(self) -> Assignment:
        self.looks -= 1
        return ALONE if self.looks > 0 else REST

    def left(self, assignment: Assignment) -> bool:
        return not self.current().train

    def wait(self, timeout_s: float) -> Assignment:
        time.sleep(timeout_s)
        return ALONE if self.looks > 0 else REST

    def report(self, *args: Any, num_samples: int | None = None, **said: Any) -> None:
        self.num_samples = self.num_samples if num_samples is None else num_samples


@dataclass
class Alone:
    spot: SpotTrainer
    control: Control
    learner: Learner
    metrics: Recorder
    drafters: DrafterPublisher
    hub: Hub
    folder: Path

    def train(self, looks: int) -> None:
        self.spot.rest(0.0)
        self.control.looks = looks
        self.spot.train()
        self.spot.close(10)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def post(url: str, body: Any, api_key: Any, timeout_s: float) -> dict[str, Any]:
        if "away" in url:
            raise ConnectionRefusedError("nobody there")
        return {"success": True}

    monkeypatch.setattr(publish_module, "post_json", post)
    folder = write_target(tmp_path / "model", "0:0")
    target, rng = load_target(folder), np.random.default_rng(0)
    buffer = tmp_path / "buffer"
    buffer.mkdir()
    for i in range(32):
        write_sample(buffer, make_sample(target, "0:0", 1, int(rng.integers(20, 60)), rng), i + 1)
    weights = init_weights(EagleConfig.for_target(target.config), target, torch.Generator().manual_seed(0))
    trainer = DrafterTrainer(weights, FrozenTarget.load(folder, "0:0").weights, 3e-3)
    reader = BufferReader(buffer, 0)
    learner = Learner(trainer, reader, [folder], LearnerSettings(micro_step_s=0.02), 0)
    control, metrics, hub = Control(), Recorder(), Hub("w")
    drafters = DrafterPublisher(tmp_path / "v", {"near": "http://near", "far": "http://away"}, metrics)
    spot = SpotTrainer(
        cast(ControlLink, control),
        hub,
        learner,
        SpotSettings(step_tokens=200, publish_steps=5, refresh_s=0.0),
        metrics,
        AsyncCheckpoint(tmp_path / "c"),
        drafters,
    )
    yield Alone(spot, control, learner, metrics, drafters, hub, tmp_path)
    hub.close()


def test_a_better_drafter_is_published_readable_and_a_server_that_is_away_is_reported(alone: Alone) -> None:
    alone.train(80)
    assert alone.drafters.answers == {"near": "ok", "far": "nobody there"}
    assert "nobody there" in alone.metrics.of("drafter/refused")
    folder = newest_drafter(alone.drafters.root)
    assert folder is not None
    weights, manifest = read_drafter(folder, load_target(alone.folder / "model"))
    assert manifest.weight_version.startswith(f"d{int(folder.name.removeprefix('drafter_'))}.")
    assert torch.isfinite(weights.fc).all()
    losses = alone.metrics.of("drafter/loss")
    assert losses[-1] < losses[0]
    assert latest_step(alone.folder / "c") == len(losses)  # saved when the assignment ended


def test_a_drafter_that_got_worse_on_held_out_samples_is_not_published(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter((0.8, 0.5, 0.7, 0.9, 0.8))
    monkeypatch.setattr(alone.learner, "top3", lambda batch, folder=None: next(scores))
    alone.learner.refresh()
    for _ in range(3):
        alone.spot._publish()
        alone.drafters.wait(10)
    assert len(alone.metrics.of("drafter/published")) == 2
    assert (
        alone.metrics.of("drafter/not_published") == ["held-out top-3 accuracy 0.500, the published drafter has 0.700"]
        or alone.metrics.of("drafter/not_published") == ["no held-out samples yet"] * 3
    )


def test_held_out_accuracy_of_the_drafter_in_training_and_of_a_published_one_agree(alone: Alone) -> None:
    alone.train(40)
    alone.drafters.start(alone.learner.trainer.weights(), 77)
    alone.drafters.wait(10)
    batch = alone.learner.held_out()
    assert batch is not None
    folder = alone.drafters.root / "drafter_000000077"
    assert alone.learner.top3(batch, folder) == alone.learner.top3(batch)


def test_a_torn_published_drafter_is_passed_over(alone: Alone) -> None:
    for step in (1, 2):
        alone.drafters.start(alone.learner.trainer.weights(), step)
        alone.drafters.wait(10)
    (alone.drafters.root / "drafter_000000002" / "model.safetensors").write_bytes(b"torn")
    newest = newest_drafter(alone.drafters.root)
    assert newest is not None and newest.name == "drafter_000000001"


def test_old_drafters_are_deleted_and_only_one_publication_runs(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(publish_module, "post_json", lambda *args: release.wait(5) and {"success": True})
    assert alone.drafters.start(alone.learner.trainer.weights(), 1)
    assert not alone.drafters.start(alone.learner.trainer.weights(), 2)
    release.set()
    alone.drafters.wait(10)
    for step in range(3, 7):
        alone.drafters.start(alone.learner.trainer.weights(), step)
        alone.drafters.wait(10)
    assert [p.name[-1] for p in sorted(alone.drafters.root.iterdir())] == ["4", "5", "6"]


def test_with_too_few_samples_or_an_unknown_version_the_worker_does_not_ask_to_train(alone: Alone) -> None:
    alone.spot.rest(0.0)
    assert alone.control.num_samples == 28  # every eighth is held out
    for entry in alone.learner.reader.entries[:24]:
        entry.path.unlink()
    alone.spot.rest(0.0)
    assert alone.control.num_samples == 0
    target, rng = load_target(alone.folder / "model"), np.random.default_rng(0)
    for i in range(20):
        write_sample(alone.folder / "buffer", make_sample(target, "9:9", 1, 20, rng), 100 + i)
    alone.spot.rest(0.0)
    assert alone.control.num_samples == 0
    assert alone.learner.micro_step() is not None  # the few that are left


def test_samples_of_another_model_are_passed_over(alone: Alone) -> None:
    other = write_target(alone.folder / "model" / "other", "0:1", hidden_size=48)
    target, rng = load_target(other), np.random.default_rng(0)
    for i in range(20):
        write_sample(alone.folder / "buffer", make_sample(target, "0:1", 1, 20, rng), 200 + i)
    alone.learner.refresh()
    for _ in range(10):
        assert alone.learner.micro_step() is not None
    assert alone.learner.counters["refused_version"] == 1


def test_micro_steps_stay_near_the_wanted_duration(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine ten times slower gets about a tenth of the tokens."""
    alone.learner.refresh()
    inner, cost_s = alone.learner.trainer.gradients, 20e-6

    def slow(batches: Any) -> Any:
        time.sleep(sum(b.num_tokens for b in batches) * cost_s)
        return inner(batches)

    monkeypatch.setattr(alone.learner.trainer, "gradients", slow)
    for _ in range(20):
        alone.learner.micro_step()
    fast_tokens, cost_s = alone.learner.last_tokens, 400e-6
    for _ in range(20):
        alone.learner.micro_step()
    assert alone.learner.last_tokens < 0.5 * fast_tokens
    assert alone.learner.last_tokens * cost_s < 0.05


def test_a_micro_step_that_is_to_be_ready_soon_is_small_and_the_next_one_is_not(alone: Alone) -> None:
    alone.learner.refresh()
    for _ in range(10):
        alone.learner.micro_step()
    whole = alone.learner._micro_tokens
    found = alone.learner.micro_step(0.0)
    assert found is not None and 0 < found.num_rows < alone.learner.last_tokens <= 32
    assert alone.learner._micro_tokens == whole > 64
    half = alone.learner.micro_step(whole / alone.learner._tokens_per_s / 2)
    assert half is not None and alone.learner.last_tokens <= whole / 2 + 1
    alone.learner.micro_step()
    assert alone.learner.last_tokens > whole / 2


def test_settings_of_a_run_come_from_its_plan_and_unknown_keys_are_named(tmp_path: Path) -> None:
    plan = LaunchPlan(
        str(tmp_path),
        1,
        "tcp://b",
        "tcp://m",
        "http://r",
        ("http://a:1", "http://a:2"),
        "h",
        1,
        1,
        1,
        1,
        1,
        None,
        "key",
    )
    plan.write(tmp_path / "launch.json")
    (tmp_path / "drafter").mkdir()
    common = {"coordinator": "tcp://127.0.0.1:5", "cores": [[0], [1]], "learner": {"micro_step_s": 0.1}}
    (tmp_path / "drafter" / "worker.json").write_text(json.dumps(common))
    found = settings_from_run(tmp_path, 1)
    assert (found.name, found.server, found.cores, found.api_key) == ("drafter.1", "server.1", (1,), "key")
    assert found.servers == {"server.0": "http://a:1", "server.1": "http://a:2"}
    assert found.target_folders == (str(tmp_path / "model"), str(tmp_path / "weights"))
    assert found.learner == replace(LearnerSettings(), micro_step_s=0.1)
    with pytest.raises(ValueError, match="--index 2"):
        settings_from_run(tmp_path, 2)
    with pytest.raises(ValueError, match="colour"):
        WorkerSettings.from_dict({"colour": "red"})


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_a_worker_makes_of_a_portable_drafter_is_portable(kind: str, tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "model", "0:0"))
    shape = EagleConfig.for_target(target.config, kind, 16, portable=True)
    start = init_weights(shape, target, torch.Generator().manual_seed(0), torch.arange(16))
    write_drafter(tmp_path / "start", start, "d0")
    settings = WorkerSettings(
        name="drafter.0",
        server="server.0",
        coordinator="tcp://127.0.0.1:1",
        buffer=str(tmp_path / "buffer"),
        target_folders=(str(tmp_path / "model"),),
        checkpoints=str(tmp_path / "checkpoints"),
        drafters=str(tmp_path / "versions"),
        drafter=str(tmp_path / "start"),
    )
    spot, control, hub = build(settings, NullPublisher())
    control.close()
    hub.close()
    made = spot._learner.trainer.weights().config
    assert (made, sglang_obstacles(made)) == (shape, ())


def test_draws_for_training_differ_between_workers_but_held_out_ones_do_not(alone: Alone) -> None:
    readers = [BufferReader(alone.folder / "buffer", seed) for seed in (1, 2)]
    for reader in readers:
        reader.refresh()
    trained = [[s.num_tokens for s in b.samples] for b in (r.sample(300) for r in readers) if b]
    held = [
        [s.num_tokens for s in b.samples] for b in (r.sample(99, None, True, random.Random(0)) for r in readers) if b
    ]
    assert trained[0] != trained[1] and held[0] == held[1]

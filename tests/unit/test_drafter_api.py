"""Speculation over HTTP: the drafter is changed while serving, refused if it does not fit, and changes no token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_dta.drafter.buffer_files import list_entries, read_sample
from areal_dta.drafter.eagle import init_weights
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.nn import DecoderConfig, Rotary, load_decoder
from areal_dta.nn.decoder import decode_features
from areal_dta.rollout.server.feature_recorder import RecorderSettings
from areal_dta.rollout.server.spec_control import SpecControl, SpecSettings
from tests.unit.server_kit import call, generate, make_scheduler, server_process, wait_until
from tests.unit.spec_kit import dense_attend, mixed_requests, run_all, same
from tests.unit.tiny_models import save_tiny_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def write_fresh_drafter(folder: Path, model: Path, version: str, kind: str = "eagle") -> Path:
    target = load_decoder(model, DecoderConfig.from_folder(model), torch.float64)
    config = EagleConfig.for_target(target.config, kind)
    write_drafter(folder, init_weights(config, target, torch.Generator().manual_seed(0)), version)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def drafters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    other = tmp_path_factory.mktemp("other")
    save_tiny_model(other, "qwen3", hidden_size=64)
    made = {
        "good": write_fresh_drafter(root / "good", model, "d1"),
        "eagle3": write_fresh_drafter(root / "eagle3", model, "d2", "eagle3"),
        "other": write_fresh_drafter(root / "other", other, "x1"),
        "torn": shutil.copytree(root / "good", root / "torn"),
    }
    with (made["torn"] / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    return made


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with server_process(model, "--dtype", "float64", "--speculation", "auto") as (_, address):
        yield address


def speculation(url: str) -> dict[str, Any]:
    return call(url, "/get_server_info")[1]["speculation"]


def test_a_drafter_is_installed_and_swapped_while_serving_and_changes_no_token(url: str, drafters: dict[str, Path]):
    before = generate(url, PROMPT, max_new_tokens=60, temperature=0)
    assert speculation(url)["drafter_version"] is None
    for name, version in (("good", "d1"), ("eagle3", "d2"), ("good", "d1")):
        status, answer = call(url, "/update_drafter_from_disk", {"model_path": str(drafters[name])})
        assert (status, answer["drafter_version"]) == (200, version)
        assert speculation(url)["drafter_version"] == version
        assert generate(url, PROMPT, max_new_tokens=60, temperature=0)["output_ids"] == before["output_ids"]


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("other", {}, "train a drafter for this target"),
        ("torn", {}, "holds no drafter"),
        ("good", {"drafter_version": "d9"}, "not d9"),
        ("good", {"digest": "0" * 64}, "announced"),
        ("missing", {}, "holds no drafter"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_and_the_old_one_stays(
    url: str, drafters: dict[str, Path], name: str, extra: dict[str, str], said: str
):
    call(url, "/update_drafter_from_disk", {"model_path": str(drafters["good"])})
    path = str(drafters.get(name, "/nowhere"))
    status, answer = call(url, "/update_drafter_from_disk", {"model_path": path, **extra})
    assert (status, answer["success"]) == (400, False)
    assert said in answer["message"]
    assert speculation(url)["drafter_version"] == "d1"


def test_memory_released_until_work_comes_is_taken_again_by_the_first_request(url: str):
    first = generate(url, PROMPT, max_new_tokens=5, temperature=0)["output_ids"]
    assert call(url, "/release_memory_occupation", {"requests": "resume"})[0] == 200
    assert call(url, "/get_server_info")[1]["memory_released"]
    assert generate(url, PROMPT, max_new_tokens=5, temperature=0)["output_ids"] == first
    wait_until(lambda: not call(url, "/get_server_info")[1]["memory_released"], "memory taken again")


def test_a_server_whose_drafter_does_not_fit_serves_without_it_and_says_why(model: Path, drafters: dict[str, Path]):
    scheduler = make_scheduler(model)
    control = SpecControl(scheduler, SpecSettings(drafter=drafters["torn"]))
    assert control.drafter_version is None
    assert "holds no drafter" in control.snapshot()["problem"]
    control.install(control.read(drafters["good"], None, None))
    assert control.snapshot()["problem"] is None


@pytest.mark.parametrize("eagle3", [False, True])
def test_recorded_samples_hold_every_position_of_their_sequence_by_one_version(
    eagle3: bool, model: Path, tmp_path: Path
):
    """Fp64 sampling of the same seeds with everything in between: retractions, weight updates, prefix hits."""
    requests = mixed_requests(16, 320, seed=5)
    plain = run_all(make_scheduler(model, torch.float64), requests, 4)
    scheduler = make_scheduler(model, torch.float64, max_total_tokens=400, max_prefill_tokens=24, page_size=8)
    settings = SpecSettings(buffer=tmp_path / "buffer", recorder=RecorderSettings(max_tokens=64), eagle3=eagle3)
    control = SpecControl(scheduler, settings)

    def disturb(step: int) -> None:
        if step % 13 == 7:
            scheduler.retract_all()

    done = run_all(scheduler, requests, 4, disturb)
    assert all(same(c, d) for c, d in zip(plain, done, strict=True))
    control.close()
    entries = list_entries(tmp_path / "buffer")
    assert len(entries) >= 8
    answers = [[*c.request.input_ids, *c.output_ids] for c in done]
    dense = load_decoder(model, DecoderConfig.from_folder(model), torch.float64)
    for entry in entries:
        sample = read_sample(entry)
        ids = sample.ids_T.tolist()
        places = [(a, at) for a in answers for at in range(len(a)) if a[at : at + len(ids)] == ids]
        assert places, "the sample's tokens are consecutive tokens of a sequence"
        expected = [hidden_states(dense, a[: at + len(ids)])[at:] for a, at in places]
        hidden_TD = sample.features_TF if sample.hidden_TD is None else sample.hidden_TD
        assert (sample.hidden_TD is not None) == eagle3
        assert sample.features_TF.shape[1] == hidden_TD.shape[1] * (3 if eagle3 else 1)
        error = min(float((hidden_TD.double() - e).abs().max()) for e in expected)
        assert error < 5e-3 * float(expected[0].abs().max())  # float16
        assert sample.loss_end == len(ids)


def hidden_states(weights: Any, ids: list[int]) -> torch.Tensor:
    cos_sin = Rotary(weights.config, weights.dtype, weights.device)(torch.arange(len(ids)), len(ids))
    return decode_features(weights, torch.tensor(ids), cos_sin, dense_attend, ())[0]

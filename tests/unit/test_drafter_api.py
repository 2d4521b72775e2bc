"""Speculation over HTTP: the drafter is changed while serving, refused if it does not fit, and changes no token."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiohttp import web

from areal_dta.drafter.buffer_files import list_entries, read_sample
from areal_dta.drafter.eagle import init_weights
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.nn import DecoderConfig, Rotary, load_decoder
from areal_dta.nn.decoder import decode_features
from areal_dta.rollout.server.drafter_api import DrafterApi
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.feature_recorder import RecorderSettings
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.spec_control import DrafterUpdate, SpecControl, SpecSettings
from tests.unit.server_kit import call, generate, make_scheduler, server_process, wait_until
from tests.unit.spec_kit import dense_attend, mixed_requests, run_all, same
from tests.unit.test_server_stream import metrics
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


def test_metrics_count_what_was_drafted_and_which_drafter_is_in_use(url: str, drafters: dict[str, Path]):
    call(url, "/update_drafter_from_disk", {"model_path": str(drafters["good"])})
    before = metrics(url)
    generate(url, PROMPT, max_new_tokens=200, temperature=0, ignore_eos=True)
    call(url, "/update_drafter_from_disk", {"model_path": str(drafters["torn"])})
    after, info = metrics(url), speculation(url)
    assert info["draft_steps"] > 0
    assert after["sglang:spec_verify_calls_total"] == info["draft_steps"]
    assert after["areal_dta:drafted_tokens_total"] == info["drafted_tokens"]
    assert after["areal_dta:accepted_tokens_total"] == info["accepted_tokens"]
    assert after["areal_dta:draft_starved_total"] == info["starved"] == 0
    assert after["sglang:spec_accept_length"] == pytest.approx(info["accept_length"])
    assert after["sglang:spec_accept_rate"] == pytest.approx(info["accepted_tokens"] / info["drafted_tokens"])
    steps, seconds, tokens = (
        {arm: after[f'areal_dta:decode_{what}_total{{arm="{arm}"}}'] for arm in info["steps_by_arm"]}
        for what in ("steps", "seconds", "tokens")
    )
    assert steps == info["steps_by_arm"] and len(steps) > 1
    assert all(0 < seconds[arm] < 60 for arm in steps)
    grown = sum(tokens.values()) - sum(v for k, v in before.items() if k.startswith("areal_dta:decode_tokens_total"))
    assert grown in (199, 200)  # the first one may come with the prompt
    assert after['areal_dta:drafter_version_info{drafter_version="d1"}'] == 1
    assert after["areal_dta:drafter_missing"] == 0
    name = "areal_dta:drafter_update_failures_total"
    assert after[name] == before[name] + 1


def test_a_drafter_that_the_model_thread_refuses_is_told_as_a_refusal():
    class Control:
        drafter_version = "d1"

        def read(self, *asked: object) -> DrafterUpdate:
            return cast(DrafterUpdate, SimpleNamespace(version="d2"))

        def install(self, update: DrafterUpdate) -> None:
            raise DrafterMismatch("this server records what the training of another kind needs; set tlt.kind")

    class ModelThread:
        def call(self, function: Callable[[], None]) -> Future[None]:
            done: Future[None] = Future()
            try:
                function()
            except DrafterMismatch as error:
                done.set_exception(error)
            return done

    async def read() -> bytes:
        return b'{"model_path": "/drafter"}'

    front = Front(cast(Engine, ModelThread()), 5.0, 1)
    api = DrafterApi(front, cast(SpecControl, Control()))
    answer = asyncio.run(api.from_disk(cast(web.Request, SimpleNamespace(read=read))))
    assert (answer.status, api.num_failed) == (400, 1)
    assert "drafter d1 stays: this server records" in (answer.text or "")


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

"""Drafters installed or read when something is in the way: no memory, a newer target, damaged files."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import read_drafter, write_drafter
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.runner import ModelRunner
from areal_dta.rollout.server.spec_control import DrafterUpdate
from tests.unit.server_kit import make_scheduler
from tests.unit.spec_kit import mixed_requests, run_all, same, spelling
from tests.unit.test_speculation_fuzz import VOCAB, controlled, fresh_drafter
from tests.unit.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_tiny_model(made, "qwen3")
    return made


@pytest.mark.parametrize("where", ["ModelRunner", "EagleRuntime"])
@pytest.mark.parametrize("had_drafter", [False, True])
def test_without_memory_for_a_drafter_decoding_goes_on_plain_and_says_so(
    where: str, had_drafter: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(12, VOCAB, seed=2)
    plain = run_all(spelling(make_scheduler(folder, torch.float64)), requests, 4)
    scheduler = spelling(make_scheduler(folder, torch.float64))
    control = controlled(scheduler)
    target = scheduler.runner.weights
    if had_drafter:
        control.install(DrafterUpdate(fresh_drafter(target, "eagle"), "d0"))

    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 68719476736 bytes")

    def install_when_full(step: int) -> None:
        if step != 6:
            return
        with monkeypatch.context() as patch:
            patch.setattr(EagleRuntime if where == "EagleRuntime" else ModelRunner, "__init__", full)
            with pytest.raises(MemoryError, match="max_total_tokens"):
                control.install(DrafterUpdate(fresh_drafter(target, "eagle3"), "d1"))

    done = run_all(scheduler, requests, 4, install_when_full)
    assert all(same(p, d) for p, d in zip(plain, done, strict=True))
    assert control.drafter_version is None
    assert "no memory for drafter d1" in control.snapshot()["problem"]
    control.install(DrafterUpdate(fresh_drafter(target, "eagle3"), "d1"))
    assert (control.drafter_version, control.snapshot()["problem"]) == ("d1", None)


def test_a_drafter_read_before_a_target_update_takes_its_head_from_the_new_target(folder: Path, tmp_path: Path) -> None:
    scheduler = make_scheduler(folder, torch.float64)
    control = controlled(scheduler)
    update = DrafterUpdate(fresh_drafter(scheduler.runner.weights, "eagle", 64), "d0")
    save_tiny_model(tmp_path, "qwen3", seed=1)
    config = DecoderConfig.from_folder(tmp_path)
    scheduler.swap_weights(load_decoder(tmp_path, config, torch.float64), "v1")
    control.install(update)
    runtime = scheduler.speculator.drafter if scheduler.speculator else None
    assert isinstance(runtime, EagleRuntime)
    assert runtime._weights.head is not None
    assert torch.equal(runtime._weights.head, scheduler.runner.weights.head_VD[torch.arange(0, 128, 2)])


def test_a_drafter_damaged_or_replaced_while_it_is_read_is_refused(folder: Path, tmp_path: Path) -> None:
    target = make_scheduler(folder, torch.float64).runner.weights
    good, other = tmp_path / "good", tmp_path / "other"
    write_drafter(good, fresh_drafter(target, "eagle", 64), "d0")
    write_drafter(other, fresh_drafter(target, "hass"), "d1")
    rng = random.Random(3)
    for name in ("model.safetensors", "drafter.json", "version.json"):
        for _ in range(12):
            torn = tmp_path / "torn"
            shutil.rmtree(torn, ignore_errors=True)
            shutil.copytree(good, torn)
            data = bytearray((torn / name).read_bytes())
            if rng.random() < 0.5:
                del data[rng.randrange(len(data)) :]
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (torn / name).write_bytes(data)
            try:
                _, manifest = read_drafter(torn, target)
            except DrafterMismatch:
                continue
            assert name != "model.safetensors", "damaged weights were loaded"
            assert manifest.files

    def replaced(folder: Path) -> EagleConfig:
        config = honest(folder)
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        return config

    honest = EagleConfig.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleConfig, "read", replaced)
        with pytest.raises(DrafterMismatch, match="replaced while"):
            read_drafter(good, target)

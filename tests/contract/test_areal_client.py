"""AReaL's unmodified RemoteSGLangEngine against the embedded server and against the router.

Updates through a process group are in test_areal_weight_group.py. Not covered: LoRA, vision inputs, a real SGLang.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from areal.api import WeightUpdateMeta
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.infra import remote_inf_engine
from areal.utils import name_resolve, names
from safetensors.numpy import load_file

from areal_dta.weights import write_version
from tests.contract.areal_kit import (
    PROMPT,
    WAIT_S,
    Completion,
    areal_engine,
    interrupt,
    logprobs_by,
    weights_of,
)
from tests.unit.server_kit import call, load, router_process, server_process
from tests.unit.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module", params=["server", "router"])
def address(request: pytest.FixtureRequest, model: Path) -> Iterator[str]:
    with server_process(model) as (_, server):
        if request.param == "server":
            yield server
        else:
            with router_process([server]) as (_, router):
                yield router


@pytest.fixture(scope="module")
def engine(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteSGLangEngine]:
    with areal_engine([address], tmp_path_factory.mktemp("names")) as engine:
        yield engine


def test_rollouts_carry_the_tokens_and_logprobs_of_the_model(engine: RemoteSGLangEngine, model: Path):
    weights = weights_of(model)
    rows = engine.rollout_batch([{"ids": [*PROMPT, 2 + i]} for i in range(8)], workflow=Completion(12))
    assert len(rows) == 8
    for row in rows:
        mask = row["loss_mask"][0][1:].bool()
        assert int(mask.sum()) == 12
        assert (logprobs_by(weights, row)[mask] - row["logprobs"][0][1:][mask]).abs().max() < 1e-5


def test_scoring_agrees_with_the_model(engine: RemoteSGLangEngine, model: Path):
    ids = torch.tensor([[*PROMPT, 7, 9, 11]])
    row = {"input_ids": ids, "loss_mask": torch.tensor([[0] * len(PROMPT) + [1] * 3])}
    scored = engine.compute_logp([row])[0][0]
    assert (scored[-3:] - logprobs_by(weights_of(model), row, 1.0)[-3:]).abs().max() < 1e-5


def test_interrupted_rollouts_go_on_with_the_next_version(engine: RemoteSGLangEngine, address: str):
    version = engine.get_version()
    rows = interrupt(engine, [address], lambda: engine.set_version(version + 1))
    for row in rows:
        assert int(row["loss_mask"].sum()) == 500
        versions = row["versions"][0][row["loss_mask"][0].bool()]
        assert versions[-1] == version + 1
    assert any(len(set(row["versions"][0].tolist())) == 3 for row in rows)  # -1, old, new


def test_weights_from_disk_serve_the_rest_of_interrupted_rollouts(
    engine: RemoteSGLangEngine, address: str, model: Path, tmp_path: Path
):
    published = tmp_path / "weights"
    save_tiny_model(tmp_path / "new", seed=5)
    write_version(published, load_file(tmp_path / "new" / "model.safetensors"), "0:3", template=model)
    new = weights_of(tmp_path / "new")
    version = engine.get_version()

    def update() -> None:
        key = names.update_weights_from_disk(engine.config.experiment_name, engine.config.trial_name, version)
        name_resolve.add(key, str(time.time_ns()), keepalive_ttl=120, replace=True)
        meta = WeightUpdateMeta(type="disk", path=str(published), clear_checkpoint_after_load=False)
        engine.update_weights_from_disk(meta).result(timeout=WAIT_S)
        engine.set_version(version + 1)

    rows = interrupt(engine, [address], update)
    assert call(address, "/get_model_info")[1]["weight_version"] == "0:3"
    for row in rows:
        fresh = (row["versions"][0] == version + 1)[1:]
        assert 0 < int(fresh.sum()) < 500
        assert (logprobs_by(new, row)[fresh] - row["logprobs"][0][1:][fresh]).abs().max() < 1e-5
    shutil.rmtree(published)


def test_pausing_twice_and_the_executors_limits_leave_nothing_behind(engine: RemoteSGLangEngine, address: str):
    engine.pause_generation()
    engine.pause_generation()
    engine.continue_generation()
    engine.rollout_batch([{"ids": PROMPT}] * 8, workflow=Completion(4))
    info = call(address, "/get_server_info")[1]
    urls = list(info["servers"]) if "servers" in info else [address]
    assert all(load(u)["num_running"] + load(u)["num_waiting"] == 0 for u in urls)
    assert remote_inf_engine.RemoteInfEngine is type(engine._engine)  # the client is AReaL's own

"""AReaL's own process group and client as the sender of weights to two embedded servers. Not covered: nccl."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import ParamSpec, WeightUpdateMeta
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine
from safetensors.torch import load_file

from tests.contract.areal_kit import (
    PROMPT,
    WAIT_S,
    Completion,
    areal_engine,
    interrupt,
    logprobs_by,
    wait_for,
    weights_of,
)
from tests.unit.server_kit import call, generate, router_process, server_process
from tests.unit.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Old and new weights."""
    root = tmp_path_factory.mktemp("weights")
    save_tiny_model(root / "old")
    save_tiny_model(root / "new", seed=1)
    return root / "old", root / "new"


@pytest.fixture(scope="module")
def urls(folders: tuple[Path, Path]) -> Iterator[list[str]]:
    with server_process(folders[0]) as (_, first), server_process(folders[0]) as (_, second):
        yield [first, second]


@pytest.fixture(scope="module")
def engine(urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteSGLangEngine]:
    with areal_engine(urls, tmp_path_factory.mktemp("names")) as engine:
        yield engine


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def described(name: str, num_servers: int) -> WeightUpdateMeta:
    return WeightUpdateMeta(
        type="xccl",
        gen_allocation=ModelAllocation.from_str(f"sglang:d{num_servers}"),
        nccl_master_address="127.0.0.1",
        nccl_master_port=free_port(),
        nccl_group_name=name,
    )


def test_weights_over_the_group_serve_the_rest_of_interrupted_rollouts(
    engine: RemoteSGLangEngine, urls: list[str], folders: tuple[Path, Path]
):
    tensors = list(load_file(folders[1] / "model.safetensors").items())
    meta = described("update_weight_group", len(urls))
    joined = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend="gloo",
        world_size=1 + len(urls),
        init_method=f"tcp://127.0.0.1:{meta.nccl_master_port}",
        rank=0,
        group_name=meta.nccl_group_name,
        timeout=timedelta(seconds=WAIT_S),
    )
    joined.result(timeout=WAIT_S)
    version = engine.get_version()

    def update() -> None:
        for lo in range(0, len(tensors), 9):
            bucket = tensors[lo : lo + 9]
            specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).split("torch.")[1]) for name, t in bucket]
            taken = engine.update_weights_from_distributed(meta, specs)
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=group)
            taken.result(timeout=WAIT_S)
        engine.set_version(version + 1)

    rows = interrupt(engine, urls, update)
    served = {call(url, "/get_model_info")[1]["weight_version"] for url in urls}
    assert len(served) == 1 and served.pop().startswith("sha256:")  # of the tensors, so the same on both
    new = weights_of(folders[1])
    for row in rows:
        fresh = (row["versions"][0] == version + 1)[1:]
        assert 0 < int(fresh.sum()) < 500
        assert (logprobs_by(new, row)[fresh] - row["logprobs"][0][1:][fresh]).abs().max() < 1e-5
    with server_process(folders[1]) as (_, other):
        expected = generate(other, PROMPT, max_new_tokens=9, temperature=0.0)["output_ids"]
    assert [generate(u, PROMPT, max_new_tokens=9, temperature=0.0)["output_ids"] for u in urls] == [expected] * 2
    engine.submit({"ids": PROMPT}, workflow=Completion(4))
    assert wait_for(engine, 1)[0]["versions"][0, -1] == version + 1
    dist.destroy_process_group(group)
    assert torch.isfinite(tensors[0][1]).all()


def test_through_the_router_the_client_is_told_that_groups_do_not_pass(urls: list[str], tmp_path: Path):
    with router_process(urls) as (_, router), areal_engine([router], tmp_path) as engine:
        with pytest.raises(Exception, match="status=400"):
            engine.init_weights_update_group(described("other", 1)).result(timeout=WAIT_S)
        assert engine.rollout_batch([{"ids": PROMPT}], workflow=Completion(4)) is not None

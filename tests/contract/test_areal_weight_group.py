"""AReaL's own process group and update requests as the sender of weights to the embedded server. Not covered: nccl."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from areal.api.io_struct import ParamSpec, WeightUpdateMeta
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import SGLangBackend
from safetensors.torch import load_file

from tests.unit.server_kit import Background, call, generate, server_process
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(2, 40))


def test_buckets_sent_as_areal_sends_them_become_the_weights(tmp_path: Path):
    save_tiny_model(tmp_path / "old")
    save_tiny_model(tmp_path / "new", seed=1)
    tensors = list(load_file(tmp_path / "new" / "model.safetensors").items())
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    meta = WeightUpdateMeta(type="xccl", nccl_group_name="update_weight_group")
    backend = SGLangBackend()
    with server_process(tmp_path / "old") as (_, url), server_process(tmp_path / "new") as (_, other):
        expected = generate(other, PROMPT, max_new_tokens=9, temperature=0.0)["output_ids"]
        body = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
        body |= {"backend": "gloo", "group_name": meta.nccl_group_name}
        joined = Background(lambda: call(url, "/init_weights_update_group", body))
        group = init_custom_process_group(
            backend="gloo",
            world_size=2,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=0,
            group_name=meta.nccl_group_name,
            timeout=timedelta(seconds=30),
        )
        assert joined.result()[1]["success"]
        for lo in range(0, len(tensors), 9):
            bucket = tensors[lo : lo + 9]
            specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).split("torch.")[1]) for name, t in bucket]
            (request,) = backend.build_distributed_weight_update_requests(meta, specs).requests
            answer = Background(lambda request=request: call(url, request.endpoint, request.payload))
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=group)
            status, told = answer.result()
            assert status == 200, told
        assert told["weight_version"].startswith("sha256:")
        assert generate(url, PROMPT, max_new_tokens=9, temperature=0.0)["output_ids"] == expected
        dist.destroy_process_group(group)
    assert torch.isfinite(tensors[0][1]).all()

"""Process groups: torch.distributed's default group, Megatron's model-parallel grid, two groups per pipeline."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_dta.engine.settings import ParallelSizes

__all__ = ["PipelineGroups", "broadcast_text", "init_model_parallel", "init_process_group", "pipeline_groups"]


@dataclass(frozen=True)
class PipelineGroups:
    """The ranks of one pipeline, stage by stage, in a group for each direction: neither ever blocks the other."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


_pipelines: dict[dist.ProcessGroup, PipelineGroups] = {}  # by Megatron's group of the same ranks; made once per grid


def init_process_group(rank: int, world: int, addr: str, port: int, timeout_s: float = 600.0) -> None:
    """Join the default group of ``world`` ranks over TCP at ``addr:port`` (rank 0 listens); NCCL on CUDA, else gloo.

    Every collective fails after ``timeout_s`` seconds. Raises ValueError if a default group of another size exists.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world or dist.get_rank() != rank:
            have = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise ValueError(f"torch.distributed is already {have}; cannot become rank {rank} of {world}")
        return
    if addr in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve would stop gloo
    if parallel_state.model_parallel_is_initialized():  # of a default group that was destroyed since
        parallel_state.destroy_model_parallel()
        _pipelines.clear()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{addr}:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def init_model_parallel(sizes: ParallelSizes, timeout_s: float = 600.0) -> None:
    """Set up all groups once per process: tp varies fastest over ranks, then dp, then pp.

    Raises RuntimeError without a default group, ValueError when sizes do not fit the world or earlier groups.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call areal_dta.engine.init_process_group first")
    if sizes.world_size != dist.get_world_size():
        raise ValueError(f"dp={sizes.dp} x tp={sizes.tp} x pp={sizes.pp} is not the world size {dist.get_world_size()}")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            sizes.tp, sizes.pp, distributed_timeout_minutes=max(1, round(timeout_s / 60))
        )
    have = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if have != (sizes.dp, sizes.tp, sizes.pp):
        raise ValueError(f"this process already runs (dp, tp, pp)={have}; all policies of a process share one grid")
    if sizes.pp > 1 and parallel_state.get_pipeline_model_parallel_group() not in _pipelines:
        _init_pipelines(sizes, timeout_s)


def _init_pipelines(sizes: ParallelSizes, timeout_s: float) -> None:
    """Two groups for every pipeline; collective over the whole world, as creating any group is."""
    mine = parallel_state.get_pipeline_model_parallel_group()
    num_pipelines = sizes.dp * sizes.tp
    for first in range(num_pipelines):
        ranks = list(range(first, sizes.world_size, num_pipelines))
        timeout = datetime.timedelta(seconds=timeout_s)
        forward, backward = (dist.new_group(ranks, timeout=timeout) for _ in range(2))
        if ranks == dist.get_process_group_ranks(mine):
            _pipelines[mine] = PipelineGroups(forward, backward)
    if mine not in _pipelines:
        raise RuntimeError(f"ranks {dist.get_process_group_ranks(mine)} are no pipeline of {sizes}")


def pipeline_groups() -> PipelineGroups | None:
    """This rank's pipeline; None when the model has one stage."""
    return _pipelines.get(parallel_state.get_pipeline_model_parallel_group())


def broadcast_text(text: str, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The text of rank ``source`` of ``group`` (None: all ranks) on all of them, as bytes: nothing is unpickled."""
    here = dist.get_rank(group) == source
    raw = torch.tensor(list(text.encode()) if here else [], dtype=torch.uint8, device=device)
    length = torch.tensor([len(raw)], device=device)
    dist.broadcast(length, group=group, group_src=source)
    data = raw if here else torch.empty(int(length), dtype=torch.uint8, device=device)
    if len(data):
        dist.broadcast(data, group=group, group_src=source)
    return bytes(data.cpu().tolist()).decode()

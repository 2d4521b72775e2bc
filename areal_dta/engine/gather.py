"""Whole parameters out of a model split over tensor-parallel ranks and pipeline stages, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_dta.engine import hf
from areal_dta.engine.groups import broadcast_text

if TYPE_CHECKING:
    from areal_dta.engine.megatron import MegatronPolicy

__all__ = ["hf_tensors"]


def hf_tensors(policy: MegatronPolicy) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, in the same order for every layout.

    All ranks of one model must run it to its end. On the first stage it yields whole tensors; the other stages have
    nothing to yield, they send theirs there.
    """
    for stage in range(policy.sizes.pp):
        for name, parts in _stage_parameters(policy, stage):
            yield from hf.from_megatron(name, parts, policy.shape).items()


def _stage_parameters(policy: MegatronPolicy, stage: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(name, parts of all tensor-parallel ranks) of one stage's parameters, on the first stage."""
    own = dict(policy.named_parameters()) if policy.stage == stage else {}
    if stage > 0 and policy.shape.tied:
        own.pop("embedding.word_embeddings.weight", None)  # the last stage's copy
    if stage == 0:
        if policy.stage == 0:
            for name, param in own.items():
                yield name, _gather_tensor_parallel(policy, param)
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    shapes = json.dumps({name: tuple(param.shape) for name, param in own.items()})
    shapes = broadcast_text(shapes, stage, policy.device, group)
    for name, shape in json.loads(shapes).items():
        if policy.stage == stage:
            dist.send(torch.stack(_gather_tensor_parallel(policy, own[name])), group=group, group_dst=0)
        elif policy.stage == 0:
            parts = torch.empty((policy.sizes.tp, *shape), dtype=policy.dtype, device=policy.device)
            dist.recv(parts, group=group, group_src=stage)
            yield name, list(parts)


def _gather_tensor_parallel(policy: MegatronPolicy, param: torch.nn.Parameter) -> list[torch.Tensor]:
    part = param.detach().contiguous()
    if policy.sizes.tp == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(policy.sizes.tp)]
    dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    return parts

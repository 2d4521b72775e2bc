"""Training checkpoints through Megatron's dist_checkpointing: written by one grid, loadable on any other.

A folder holds the sharded tensors (model, and fp32 weights and Adam moments in model space), one RNG state per rank
and ``manifest.json``, written last: step number, Adam's step, the size of every file. The folder appears under its
name only when complete (written beside it, then renamed), and loading verifies the manifest, so a torn one is
refused. The files are local and our own; Megatron's metadata file inside is torch's format and must not come from an
untrusted place.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors.torch import load_file, save_file

from areal_dta.engine.checkpoint_writer import InProcessSave

if TYPE_CHECKING:
    from areal_dta.engine.megatron import MegatronPolicy

__all__ = ["CheckpointError", "adam_instances", "load", "save"]

_MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, torn, or of another model."""


def _distributed_optimizers(optimizer: Any) -> list[DistributedOptimizer]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def adam_instances(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers below Megatron's that keep their own ``step`` (none with fused ones)."""
    inner = [part.optimizer for part in _distributed_optimizers(optimizer)]
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam | torch.optim.AdamW)]


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _sharded_state(policy: MegatronPolicy, *, optimizer: bool, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {"model": policy.model.sharded_state_dict(metadata=metadata)}
    if optimizer:
        parts = _distributed_optimizers(policy.optimizer)
        state["optimizer"] = {
            str(i): part.sharded_param_state_fully_reshardable(state["model"], is_loading, metadata)
            for i, part in enumerate(parts)
        }
    return state


def save(policy: MegatronPolicy, path: Path) -> None:
    """Collective. Raises FileExistsError if ``path`` exists (checkpoints are immutable)."""
    if path.exists():
        raise FileExistsError(f"checkpoint {path} exists already; remove it or choose another step")
    partial = path.with_name(f".{path.name}.partial")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(policy, optimizer=policy.optimizer is not None, is_loading=False)
    dist_checkpointing.save(state, str(partial / "state"), InProcessSave())
    save_file(_rng_state(), partial / f"rng_{dist.get_rank()}.safetensors")
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = {
            "format": _FORMAT,
            "num_steps": policy.num_steps,
            "adam_steps": _adam_steps(policy),
            "has_optimizer": policy.optimizer is not None,
            "world_size": dist.get_world_size(),
            "seed": policy.seed,
            "shape": vars(policy.shape),
            "files": _file_sizes(partial),
        }
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        partial.rename(path)
    dist.barrier()


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != _MANIFEST)
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _adam_steps(policy: MegatronPolicy) -> float:
    if policy.optimizer is None:
        return 0.0
    steps = {float(s["step"]) for adam in adam_instances(policy.optimizer) for s in adam.state.values()}
    return max(steps, default=float(policy.num_steps))


def _verified_manifest(policy: MegatronPolicy, path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {_MANIFEST}")
    manifest: dict[str, Any] = json.loads(file.read_text())
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {manifest['format']}, this version reads {_FORMAT}")
    found = _file_sizes(path)
    for name, size in manifest["files"].items():
        if found.get(name) != size:
            raise CheckpointError(f"{path} is torn: {name} has {found.get(name)} bytes, expected {size}")
    shape = {"value_head": False, **manifest["shape"]}
    if shape != vars(policy.shape):
        raise CheckpointError(f"{path} belongs to another model: {shape}, expected {vars(policy.shape)}")
    return manifest


def load(policy: MegatronPolicy, path: Path, *, model: bool, optimizer: bool, zero_first_moment: bool) -> None:
    """Collective; see `MegatronPolicy.load_checkpoint`."""
    manifest = _verified_manifest(policy, path)
    if optimizer and (policy.optimizer is None or not manifest["has_optimizer"]):
        missing = "this policy" if policy.optimizer is None else str(path)
        raise CheckpointError(f"{missing} has no optimizer state; pass optimizer=False")
    present = {name: param.detach().clone() for name, param in policy.model.named_parameters()} if not model else {}
    state = dist_checkpointing.load(
        _sharded_state(policy, optimizer=optimizer, is_loading=True),
        str(path / "state"),
        validate_access_integrity=False,
    )
    if model:
        policy.model.load_state_dict(state["model"])
    if optimizer:
        _load_moments(policy, state["optimizer"], manifest["adam_steps"], zero_first_moment)
    with torch.no_grad():
        for name, param in policy.model.named_parameters():
            if name in present:
                param.copy_(present[name])
    if policy.optimizer is not None and not (model and optimizer):
        policy.optimizer.reload_model_params()
    if model:
        policy.num_steps = manifest["num_steps"]
        _restore_rng(path, manifest)
    dist.barrier()


def _load_moments(policy: MegatronPolicy, states: dict[str, Any], adam_steps: float, zero_first_moment: bool) -> None:
    """Copy fp32 weights and moments into this rank's shards; Megatron's loader does not know torch's ``step``."""
    adams = adam_instances(policy.optimizer)
    for adam in adams:
        for param_state in adam.state.values():
            param_state.pop("step", None)
    for i, part in enumerate(_distributed_optimizers(policy.optimizer)):
        part.load_parameter_state_from_fully_reshardable(states[str(i)])
    for adam in adams:
        for param_state in adam.state.values():
            param_state["step"] = torch.tensor(adam_steps)
            if zero_first_moment:
                param_state["exp_avg"].zero_()


def _rng_state() -> dict[str, torch.Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(path: Path, manifest: dict[str, Any]) -> None:
    """This rank's RNG as saved; on a grid of another size a fresh one, fixed by seed, step and rank."""
    file = path / f"rng_{dist.get_rank()}.safetensors"
    if manifest["world_size"] != dist.get_world_size() or not file.is_file():
        seed = manifest["seed"] + 1_000_003 * manifest["num_steps"]
        torch.manual_seed(seed + dist.get_rank())
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return
    states = load_file(file)
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])

"""Weights that arrive over a process group instead of a folder: join the group, receive, collect until complete.

Whatever is received goes into a staging area first. Only a complete, well-shaped set of finite tensors becomes an
update; everything else is refused whole, and the running weights are never touched here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["GroupSpec", "Staging", "TensorSpec", "UpdateRefused", "WeightGroup"]

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


class UpdateRefused(ValueError):
    """An update that cannot be used; the weights in use are unchanged."""


@dataclass(frozen=True)
class GroupSpec:
    """The group to join: rank ``rank_offset`` of ``world_size``, rank 0 being the sender."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "gloo"
    timeout_s: float = 600.0


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as the sender announces it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightGroup:
    """A process group beside torch's default one. Blocking: every method runs on a helper thread."""

    def __init__(self, spec: GroupSpec) -> None:
        """Meets the others at the master; raises UpdateRefused when they do not come within the time-out."""
        self.spec = spec
        timeout = timedelta(seconds=spec.timeout_s)
        try:
            url = f"tcp://{spec.master_address}:{spec.master_port}"
            store, rank, world_size = next(c10d.rendezvous(url, spec.rank_offset, spec.world_size, timeout=timeout))
            store.set_timeout(timeout)
            # The two prefixes that torch's helper and the senders of RL frameworks agree on.
            prefixed = dist.PrefixStore(spec.name, store)
            self._group, _ = c10d._new_process_group_helper(
                world_size, rank, [], dist.Backend(spec.backend), prefixed, group_name=spec.name, timeout=timeout
            )
            c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}
        except (RuntimeError, ValueError, OSError) as error:
            raise UpdateRefused(f"cannot join weight group {spec.name!r} at {url}: {error}") from error

    def receive(self, specs: Sequence[TensorSpec], device: torch.device) -> dict[str, torch.Tensor]:
        """The announced tensors, broadcast by rank 0 in this order; raises UpdateRefused when the sender breaks off."""
        tensors: dict[str, torch.Tensor] = {}
        for spec in specs:
            # Not uninitialised memory: a transfer that fails half-way must not look like weights.
            tensor = torch.full(spec.shape, float("nan"), dtype=spec.dtype, device=device)
            try:
                dist.broadcast(tensor, src=0, group=self._group)
            except RuntimeError as error:
                raise UpdateRefused(f"the sender broke off at {spec.name}: {error}") from error
            tensors[spec.name] = tensor
        return tensors

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The other side, for a trainer of this project: broadcast in the order of the mapping."""
        for tensor in tensors.values():
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


@dataclass
class Staging:
    """Tensors of the update that is under way.

    ``explicit``: between begin and end. Without these an update is complete when every name has come; it starts with
    the call that holds ``first_name``, the first tensor of the first such update, because senders keep their order.
    Only so the rest of a torn update cannot become part of the next one.
    """

    explicit: bool = False
    first_name: str | None = None
    version: str | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    problem: str | None = None  # why an explicit update will be refused
    _open: bool = False

    def reset(self, explicit: bool = False) -> int:
        """Forget the update; returns how many tensors it had."""
        dropped = len(self.tensors)
        self.explicit, self.version, self.tensors, self.problem, self._open = explicit, None, {}, None, False
        return dropped

    def add(self, new: Mapping[str, torch.Tensor], version: str | None) -> int:
        """Take what has come; returns how many tensors of an unfinished update were dropped. Raises UpdateRefused."""
        dropped = 0
        if not self.explicit:
            if self.first_name is None or self.first_name in new:
                dropped = self.reset()
                self.first_name = self.first_name or next(iter(new))
                self._open = True
            elif not self._open:
                raise UpdateRefused(
                    f"this continues an update that was refused; begin again with {self.first_name}, or use "
                    "/begin_weight_update"
                )
        twice = sorted(set(new) & set(self.tensors))
        problem = f"{twice[0]} came twice" if twice else None
        if version is not None and self.version is not None and version != self.version:
            problem = f"tensors of versions {self.version} and {version} in one update"
        if problem is not None:
            self.refuse(problem)
        self.tensors.update(new)
        self.version = version or self.version
        return dropped

    def refuse(self, problem: str) -> NoReturn:
        """Give up the whole update; an explicit one stays open until its end, which will say the same."""
        if self.explicit:
            self.problem = self.problem or problem
            self.tensors = {}
        else:
            self.reset()
        raise UpdateRefused(problem)

    def missing(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        return sorted(set(expected) - set(self.tensors))

    def version_or_digest(self) -> str:
        """The version the sender named, else one derived from the tensors."""
        if self.version is not None:
            return self.version
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return f"sha256:{digest.hexdigest()[:16]}"

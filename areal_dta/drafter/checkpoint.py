"""Checkpoints of drafter training that hardly hold it up: trainable tensors and optimiser state only, written aside.

`AsyncCheckpoint.save` copies the tensors into host buffers that are allocated once and used again, and returns; a
thread writes, syncs and renames. A file is whole or absent, and its digest is checked before it is resumed from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

__all__ = [
    "AsyncCheckpoint",
    "Resumed",
    "Timing",
    "flatten",
    "latest_step",
    "measure",
    "resume",
    "save_sync",
    "unflatten",
]

log = logging.getLogger(__name__)
NAME = "step_{:09d}.safetensors"
TENSOR_KEY = "__tensor__"
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split nested dicts and lists into tensors by name and a skeleton of plain JSON values; `unflatten` joins them.

    Dicts become lists of pairs, as their keys may be integers (optimiser states). Raises TypeError for other values.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            return {TENSOR_KEY: name}
        if isinstance(value, Mapping):
            return {"pairs": [[key, walk(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [walk(item, f"{name}.{i}") for i, item in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, text, lists, maps")

    return tensors, walk(tree, "state")


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Inverse of `flatten` (tuples come back as lists)."""
    if isinstance(skeleton, dict):
        if TENSOR_KEY in skeleton:
            return tensors[skeleton[TENSOR_KEY]]
        return {key: unflatten(tensors, item) for key, item in skeleton["pairs"]}
    if isinstance(skeleton, list):
        return [unflatten(tensors, item) for item in skeleton]
    return skeleton


@dataclass(frozen=True)
class Resumed:
    """A checkpoint read back: the state tree as it was saved, the step, and what else was noted."""

    step: int
    state: Any
    meta: dict[str, Any]


class _HostCopy:
    """Buffers of one checkpoint under way; kept for the next one with the same tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            have = self.tensors.get(name)
            if have is None or have.shape != tensor.shape or have.dtype != tensor.dtype:
                have = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                have.zero_()  # touched now, so that no page is faulted in during a later copy
                self.tensors[name] = have
            have.copy_(tensor.detach(), non_blocking=True)
        for name in set(self.tensors) - set(tensors):
            del self.tensors[name]
        if any(t.is_cuda for t in tensors.values()):
            torch.cuda.synchronize()


class AsyncCheckpoint:
    """At most one checkpoint is being written; one that comes meanwhile is skipped and counted (``num_skipped``)."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for debris in folder.glob(".*.partial"):
            debris.unlink(missing_ok=True)
        self.folder, self._keep = folder, keep
        self._host = _HostCopy()
        self._thread: threading.Thread | None = None
        self.num_skipped = 0
        self.num_failed = 0
        self.blocked_s = 0.0  # of the last save

    def prepare(self, state: Any) -> None:
        """Allocate the buffers before training starts, so that the first save is as quick as the others."""
        self._host.fill(flatten(state)[0])

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Copy and return; False: the one before is still being written. ``meta`` holds plain JSON values."""
        start_s = time.perf_counter()
        if self._thread is not None and self._thread.is_alive():
            self.num_skipped += 1
            return False
        tensors, skeleton = flatten(state)
        self._host.fill(tensors)
        self._thread = threading.Thread(
            target=self._write, args=(step, skeleton, dict(meta)), name="drafter-checkpoint", daemon=True
        )
        self._thread.start()
        self.blocked_s = time.perf_counter() - start_s
        return True

    def _write(self, step: int, skeleton: Any, meta: dict[str, Any]) -> None:
        try:
            _write_file(self.folder / NAME.format(step), self._host.tensors, skeleton, meta)
            for old in sorted(self.folder.glob("step_*.safetensors"))[: -self._keep]:
                old.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self.num_failed += 1
            log.warning("checkpoint of step %d was not written: %s", step, error)

    def wait(self, timeout_s: float) -> None:
        """Wait for the one under way; raises TimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the checkpoint in {self.folder} was not written within {timeout_s:g} s")


def save_sync(path: Path, state: Any, meta: Mapping[str, Any]) -> None:
    """Write everything here and now, synced: what `AsyncCheckpoint` is compared with."""
    tensors, skeleton = flatten(state)
    _write_file(path, {n: t.detach().cpu() for n, t in tensors.items()}, skeleton, dict(meta))


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], skeleton: Any, meta: dict[str, Any]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(dtype=DTYPES[t.dtype], shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes)
        for name, t in contiguous.items()
    }
    text = json.dumps({"skeleton": skeleton, "meta": meta})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        serialize_file(specs, str(temporary), metadata={"state": text, "digest": _digest(contiguous, text)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, torch.Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def latest_step(folder: Path) -> int:
    """Step of the newest checkpoint, whole or not; 0: there is none."""
    return max((int(p.stem.removeprefix("step_")) for p in folder.glob("step_*.safetensors")), default=0)


def resume(folder: Path) -> Resumed | None:
    """The newest checkpoint that is whole; torn ones are passed over with a warning. None: there is none."""
    for path in sorted(folder.glob("step_*.safetensors"), reverse=True):
        try:
            return _read(path)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            log.warning("%s cannot be resumed from (%s); trying the one before", path, error)
    return None


def _read(path: Path) -> Resumed:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if _digest(tensors, metadata["state"]) != metadata["digest"]:
        raise ValueError("its digest differs from its contents")
    stored = json.loads(metadata["state"])
    return Resumed(int(path.stem.removeprefix("step_")), unflatten(tensors, stored["skeleton"]), stored["meta"])


@dataclass(frozen=True)
class Timing:
    """Median seconds that training stands still per checkpoint."""

    full_sync_s: float
    selective_async_s: float
    full_bytes: int
    selective_bytes: int

    @property
    def ratio(self) -> float:
        return self.full_sync_s / self.selective_async_s


def measure(folder: Path, trained: Any, frozen: Any, repeats: int = 3) -> Timing:
    """Compare blocking times: trained state saved selectively and aside, against everything saved synchronously."""
    checkpoint = AsyncCheckpoint(folder / "selective")
    checkpoint.prepare(trained)
    full_s, blocked_s = [], []
    for i in range(repeats):
        start_s = time.perf_counter()
        save_sync(folder / f"full_{i}.safetensors", {"trained": trained, "frozen": frozen}, {})
        full_s.append(time.perf_counter() - start_s)
        (folder / f"full_{i}.safetensors").unlink()
        checkpoint.save(i, trained, {})
        blocked_s.append(checkpoint.blocked_s)
        checkpoint.wait(60.0)
    middle = repeats // 2
    sizes = [sum(t.nbytes for t in flatten(tree)[0].values()) for tree in (trained, frozen)]
    return Timing(sorted(full_s)[middle], sorted(blocked_s)[middle], sum(sizes), sizes[0])

"""Make megatron-core 0.16.1 run on CPU tensors with gloo groups.

Megatron-core assumes CUDA in a handful of places. `install` maps each of them onto the CPU; it must run before a
model is built and does nothing when CUDA is available. The patches, and what fails without each:

1. ``torch.cuda.current_device`` answers the CPU device: about forty allocations use it as ``device=``, the first in
   the rotary embedding ("Found no NVIDIA driver").
2. ``Tensor.cuda`` is the identity: batches, masks and RNG helpers call it.
3. ``torch.cuda.synchronize`` and ``empty_cache`` do nothing: point-to-point communication and checkpoint saving call
   them.
4. Tensor factories read ``device="cuda"`` as CPU and drop pinned memory: gradient clipping and its norm allocate with
   the literal.
5. The RNG tracker's generator is the CPU's: ``model_parallel_cuda_manual_seed`` fails otherwise, and no seed would be
   deterministic.
6. ``Tensor.type()`` reports ``torch.cuda.FloatTensor``: the optimizers dispatch on that string and reject
   "torch.FloatTensor".
7. Streams and events are inert objects: dispatchers and buffers create them at construction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.utils._device import _device_constructors

__all__ = ["install"]

_FACTORIES = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "as_tensor",
)
_CPU = torch.device("cpu")
_MARK = "_areal_dta_cpu_shim"


class _InertStream:
    """Stands for a CUDA stream or event: everything on the CPU is already in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, *_args: Any) -> None: ...

    def wait_event(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_args: Any) -> _InertStream:
        return self

    def record(self, *_args: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InertStream)

    __hash__ = object.__hash__


def install() -> bool:
    """Apply the patches once; returns whether this process runs on the CPU through them."""
    if torch.cuda.is_available():
        return False
    if getattr(torch.cuda, _MARK, False):
        return True
    setattr(torch.cuda, _MARK, True)
    _patch_device_queries()
    _patch_factories()
    _patch_rng()
    _patch_type_strings()
    _patch_streams()
    return True


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _patch_device_queries() -> None:
    _set(torch.cuda, "current_device", lambda: _CPU)  # 1
    _set(torch.Tensor, "cuda", lambda self, *_a, **_k: self)  # 2
    _set(torch.cuda, "synchronize", lambda *_a, **_k: None)  # 3
    _set(torch.cuda, "empty_cache", lambda: None)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _patch_factories() -> None:  # 4
    _device_constructors()  # torch caches them at first use: without the originals `with torch.device()` has no effect
    for name in _FACTORIES:
        _set(torch, name, _on_cpu(getattr(torch, name)))


def _patch_rng() -> None:  # 5
    _set(torch.cuda, "get_rng_state", lambda *_a, **_k: torch.get_rng_state())
    _set(torch.cuda, "set_rng_state", lambda state, *_a, **_k: torch.set_rng_state(state))
    _set(torch.cuda, "manual_seed", torch.manual_seed)
    _set(megatron_random, "_get_cuda_rng_state", lambda *_a, **_k: torch.get_rng_state())
    _set(megatron_random, "_set_cuda_rng_state", lambda state, *_a, **_k: torch.set_rng_state(state))


def _patch_type_strings() -> None:  # 6
    original = torch.Tensor.type

    def type_string(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not args and not kwargs and isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    _set(torch.Tensor, "type", type_string)


def _patch_streams() -> None:  # 7
    for name in ("Stream", "Event"):
        _set(torch.cuda, name, _InertStream)
    for name in ("current_stream", "default_stream"):
        _set(torch.cuda, name, lambda *_a, **_k: _InertStream())
    _set(torch.cuda, "stream", lambda *_a, **_k: contextlib.nullcontext())
    _set(torch.Tensor, "record_stream", lambda self, _stream: None)

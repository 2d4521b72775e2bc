"""The allocation grammar: ``backend:d2t2p2``, AReaL's names and letters, and the older ``allocation_mode`` strings.

Letters: d data, t tensor, p pipeline, c context, e expert parallel. Absent letters are 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areal_dta.config_schema_check import ConfigError

__all__ = ["Allocation", "parse_allocation", "split_allocation_mode"]

TRAIN = ("megatron",)
ROLLOUT = ("embedded", "sglang")
MAPPED = ("archon", "fsdp")  # AReaL training backends that run on megatron here
_SPEC = re.compile(r"^(?:(?P<backend>[a-z]+)(?:\[[\w-]+\]|\([\w-]+\))?[:.])?(?P<dims>(?:[a-z]\d+)+)$")


@dataclass(frozen=True)
class Allocation:
    """A backend and its sizes; ``world_size`` = devices (trainer ranks, or servers x tp x pp)."""

    backend: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        sizes = {"d": self.dp, "t": self.tp, "p": self.pp, "c": self.cp, "e": self.ep}
        return f"{self.backend}:" + "".join(f"{k}{v}" for k, v in sizes.items() if v > 1 or k == "d")


def parse_allocation(spec: str, key: str) -> Allocation:
    """Parse ``backend:dims``; `key` names the setting in errors. Raises ConfigError."""
    match = _SPEC.match(spec.strip())
    if match is None:
        extra = " (hybrid MoE allocations need expert parallelism, which is not supported)" if "|" in spec else ""
        raise ConfigError(f"{key}={spec!r} is not an allocation such as megatron:d2t2p1 or sglang:d4t2{extra}")
    sizes: dict[str, int] = {}
    for letter, digits in re.findall(r"([a-z])(\d+)", match["dims"]):
        if letter not in "dtpce":
            raise ConfigError(f"{key}={spec!r}: unknown dimension {letter!r}; use d, t, p (data, tensor, pipeline)")
        if letter in sizes:
            raise ConfigError(f"{key}={spec!r}: dimension {letter!r} is given twice; keep one")
        if int(digits) < 1:
            raise ConfigError(f"{key}={spec!r}: size {letter}{digits} must be at least 1")
        sizes[letter] = int(digits)
    names = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
    return Allocation(match["backend"] or "", **{names[k]: v for k, v in sizes.items()})


def split_allocation_mode(mode: str) -> tuple[str | None, str | None]:
    """(rollout.backend, actor.backend) of an ``allocation_mode`` such as ``sglang:d6+d2``; None where a part is absent.

    Dots instead of colons (older files) and names in brackets are accepted; colocation (``|``) is not.
    """
    if "|" in mode:
        raise ConfigError(f"allocation_mode={mode!r} colocates parts (|), which is not supported; separate them with +")
    rollout: str | None = None
    train: str | None = None
    for part in mode.split("+"):
        alloc = parse_allocation(part, "allocation_mode")
        spec = str(alloc) if alloc.backend else "megatron" + str(alloc)
        if alloc.backend in (*ROLLOUT, "vllm"):
            if rollout is not None:
                raise ConfigError(f"allocation_mode={mode!r} names two rollout parts; set rollout.backend instead")
            rollout = spec
        elif train is None:
            train = spec
        else:
            raise ConfigError(f"allocation_mode={mode!r} names two training parts; set actor.backend instead")
    return rollout, train

"""What is simulated: sizes, bounds and counts of a run, without speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from areal_dta.batcher.settings import StalenessPolicy

__all__ = ["SimulationError", "SimulationSettings"]


class SimulationError(ValueError):
    """Something that cannot be simulated; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """``steps`` are simulated, the first ``warmup_steps`` left out of averages. ``total_steps``: the length of the run
    whose beginning this is (None: unlimited), as admission counts it. ``max_concurrent`` episodes run at once over all
    ``workers`` (None: those of a step, as a worker assumes). ``cores`` None: nothing shares a processor.
    ``failure_rate`` of episodes fail after a random part of their turns and are tried again, ``max_attempts`` times;
    ``min_group_size`` and ``stale_reissues`` are the batcher's.
    """

    servers: int
    batch_groups: int
    group_size: int
    eta: int
    workers: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    server_tp: int = 1
    max_concurrent: int | None = None
    policy: StalenessPolicy = "wait"
    steps: int = 20
    warmup_steps: int = 2
    total_steps: int | None = None
    seed: int = 0
    cores: float | None = None
    background: float = 0.0
    failure_rate: float = 0.0
    max_attempts: int = 3
    min_group_size: int | None = None
    stale_reissues: int = 1

    def __post_init__(self) -> None:
        for name in ("servers", "batch_groups", "group_size", "workers", "dp", "tp", "pp", "server_tp", "steps"):
            if getattr(self, name) < 1:
                raise SimulationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.eta < 0:
            raise SimulationError(f"eta is {self.eta}; it must not be negative")
        if self.policy not in get_args(StalenessPolicy):
            raise SimulationError(f"policy {self.policy!r} is not one of {', '.join(get_args(StalenessPolicy))}")
        if not 0 <= self.warmup_steps < self.steps:
            raise SimulationError(f"warmup_steps={self.warmup_steps} must be below steps={self.steps}")
        if self.total_steps is not None and self.total_steps < self.steps:
            raise SimulationError(f"total_steps={self.total_steps} ends before steps={self.steps}")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise SimulationError(f"max_concurrent is {self.max_concurrent}; it must be at least 1")
        if not 0 <= self.failure_rate < 1:
            raise SimulationError(f"failure_rate is {self.failure_rate}; it must be at least 0 and below 1")
        if self.max_attempts < 1:
            raise SimulationError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.min_group_size is not None and not 1 <= self.min_group_size <= self.group_size:
            raise SimulationError(f"min_group_size is {self.min_group_size}; it must be 1 to {self.group_size}")
        if self.stale_reissues < 0:
            raise SimulationError(f"stale_reissues is {self.stale_reissues}; it must not be negative")

    @property
    def batch_episodes(self) -> int:
        return self.batch_groups * self.group_size

    @property
    def concurrent(self) -> int:
        """Episodes that run at once, at most."""
        return self.batch_episodes if self.max_concurrent is None else self.max_concurrent

    @property
    def trainer_gpus(self) -> int:
        return self.dp * self.tp * self.pp

"""Learning rate by step, with AReaL's keys and values; pure numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LrSchedule"]

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LrSchedule:
    """``lr_at(step)`` for step 0, 1, ...; the values are those of the schedulers that AReaL's FSDP engine builds.

    Linear warm-up over ``warmup_share * total_steps`` steps (from 0; for cosine from ``min_ratio``), then constant,
    linear to 0, or cosine to ``min_ratio``. As in AReaL, the very first step of a warm-up has learning rate 0 (cosine:
    ``min_ratio * lr``).
    """

    lr: float
    total_steps: int
    kind: str = "constant"
    warmup_share: float = 0.0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"optimizer.lr_scheduler_type={self.kind!r} is not one of {', '.join(KINDS)}")
        if self.lr < 0 or not math.isfinite(self.lr):
            raise ValueError(f"optimizer.lr={self.lr} must be a number of at least 0")
        if not 0 <= self.min_ratio <= 1 or not 0 <= self.warmup_share <= 1:
            raise ValueError(
                f"optimizer.min_lr_ratio={self.min_ratio} and warmup_steps_proportion={self.warmup_share} "
                "must be within 0..1"
            )

    @property
    def warmup_steps(self) -> int:
        return int(self.warmup_share * self.total_steps)

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based step ``step``."""
        return self.lr * self._factor(step)

    def _factor(self, step: int) -> float:
        warmup = self.warmup_steps
        if step < warmup:
            rise = step / max(1, warmup)
            return self.min_ratio + (1 - self.min_ratio) * rise if self.kind == "cosine" else rise
        if self.kind == "constant":
            return 1.0
        length = max(1, self.total_steps - warmup)
        if self.kind == "linear":
            return max(0.0, (self.total_steps - step) / length)
        swing = math.cos(math.pi * (step - warmup) / length)
        return max(self.min_ratio, swing * (1 - self.min_ratio) / 2 + (1 + self.min_ratio) / 2)

"""What a caller chooses about a policy: parallel sizes and optimizer; plain records, no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OptimizerSettings", "ParallelSizes", "StepResult"]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the process grid; ``dp * tp * pp`` must equal the world size.

    Raises ValueError for sizes below 1 and for combinations the engine does not run.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel size {name}={getattr(self, name)} must be at least 1")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1; set it to false or raise tp")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam with decoupled weight decay (one-dimensional parameters are not decayed).

    ``gradient_clipping`` bounds the global L2 norm; 0 turns clipping off. Field names follow AReaL's optimizer section.
    """

    type: str = "adam"
    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        if self.type not in ("adam", "adamw"):
            raise ValueError(f"optimizer.type={self.type!r} is not supported; use 'adam' (AdamW)")
        for name in ("lr", "eps", "weight_decay", "gradient_clipping"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must lie in [0, 1)")


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step: ``ok`` is false when the gradient norm was not finite and nothing was changed."""

    ok: bool
    grad_norm: float

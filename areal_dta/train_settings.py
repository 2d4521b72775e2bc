"""Settings of the train engine that AReaL's engine configuration has no key for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_dta.engine import PlanSettings

__all__ = ["EngineSettings"]


@dataclass(frozen=True)
class EngineSettings:
    """What AReaL's engine config has no key for. Rendezvous fields left None come from torchrun's environment."""

    mode: str = "dta"  # tree_training_mode: disabled (one row at a time), sparse, dta
    plan: PlanSettings | None = None
    calibration: Path | None = None  # file of measured block costs, written if it does not hold here; None: estimates
    rank: int | None = None
    world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    timeout_s: float = 600.0  # of every collective
    seed: int = 1
    reuse_forward: bool = True  # part 1 of the first minibatch from the proximal log-probs of the same weights
    fused_loss: bool = False  # AReaL's token-level PPO loss inside the walk where part 1 would be a walk of its own
    loss_positions_only: bool = False  # project hidden states where PPOActor's loss masks ask for it; 0 elsewhere
    run_epoch: int = 0  # of published weight versions
    router: str | None = None
    api_key: str | None = None
    publish_timeout_s: float = 600.0

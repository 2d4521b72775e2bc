"""What the `tlt` section must satisfy beyond its types."""

from __future__ import annotations

from areal_dta.config_schema import PPOConfig, TltConfig
from areal_dta.config_schema_alloc import Allocation
from areal_dta.config_schema_check import ConfigError
from areal_dta.drafter.arms import Arm

__all__ = ["check_tlt"]

_WITH_SGLANG = ("enabled", "drafter", "arms", "max_batch", "max_regret")


def check_tlt(config: PPOConfig, alloc: Allocation) -> None:
    """Raises ConfigError naming the key: settings without effect, or that no server could follow."""
    tlt = config.tlt
    if alloc.backend != "embedded":
        _check_sglang(config)
    _check_arms(tlt)
    if not 0 <= tlt.max_regret < 1:
        raise ConfigError(f"tlt.max_regret={tlt.max_regret} must lie in [0, 1)")
    if not 0 <= tlt.record_share <= 1:
        raise ConfigError(f"tlt.record_share={tlt.record_share} must lie in [0, 1]")
    if tlt.idle_s < 0:
        raise ConfigError(f"tlt.idle_s={tlt.idle_s} must not be negative; 0 trains in every idle moment")
    if tlt.train and not tlt.enabled:
        raise ConfigError("tlt.train=true with tlt.enabled=false: nobody would use the drafter; set one of them")
    if tlt.train and tlt.min_idle_servers > alloc.dp:
        raise ConfigError(
            f"tlt.min_idle_servers={tlt.min_idle_servers} of {alloc.dp} servers can never be idle; lower it"
        )
    if any(core < 0 for core in tlt.cores):
        raise ConfigError(f"tlt.cores={list(tlt.cores)} must be numbers of CPU cores, from 0")
    if tlt.cores and len(tlt.cores) != alloc.dp:
        raise ConfigError(f"tlt.cores={list(tlt.cores)} must name one core for each of {alloc.dp} servers, or be empty")


def _check_sglang(config: PPOConfig) -> None:
    tlt, backend = config.tlt, config.rollout.backend
    for key in (key for key in vars(tlt) if getattr(tlt, key) != getattr(TltConfig(), key)):
        if key not in _WITH_SGLANG:
            raise ConfigError(
                f"tlt.{key} has no effect with rollout.backend={backend}: SGLang takes a drafter (tlt.drafter); its "
                "other speculation is set by sglang.speculative_* flags"
            )
        if key not in ("enabled", "drafter") and tlt.drafter is None:
            raise ConfigError(
                f"tlt.{key} has no effect with rollout.backend={backend} without tlt.drafter: SGLang has no n-gram "
                "drafts from here"
            )
    if tlt.arms and not any(arm.startswith("eagle-") for arm in tlt.arms):
        raise ConfigError(f"tlt.arms={list(tlt.arms)} has no eagle strategy, the only ones that SGLang can run")


def _check_arms(tlt: TltConfig) -> None:
    for arm in tlt.arms:
        try:
            Arm.parse(arm)
        except ValueError as error:
            raise ConfigError(f"tlt.arms: {arm!r}: {error}") from error

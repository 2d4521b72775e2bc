"""Which `batcher` values cannot work together with the rest of a configuration."""

from __future__ import annotations

from areal_dta.config_schema import PPOConfig
from areal_dta.config_schema_check import ConfigError

__all__ = ["check_batcher"]


def check_batcher(config: PPOConfig) -> None:
    """Raise ConfigError for values that could only wait for ever or fail once the run has begun."""
    batcher, num_samples = config.batcher, config.gconfig.n_samples
    smallest = batcher.min_group_size
    if smallest is not None and not 1 <= smallest <= num_samples:
        raise ConfigError(
            f"batcher.min_group_size={smallest} must be 1 to gconfig.n_samples={num_samples}; no group could be used"
        )
    if batcher.filter_equal_rewards and num_samples < 2:
        raise ConfigError(
            f"batcher.filter_equal_rewards=true with gconfig.n_samples={num_samples} would drop every group: one "
            "episode has one reward; raise gconfig.n_samples or set batcher.filter_equal_rewards=false"
        )
    if batcher.cost != "time":
        return
    if config.tree_training_mode != "dta":
        raise ConfigError(
            f"batcher.cost=time needs measured costs, and nothing is measured with tree_training_mode="
            f"{config.tree_training_mode}; set batcher.cost=flops, or tree_training_mode=dta and dta.calibrate=true"
        )
    if not config.dta.calibrate:
        raise ConfigError(
            "batcher.cost=time needs measured costs: set dta.calibrate=true, so that the trainer measures them when it "
            "starts and keeps them in RUN/calibration.json, or batcher.cost=flops"
        )

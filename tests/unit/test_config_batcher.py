"""Values of `batcher`: what AReaL's spelling becomes, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_dta.config import ConfigError, load_config

QUICKSTART = Path(__file__).resolve().parents[2] / "experiments" / "quickstart" / "quickstart.yaml"


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    return str(caught.value)


@pytest.mark.parametrize("switch", [True, False])
def test_areals_dynamic_sampling_switches_the_batchers_filter_and_says_so(switch: bool) -> None:
    config = load_config(QUICKSTART, [f"actor.dynamic_sampling={str(switch).lower()}"])
    assert config.batcher.filter_equal_rewards is switch
    assert "dynamic_sampling" not in config.raw["actor"]
    [notice] = config.notices
    assert f"actor.dynamic_sampling={str(switch).lower()} is called batcher.filter_equal_rewards here" in notice
    assert ("replaced by other prompts" in notice) is switch


def test_dynamic_sampling_that_says_otherwise_than_the_filter_is_refused() -> None:
    message = error_of("actor.dynamic_sampling=true", "batcher.filter_equal_rewards=false")
    assert "actor.dynamic_sampling=true contradicts batcher.filter_equal_rewards=false; keep the latter" in message
    assert "actor.dynamic_sampling=1 must be true or false" in error_of("actor.dynamic_sampling=1")
    both = load_config(QUICKSTART, ["actor.dynamic_sampling=true", "batcher.filter_equal_rewards=true"])
    assert both.batcher.filter_equal_rewards


def test_measured_time_as_cost_needs_a_run_that_measures() -> None:
    assert load_config(QUICKSTART, ["batcher.cost=time", "dta.calibrate=true"]).batcher.cost == "time"
    assert "set dta.calibrate=true" in error_of("batcher.cost=time")
    message = error_of("batcher.cost=time", "dta.calibrate=true", "tree_training_mode=sparse")
    assert "tree_training_mode=sparse" in message and "batcher.cost=flops" in message
    assert "flops, tree_tokens, time" in error_of("batcher.cost=seconds")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("batcher.min_group_size=9 gconfig.n_samples=8", ["batcher.min_group_size=9", "gconfig.n_samples=8"]),
        ("batcher.min_group_size=0", ["batcher.min_group_size=0", "must be 1 to"]),
        (
            "batcher.filter_equal_rewards=true gconfig.n_samples=1",
            ["batcher.filter_equal_rewards=true", "gconfig.n_samples=1", "drop every group"],
        ),
        ("batcher.stale_reissues=-1", ["batcher.stale_reissues=-1", "must not be negative"]),
    ],
)
def test_values_that_could_only_wait_for_ever_are_refused_naming_key_value_and_remedy(overrides, parts) -> None:
    message = error_of(*overrides.split())
    for part in parts:
        assert part in message

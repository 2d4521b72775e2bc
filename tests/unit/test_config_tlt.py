"""The `tlt` section: what is refused, what each key means, and that every key is documented."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from areal_dta.config import ConfigError, load_config
from areal_dta.config_schema import TltConfig
from areal_dta.drafter.arms import DEFAULT_ARMS, Arm

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
GPU_CONFIG = REPO / "experiments" / "tau2" / "qwen3_8b_airline_8gpu.yaml"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("tlt.arms=[eagle-d4-k2]", ["tlt.arms", "'eagle-d4-k2'", "eagle-d4-k2-v7"]),
        ("tlt.arms=[medusa-d4-k2-v7]", ["tlt.arms", "medusa-d4-k2-v7"]),
        ("tlt.arms=[ngram-d7-k1-v3]", ["tlt.arms", "ngram-d7-k1-v3", "1 <= depth <= num_verify"]),
        ("tlt.arms=[ngram-d0-k1-v3]", ["tlt.arms", "1 <= depth"]),
        ("tlt.arms=['off',eagle-d4-k0-v7]", ["tlt.arms", "eagle-d4-k0-v7", "top_k >= 1"]),
        ("tlt.arms=7", ["tlt.arms=7", "list"]),
        ("tlt.max_regret=1", ["tlt.max_regret=1", "[0, 1)"]),
        ("tlt.record_share=1.5", ["tlt.record_share=1.5", "[0, 1]"]),
        ("tlt.learning_rate=0", ["tlt.learning_rate=0", "positive"]),
        ("tlt.idle_s=-1", ["tlt.idle_s=-1", "not be negative"]),
        ("tlt.max_batch=0", ["tlt.max_batch=0", "positive"]),
        ("tlt.publish_steps=0", ["tlt.publish_steps=0", "positive"]),
        ("tlt.buffer_bytes=2Gigs", ["tlt.buffer_bytes='2Gigs'", "2GiB"]),
        ("tlt.kind=medusa", ["tlt.kind=medusa", "eagle, hass, eagle3"]),
        ("tlt.train=true tlt.enabled=false", ["tlt.train=true", "tlt.enabled=false"]),
        ("tlt.train=true tlt.min_idle_servers=2", ["tlt.min_idle_servers=2", "1 servers", "lower it"]),
        ("tlt.cores=[0,1]", ["tlt.cores=[0, 1]", "each of 1 servers"]),
        ("tlt.cores=[-1]", ["tlt.cores=[-1]", "from 0"]),
        ("tlt.drafer=x", ["tlt.drafer", "did you mean tlt.drafter"]),
    ],
)
def test_a_value_that_no_server_could_follow_is_refused_by_name(overrides: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides.split())
    for part in parts:
        assert part in str(caught.value)


def test_with_sglang_only_the_defaults_and_switching_off_are_accepted() -> None:
    assert load_config(GPU_CONFIG, ["tlt.enabled=false"]).tlt.enabled is False
    with pytest.raises(ConfigError, match=r"tlt\.train has no effect.*sglang\.speculative_"):
        load_config(GPU_CONFIG, ["tlt.train=true"])
    with pytest.raises(ConfigError, match=r"tlt\.idle_s has no effect"):
        load_config(GPU_CONFIG, ["tlt.idle_s=1"])


def test_speculation_is_on_and_training_off_unless_asked_for() -> None:
    tlt = load_config(QUICKSTART).tlt
    assert (tlt.enabled, tlt.train, tlt.drafter, tlt.max_batch) == (True, False, None, None)


def test_every_built_in_arm_can_be_written_into_the_file() -> None:
    names = [arm.name for arm in DEFAULT_ARMS]
    quoted = ",".join(f"'{name}'" for name in names)  # YAML reads a bare off as false
    config = load_config(QUICKSTART, [f"tlt.arms=[{quoted}]"])
    assert tuple(Arm.parse(name) for name in config.tlt.arms) == DEFAULT_ARMS


def test_every_key_has_its_row_with_its_default_in_the_documentation() -> None:
    text = (REPO / "docs" / "configuration.md").read_text()
    section = text.partition("## `tlt`\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(?:tlt\.)?(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    assert set(rows) == {f.name for f in fields(TltConfig)}
    for name in ("enabled", "train", "max_regret", "kind", "record_tokens", "idle_s", "min_idle_servers"):
        shown = str(getattr(TltConfig(), name))
        assert rows[name].strip(" `") == (shown.lower() if shown in ("True", "False") else shown.removesuffix(".0"))

"""What a server of a run takes from its configuration, and what its command line refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_dta.config import load_config
from areal_dta.records import LaunchPlan
from areal_dta.rollout.server.__main__ import parse_args, settings_from_run

QUICKSTART = Path(__file__).resolve().parents[2] / "experiments/quickstart/quickstart.yaml"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    overrides = ["rollout.backend=embedded:d2", "embedded.max_prefill_tokens=77", "embedded.max_waiting=555"]
    overrides += ["embedded.while_released=refuse", "embedded.reasoning_parser=qwen3", "embedded.max_batch=5"]
    (tmp_path / "config.yaml").write_text(json.dumps(load_config(QUICKSTART, overrides).raw))
    servers = ("http://127.0.0.1:7001", "http://127.0.0.1:7002")
    plan = LaunchPlan(
        str(tmp_path), 3, "tcp://b", "tcp://m", "http://r", servers, "127.0.0.1", 5, 1, 1, 1, 1, api_key="k"
    )
    plan.write(tmp_path / "launch.json")
    return tmp_path


def test_every_key_of_a_run_reaches_its_server(run_dir: Path):
    settings = settings_from_run(run_dir, 1)
    assert (settings.name, settings.port, settings.initial_version) == ("server.1", 7002, "3:0")
    assert (settings.limits.max_batch, settings.limits.max_prefill_tokens) == (5, 77)
    api = settings.api
    assert (api.api_key, api.max_waiting, api.while_released, api.reasoning) == ("k", 555, "refuse", True)


def test_a_server_that_the_run_does_not_have_is_refused(run_dir: Path):
    with pytest.raises(ValueError, match="--index 2 but .* names 2 servers"):
        settings_from_run(run_dir, 2)


@pytest.mark.parametrize("flag", ["--max-batch", "--max-waiting", "--max-prefill-tokens", "--threads"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_args(["--model", "x", flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err

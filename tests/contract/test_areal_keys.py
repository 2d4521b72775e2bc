"""Our key table and mappings against the installed AReaL. One process imports it for all tests (seconds)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_dta.config import load_config

REPO = Path(__file__).resolve().parents[2]
CONFIGS = [*sorted((REPO / "experiments").glob("*/*.yaml")), *sorted((REPO / "tests/unit/fixtures").glob("*.yaml"))]
PROBE = """
import json, runpy, sys
from omegaconf import OmegaConf
gen = runpy.run_path("scripts/gen_areal_keys")
from areal.api.cli_args import PPOConfig
out = {"table": gen["render"](gen["build"]()), "objects": []}
for mapping in json.load(sys.stdin):
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PPOConfig), OmegaConf.create(mapping)))
    out["objects"].append([merged.actor.path, merged.gconfig.n_samples, merged.actor.eps_clip, merged.saver.fileroot])
print("\\n" + json.dumps(out))
"""


@pytest.fixture(scope="module")
def areal() -> dict[str, Any]:
    mappings = json.dumps([load_config(path).areal_mapping() for path in CONFIGS])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=mappings,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "WANDB_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_key_table_equals_the_installed_areal(areal: dict[str, Any]) -> None:
    assert areal["table"] == (REPO / "areal_dta" / "areal_keys.json").read_text(), "run scripts/gen_areal_keys"


def test_areal_accepts_the_mapping_of_every_config(areal: dict[str, Any]) -> None:
    for path, (actor_path, n_samples, eps_clip, fileroot) in zip(CONFIGS, areal["objects"], strict=True):
        config = load_config(path)
        assert (actor_path, n_samples, eps_clip) == (config.actor.path, config.gconfig.n_samples, config.actor.eps_clip)
        assert fileroot == config.cluster.fileroot

"""Environment and fixtures shared by every test: offline, quiet, one thread, one untrained policy per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    WANDB_MODE="disabled",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def untrained_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy before its warm start: HF folder with tokenizer, random weights."""
    from experiments.tau2.policy import build_policy

    folder = tmp_path_factory.mktemp("policy") / "model"
    build_policy(folder, seed=0)
    return folder

"""The script in docs/tree_engine.md does what the text says: extracted, run in its own process, on a tiny model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.unit.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 30


@pytest.fixture(scope="module")
def script() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/tree_engine.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return blocks[0]


def test_the_script_has_at_most_30_lines_and_does_without_areal(script: str) -> None:
    assert len(script.splitlines()) <= MAX_LINES
    assert "import areal\n" not in script


def test_the_script_trains_and_saves(script: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "sft.py").write_text(script)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ENGINE_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "sft.py", "model", "trained"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "trained"))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)

"""`scripts/setup` with a stand-in for Python, and what the package promises to carry. Nothing is installed."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# Logs what it is asked for; `-m venv` makes a folder whose Python is this script again, with pip.
PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$*" >> "$LOG"
case "$*" in
  *"import pip"*) [ -f "$here/pip" ] ;;
  "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/pip ;;
  "-m pip install"*) [ ! -f .venv/.areal-dta-lock ] && [ -z "${PIP_FAILS:-}" ] ;;
esac
"""


@dataclass
class Clone:
    """As much of a clone as the script needs."""

    path: Path
    python: Path

    @property
    def stamp(self) -> Path:
        return self.path / ".venv" / ".areal-dta-lock"

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(self.python), "LOG": str(self.path / "log"), **env}
        return subprocess.run(
            [self.path / "scripts" / "setup"], env=environment, capture_output=True, text=True, timeout=60
        )

    def asked(self) -> list[str]:
        """What Python was asked for since the last call, shortened."""
        log = self.path / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line[:15] for line in lines if line.startswith("-m")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    path = tmp_path / "clone"
    (path / "scripts").mkdir(parents=True)
    shutil.copy(REPO / "scripts" / "setup", path / "scripts")
    for name in ("requirements.lock", "requirements-dev.lock", "setup.cfg", "pyproject.toml"):
        (path / name).write_text(name)
    python = tmp_path / "python3.11"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return Clone(path, python)


INSTALL = ["-m pip install "] * 2


def test_setup_installs_once_and_again_after_a_change(clone: Clone) -> None:
    assert clone.setup().returncode == 0
    assert clone.asked() == ["-m venv --clear", *INSTALL]
    assert clone.setup().stdout == ""
    assert clone.asked() == []
    (clone.path / "requirements.lock").write_text("more")
    assert clone.setup().returncode == 0
    assert clone.asked() == INSTALL


def test_a_venv_without_pip_is_made_anew(clone: Clone) -> None:
    clone.setup()
    (clone.path / ".venv" / "bin" / "pip").unlink()
    clone.asked()
    assert clone.setup().returncode == 0
    assert clone.asked() == ["-m venv --clear", *INSTALL]


def test_a_failed_installation_leaves_no_stamp(clone: Clone) -> None:
    clone.setup()
    (clone.path / "setup.cfg").write_text("more")
    assert clone.setup(PIP_FAILS="1").returncode != 0
    assert not clone.stamp.exists()
    (clone.path / "setup.cfg").write_text("setup.cfg")
    clone.asked()
    assert clone.setup().returncode == 0
    assert clone.asked() == INSTALL


def test_a_python_that_was_asked_for_and_is_not_there_is_an_error(clone: Clone) -> None:
    answer = clone.setup(PYTHON="/no/such/python3.11")
    assert answer.returncode == 2
    assert "PYTHON=/no/such/python3.11" in answer.stderr
    assert not (clone.path / ".venv").exists()


def test_every_pattern_of_package_data_matches_a_file() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    for package, patterns in setup["options.package_data"].items():
        for pattern in patterns.split(","):
            assert list((REPO / package).glob(pattern.strip())), f"{package}: {pattern}"

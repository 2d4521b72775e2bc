"""Nonsense on the command line: a clear error within seconds, before a run directory or a process exists.

The faults of episodes (bad rewards, exceptions) are counted by worker and batcher and tested there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
LIMIT_S = 20.0
PREPARE_MODULE = """
import json
from pathlib import Path

def tiny(config, run_dir):
    print("writing three prompts", flush=True)
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    with (run_dir / "dataset" / "train.jsonl").open("w") as file:
        for i in range(3):
            file.write(json.dumps({"task_id": str(i)}) + "\\n")

def failing(config, run_dir):
    raise RuntimeError("no tokenizer texts found")

def endless(config, run_dir):
    import signal
    print("waiting", flush=True)
    signal.pause()
"""


@dataclass
class Answer:
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_json(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])


@pytest.fixture
def prepare_path(tmp_path: Path) -> Path:
    (tmp_path / "prepare_stand_ins.py").write_text(PREPARE_MODULE)
    return tmp_path


def command(*arguments: str, python_path: Path | None = None) -> Answer:
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(python_path)} if python_path else None
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *arguments],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def run(run_dir: Path, *overrides: str, python_path: Path | None = None) -> Answer:
    return command("run", str(QUICKSTART), *overrides, "--run-dir", str(run_dir), "--json", python_path=python_path)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.optimzer.lr=1", ["actor.optimzer", "did you mean actor.optimizer"]),
        ("train_dataset.batch_size=-1", ["train_dataset.batch_size=-1", "positive"]),
        ("actor.path=no/such/model", ["actor.path=no/such/model", "does not exist"]),
    ],
    ids=["unknown-key", "negative-batch-size", "missing-model"],
)
def test_wrong_value_is_refused_before_anything_is_created(tmp_path: Path, override: str, parts: list[str]) -> None:
    answer = run(tmp_path / "run", override)
    assert answer.code == 2
    assert answer.seconds < LIMIT_S
    assert answer.last_json["status"] == "failed"
    for part in parts:
        assert part in answer.stderr
        assert part in answer.last_json["cause"]
    assert not (tmp_path / "run").exists()


def test_taken_port_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        answer = run(tmp_path / "run", f"batcher.port={port}")
    assert answer.code == 2
    assert f"batcher.port={port}" in answer.last_json["cause"]
    assert answer.seconds < LIMIT_S
    assert not (tmp_path / "run").exists()


def test_data_set_smaller_than_a_batch_fails_after_prepare(tmp_path: Path, prepare_path: Path) -> None:
    answer = run(tmp_path / "run", "prepare=prepare_stand_ins.tiny", python_path=prepare_path)
    assert answer.code == 1
    assert answer.seconds < LIMIT_S
    assert "3 prompts" in answer.last_json["cause"]
    assert "train_dataset.batch_size=9" in answer.last_json["cause"]
    assert "writing three prompts" in answer.stderr
    assert json.loads((tmp_path / "run" / "state.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "launch.json").exists()


def test_prepare_that_raises_shows_its_error(tmp_path: Path, prepare_path: Path) -> None:
    answer = run(tmp_path / "run", "prepare=prepare_stand_ins.failing", python_path=prepare_path)
    assert answer.code == 1
    assert "no tokenizer texts found" in answer.last_json["cause"]


def test_prepare_that_is_no_function_is_named(tmp_path: Path) -> None:
    answer = run(tmp_path / "run", "prepare=areal_dta.nothing.here")
    assert answer.code == 1
    assert "prepare=areal_dta.nothing.here" in answer.last_json["cause"]


def test_prepare_without_end_is_cut_off(tmp_path: Path, prepare_path: Path) -> None:
    answer = run(
        tmp_path / "run", "prepare=prepare_stand_ins.endless", "runtime.prepare_timeout_s=2", python_path=prepare_path
    )
    assert answer.code == 1
    assert "runtime.prepare_timeout_s=2" in answer.last_json["cause"]
    assert answer.seconds < LIMIT_S


def test_stop_ends_a_run_while_it_prepares(tmp_path: Path, prepare_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "run", str(QUICKSTART), "prepare=prepare_stand_ins.endless",
         "--run-dir", str(run_dir)],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(prepare_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        while running.stdout.readline() not in ("waiting\n", ""):
            pass
        assert json.loads(command("status", str(run_dir), "--json").stdout)["status"] == "preparing"
        refused = command("resume", str(run_dir), "--json")
        assert (refused.code, "is running" in refused.last_json["cause"]) == (2, True)
        stopped = command("stop", str(run_dir))
        assert stopped.code == 0, stopped.stderr
        assert running.wait(timeout=10) == 130
    finally:
        running.kill()
        said = running.communicate(timeout=10)[1]
    assert f"areal-dta resume {run_dir}" in said
    assert json.loads(command("status", str(run_dir), "--json").stdout)["status"] == "stopped"


def test_status_of_a_killed_launcher_is_failed(tmp_path: Path, prepare_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "run", str(QUICKSTART), "prepare=prepare_stand_ins.endless",
         "--run-dir", str(run_dir)],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(prepare_path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    while running.stdout.readline() not in ("waiting\n", ""):
        pass
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=10)
    shown = json.loads(command("status", str(run_dir), "--json").stdout)
    assert shown["status"] == "failed"
    assert "is gone" in shown["cause"]


@pytest.mark.parametrize("name", ["status", "stop", "resume", "report"])
def test_commands_on_no_run_directory_say_so(tmp_path: Path, name: str) -> None:
    answer = command(name, str(tmp_path))
    assert answer.code == 2
    assert "is not a run directory" in answer.stderr


@pytest.mark.parametrize("path", sorted((REPO / "experiments").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_passes_a_dry_run(tmp_path: Path, path: Path) -> None:
    shown = command("run", str(path), "--dry-run", "--json", "--run-dir", str(tmp_path / "run")).last_json
    roles = {row["role"] for row in shown["processes"]}
    assert roles == {"server", "router", "worker", "batcher", "trainer"}
    assert shown["config"]["experiment_name"]
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_processes_ports_values_and_notices() -> None:
    answer = command("run", str(QUICKSTART), "actor.backend=fsdp:d2", "batcher.port=7123", "--dry-run")
    assert answer.code == 0
    for part in ("fsdp:d2 runs on Megatron-core", "trainer.1", "port 7123", "port any free", "lr: 0.0002"):
        assert part in answer.stdout

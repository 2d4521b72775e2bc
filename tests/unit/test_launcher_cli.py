"""What the commands do with damaged run directories and impossible arguments: one `error:` line and exit code 2.

The command runs inside the test, since starting a process for each would take most of the time.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from areal_dta.config import load_config
from areal_dta.metrics import read_metrics
from areal_dta.records import LaunchPlan
from launcher import cli, commands, launch
from launcher import plan as planning
from launcher.launch import Outcome
from launcher.newrun import new_run
from launcher.rundir import RunDir, RunState
from launcher.runlock import RunLock
from launcher.steps import StepTable
from launcher.summary import summarise
from tests.e2e.synthetic_run import write_synthetic_run

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
HEAVY = {"aiohttp", "msgpack", "numpy", "omegaconf", "torch", "yaml", "zmq"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A failed run after one step: the files of a real launch and two ranks' metrics."""
    config = load_config(QUICKSTART)
    _, run = new_run(config, tmp_path / "run", 0.0)
    run.release()
    chosen = planning.planned_ports(config)
    planning.launch_plan(config, run.path, chosen, 0, None).write(run.launch_file)
    run.write_state(RunState("failed", pid=1, step=1, total_steps=30, cause="trainer.1 died"))
    scratch = tmp_path / "scratch"
    write_synthetic_run(scratch, steps=2)
    run.metrics_file.write_bytes((scratch / "metrics.jsonl").read_bytes())
    return run.path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line of a command that must answer with exit code 2."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize("command", ["report", "dashboard"])
def test_a_damaged_config_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (run_dir / "config.yaml").write_text("a: [")
    assert "config.yaml is damaged" in error_of(capsys, command, str(run_dir))


@pytest.mark.parametrize("out", ["file/report.html", "file/deep/report.html", "folder"])
def test_a_report_that_cannot_be_written_is_an_error(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    assert "choose another --out" in error_of(capsys, "report", str(run_dir), "--out", str(tmp_path / out))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("text", ['{"server.0": {"pid"', "[]", ""])
@pytest.mark.parametrize("name", ["processes.json", "launch.json", "state.json"])
def test_status_names_a_torn_file(run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    (run_dir / name).write_text(text)
    assert f"{name} is damaged" in error_of(capsys, "status", str(run_dir))


def test_resume_names_a_damaged_checkpoint_pointer(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints" / "latest.json").write_text('{"step": 4')
    assert "latest.json" in error_of(capsys, "resume", str(run_dir))


def test_a_dashboard_on_a_taken_port_or_for_everyone_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port" in error_of(capsys, "dashboard", str(run_dir), "--port", port)
    assert "runtime.api_key" in error_of(capsys, "dashboard", str(run_dir), "--host", "0.0.0.0", "--port", "0")


@pytest.mark.parametrize("port", ["99999", "-1", "web", "8787.5"])
def test_a_port_that_is_none_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["dashboard", "RUN", f"--port={port}"])
    assert ended.value.code == 2
    assert "65535" in capsys.readouterr().err


def test_the_dashboard_asks_for_the_key_of_its_run(run_dir: Path) -> None:
    config = load_config(run_dir / "config.yaml", ["runtime.api_key=sesame"])
    (run_dir / "config.yaml").write_text(config.to_yaml())
    serving = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "dashboard", str(run_dir), "--host", "0.0.0.0", "--port", "0"],
        cwd=REPO, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        assert "/?key=sesame" in serving.stdout.readline()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(10) == 130
    finally:
        serving.kill()
        serving.communicate(timeout=10)


def test_dry_run_shows_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = REPO / "experiments" / "tau2" / "qwen3_8b_airline_8gpu.yaml"
    for options in ([], ["--json"]):
        assert cli.main(["run", str(gpu), "runtime.api_key=sesame", "--dry-run", *options]) == 0
        said = capsys.readouterr().out
        assert "sesame" not in said and "--api-key" in said and "***" in said


def test_status_and_summary_mean_the_same_by_tokens_per_second(run_dir: Path) -> None:
    plan = LaunchPlan.read(run_dir / "launch.json")
    assert (plan.dp, plan.trainer_world_size) == (2, 2)
    [_, last] = StepTable(read_metrics(run_dir / "metrics.jsonl")).complete(2)
    shown = commands.describe_run(RunDir(run_dir))["metrics"]["tokens_per_s"]
    slowest_s = sum(last.by_source(f"time/{stage}")["trainer.1"] for stage in ("logprob", "advantages", "update"))
    assert shown == pytest.approx(2 * 75_000 / slowest_s)
    assert summarise(run_dir)["tokens_per_s"] == pytest.approx(shown, rel=0.2)  # of both steps


def test_stop_signals_nobody_when_the_holder_is_unknown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(run_dir)
    run.write_state(RunState("running", pid=os.getpid()))  # a number that the state has long outlived
    lock = RunLock(run_dir / "launcher.lock")
    assert lock.acquire()
    try:
        for text in ("", "1 12", f"{os.getpid()} 0"):
            lock.path.write_text(text)
            assert "try again" in error_of(capsys, "stop", str(run_dir))
    finally:
        lock.release()


@pytest.mark.parametrize("total_steps", [0, 30])
def test_a_stopped_run_always_says_how_to_go_on(
    run_dir: Path, capsys: pytest.CaptureFixture[str], total_steps: int
) -> None:
    state = RunState("stopped", 1, total_steps=total_steps, cause="stopped by SIGINT")
    assert commands._finish(Outcome(state, run_dir, {}), sys.stdout, as_json=False) == 130
    assert f"areal-dta resume {run_dir}" in capsys.readouterr().err


def test_a_second_ctrl_c_while_preparing_stops_the_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> int:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal did not interrupt")

    monkeypatch.setattr(launch, "prepare_inputs", interrupted)
    run = RunDir(run_dir)
    outcome = launch.execute(load_config(run.config_file), run, 0, None, io.StringIO(), live=False)
    assert (outcome.exit_code, run.read_state().status) == (130, "stopped")
    assert "second signal" in (run.read_state().cause or "")
    assert not run.is_locked()


def test_ctrl_c_anywhere_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "status", interrupted)
    assert cli.main(["status", "RUN"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_loads_nothing_heavy() -> None:
    """So that it answers at once, on any machine."""
    code = (
        "import json, sys\nfrom launcher.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "launcher" in loaded
    assert not loaded & HEAVY

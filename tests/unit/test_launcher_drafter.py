"""The processes that train the drafter: when they are part of a run, what they are told, and that a run does without.

Supervision is tested with small stand-in processes; the real ones are in tests/e2e.
"""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from pathlib import Path

import pytest

from areal_dta.config import Config, ConfigError, load_config
from areal_dta.drafter.coordinator import CoordinatorSettings
from areal_dta.drafter.worker import settings_from_run
from areal_dta.records import LaunchPlan
from launcher import cli
from launcher import plan as planning
from launcher.drafter_files import write_drafter_settings
from launcher.inputs import precheck
from launcher.supervise import LaunchFailed
from tests.unit.test_launcher_supervise import Bench, bench, is_gone, stand_in

__all__ = ["bench"]

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
TRAINS = ("tlt.train=true", "rollout.backend=embedded:d2", "runtime.api_key=sesame")


def planned(run_dir: Path, *overrides: str) -> tuple[Config, LaunchPlan, list[planning.ProcessSpec]]:
    config = load_config(QUICKSTART, overrides)
    chosen = planning.choose_ports(config)
    plan = planning.launch_plan(config, run_dir, chosen, epoch=0, resume_step=None)
    return config, plan, planning.process_table(config, plan, chosen)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """As a launch leaves it before its processes start."""
    config, plan, _ = planned(tmp_path, *TRAINS, "tlt.cores=[0,1]", "tlt.idle_s=0.5", "tlt.publish_steps=7")
    plan.write(tmp_path / "launch.json")
    write_drafter_settings(config, plan, tmp_path / "drafter")
    return tmp_path


def test_a_coordinator_and_a_worker_for_each_server_come_last_and_have_the_address_in_the_plan() -> None:
    _, plan, table = planned(Path("run"), *TRAINS)
    assert [spec.name for spec in table[-3:]] == ["coordinator", "drafter.0", "drafter.1"]
    assert [spec.role for spec in table[-3:]] == ["coordinator", "drafter", "drafter"]
    assert all(spec.role in planning.OPTIONAL_ROLES and spec.restartable for spec in table[-3:])
    coordinator, _, last = table[-3:]
    assert plan.coordinator == f"tcp://127.0.0.1:{coordinator.port}"
    assert coordinator.argv == (
        *(sys.executable, "-m", "areal_dta.drafter.coordinator", "--settings", "run/drafter/coordinator.json"),
    )
    assert last.argv == (sys.executable, "-m", "areal_dta.drafter.worker", "--run", "run", "--index", "1")
    assert len({spec.port for spec in table if spec.port is not None}) == 5  # servers, batcher, router, coordinator


@pytest.mark.parametrize("overrides", [(), ("tlt.enabled=false",)])
def test_without_training_there_is_no_such_process(overrides: tuple[str, ...]) -> None:
    _, plan, table = planned(Path("run"), *overrides)
    assert plan.coordinator is None
    assert not [spec for spec in table if spec.role in planning.OPTIONAL_ROLES]


def test_the_plan_with_its_coordinator_reads_back_equal(run_dir: Path) -> None:
    plan = LaunchPlan.read(run_dir / "launch.json")
    assert plan.coordinator is not None
    assert plan == LaunchPlan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})


def test_the_processes_understand_what_the_launcher_writes(run_dir: Path) -> None:
    plan = LaunchPlan.read(run_dir / "launch.json")
    raw = json.loads((run_dir / "drafter" / "coordinator.json").read_text())
    coordinator = CoordinatorSettings.from_dict(raw)
    assert (coordinator.address, coordinator.metrics_address) == (plan.coordinator, plan.metrics)
    assert coordinator.servers == {"server.0": plan.servers[0], "server.1": plan.servers[1]}
    assert (coordinator.rules.min_idle, coordinator.rules.idle_s, coordinator.api_key) == (1, 0.5, "sesame")
    worker = settings_from_run(run_dir, 1)
    assert (worker.name, worker.server, worker.coordinator) == ("drafter.1", "server.1", plan.coordinator)
    assert (worker.cores, worker.spot.publish_steps, worker.api_key) == ((1,), 7, "sesame")
    assert worker.buffer == str(run_dir / "drafter" / "buffer.1")


def test_only_the_owner_may_read_what_holds_the_key(run_dir: Path) -> None:
    config, plan, _ = planned(run_dir, *TRAINS)
    for _ in range(2):  # a resumed run writes them again
        write_drafter_settings(config, plan, run_dir / "drafter")
        files = sorted((run_dir / "drafter").glob("*"))
        assert [path.name for path in files] == ["coordinator.json", "worker.json"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert "sesame" not in (run_dir / "drafter" / "worker.json").read_text()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_dry_run_shows_the_processes_but_not_the_key(
    form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(QUICKSTART), *TRAINS, "--dry-run", *form]) == 0
    said = capsys.readouterr().out
    assert "areal_dta.drafter.coordinator" in said and "drafter.1" in said
    assert "sesame" not in said


@pytest.mark.parametrize("key", ["tlt.drafter", "tlt.draft_ids"])
def test_a_drafter_that_is_not_there_is_refused_before_anything_starts(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*/none"):
        precheck(load_config(QUICKSTART, [f"{key}={tmp_path}/none"]))
    there = tmp_path / "there"
    there.mkdir() if key == "tlt.drafter" else there.touch()
    precheck(load_config(QUICKSTART, [f"{key}={there}"]))


def test_a_run_goes_on_without_a_drafter_that_dies_again_and_again(bench: Bench, tmp_path: Path) -> None:
    """The trainer ends once both are given up for good; ends of a stop on purpose are not counted as deaths."""
    log = bench.run.metrics_file
    wait_for_both = f"""
import time
deadline = time.monotonic() + 20
while open({str(log)!r}).read().count("process/given_up") < 2:
    assert time.monotonic() < deadline, "nothing was given up"
    time.sleep(0.05)
"""
    bench.supervisor("runtime.restart_limit=1").run_to_end([
        stand_in("trainer.0", wait_for_both), stand_in("coordinator", "import os; os._exit(7)"),
        stand_in("drafter.0", "raise SystemExit('cannot train: no buffer')"),
    ])  # fmt: skip
    assert sorted(bench.events("process/restart")) == ["coordinator", "drafter.0"]
    assert sorted(bench.events("process/given_up")) == ["coordinator", "drafter.0"]
    said = bench.out.getvalue()
    assert "cannot train: no buffer" in said and "was restarted 1 times already, the run goes on without it" in said
    assert all(is_gone(pid) for pid in bench.pids())


def test_the_drafter_does_not_make_other_processes_optional(bench: Bench) -> None:
    with pytest.raises(LaunchFailed, match=r"batcher exited with code 7.*restart_limit=0"):
        bench.supervisor("runtime.restart_limit=0").run_to_end([
            stand_in("trainer.0", "import signal; signal.pause()"), stand_in("drafter.0", "import os; os._exit(7)"),
            stand_in("batcher", "import os; os._exit(7)"),
        ])  # fmt: skip

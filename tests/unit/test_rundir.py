"""The run directory: its files, its lock, its making. Not covered: file systems without flock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_dta.config import Config, load_config
from launcher.newrun import new_run
from launcher.rundir import RunDir, RunError, RunState
from launcher.runlock import Holder, RunLock

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
HOLD = (
    "import sys; from pathlib import Path; from launcher.rundir import RunDir;"
    "RunDir(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
)


def quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def create(config: Config, where: Path | None, now: float = 0.0) -> tuple[Config, RunDir]:
    """`new_run`, and the lock let go, as after the launcher's end."""
    config, run = new_run(config, where, now)
    run.release()
    return config, run


# ---- making ----


def test_trial_without_a_name_gets_one_and_a_second_run_does_not_overwrite(tmp_path: Path) -> None:
    config, run = create(quickstart(f"cluster.fileroot={tmp_path}"), None)
    assert run.path.parent == tmp_path / "quickstart"
    assert config.trial_name == run.path.name
    assert load_config(run.config_file) == config
    run.write_state(RunState("running", pid=1))
    with pytest.raises(RunError, match="already holds a run"):
        create(config, run.path)


def test_two_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    made = [create(quickstart(f"cluster.fileroot={tmp_path}"), None) for _ in range(3)]
    first = made[0][1].path.name
    assert [run.path.name for _, run in made] == [first, f"{first}-2", f"{first}-3"]
    assert [config.trial_name for config, _ in made] == [first, f"{first}-2", f"{first}-3"]


def test_a_run_directory_is_its_makers_until_it_ends(tmp_path: Path) -> None:
    _, run = new_run(quickstart(), tmp_path / "run", 0.0)
    assert run.is_locked()
    run.acquire()  # as `execute` does
    run.release()
    assert not run.is_locked()


def test_an_empty_folder_is_taken_and_a_full_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    create(quickstart(), tmp_path / "mine")
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.yaml").write_text("a person's")
    with pytest.raises(RunError, match=r"not empty \(it holds config.yaml\).*--run-dir"):
        create(quickstart(), full)
    assert (full / "config.yaml").read_text() == "a person's"
    assert [p.name for p in full.iterdir()] == ["config.yaml"]


def test_a_launcher_killed_before_the_first_state_leaves_a_folder_that_run_takes(tmp_path: Path) -> None:
    create(quickstart("seed=3"), tmp_path / "run")
    config, run = create(quickstart("seed=4"), tmp_path / "run")
    assert load_config(run.config_file).seed == config.seed == 4
    with pytest.raises(RunError, match="not a run directory"):
        run.require()
    (run.path / "dataset" / "train.jsonl").write_text("{}")
    with pytest.raises(RunError, match="it holds dataset"):
        create(quickstart(), tmp_path / "run")


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_file_in_the_place_of_the_folder_is_an_error_that_names_the_option(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RunError, match=r"cannot create .*choose another --run-dir"):
        create(quickstart(), file / below)
    with pytest.raises(RunError, match=r"cannot create .*set cluster\.fileroot"):
        create(quickstart(f"cluster.fileroot={file}"), None)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # a superuser is never refused by the kernel
    with pytest.raises(RunError, match="Permission denied; choose another --run-dir"):
        create(quickstart(), tmp_path / "run")


def test_the_config_of_a_run_is_its_owners_only(tmp_path: Path) -> None:
    _, run = create(quickstart("runtime.api_key=sesame"), tmp_path / "run")
    assert run.config_file.stat().st_mode & 0o077 == 0


# ---- files ----


def test_state_survives_a_round_trip_and_names_the_missing_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(RunError, match="not a run directory"):
        run.require()
    run.write_state(RunState("running", pid=1, step=3, total_steps=9))
    assert (run.read_state().status, run.read_state().step) == ("running", 3)
    assert run.read_state().updated_at > 0


@pytest.mark.parametrize("text", ["", '{"status": "run', "[1]", '{"status": "running"}', "\udcff"])
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.state_file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=r"state\.json is damaged"):
        run.read_state()


def test_latest_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.latest_checkpoint() is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text(json.dumps({"step": 6}))
    assert run.latest_checkpoint() == 6


@pytest.mark.parametrize("text", ["", '{"step": 6', "[6]", '{"step": "6"}', '{"step": true}', "{}"])
def test_a_damaged_checkpoint_pointer_is_named_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text(text)
    with pytest.raises(RunError, match=r"latest\.json.*delete it to resume from the start"):
        RunDir(tmp_path).latest_checkpoint()


# ---- lock ----


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=10)


def test_lock_is_exclusive_between_processes_and_freed_by_death(tmp_path: Path, held: subprocess.Popen[str]) -> None:
    run = RunDir(tmp_path)
    assert run.is_locked()
    with pytest.raises(RunError, match="is running"):
        run.acquire()
    held.kill()
    held.wait(10)
    assert not run.is_locked()
    run.acquire()
    run.release()


def test_the_holder_is_named_and_a_reused_number_is_not_taken_for_it(
    tmp_path: Path, held: subprocess.Popen[str]
) -> None:
    holder = RunDir(tmp_path).lock.holder()
    assert holder is not None
    assert holder.pid == held.pid
    fd = holder.open()
    assert fd is not None
    os.close(fd)
    assert Holder(holder.pid, holder.started - 1).open() is None
    held.kill()
    held.wait(10)
    assert holder.open() is None


def test_nobody_is_named_before_and_after(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "launcher.lock")
    assert lock.holder() is None
    assert lock.acquire()
    lock.release()
    assert lock.holder() is None
    lock.path.write_text("12")
    assert lock.holder() is None


def test_probes_do_not_see_each_other_and_do_not_keep_a_launcher_out(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "launcher.lock")
    lock.acquire()
    lock.release()
    end, seen = threading.Event(), set[bool]()

    def probe() -> None:
        while not end.is_set():
            seen.add(RunLock(lock.path).is_held())

    probes = [threading.Thread(target=probe) for _ in range(3)]
    for thread in probes:
        thread.start()
    try:
        while not seen:
            os.sched_yield()
        for _ in range(50):
            assert not RunLock(lock.path).is_held()
        assert lock.acquire(timeout_s=20.0)
    finally:
        end.set()
        for thread in probes:
            thread.join(10)
    lock.release()

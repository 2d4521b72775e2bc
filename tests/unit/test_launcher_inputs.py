"""What a run needs before its processes start: address, data sets, model. No process is started here."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from areal_dta.config import Config, ConfigError, load_config
from launcher.inputs import precheck, prepare_inputs
from launcher.rundir import RunDir
from launcher.supervise import StopSignal

QUICKSTART = Path(__file__).resolve().parents[2] / "experiments" / "quickstart" / "quickstart.yaml"


def lines(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"task_id": "{path.stem}{i}"}}\n' for i in range(count)))
    return path


def own_agent(tmp_path: Path, *overrides: str) -> Config:
    """A configuration without `prepare`: files of the user's give prompts and model."""
    (tmp_path / "policy").mkdir(exist_ok=True)
    (tmp_path / "policy" / "config.json").write_text("{}")
    train = lines(tmp_path / "mine.jsonl", 9)
    given = ["workflow=my.Agent", "prepare=null", f"actor.path={tmp_path / 'policy'}", f"train_dataset.path={train}"]
    return load_config(QUICKSTART, [*given, *overrides])


def prepared(config: Config, tmp_path: Path) -> tuple[RunDir, int, str]:
    run, out = RunDir(tmp_path / "run"), io.StringIO()
    (run.path / "dataset").mkdir(parents=True)
    items = prepare_inputs(config, run, StopSignal(), out)
    return run, items, out.getvalue()


def test_files_of_both_data_sets_become_the_runs(tmp_path: Path) -> None:
    held_out = lines(tmp_path / "held_out.jsonl", 3)
    config = own_agent(tmp_path, f"valid_dataset.path={held_out}")
    precheck(config)
    run, items, said = prepared(config, tmp_path)
    assert (items, said) == (9, "")
    assert (run.path / "dataset" / "train.jsonl").read_text() == (tmp_path / "mine.jsonl").read_text()
    assert (run.path / "dataset" / "eval.jsonl").read_text() == held_out.read_text()


@pytest.mark.parametrize("empty", [False, True], ids=["no file", "an empty file"])
def test_a_run_without_evaluation_items_says_so_once(tmp_path: Path, empty: bool) -> None:
    overrides = [f"valid_dataset.path={lines(tmp_path / 'none.jsonl', 0)}"] if empty else []
    _, _, said = prepared(own_agent(tmp_path, *overrides), tmp_path)
    assert said.count("no evaluation items") == 1
    assert "valid_dataset.path" in said


def test_missing_data_files_are_refused_with_key_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"valid_dataset\.path='.*nowhere.jsonl' is no file.*give a jsonl file"):
        precheck(own_agent(tmp_path, f"valid_dataset.path={tmp_path}/nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"train_dataset\.path='' is no file"):
        precheck(own_agent(tmp_path, "train_dataset.path="))


def test_paths_may_be_labels_where_prepare_writes_the_data() -> None:
    precheck(load_config(QUICKSTART, ["train_dataset.path=tau2/train", "valid_dataset.path=tau2/test"]))


@pytest.mark.parametrize("host", ["203.0.113.7", "::1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"runtime\.host={host} is no IPv4 address of this machine.*127\.0\.0\.1"):
        precheck(load_config(QUICKSTART, [f"runtime.host='{host}'", "batcher.port=7001"]))

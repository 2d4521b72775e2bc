"""`areal-dta plan`: what it prints about a trace, how rows are read, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from areal_dta.config_schema import DtaConfig
from areal_dta.records import Trajectory, write_trace
from areal_dta.tree.calibration import Calibration
from areal_dta.tree.plan import ChildOrder, PlanKind, PlanSettings
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.timing import TimeModel
from areal_dta.tree.trie import build_trie
from launcher import cli
from launcher.trace_plan import needed_tokens
from launcher.trace_rows import read_rows
from tests.unit.test_launcher_cli import QUICKSTART, error_of

SIZES = ModelSizes(64, 4, 4, 2, 16, 128, 1000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    raw = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def npz(path: Path, rows: list[list[int]], **arrays: Any) -> Path:
    offsets = np.cumsum([0, *map(len, rows)])
    np.savez(path, ids=np.asarray([t for row in rows for t in row], np.int32), offsets=offsets, **arrays)
    return path


def agent_rows(num_episodes: int, seed: int = 0) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Episodes that share a prompt, four turns of 20 tokens each after 30 tokens of observation."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 500, 200).tolist()
    rows = [prompt + rng.integers(500, 999, 200).tolist() for _ in range(num_episodes)]
    turn = np.arange(4 * num_episodes)
    start = 200 + 30 + 50 * (turn % 4)
    return rows, {"turn_traj": turn // 4, "turn_start": start, "turn_end": start + 20}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows, turns = agent_rows(8)
    return npz(tmp_path / "trace.npz", rows, **turns, domain=np.asarray(["air", "shop"] * 4))


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tree_and_every_rank_are_told(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, trace, "--model", model, "--ranks", 2, "--max-block-tokens", 128)
    tree, ranks = report["tree"], report["ranks"]
    assert (tree["episodes"], tree["rows"], tree["leaves"], tree["loss_tokens"]) == (8, 32, 8, 8 * 4 * 20)
    assert tree["tree_tokens"] == 200 + 8 * 200
    assert tree["row_tokens"] == sum(250 + 50 * turn for turn in range(4)) * 8
    assert 1 < tree["flop_limit"] < tree["token_ratio"] + 1
    assert sum(rank["rows"] for rank in ranks) == 32 and len(ranks) == 2
    assert 1 <= report["over_mean"] < 1.5 and report["over_bound"] >= 1
    for rank in ranks:
        assert rank["seconds"] > 0 and rank["peak_bytes"] > 0 and rank["blocks"] > 1
        assert rank["computed_tokens"] <= rank["tree_tokens"]
        assert rank["kept_tokens"] + rank["recomputed_tokens"] >= 128


def test_plans_are_compared_with_every_row_alone(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, trace, "--model", model, "--compare", "--plan", "classic")
    plans = {name: ranks[0] for name, ranks in report["comparison"].items()}
    assert list(plans) == ["classic", "auto", "sparse", "dense", "rows alone"]
    assert plans["rows alone"]["computed_tokens"] == report["tree"]["row_tokens"] - 32  # no row's last token predicts
    assert plans["dense"]["computed_tokens"] == 8 * 399
    assert plans["auto"]["seconds"] < plans["rows alone"]["seconds"] > plans["dense"]["seconds"]


def test_text_names_every_figure(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(trace), "--model", str(model), "--ranks", "2", "--compare"]) == 0
    said = capsys.readouterr().out
    for part in ("32 rows of 8 episodes", "tree tokens", "FLOP limit", "segments", "8 leaves", "recomputed", "peak",
                 "heaviest rank: ", "lower bound", "classic", "sparse", "rows alone", "estimated"):  # fmt: skip
        assert part in said


def test_without_a_model_only_tokens_are_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, trace)
    assert report["tree"]["flop_limit"] is None and report["ranks"][0]["seconds"] is None
    assert "--model" in report["basis"]


def test_measured_costs_are_used_and_said(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = TimeModel((10.0, 0, 0, 0, 0, 0), (10.0, 0, 0, 0, 0, 0), (0, 0), (0, 0), measured=True)
    file = tmp_path / "calibration.json"
    Calibration({"device": "toaster", "dtype": "float32"}, slow, SIZES.memory("float32"), {}).write(file)
    report = planned(capsys, trace, "--calibration", file)
    assert report["ranks"][0]["seconds"] >= 20 * report["ranks"][0]["blocks"] and "toaster" in report["basis"]
    assert "remove one" in error_of(capsys, "plan", str(trace), "--calibration", str(file), "--tp", "2")


def test_a_tighter_budget_recomputes_more(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (trace, "--model", model, "--max-block-tokens", 64)
    free = planned(capsys, *options, "--activation-budget", "1GiB")["ranks"][0]
    tight = planned(capsys, *options, "--activation-budget", "10MiB")["ranks"][0]
    assert free["recomputed_tokens"] == 0 < tight["recomputed_tokens"]
    assert tight["peak_bytes"] < free["peak_bytes"]
    assert "too small" in error_of(capsys, "plan", *map(str, options), "--activation-budget", "1KiB")


def test_kinds_beyond_the_budget_are_named_in_the_comparison(
    trace: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (trace, "--model", model, "--max-block-tokens", 64, "--activation-budget", "11MiB", "--compare")
    report = planned(capsys, *options)
    assert [name for name, ranks in report["comparison"].items() if ranks is None] == ["sparse"]
    assert "exceeds dta.activation_budget" in report["over_budget"]["sparse"]
    assert cli.main(["plan", *map(str, options)]) == 0
    said = capsys.readouterr().out
    assert "sparse: exceeds the budget" in said and "rows alone" in said


def test_pipeline_stages_have_peaks_of_their_own(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (trace, "--model", model, "--max-block-tokens", 64, "--activation-budget", "1GiB")
    whole = planned(capsys, *options)["ranks"][0]
    staged = planned(capsys, *options, "--pp", 2)["ranks"][0]
    assert whole["stage_peak_bytes"] == [whole["peak_bytes"]]
    first, last = staged["stage_peak_bytes"]
    assert last < first == staged["peak_bytes"] < whole["peak_bytes"]
    assert whole["seconds"] / 2 < staged["seconds"] < whole["seconds"]
    assert cli.main(["plan", *map(str, options), "--pp", "2"]) == 0
    assert "peak of 2 stages" in capsys.readouterr().out


def test_plans_of_any_settings_can_be_shown(trace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (trace, "--model", model, "--plan", "classic")
    cut, whole = planned(capsys, *options), planned(capsys, *options, "--no-cut-tail", "--order", "heavy_first")
    assert cut["ranks"][0]["recomputed_tokens"] < whole["ranks"][0]["recomputed_tokens"]
    assert (whole["settings"]["order"], whole["settings"]["cut_tail"]) == ("heavy_first", False)
    rows = planned(capsys, trace, "--model", model, "--plan", "dense", "--no-leaf-merge", "--compare")
    assert list(rows["comparison"]) == ["rows alone", "auto", "classic", "sparse", "dense"]
    assert cli.main(["plan", *map(str, options), "--no-cut-tail"]) == 0
    assert "plan classic (cut_tail=False)" in capsys.readouterr().out
    assert "needs dta.plan=classic" in error_of(capsys, "plan", str(trace), "--no-cut-tail")


def calibration(file: Path, **memory: Any) -> Path:
    time_model = TimeModel((1e-3, 1e-6, 0, 0, 0, 0), (1e-3, 1e-6, 0, 0, 0, 0), (0, 0), (0, 0), measured=True)
    measured = Calibration(
        {"parallel": "dp 1 tp 1 pp 2 sequence_parallel False"}, time_model, SIZES.memory("float32"),
        {"largest_block": 64.0},
    ).to_dict()  # fmt: skip
    measured["memory"] |= memory
    file.write_text(json.dumps(measured))
    return file


def test_a_calibration_has_its_run_s_stages_and_tells_what_is_extrapolated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (trace, "--calibration", calibration(tmp_path / "costs.json"))
    report = planned(capsys, *options, "--max-block-tokens", 128)
    assert len(report["ranks"][0]["stage_peak_bytes"]) == 2 and report["notes"] == []
    notes = planned(capsys, *options, "--max-block-tokens", 128, "--compare")["notes"]
    assert any(note.startswith("plan sparse: blocks of 1,7") and "up to 64" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_per_working_token", 0),
        ("bytes_per_working_token", "abc"),
        ("bytes_per_kept_token", float("inf")),
        ("bytes_per_kept_token", float("nan")),
        ("bytes_fixed", -5),
        ("bytes_fixed", True),
    ],
)
def test_a_calibration_of_impossible_bytes_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    file = calibration(tmp_path / "costs.json", **{name: value})
    said = error_of(capsys, "plan", str(trace), "--calibration", str(file))
    assert f"{file}: memory.{name} is {value!r}" in said and "dta.calibrate=true" in said


def test_a_foreign_file_is_no_calibration_and_stays(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("[1, 2]", "{}", "no json", '{"format": 7}'):
        (tmp_path / "mine.json").write_text(text)
        said = error_of(capsys, "plan", str(trace), "--calibration", str(tmp_path / "mine.json"))
        assert "mine.json" in said and "remove" not in said and "dta.calibrate=true" in said
    said = error_of(capsys, "plan", str(trace), "--calibration", str(tmp_path / "none.json"))
    assert "does not exist" in said and "dta.calibrate=true" in said


class TestRows:
    def test_turns_are_rows_that_end_with_their_turn(self, trace: Path) -> None:
        rows = read_rows(trace)
        assert rows.loss_T is not None
        assert np.diff(rows.offsets_S1)[:5].tolist() == [250, 300, 350, 400, 250]
        assert rows.loss_T[:250].nonzero()[0].tolist() == list(range(230, 250))

    def test_episodes_are_taken_as_they_are(self, trace: Path) -> None:
        rows = read_rows(trace, "episodes")
        assert rows.num_rows == 8 and rows.loss_T is None

    def test_conditions_select_episodes(self, trace: Path) -> None:
        assert read_rows(trace, "episodes", ["domain=air"]).num_rows == 4
        assert read_rows(trace, "turns", ["domain=shop"]).num_rows == 16

    def test_a_plain_file_of_ids_and_offsets_will_do(self, tmp_path: Path) -> None:
        rows = read_rows(npz(tmp_path / "plain.npz", [[1, 2, 3], [1, 2]]))
        assert rows.num_rows == 2 and rows.loss_T is None

    def test_needed_positions_predict_a_token_with_loss(self, trace: Path) -> None:
        rows = read_rows(trace)
        trie = build_trie(rows.ids_T, rows.offsets_S1)
        need_U = needed_tokens(rows, trie)
        assert need_U is not None and need_U.sum() == 8 * 4 * 20
        assert set(trie.depth_U[need_U].tolist()) == {p for t in range(4) for p in range(229 + 50 * t, 249 + 50 * t)}

    def test_a_written_trace_reads_back_as_the_rows_that_were_trained(self, tmp_path: Path) -> None:
        first, second = [5, 6, 7, 8], [5, 6, 7, 8, 9, 1, 2]
        ids = np.asarray(first + second, np.int32)
        mask = np.asarray([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1], np.uint8)
        episode = Trajectory(
            lease_id="a", group_id=0, sample=0, task_id="t", reward=1.0, input_ids_T=ids,
            offsets_S1=np.asarray([0, 4, 11]), loss_mask_T=mask, logprobs_T=np.zeros(11, np.float32),
            versions_T=np.where(mask, 0, -1).astype(np.int32), rewards_S=np.ones(2, np.float32),
        )  # fmt: skip
        write_trace(tmp_path / "trace.npz", [episode], "mock", 0)
        rows = read_rows(tmp_path / "trace.npz")
        assert rows.ids_T.tolist() == ids.tolist() and rows.offsets_S1.tolist() == [0, 4, 11]
        assert rows.loss_T is not None and rows.loss_T.tolist() == mask.astype(bool).tolist()


class TestRefused:
    def test_files_that_are_no_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        assert "neither a trace (.npz) nor a configuration (.yaml)" in error_of(
            capsys, "plan", str(tmp_path / "notes.txt")
        )
        (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 and no more")
        assert "not a readable npz file" in error_of(capsys, "plan", str(tmp_path / "torn.npz"))
        assert "does not exist" in error_of(capsys, "plan", str(tmp_path / "none.npz"))
        (tmp_path / "junk.npz").write_bytes(b"neither a zip nor an array")
        said = error_of(capsys, "plan", str(tmp_path / "junk.npz"))
        assert "not a readable npz file" in said and "pickle" not in said

    def test_files_whose_members_are_no_arrays(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "odd.npz"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("ids", b"12")
            archive.writestr("offsets", b"02")
        assert "no array 'ids'" in error_of(capsys, "plan", str(file))
        with file.open("wb") as raw:
            np.save(raw, np.arange(3))
        assert "not a readable npz file: it is one array" in error_of(capsys, "plan", str(file))
        np.savez(file, ids=np.asarray([{}], object), offsets=np.asarray([0, 1]))
        said = error_of(capsys, "plan", str(file))
        assert "array 'ids' cannot be read: it holds Python objects" in said and "allow_pickle" not in said

    def test_fields_without_episodes_are_not_offered(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = npz(tmp_path / "scalar.npz", [[1, 2], [3]], step=np.asarray(4), mood=np.asarray([1, 2]))
        assert "give field=value; the fields are mood" in error_of(capsys, "plan", str(file), "--where", "foo")
        assert "it has mood" in error_of(capsys, "plan", str(file), "--where", "step=4")

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("start", [[float("nan")], [[0]]])
    def test_turns_that_are_no_flat_integers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: list[Any]
    ) -> None:
        file = npz(tmp_path / "turns.npz", [[1, 2]], turn_traj=[0], turn_start=start, turn_end=[1])
        assert f"{file}: turn_start must be a flat integer array" in error_of(capsys, "plan", str(file))

    @pytest.mark.parametrize(
        ("arrays", "part"),
        [
            ({"ids": [1, 2]}, "no array 'offsets'"),
            ({"ids": [1, 2], "offsets": [0, 3]}, "offsets must rise from 0 to 2"),
            ({"ids": [1, 2], "offsets": [0, 1, 1, 2]}, "offsets must rise"),
            ({"ids": [1.5, 2], "offsets": [0, 2]}, "integer"),
            ({"ids": [1, -2], "offsets": [0, 2]}, "negative token id -2"),
            ({"ids": [1, 1 << 40], "offsets": [0, 2]}, "bad.npz: token id 1099511627776 is above 2147483647"),
            ({"ids": [1, 2], "offsets": [0, 2], "turn_traj": [1], "turn_start": [0], "turn_end": [1]}, "outside its"),
            ({"ids": [1, 2], "offsets": [0, 2], "turn_traj": [0], "turn_start": [0], "turn_end": [9]}, "outside its"),
            ({"ids": [1, 2], "offsets": [0, 2], "turn_traj": [0], "turn_start": [1], "turn_end": [1]}, "no turn"),
        ],
    )
    def test_arrays_that_do_not_fit(
        self, tmp_path: Path, arrays: dict[str, list[int]], part: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        np.savez(tmp_path / "bad.npz", **{name: np.asarray(values) for name, values in arrays.items()})
        assert part in error_of(capsys, "plan", str(tmp_path / "bad.npz"))

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            (["--where", "domain=sea"], "no episode has domain=sea"),
            (["--where", "colour=red"], "it has domain"),
            (["--partition", "halves"], "unknown partition 'halves'"),
            (["--activation-budget", "lots"], "--activation-budget='lots'"),
            (["--model", "/nowhere"], "/nowhere/config.json cannot be read"),
            (["--calibration", "/nowhere.json"], "--calibration /nowhere.json"),
            (["--activation-budget", "1GiB"], "add --model FOLDER or --calibration FILE"),
            (["--tp", "2"], "--tp is for estimates; add --model FOLDER"),
            (["seed=3"], "key=value is for configurations"),
        ],
    )
    def test_options_that_do_not_fit(
        self, trace: Path, options: list[str], part: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert part in error_of(capsys, "plan", str(trace), *options)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--tp", "4"], "--tp 4 does not divide the model's 2 key/value heads"),
        (["--pp", "3"], "--pp 3 does not divide the model's 4 layers"),
    ],
)
def test_parallel_sizes_that_do_not_divide_the_model_are_refused(
    trace: Path, model: Path, options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in error_of(capsys, "plan", str(trace), "--model", str(model), *options)


def test_a_configuration_is_shown_as_a_dry_run_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(QUICKSTART), "trial_name=x", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert cli.main(["run", str(QUICKSTART), "trial_name=x", "--dry-run", "--json"]) == 0
    assert shown == json.loads(capsys.readouterr().out)
    assert "--ranks is for traces" in error_of(capsys, "plan", str(QUICKSTART), "--ranks", "2")


def test_planning_loads_neither_torch_nor_areal(trace: Path, model: Path) -> None:
    code = (
        "import sys; from launcher.cli import main; assert main(sys.argv[1:]) == 0;"
        "bad = {'torch', 'areal', 'megatron', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    arguments = ["plan", str(trace), "--model", str(model), "--compare"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_spellings_of_plans_are_the_planners() -> None:
    """They are repeated where numpy must not be loaded."""
    keys = get_type_hints(DtaConfig)
    assert get_args(PlanKind) == cli.PLANS and set(get_args(keys["plan"])) == set(get_args(PlanKind))
    assert get_args(keys["order"]) == get_args(ChildOrder) == cli.ORDERS
    defaults = PlanSettings()
    assert all(
        getattr(DtaConfig(), f.name) == getattr(defaults, f.name) for f in fields(PlanSettings) if f.name != "kind"
    )

"""The row sets of `scripts/bench.py`: sizes, sharing, loss positions, recorded turns; and the tree benchmark as a
command, on four short rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.tree.trie import build_trie, sort_rows
from scripts.benchlib import partition, tree, workloads
from scripts.benchlib.report import UsageError
from scripts.benchlib.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]


def tree_tokens(workload: Workload) -> int:
    return sort_rows(workload.ids_T, workload.offsets_S1).tree_tokens


def rows_of(workload: Workload) -> list[list[int]]:
    return [workload.ids_T[lo:hi].tolist() for lo, hi in itertools.pairwise(workload.offsets_S1.tolist())]


def loss_targets(workload: Workload, row: int) -> list[int]:
    """Tokens of a row that the loss falls on."""
    lo, hi = workload.offsets_S1[row : row + 2]
    return (np.flatnonzero(workload.loss_T[lo:hi]) + 1).tolist()


def test_grpo_is_32_rows_of_768_tokens_that_share_80_percent() -> None:
    workload = workloads.grpo(seed=3)
    assert (workload.num_rows, workload.num_tokens) == (32, 24_576)
    assert tree_tokens(workload) == 614 + 32 * 154
    assert loss_targets(workload, 5) == list(range(614, 768))


def test_grpo_with_branches_has_two_levels() -> None:
    workload = workloads.grpo(num_rows=8, length=100, shared=0.5, branches=2)
    assert tree_tokens(workload) == 50 + 2 * 25 + 8 * 25
    with pytest.raises(UsageError, match="branches=9, rows=8"):
        workloads.grpo(num_rows=8, branches=9)


def test_turns_are_rows_whose_thinking_is_gone_from_later_ones() -> None:
    workload = workloads.turns(seed=1)
    rows = rows_of(workload)
    assert workload.num_rows == 4 * 3 * 5
    assert len({tuple(row[:400]) for row in rows}) == 1
    for first in range(0, 60, 5):
        for turn in range(4):
            this, following = rows[first + turn], rows[first + turn + 1]
            spoken = loss_targets(workload, first + turn)
            assert spoken[-1] == len(this) - 1
            assert 50 <= len(spoken) <= 210
            shared = next(i for i, (a, b) in enumerate(zip(this, following)) if a != b)
            assert shared == spoken[0]
            answer_len = next(n for n in range(20, 61) if this[-n:] == following[shared : shared + n])
            assert 30 <= len(spoken) - answer_len <= 150
            user_len = loss_targets(workload, first + turn + 1)[0] - shared - answer_len
            assert 20 <= user_len <= 60


def test_samples_of_a_task_share_its_question_and_tasks_only_the_system_prompt() -> None:
    workload = workloads.turns(seed=2)
    trie = build_trie(workload.ids_T, workload.offsets_S1)
    prompts = [trie.path(row)[: loss_targets(workload, row)[0]] for row in range(0, 60, 5)]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert {int(np.intersect1d(prompts[0], prompts[3]).size)} == {400}


def test_scale_multiplies_lengths() -> None:
    small, large = workloads.turns(seed=4), workloads.turns(seed=4, scale=2.0)
    assert small.num_rows == large.num_rows
    assert 1.9 < large.num_tokens / small.num_tokens < 2.1


def test_same_seed_same_rows() -> None:
    for make in (workloads.grpo, workloads.turns):
        first, again, other = make(seed=7), make(seed=7), make(seed=8)
        assert np.array_equal(first.ids_T, again.ids_T)
        assert not np.array_equal(first.ids_T, other.ids_T[: len(first.ids_T)])


def test_last_positions_predict_nothing_and_carry_no_loss() -> None:
    for workload in (workloads.grpo(), workloads.turns()):
        last = workload.offsets_S1[1:] - 1
        assert not workload.predicting_T[last].any()
        assert not workload.loss_T[last].any()
        assert workload.predicting_T.sum() == workload.num_tokens - workload.num_rows


def test_a_share_of_the_rows_keeps_the_spread_of_lengths_and_the_longest() -> None:
    lens = np.asarray([5, 1, 9, 3, 7, 2, 8, 4, 6, 10])
    assert lens[workloads.spread_over_lengths(lens, 0.5)].tolist() == [2, 8, 4, 6, 10]
    assert lens[workloads.spread_over_lengths(lens, 0.01)].tolist() == [10]
    assert workloads.spread_over_lengths(lens, 1.0).tolist() == list(range(10))


def test_a_subset_keeps_ids_and_loss_of_its_rows() -> None:
    workload = workloads.turns(seed=5)
    part = workload.subset(np.asarray([3, 17]))
    assert rows_of(part) == [rows_of(workload)[3], rows_of(workload)[17]]
    assert loss_targets(part, 1) == loss_targets(workload, 17)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Three trajectories of two sets; ids are 10 apart, turns end at 4 and at the trajectory's end."""
    lens, ids, spans = [8, 9, 6], [], []
    for trajectory, length in enumerate(lens):
        ids += [10 * (t if t < 3 else t + 20 * trajectory) for t in range(length)]
        spans += [(trajectory, 3, 4), (trajectory, 5, length)]
    traj, start, end = np.asarray(spans).T
    file = tmp_path / "trace.npz"
    np.savez(
        file,
        ids=np.asarray(ids, np.int32),
        offsets=np.cumsum([0, *lens]),
        turn_traj=traj,
        turn_start=start,
        turn_end=end,
        set=np.asarray(["air/a", "air/b", "rail/a"]),
        task_id=np.asarray(["1", "0", "0"]),
    )
    return file


def test_a_trace_gives_one_row_per_turn_with_dense_ids(trace_file: Path) -> None:
    workload = workloads.trace(trace_file, "air", 2, max_len=100)
    assert workload.lens_S.tolist() == [4, 8, 4, 9]
    assert sorted(set(workload.ids_T.tolist())) == list(range(int(workload.ids_T.max()) + 1))
    assert loss_targets(workload, 0) == [3]
    assert loss_targets(workload, 3) == [5, 6, 7, 8]
    assert workload.vocab_size == workloads.MODEL_VOCAB
    assert "vocabulary" not in workload.notes
    assert tree_tokens(workload) == 8 + 6


def test_turns_beyond_the_limit_are_dropped_not_cut(trace_file: Path) -> None:
    workload = workloads.trace(trace_file, "air", 2, max_len=8)
    assert workload.lens_S.tolist() == [4, 8, 4]
    assert workload.notes["dropped_turns"] == 1
    with pytest.raises(UsageError, match="longer than --max-len 3"):
        workloads.trace(trace_file, "air", 2, max_len=3)


def test_more_ids_than_the_vocabulary_enlarge_it_and_say_so(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MODEL_VOCAB", 5)
    workload = workloads.trace(trace_file, "air/a", 1, max_len=100)
    assert workload.vocab_size == 8
    assert workload.notes["vocabulary"] == "enlarged from 5 to the 8 distinct ids of the trace"


def test_a_trace_that_cannot_give_what_is_asked_is_refused(trace_file: Path) -> None:
    with pytest.raises(UsageError, match=r"no set 'sea'; it has air/a, air/b, rail/a"):
        workloads.trace(trace_file, "sea", 1, 100)
    with pytest.raises(UsageError, match="has 2 trajectories at 8 per task, 3 were asked for"):
        workloads.trace(trace_file, "air", 3, 100)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    tree.add_arguments(parser)
    return parser.parse_args(words)


def test_unusable_arguments_are_refused_before_torch_is_loaded() -> None:
    for words, message in (
        (("--workload", "trace"), "needs --trace FILE and --set NAME"),
        (("--dense-share", "0"), "--dense-share 0.0"),
        (("--repeats", "0"), "--repeats 0"),
        (("--max-block-tokens", "0"), "--max-block-tokens 0"),
        (("--activation-budget", "-1"), "--activation-budget -1"),
        (("--seed", "-1"), "--seed -1"),
        (("--workload", "trace", "--set", "a", "--trace", "/nowhere.npz"), "--trace /nowhere.npz is no file"),
    ):
        with pytest.raises(UsageError, match=message):
            tree.run(arguments(*words))
    with pytest.raises(argparse.ArgumentError, match="unknown mode 'fast'"):
        arguments("--modes", "auto,fast")
    for name in ("--scale-turns", "--shared", "--dense-share"):
        with pytest.raises(argparse.ArgumentError, match="'nan' is no finite number"):
            arguments(name, "nan")
    for text in ("0,5", "big", ""):
        with pytest.raises(argparse.ArgumentError, match="is no list of whole numbers above 0"):
            arguments("--scaling", text)


def test_modes_are_sorted_and_default_to_all() -> None:
    assert arguments("--modes", "auto,dense").modes == ("dense", "auto")
    assert arguments().modes == tree.MODES


def bench(*words: str) -> tuple[dict[str, Any], str]:
    """(JSON object, progress) of `bench.py tree` with one repeat."""
    command = [sys.executable, ROOT / "scripts/bench.py", "tree", *words, "--repeats", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_tree_benchmark_prints_one_json_object_with_every_mode() -> None:
    result, progress = bench("--workload", "grpo", "--rows", "4", "--length", "48")
    assert (result["workload"], result["tokens"], result["tree_tokens"]) == ("grpo", 192, 38 + 4 * 10)
    assert result["ratio"] == pytest.approx(192 / 78)
    assert result["flop_limit"] == pytest.approx(result["ratio"], rel=0.05)
    assert list(result["modes"]) == list(tree.MODES)
    for mode in result["modes"].values():
        assert mode["grad_rel_err"] < 1e-5
        assert mode["peak_mb"] > 1
        assert mode["efficiency"] == pytest.approx(mode["speedup"] / result["flop_limit"])
        assert mode["tokens_per_s"] == pytest.approx(192 / mode["median_s"])
    assert result["modes"]["dense"]["median_s"] == min(result["dense_loop_s"], result["dense_packed_s"])
    assert [result["modes"][mode]["recomputed_tokens"] for mode in ("dense_ckpt", "leaf", "auto")] == [192, 0, 0]
    assert "dense_loop: repeat 1 of 1" in progress


def test_dense_modes_on_a_share_of_the_rows_are_scaled_by_their_flop() -> None:
    words = ("--scale-turns", "0.05", "--modes", "dense,auto", "--dense-share", "0.5", "--loss", "spans")
    result, _ = bench("--workload", "turns", *words, "--memory", "off")
    assert (result["dense_share"], result["dense_share_rows"], result["rows"]) == (0.5, 30, 60)
    assert list(result["modes"]) == ["dense", "auto"]
    dense, auto = result["modes"]["dense"], result["modes"]["auto"]
    assert 1.5 < dense["median_s"] / dense["measured_s"][0] < 2
    assert auto["median_s"] == auto["measured_s"][0]
    assert dense["peak_mb"] is None
    assert max(dense["grad_rel_err"], auto["grad_rel_err"]) < 1e-5


def test_scaling_reports_time_per_tree_token_and_the_share_of_planning() -> None:
    result, _ = bench("--scaling", "300,900", "--scale-turns", "0.05", "--memory", "off")
    small, large = result["scaling"]
    assert large["tree_tokens"] > 1.5 * small["tree_tokens"]
    for point in (small, large):
        assert point["us_per_tree_token"] == pytest.approx(1e6 * point["median_s"] / point["tree_tokens"])
        assert 0 < point["plan_share"] < 1


def test_help_names_the_commands_without_loading_them() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench.py", "--help"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0
    assert "tree" in done.stdout


def test_a_budget_below_one_block_ends_with_one_line() -> None:
    words = ("--workload", "grpo", "--rows", "4", "--length", "48", "--modes", "auto", "--activation-budget", "1")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench.py", "tree", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("bench.py tree: --activation-budget 1: dta.activation_budget=1")


def test_a_file_that_is_no_trace_is_refused_without_advice_to_load_it_unsafely(tmp_path: Path) -> None:
    (tmp_path / "junk.npz").write_bytes(b"no arrays here")
    with pytest.raises(UsageError, match=r"junk.npz is not a readable npz file: its format is another"):
        workloads.trace(tmp_path / "junk.npz", "a", 1, 10)
    with pytest.raises(UsageError, match=r"junk.npz is not a readable npz file: its format is another"):
        partition.recorded(tmp_path / "junk.npz", None, 1, 10, per_turn=True)


def test_unusable_arguments_end_with_one_line_and_status_2() -> None:
    command = [sys.executable, ROOT / "scripts/bench.py", "tree", "--workload", "trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["bench.py tree: --workload trace needs --trace FILE and --set NAME"]

"""`scripts/bench.py partition` on batches of a few rows. Not covered: that the large batches meet their limits of time
and memory.
"""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from areal_dta.tree.partition import METHODS
from areal_dta.tree.trie import sort_rows
from scripts.benchlib import partition as bench
from scripts.benchlib.report import UsageError


def run(*argv):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(argv))


@pytest.fixture
def trace(tmp_path):
    """Three trajectories of 6, 9 and 40 tokens in sets a/x, a/y and b, two turns each."""
    lens = [6, 9, 40]
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        ids=np.arange(sum(lens), dtype=np.int32) % 7,
        offsets=np.cumsum([0, *lens]),
        turn_traj=np.repeat(np.arange(3), 2),
        turn_start=np.tile([1, 4], 3),
        turn_end=np.tile([3, 6], 3),
        set=np.asarray(["a/x", "a/y", "b"]),
        task_id=np.asarray(["0", "0", "1"]),
    )
    return str(path)


def test_a_synthetic_batch_shares_what_was_asked_for():
    batch = bench.synthetic(64, 100, 0.8, seed=1)
    rows = sort_rows(batch.ids_T, batch.offsets_S1)
    assert (rows.num_rows, rows.row_tokens) == (64, 6400)
    assert rows.tree_tokens == pytest.approx(20 + 4 * 60 + 64 * 20, abs=5)
    with pytest.raises(UsageError, match="100% shared"):
        bench.synthetic(4, 10, 1.0, seed=0)


@pytest.mark.parametrize("cost", ["flops", "tokens"])
def test_every_method_is_reported_for_every_number_of_ranks(cost):
    report = run("--sequences", "48", "--length", "50", "--ranks", "2,3", "--cost", cost)
    assert set(report["ranks"]) == {"2", "3"}
    assert (report["rows"], report["leaves"]) == (48, 48) and report["sort_s"] > 0 and report["peak_mb"] > 1
    for by_method in report["ranks"].values():
        assert set(by_method) == set(METHODS)
        values = {name: row["max_over_bound"] for name, row in by_method.items()}
        assert min(values.values()) == values["refined"] >= 1
        assert all(row["duplicated_tokens"] > 0 and row["seconds"] > 0 for row in by_method.values())


def test_a_trace_gives_turns_or_whole_trajectories_of_one_set(trace):
    options = ("--trace", trace, "--trajectories", "2", "--ranks", "2")
    turns = run(*options, "--set", "a", "--per-turn")
    assert (turns["rows"], turns["row_tokens"]) == (4, 2 * (3 + 6))
    whole = run(*options, "--set", "a", "--whole", "--max-len", "9")
    assert (whole["rows"], whole["row_tokens"]) == (2, 15)
    with pytest.raises(UsageError, match="set 'b' has 1 trajectories of at most 32768 tokens at 8 per task, 2 were"):
        run(*options, "--set", "b")
    with pytest.raises(UsageError, match="is no file; give an npz"):
        run("--trace", f"{trace}.txt")

"""`bench.py tail`: its lengths, clocks and sums, and one small step through real servers.

Not covered: its speeds, which mean nothing at this size, and training beside decoding.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import TunerSettings
from areal_dta.metrics import MetricRecord
from areal_dta.nn.loading import read_tensors
from scripts.benchlib import tail
from scripts.benchlib.report import UsageError
from scripts.benchlib.tail_load import (
    Answer,
    Ask,
    idle_spans,
    make_step,
    overlap_s,
    score_gap,
    tail_lengths,
    training_spans,
)
from scripts.benchlib.tail_model import TailModel, named_tensors
from scripts.benchlib.tail_play import Outputs, Turn
from scripts.benchlib.tail_result import summary
from scripts.benchlib.tail_server import FixedTuner, TailServer
from tests.unit.spot_samples import load_target, write_target

LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 1024}


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tail.add_arguments(parser)
    return parser.parse_args(given)


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    some, others = (tail_lengths(64, 50, 16, np.random.default_rng(seed)) for seed in (0, 1))
    assert sorted(some) == sorted(others)
    assert some != others
    assert statistics.median(some) == pytest.approx(50, rel=0.05)
    assert max(some) == 800


def test_a_group_stays_on_one_server_and_no_two_requests_share_a_seed() -> None:
    asks = make_step([(1,), (2,), (3,)], 2, [5, 6, 7, 8, 9, 10], 2, 100)
    assert [a.server for a in asks] == [0, 0, 1, 1, 0, 0]
    assert [a.prompt for a in asks] == [(1,), (1,), (2,), (2,), (3,), (3,)]
    assert [a.seed for a in asks] == list(range(100, 106))


def test_idle_time_runs_from_a_servers_last_answer_to_the_last_of_all() -> None:
    asks = [Ask((1,), 1, 0, server) for server in (0, 0, 1)]
    answers = [Answer((1,), end_s) for end_s in (12.0, 11.0, 15.0)]
    assert idle_spans(10.0, asks, answers, 3) == [[(12.0, 15.0)], [], [(10.0, 15.0)]]


def test_training_counts_by_the_workers_own_word_until_now_if_it_goes_on() -> None:
    def event(t: float, name: str, proc: str = "drafter.0") -> MetricRecord:
        return MetricRecord(t, proc, "event", name)

    records = [
        event(1, "drafter/training"),
        event(2, "drafter/training", "drafter.1"),
        event(3, "drafter/resting"),
        event(7, "drafter/training"),
    ]
    spans = training_spans(records, "drafter.0", 9.0)
    assert spans == [(1, 3), (7, 9.0)]
    assert overlap_s(spans, [(2.5, 8.0)]) == 1.5
    assert overlap_s(spans, []) == 0


def test_the_static_strategy_chooses_its_arm_at_any_batch() -> None:
    arm = Arm("ngram", 3, 1, 3)
    tuner = FixedTuner(arm, StepCosts({1: 1.0}), (arm,), TunerSettings())
    for batch in (1, 30):
        assert tuner.choose(batch, 100) == arm
        tuner.record(arm, batch, 100, batch, 1.0, [0, 0, 0])
    assert tuner.snapshot()["share"] == {arm.name: 1.0}


def test_a_servers_settings_survive_their_file(tmp_path: Path) -> None:
    server = TailServer("server.1", "/m", "ngram-d3-k1-v3", (1,), 8, 1024, buffer="/b", coordinator="tcp://h:1")
    server.write(tmp_path / "s.json")
    assert TailServer.read(tmp_path / "s.json") == server
    settings = server.settings()
    assert settings.coordinator == "tcp://h:1"
    assert settings.speculation is not None
    assert settings.speculation.arms == (Arm("ngram", 3, 1, 3),)
    assert replace(server, strategy="off").settings().speculation is None


def test_named_tensors_are_what_was_loaded(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "model", "0:0", **LLAMA)
    stored, found = read_tensors(folder), named_tensors(load_target(folder))
    assert set(found) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(torch.from_numpy(found[name]), tensor), name


def test_the_gap_of_two_answers_is_that_of_the_tokens_where_they_part(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path / "model", "0:0", **LLAMA))
    ask = Ask((5, 6), 3, 7, 0)
    assert score_gap(target, ask, 0.8, (4, 5, 6), (4, 9, 6)) > 0
    assert score_gap(target, ask, 0.8, (4, 5), (4, 5, 6)) == float("inf")


def fake_bench(**turns: list[Turn]) -> Any:
    found = {n: SimpleNamespace(steps=t, pools=[], outputs=Outputs(2, 2)) for n, t in turns.items()}
    return SimpleNamespace(turns=found, trainers=None, pairs=[], tuner_notes=list)


def test_speedups_are_medians_of_ratios_within_a_round_and_the_first_round_warms_up() -> None:
    bench = fake_bench(
        plain=[Turn(10, 99.0, (9.0, 1.0)), Turn(10, 4.0, (2.0, 1.0)), Turn(10, 8.0, (4.0, 1.0))],
        tlt=[Turn(10, 1.0, (1.0, 1.0)), Turn(10, 2.0, (1.0, 1.0)), Turn(10, 4.0, (1.0, 2.0))],
    )
    result = summary(bench, skip_first=True)
    assert result["plain_s"] == 6.0
    assert result["tlt_s"] == 3.0
    assert result["speedup"] == 2.0
    assert result["cpu"]["speedup"] == 2.0
    assert result["goals"] == {"step_1.5x": True}
    assert result["passed"]


def test_an_answer_that_differs_beyond_rounding_fails_the_bench() -> None:
    bench = fake_bench(plain=[Turn(10, 1.0, (1.0,))], static=[Turn(10, 1.0, (1.0,))])
    bench.turns["static"].outputs = Outputs(2, 0, near_ties=1, different=1)
    result = summary(bench, skip_first=False)
    assert not result["same_outputs"]
    assert not result["passed"]


def test_options_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(UsageError, match="--folder"):
        tail.run(arguments("--model", "folder"))
    with pytest.raises(UsageError, match="--rounds"):
        tail.run(arguments("--rounds", "0"))
    with pytest.raises(UsageError, match="--record-share"):
        tail.run(arguments("--record-share", "2"))
    for options in (("--strategies", "tlt"), ("--static-arm", "off")):
        with pytest.raises(SystemExit):
            arguments(*options)


def test_two_steps_with_an_update_between_and_a_pool_through_real_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_target(tmp_path / "model", "0:0", **LLAMA)
    prompts = [(*range(2, 10), i) for i in range(2, 6)]
    monkeypatch.setattr(tail, "write_tiny", lambda root, num, seed: TailModel(folder, None, prompts, "random"))
    given = (
        "--requests",
        "4",
        "--samples",
        "2",
        "--rounds",
        "2",
        "--update-noise",
        "0.1",
        "--median",
        "6",
        "--longest",
        "3",
    )
    pool = ("--turns", "2", "--eta", "1", "--batch", "1", "--pool-rounds", "1", "--observation", "2")
    fewer = ("--strategies", "plain,static", "--beside-rounds", "0", "--update-noise", "0.1")
    result = tail.run(arguments(*fewer, *given, *pool))
    assert result["static_arm"] == "ngram-d7-k1-v7"
    assert result["outputs"]["static"] == {"answers": 16, "same": 16, "near_ties": 0, "different": 0}
    assert result["lengths"]["longest"] == 18
    assert result["pool"]["static_tps"] > 0
    assert result["passed"]

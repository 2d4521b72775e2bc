"""`bench.py spec` on the tiny model: what it reports adds up, and every strategy says the same.

Not covered: its speeds, which mean nothing at this size.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.rollout.server.sequence import Completion, FinishReason, GenerationRequest, SamplingParams, TokenLogprobs
from scripts.benchlib import spec
from scripts.benchlib.report import UsageError
from scripts.benchlib.spec_check import Differences, compare
from scripts.benchlib.spec_cost import StepTable
from scripts.benchlib.spec_model import SpecModel, tiny_model
from scripts.benchlib.spec_play import StepNote, Totals

NGRAM, EAGLE = Arm("ngram", 3, 1, 3), Arm("eagle", 3, 2, 7)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    spec.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture(scope="module")
def model() -> SpecModel:
    torch.set_num_threads(1)
    return tiny_model(4, 0)


@pytest.fixture(scope="module")
def result(model: SpecModel) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "tiny_model", lambda num_prompts, seed: model)
        given = ("--batch", "1,3", "--temperature", "0,1", "--tokens", "12", "--repeats", "1", "--skip-below", "0")
        return spec.run(arguments("--model", "tiny", *given))


def test_every_strategy_is_measured_and_says_what_plain_decoding_says(result: dict[str, Any]) -> None:
    names = {arm.name for arm in spec.TINY_ARMS}
    for batches in (result["batches"], result["other_temperatures"]["1.0"]["batches"]):
        assert set(batches) == {"1", "3"}
        for cell in batches.values():
            assert set(cell["arms"]) == set(cell["accept_length"]) == set(cell["predicted_tps"]) == names
            assert cell["plain_tps"] > 0
            assert cell["tuned_tps"] > 0
            assert cell["ngram_tps"] == cell["arms"]["ngram-d3-k1-v3"]
            for name in names:
                assert cell["efficiency"][name] == cell["cpu"]["arms"][name] / cell["predicted_tps"][name]
                assert cell["acceptance"][name] == sorted(cell["acceptance"][name], reverse=True)
            for found in cell["outputs"].values():
                assert found["different"] == 0
                assert found["answers"] > 0
            assert cell["skipped"] == {}
    assert result["batches"]["1"]["accept_length"]["eagle-d3-k2-v7"] > 1.3


def test_hopeless_arms_are_listed_and_not_run(model: SpecModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "tiny_model", lambda num_prompts, seed: model)
    given = ("--batch", "2", "--temperature", "0", "--tokens", "6", "--repeats", "1", "--skip-below", "99")
    cell = spec.run(arguments(*given))["batches"]["2"]
    assert cell["arms"] == {}
    assert set(cell["skipped"]) == {arm.name for arm in spec.TINY_ARMS}
    assert cell["ngram_tps"] is None
    assert set(cell["tuned_steps"]) == {"off"}


def test_costs_add_up_forward_levels_and_draws() -> None:
    table = StepTable(
        {1: {1: 1.0, 4: 2.0}, 4: {1: 2.0, 4: 8.0}}, {1: {1: 0.1, 2: 0.2}, 4: {1: 0.2, 2: 0.4}}, {0.0: 0.01}
    )
    assert table.forward_s(1, 2) == pytest.approx(2**0.5)  # half way on logarithmic axes
    assert table.forward_s(2, 1) == pytest.approx(2**0.5)
    assert table.forward_s(4, 8) == pytest.approx(16.0)  # beyond the table: in proportion
    assert table.draft_s(EAGLE, 1) == pytest.approx(0.1 + 2 * 0.2)
    assert table.draft_s(NGRAM, 1) == 0
    assert table.arm_s(Arm("ngram", 3, 1, 3), 1, 2, 0.0) == pytest.approx(2.0 + 0.02)
    noted = StepNote(EAGLE, 4, 100, 6, 9.0, (2, 0, 0), 0.5, 16)
    assert table.predict_s(noted, 0.0) == pytest.approx(8.0 + 0.2 + 2 * 0.4 + 0.06)
    assert table.points() == {1: 1.0, 4: 2.0, 16: 8.0}


def test_acceptance_is_per_stepped_sequence() -> None:
    notes = [StepNote(EAGLE, 2, 9, 5, 1.0, (2, 1), 0.0, 16), StepNote(EAGLE, 2, 9, 2, 1.0, (), 0.0, 2)]
    totals = Totals(7, 1.0, 2.0, notes)
    assert totals.accept_length == 7 / 4
    assert totals.acceptance == [0.5, 0.25]
    assert (totals.tps, totals.cpu_tps, totals.mean_batch) == (7.0, 3.5, 2.0)
    assert Totals(1, 1.0, 1.0, [StepNote(OFF, 1, 9, 1, 1.0, (), 0.0, 1)]).acceptance == []


def test_a_difference_is_a_near_tie_only_where_two_tokens_score_alike(model: SpecModel) -> None:
    request = GenerationRequest("0", model.prompts[0], SamplingParams(temperature=0.0), 0)

    def said(*tokens: int) -> list[Completion]:
        output = tuple(TokenLogprobs(token, 0.0) for token in tokens)
        return [Completion(request, output, (), (), FinishReason("length"), (), 0, "v", 0.0, 0.0)]

    assert compare(model.target, said(5, 6), said(5, 6)) == Differences(1, 1, 0, 0)
    assert compare(model.target, said(5, 6), said(5, 7)) == Differences(1, 0, 0, 1)
    assert compare(model.target, said(5, 6), said(5)) == Differences(1, 0, 0, 1)
    twins = SpecModel(_with_equal_tokens(model, 6, 7), None, model.prompts, "")
    assert compare(twins.target, said(5, 6), said(5, 7)).near_ties == 1


def _with_equal_tokens(model: SpecModel, first: int, second: int) -> Any:
    head_VD = model.target.head_VD.clone()
    head_VD[second] = head_VD[first]
    return replace(model.target, head_VD=head_VD)


def test_what_cannot_be_run_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --folder"):
        spec.run(arguments("--model", "smollm2"))
    with pytest.raises(UsageError, match="experiments.models.smollm2"):
        spec.run(arguments("--model", "smollm2", "--folder", str(tmp_path)))
    with pytest.raises(SystemExit):
        arguments("--arms", "eagle-d3")

"""`bench.py drift` in its quick form: what it reports fits together, the policy moves away from the first one, and the
language, the reward and the plot are what they say.

Not covered: that adaptation pays, which takes the full form.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.benchlib import drift
from scripts.benchlib.drift_plot import Line, Panel, svg
from scripts.benchlib.drift_world import EOS, VOCAB, Document, Language, Policy, policy_distance
from scripts.benchlib.report import UsageError

UPDATES = 3


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    drift.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture(scope="module")
def plot_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drift") / "drift.svg"


@pytest.fixture(scope="module")
def result(plot_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    given = ("--updates", str(UPDATES), "--steps", "6", "--arm", "eagle-d2-k2-v3", "--quick", "--svg", str(plot_path))
    return drift.run(arguments(*given))


def test_every_update_is_reported(result: dict[str, Any]) -> None:
    names = ("kl_to_start", "reward", "top3_before", "top3_after", "top3_recovered")
    assert {len(result[name]) for name in names} == {UPDATES}
    assert {len(curve) for curve in result["accept_length"].values()} == {UPDATES}
    assert result["top3_before"][1:] == result["top3_recovered"][:-1]
    assert all(0 <= value <= 1 for name in names[2:] for value in result[name])


def test_the_policy_moves_away_from_the_first_one_update_by_update(result: dict[str, Any]) -> None:
    distances = result["kl_to_start"]
    assert 0 < distances[0] < distances[-1]


def test_ratios_are_those_of_the_accept_lengths(result: dict[str, Any]) -> None:
    assert result["ratio"] == result["adapted"] / result["frozen"]
    assert result["of_converged"] == result["adapted"] / result["converged"]
    assert result["converged"] == max(found["accept_length"] for found in result["converged_runs"].values())
    assert all(1 <= result[name] <= 3 for name in ("start", "frozen", "adapted", "extra_first", "converged"))


def test_what_a_policy_says_does_not_depend_on_the_drafter(result: dict[str, Any]) -> None:
    assert result["different_outputs"] == 0


def test_the_adapted_drafter_and_the_one_of_the_first_policy_train_as_many_steps(result: dict[str, Any]) -> None:
    assert result["trained_steps"]["adapted"] == result["trained_steps"]["extra_first"] == UPDATES * 6


def test_the_plot_has_a_line_for_every_curve(result: dict[str, Any], plot_path: Path) -> None:
    lines = ElementTree.fromstring(plot_path.read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 6
    assert len(lines[0].get("points", "").split()) == 3 * UPDATES  # before, after, recovered


def test_a_plot_of_one_point_is_drawn() -> None:
    assert "nan" not in svg([Panel("one", [Line("a", [(1.0, 2.0)])])], "x").lower()


def test_an_arm_without_a_trained_drafter_is_refused() -> None:
    with pytest.raises(UsageError, match="ngram-d3-k1-v3 does not use a trained drafter"):
        drift.run(arguments("--arm", "ngram-d3-k1-v3"))


def test_documents_end_and_stay_inside_the_vocabulary() -> None:
    docs = Language(0, 0.5).documents(20, np.random.default_rng(0))
    assert all(doc[-1] == EOS and EOS not in doc[:-1] and max(doc) < VOCAB for doc in docs)


def test_rewarded_slots_only_grow_and_are_followed_by_nothing_at_a_phrase_end() -> None:
    language, ids = Language(3, 0.5), torch.arange(VOCAB)
    counts = []
    before = torch.zeros(VOCAB, dtype=torch.bool)
    for progress in (0.0, 0.3, 0.6, 1.0):
        words, active = language.rewarded(ids, progress)
        assert bool((active >= before).all())
        assert bool((words < VOCAB).all())
        before = active
        counts.append(int(active.sum()))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert not bool(before[-5:].any())  # the words of the last slot of a phrase


def test_policy_gradient_raises_the_rewarded_words_and_leaves_earlier_copies_alone() -> None:
    torch.manual_seed(0)
    language, policy = Language(0, 1.0), Policy(0)
    docs = [Document(d[:30], 13) for d in language.documents(4, np.random.default_rng(0))]
    first = policy.weights()
    kept = first.embed_VD.clone()
    rewards = [policy.improve(language, docs, 1.0, first, 5, 3e-3) for _ in range(3)]
    assert rewards[0] < rewards[1] < rewards[2]
    assert torch.equal(first.embed_VD, kept)
    assert policy_distance(first, first, docs) == pytest.approx(0, abs=1e-6)
    assert policy_distance(policy.weights(), first, docs) > 0.01

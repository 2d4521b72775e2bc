"""`bench.py weights`: what counts as a pause, and every path on a small server."""

from __future__ import annotations

import argparse

import pytest
import torch

from scripts.benchlib import weights
from scripts.benchlib.report import UsageError
from scripts.benchlib.weights import parts_of, pause_s, summary


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    weights.add_arguments(parser)
    return parser.parse_args(given)


def test_the_pause_is_the_longest_gap_that_touches_the_update() -> None:
    arrivals = [0.0, 5.0, 5.5, 6.0, 8.0, 8.5, 20.0]
    assert pause_s(arrivals, 5.6, 8.2) == 2.0
    assert pause_s(arrivals, 5.1, 5.2) == 0.5  # within one gap
    assert pause_s(arrivals, 6.0, 8.0) == 2.0  # ends on arrivals: their neighbours do not count
    assert pause_s(arrivals, 6.5, 9.0) == 11.5  # still silent when the answer came
    assert pause_s([1.0, 4.0], 2.0, 3.0) == 3.0


@pytest.mark.parametrize("arrivals", [[], [3.0, 9.0], [1.0, 4.0]])
def test_a_pause_without_tokens_on_both_sides_is_no_measurement(arrivals: list[float]) -> None:
    with pytest.raises(ValueError, match="do not span the update"):
        pause_s(arrivals, 2.0, 5.0)


def test_parts_hold_every_tensor_once_in_order() -> None:
    tensors = {str(i): torch.zeros(1) for i in range(7)}
    for count in (1, 3, 7, 9):
        parts = parts_of(tensors, count)
        assert [name for part in parts for name in part] == list(tensors)
        assert len(parts) == min(count, 7)


def test_medians_are_in_milliseconds() -> None:
    found = summary([(0.1, 0.01), (0.3, 0.03), (0.2, 0.5)])
    assert found == pytest.approx({"latency_ms": 200.0, "pause_ms": 30.0, "worst_pause_ms": 500.0})


def test_every_path_and_mode_is_measured() -> None:
    small = ("--streams", "2", "--prompt", "16", "--new-tokens", "64", "--layers", "1", "--hidden", "48")
    result = weights.run(arguments(*small, "--updates", "1", "--parts", "2"))
    modes = ("recompute", "keep", "abort")
    expected = {f"{path}_{mode}" for path in ("disk", "group", "session") for mode in modes}
    assert set(result["paths"]) == expected | {"router_recompute", "router_abort"}
    for row in result["paths"].values():
        assert row["latency_ms"] > 0
        assert 0 < row["pause_ms"] <= row["worst_pause_ms"]
    assert result["idle_gap_ms"] > 0


def test_an_impossible_number_of_updates_is_refused() -> None:
    with pytest.raises(UsageError, match="--updates 0"):
        weights.run(arguments("--updates", "0"))

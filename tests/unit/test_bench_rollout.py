"""`bench.py rollout` on a few requests: its numbers are of the work that was asked for."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from scripts.benchlib import rollout
from scripts.benchlib.report import UsageError


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    return parser.parse_args(given)


def test_every_part_is_measured_and_the_shared_prefix_is_found() -> None:
    small = ("--requests", "5", "--concurrency", "2", "--shared-prefix", "48", "--own-prompt", "8")
    result = rollout.run(arguments(*small, "--equal-tokens", "4", "--max-tokens", "6"))
    for name in ("equal", "staggered", "staggered_unshared"):
        part = result[name]
        assert part["tokens_per_s"] > 0
        assert part["speedup"] == pytest.approx(part["tokens_per_s"] / part["baseline_tokens_per_s"])
        assert part["cpu_speedup"] == pytest.approx(part["tokens_per_cpu_s"] / part["baseline_tokens_per_cpu_s"])
        assert 0 < part["ttft_ms"]["p50"] <= part["ttft_ms"]["p95"]
    assert result["staggered"]["hit_share"] == pytest.approx(4 * 48 / (5 * 56))
    assert result["staggered_unshared"]["hit_share"] == result["equal"]["hit_share"] == 0
    assert result["peak_mb"] > 0


def test_lengths_are_those_of_recorded_turns() -> None:
    lengths = rollout.staggered_lengths(20_000, 10_000, np.random.default_rng(0))
    assert np.percentile(lengths, 50) == pytest.approx(113, rel=0.03)
    assert np.percentile(lengths, 95) == pytest.approx(423, rel=0.05)


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match="--shared-prefix must not be negative"):
        rollout.run(arguments("--shared-prefix", "-1"))

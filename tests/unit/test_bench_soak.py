"""`bench.py soak` for some seconds, and what it calls a leak. The long version is the command itself."""

from __future__ import annotations

import argparse

import pytest

from scripts.benchlib import soak
from scripts.benchlib.report import UsageError
from scripts.benchlib.soak import HELPER_THREADS, Footprint, leaks, metric

IDLE = {
    "running": 0, "waiting": 0, "cached_tokens": 0, "kv_use": 0, "live_requests": 0, "paused": 0, "memory_released": 0,
    "threads": 9, "descriptors": 20, "kv_bytes": 4096,
}  # fmt: skip


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(given)


def test_a_server_under_mixed_load_leaves_nothing_behind() -> None:
    result = soak.run(arguments("--minutes", "0.06", "--concurrency", "24", "--interval-s", "0.1"))
    assert result["problems"] == []
    assert result["passed"]
    assert result["outcomes"]["finished_length"] > 20
    done = {name.split()[0] for name in result["operations"]}
    assert {"/pause_generation", "/update_weights_from_disk", "/end_weight_update", "/flush_cache"} <= done


@pytest.mark.parametrize("name", list(IDLE))
def test_whatever_is_left_is_named(name: str) -> None:
    assert leaks(Footprint(IDLE), Footprint(IDLE)) == []
    spare = HELPER_THREADS if name == "threads" else 0
    assert leaks(Footprint(IDLE), Footprint({**IDLE, name: IDLE[name] + spare})) == []
    (found,) = leaks(Footprint(IDLE), Footprint({**IDLE, name: IDLE[name] + spare + 1}))
    assert found.startswith(f"{name}: ")


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP a b\n# TYPE a counter\na{x="1"} 2\na{x="2"} 3.5\nab 7\n'
    assert metric(text, "a") == 5.5
    assert metric(text, "ab") == 7
    with pytest.raises(KeyError):
        metric(text, "b")


@pytest.mark.parametrize("minutes", ["0", "-1", "121", "nan"])
def test_an_impossible_length_is_refused(minutes: str) -> None:
    with pytest.raises(UsageError, match="--minutes"):
        soak.run(arguments("--minutes", minutes))

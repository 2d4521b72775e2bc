"""A whole run under fire: kill -9 of a server, a worker, the batcher and a trainer rank, then resume.

One scenario, told by several tests, because every launch costs half a minute of imports. Not covered:
machines that vanish, full disks, GPUs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_dta.metrics import read_metrics
from launcher.summary import summarise
from tests.e2e.dashboard_check import assert_dashboard_ok
from tests.e2e.run_harness import Outcome, Run, no_process_left, small_overrides

STEPS = 10
ETA = 1


@dataclass
class Story:
    """What happened: the launch that survived three kills and died of the fourth, and the one that finished it."""

    run_dir: Path
    failed: Outcome
    seconds_to_stop: float
    left_behind: bool
    resumed: Outcome


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, untrained_policy: Path) -> Story:
    run_dir = tmp_path_factory.mktemp("faults") / "run"
    settings = {
        "rollout.backend": "embedded:d2",
        "runtime.num_workers": 2,
        "total_train_steps": STEPS,
        "rollout.max_head_offpolicyness": ETA,
    }
    run = Run.start(run_dir, small_overrides(untrained_policy, **settings))
    run.wait_for_step(1, timeout_s=240)
    for victim in ("server.0", "worker.0", "batcher"):
        done = run.steps_done()
        pid = run.kill(victim)
        run.wait_for_restart(victim, pid)
        run.wait_for_step(done + 2)
    pid = run.kill("trainer.1")
    killed_at = time.monotonic()
    failed = run.finish(timeout_s=90)
    seconds_to_stop = time.monotonic() - killed_at
    assert pid not in (0, 1)
    left_behind = not no_process_left(run_dir)
    resumed = Run.resume(run_dir).finish(timeout_s=300)
    return Story(run_dir, failed, seconds_to_stop, left_behind, resumed)


def test_run_survives_kills_of_server_worker_and_batcher(story: Story) -> None:
    records = read_metrics(story.run_dir / "metrics.jsonl")
    restarts = {r.labels.get("process") for r in records if r.name == "process/restart"}
    assert {"server.0", "worker.0", "batcher"} <= restarts


def test_death_of_a_trainer_rank_stops_the_run_within_a_minute_and_names_the_cause(story: Story) -> None:
    assert story.failed.code == 1, str(story.failed)
    assert story.seconds_to_stop < 60
    assert story.failed.json["status"] == "failed"
    assert "trainer.1" in story.failed.json["cause"], story.failed.json
    assert "SIGKILL" in story.failed.json["cause"], story.failed.json
    assert not story.left_behind


def test_resume_finishes_the_run(story: Story) -> None:
    assert story.resumed.code == 0, str(story.resumed)
    assert story.resumed.json["status"] == "finished"
    assert story.resumed.json["steps"] == STEPS


def test_nothing_acknowledged_is_lost_or_trained_twice(story: Story) -> None:
    assert story.resumed.json["lost"] == 0, str(story.resumed)
    assert story.resumed.json["duplicated"] == 0


def test_every_step_was_trained_on_a_full_batch(story: Story) -> None:
    counts = {r.step: r.value for r in read_metrics(story.run_dir / "metrics.jsonl") if r.name == "batch/episodes"}
    assert sorted(counts) == list(range(STEPS))
    assert all(count == 4 for count in counts.values()), counts


def test_staleness_never_exceeds_its_bound(story: Story) -> None:
    values = [r.value for r in read_metrics(story.run_dir / "metrics.jsonl") if r.name == "batch/staleness_max"]
    assert values
    assert max(v for v in values if v is not None) <= ETA


def test_server_and_trainer_agree_on_log_probs(story: Story) -> None:
    assert story.resumed.json["logprob_mismatch"] is not None
    assert story.resumed.json["logprob_mismatch"] < 1e-3


def test_summary_names_every_promised_value(story: Story) -> None:
    promised = {
        *(
            "steps",
            "reward_first5",
            "reward_last5",
            "eval_before",
            "eval_after",
            "max_staleness",
            "mixed_version_share",
        ),
        *("logprob_mismatch", "tree_ratio", "rank_loads", "tokens_per_s", "lost", "duplicated", "wall_s", "run_dir"),
    }
    missing = [name for name in promised if story.resumed.json.get(name) is None]
    assert not missing, json.dumps(story.resumed.json)
    assert len(story.resumed.json["rank_loads"]) == 2
    assert all(load > 0 for load in story.resumed.json["rank_loads"])
    assert summarise(story.run_dir)["steps"] == STEPS


@pytest.mark.browser
def test_dashboard_of_the_run_has_data_in_every_chart(story: Story) -> None:
    assert_dashboard_ok(story.run_dir)

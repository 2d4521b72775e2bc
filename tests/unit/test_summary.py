"""What a run's summary says, and which stage bounds a step. Not covered: files of a run on another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_dta.metrics import MetricRecord
from launcher.run_files import RunFileError, RunFiles, read_run_files
from launcher.speculation import speculation_text, summarise_drafter, training_text
from launcher.steps import StepTable, bounding_stage, compute_seconds, mean_stage_seconds, stage_seconds
from launcher.summary import render, summarise, summarise_records

ISSUE_KEYS = {
    *("steps", "reward_first5", "reward_last5", "eval_before", "eval_after", "max_staleness", "mixed_version_share"),
    *("logprob_mismatch", "tree_ratio", "rank_loads", "tokens_per_s", "lost", "duplicated", "wall_s", "run_dir"),
}


def value(name: str, number: float | None, step: int | None = None, proc: str = "trainer.0", **labels) -> MetricRecord:
    return MetricRecord(
        float(step or 0), proc, "span" if name.startswith("time/") else "value", name, number, step, labels
    )


def spans(step: int, proc: str = "trainer.0", /, **seconds: float) -> list[MetricRecord]:
    return [value(f"time/{stage}", s, step, proc) for stage, s in seconds.items()]


def only_row(*records: MetricRecord):
    return StepTable(records).ordered()[0]


# ---- stages ----


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"wait_batch": 9.0, "assemble": 0.1, "logprob": 2.0, "update": 4.0}, "rollout"),
        ({"wait_batch": 9.0, "assemble": 8.0, "logprob": 2.0, "update": 4.0}, "batcher"),
        ({"wait_batch": 1.0, "assemble": 5.0, "logprob": 2.0, "update": 4.0}, "update"),
        ({"wait_batch": 1.0, "logprob": 5.0, "update": 4.0}, "logprob"),
        ({"wait_batch": 1.0, "logprob": 1.0, "update": 2.0, "publish": 3.0}, "publish"),
        ({"update": 3.0, "checkpoint": 6.0}, "checkpoint"),
        ({}, None),
    ],
)
def test_the_longest_stage_bounds_the_step_and_waiting_is_owed_to_rollout_or_batcher(seconds, bound):
    row = only_row(value("train/loss", 0.0, 0), *spans(0, **seconds))
    assert bounding_stage(stage_seconds(row)) == bound


def test_a_stage_takes_as_long_as_its_slowest_rank_and_waiting_as_long_as_the_least_waiting_rank():
    row = only_row(
        *spans(0, "trainer.0", wait_batch=1.0, update=5.0, publish=2.0),
        *spans(0, "trainer.1", wait_batch=3.0, update=4.0, publish=0.5),
    )
    assert stage_seconds(row) == {"rollout": 1.0, "batcher": 0.0, "update": 5.0, "publish": 2.0}


def test_computing_takes_what_the_slowest_rank_took_over_all_its_stages():
    row = only_row(*spans(0, "trainer.0", logprob=1.0, update=5.0), *spans(0, "trainer.1", logprob=3.0, update=4.0))
    assert compute_seconds(row) == 7.0
    assert compute_seconds(only_row(*spans(0, step=9.0))) is None


def test_a_stage_that_only_some_steps_have_counts_as_zero_in_the_others():
    rows = StepTable([*spans(0, update=2.0, checkpoint=4.0), *spans(1, update=4.0)]).ordered()
    assert mean_stage_seconds(rows) == {"update": 3.0, "checkpoint": 2.0}


def test_a_step_whose_loss_is_not_finite_was_trained_all_the_same():
    table = StepTable([value("train/loss", None, 0), value("batch/reward_mean", 1.0, 1, "batcher")])
    assert [row.step for row in table.trained()] == [0]


# ---- the summary ----


def full_run() -> list[MetricRecord]:
    records = [value("eval/reward", 0.25, 0, tag="before")]
    for step in range(12):
        records += [
            value("batch/reward_mean", step / 10, step, "batcher"),
            value("batch/episodes", 8, step, "batcher"),
            value("batch/mixed_version_share", 0.5 if step else 0.0, step, "batcher"),
            value("batch/staleness_max", min(step, 1), step, "batcher"),
            value("batch/rank_cost", 100.0, step, "batcher", rank=0),
            value("batch/rank_cost", 110.0, step, "batcher", rank=1),
            value("train/logprob_mismatch_tokens", 10 * (step != 3), step),
            value("train/logprob_mismatch_max", 1e-5 * (1 + step) if step != 3 else 99.0, step),
        ]
        for rank in range(2):
            proc = f"trainer.{rank}"
            records += [value("train/row_tokens", 500, step, proc), value("train/tree_tokens", 100, step, proc)]
            records += spans(step, proc, wait_batch=1.0, update=3.0, step=5.0)
        records.append(value("train/loss", 0.1, step))
    return [*records, value("eval/reward", 0.75, 12, tag="after")]


FILES = RunFiles(
    Path("run"),
    state={"status": "finished", "cause": None, "started_at": 100.0, "updated_at": 160.0, "total_steps": 12},
    launch={"dp": 2},
    config={"rollout": {"max_head_offpolicyness": 2}},
    batcher={"lost": 0, "duplicated": 0, "max_staleness": 2, "rejected": {"raised": 3}},
)


def test_the_numbers_of_a_run_are_reduced_over_steps_and_ranks():
    s = summarise_records(full_run(), FILES)
    assert set(s) >= ISSUE_KEYS
    assert s["steps"] == 12 and s["wall_s"] == 60.0 and s["run_dir"] == "run" and s["status"] == "finished"
    assert s["reward_first5"] == pytest.approx(0.2) and s["reward_last5"] == pytest.approx(0.9)
    assert (s["eval_before"], s["eval_after"]) == (0.25, 0.75)
    assert s["max_staleness"] == 2 and s["staleness_bound"] == 2
    assert s["mixed_version_share"] == pytest.approx(0.5 * 11 / 12)
    assert s["logprob_mismatch"] == pytest.approx(1.2e-4) and s["logprob_mismatch_tokens"] == 110
    assert s["tree_ratio"] == 5.0 and s["rank_loads"] == [100.0, 110.0]
    assert s["tokens_per_s"] == pytest.approx(1000 / 3.0)  # both ranks' row tokens, the slower one's update
    assert (s["lost"], s["duplicated"], s["rejected"]) == (0, 0, {"raised": 3})
    assert s["bounding_stage"] == "update" and s["stage_s"]["update"] == 3.0
    json.dumps(s, allow_nan=False)


def test_a_step_that_a_resumed_run_trained_again_counts_once_with_its_last_record():
    again = [value("batch/reward_mean", 0.0, 11, "batcher"), *spans(11, update=300.0), value("train/loss", 0.1, 11)]
    s = summarise_records([*full_run(), *again], FILES)
    assert s["steps"] == 12
    assert s["reward_last5"] == pytest.approx((0.7 + 0.8 + 0.9 + 1.0) / 5)
    assert s["stage_s"]["update"] == pytest.approx((11 * 3 + 300) / 12)


def test_what_was_not_measured_is_null_and_never_a_number():
    s = summarise_records([], RunFiles(Path("run")))
    for key in ISSUE_KEYS - {"steps", "run_dir"}:
        assert s[key] is None, key
    assert s["steps"] == 0 and s["bounding_stage"] is None
    assert "not measured" in render(s)


def test_no_mismatch_is_claimed_where_no_token_was_compared():
    records = [value("train/logprob_mismatch_max", 0.0, 0), value("train/logprob_mismatch_tokens", 0, 0)]
    s = summarise_records([*records, value("train/loss", 1.0, 0)], FILES)
    assert s["logprob_mismatch"] is None and s["logprob_mismatch_tokens"] == 0


def test_model_parallel_ranks_that_report_the_same_share_count_once():
    records = [value("train/loss", 0.0, 0)]
    for rank in range(4):
        proc = f"trainer.{rank}"
        records += [value("train/row_tokens", 500, 0, proc), value("train/load", float(rank // 2), 0, proc)]
        records += spans(0, proc, update=4.0 + (rank == 3), step=9.0)
    s = summarise_records(records, FILES)
    assert s["tokens_per_s"] == 200.0
    assert s["rank_loads"] is None  # which of them is which data-parallel rank, only the batcher's records tell


def test_ranks_are_ordered_by_number():
    records = [value("batch/rank_cost", float(rank), 0, "batcher", rank=rank) for rank in (10, 2, 0)]
    assert summarise_records(records, FILES)["rank_loads"] == [0.0, 2.0, 10.0]


def test_the_text_tells_everything_that_was_promised():
    text = render(summarise_records(full_run(), FILES))
    for part in ("0.200", "0.900", "0.250", "0.750", "rank 0: 100", "rank 1: 110", "5.00", "2, bound 2", "45.8%"):
        assert part in text
    for part in ("1.20e-04", "110 tokens", "333", "update 3.00", "bounded by update", "raised 3", "restarts"):
        assert part in text


# ---- speculation ----


def report(proc: str, drafts: float, accepted: float, loss: float, **seconds: float) -> list[MetricRecord]:
    """What a server publishes once a second: cumulative counters since its start."""
    return [
        value("tlt/accept_length", 1.0, None, proc),
        value("tlt/draft_steps", drafts, None, proc),
        value("tlt/accepted_tokens", accepted, None, proc),
        value("tlt/loss_to_plain", loss, None, proc),
        *(value("tlt/seconds", spent, None, proc, arm=arm.replace("_", "-")) for arm, spent in seconds.items()),
        *(value("tlt/tokens", 9.0, None, proc, arm=arm.replace("_", "-")) for arm in seconds),
    ]


def test_speculation_is_summed_over_servers_by_the_last_report_of_each():
    records = report("server.0", 5, 5, -0.9, off=1.0)
    records += report("server.0", 20, 30, -0.5, off=1.0, ngram_d3_k1_v3=3.0)
    records += report("server.1", 10, 0, 0.25, off=1.0, eagle_d4_k2_v7=3.0)
    found = summarise_records(records, FILES)["speculation"]
    assert found["accept_length"] == 1 + 30 / 30
    assert found["arms"] == {"ngram-d3-k1-v3": 3 / 8, "eagle-d4-k2-v7": 3 / 8, "off": 2 / 8}
    assert found["decode_s"] == 8.0
    assert found["speedup"] == pytest.approx((8.0 + 0.5 * 4.0 - 0.25 * 4.0) / 8.0)
    text = speculation_text(found)
    assert text.startswith("accept length 2.00, 1.12 x plain decoding; time by arm: ")
    assert "ngram-d3-k1-v3 38%" in text and "off 25%" in text


def test_what_a_server_counted_before_its_restarts_is_kept():
    records = [r for _ in range(3) for r in report("server.0", 20, 30, -0.5, off=1.0, ngram=1.0)]
    records += report("server.0", 0, 0, 0.0)  # started again, nothing decoded yet
    records += report("server.0", 4, 2, 0.0, off=0.5)
    records += report("server.0", 1, 1, -1.0, off=0.25)  # and again
    found = summarise_records(records, FILES)["speculation"]
    assert found["accept_length"] == 1 + (30 + 2 + 1) / (20 + 4 + 1)
    assert found["decode_s"] == 2.75 and found["arms"]["ngram"] == pytest.approx(1 / 2.75)
    assert found["speedup"] == pytest.approx((2.75 + 0.5 * 2.0 + 1.0 * 0.25) / 2.75)


def test_where_nothing_was_drafted_no_accept_length_is_claimed():
    found = summarise_records(report("server.0", 0, 0, 0.0, off=2.0), FILES)["speculation"]
    assert found == {"accept_length": None, "arms": {"off": 1.0}, "speedup": 1.0, "decode_s": 2.0}
    assert speculation_text(found) == "nothing drafted, 1.00 x plain decoding; time by arm: off 100%"


@pytest.mark.parametrize("records", [[], report("server.0", 0, 0, 0.0), [value("tlt/seconds", None, arm="off")]])
def test_without_decoding_there_is_nothing_to_tell(records):
    s = summarise_records(records, FILES)
    assert s["speculation"] is None and "speculation            off" in render(s)


def test_the_training_of_the_drafter_is_told_by_what_came_of_it():
    idle = [value("drafter/buffer_samples", 0, None, "drafter.0")]
    s = summarise_records(idle, FILES)
    assert s["drafter_training"]["steps"] == 0
    assert "no server was idle" in training_text(s["drafter_training"])
    trained = [value("drafter/loss", 1.0, step, "drafter.0") for step in (1, 2)]
    trained += [value("drafter/preempt_s", seconds, None, "drafter.0") for seconds in (0.2, 0.3, 0.1)]
    assert "nothing published; left within 0.30 s" in training_text(summarise_drafter([*idle, *trained]))
    for step, servers in ((2, "server.0,server.1"), (3, "")):  # nobody took the second
        trained.append(value("drafter/held_out_top3", step / 4, step, "drafter.0"))
        labels = {"version": f"d{step}"}
        trained.append(MetricRecord(9.0, "drafter.0", "event", "drafter/published", None, None, labels, servers))
    text = training_text(summarise_drafter([*idle, *trained]))
    assert text == "2 steps in idle time; d2 in use, top-3 accuracy 0.50; left within 0.30 s"
    assert "drafter training       off" in render(summarise_records([], FILES))


# ---- the files ----


def test_a_run_directory_is_read_with_whatever_it_holds(tmp_path):
    (tmp_path / "config.yaml").write_text("experiment_name: e\ntrial_name: t\nrollout: {max_head_offpolicyness: 3}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(value("train/loss", 1.0, 0).to_wire()) + '\n{"t": 1, "pro')
    files = read_run_files(tmp_path)
    assert files.name == "e/t" and files.staleness_bound == 3 and files.num_dp_ranks is None
    assert summarise(tmp_path)["steps"] == 1


def test_a_run_whose_launcher_was_killed_is_not_called_running(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"status": "running", "pid": 7}))
    state = read_run_files(tmp_path).state
    assert state["status"] == "failed" and "resume" in state["cause"]


@pytest.mark.parametrize(("name", "text"), [("state.json", "{"), ("launch.json", "[1]"), ("config.yaml", "a: [")])
def test_a_damaged_file_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunFileError, match=name):
        summarise(tmp_path)


def test_a_directory_that_is_not_there_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(RunFileError, match="run_dir"):
        summarise(tmp_path / "nowhere")

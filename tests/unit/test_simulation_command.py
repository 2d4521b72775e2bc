"""`areal-dta plan --simulate`: speeds of options, of a recorded run, and what is refused.

The recorded run is made up: files of a run whose speeds are known, so that measuring them can be checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.config import load_config
from areal_dta.metrics import MetricRecord
from areal_dta.records import Trajectory, write_trace
from areal_dta.simulation.assumptions import Assumptions
from areal_dta.simulation.from_run import observe
from areal_dta.simulation.search import candidates, fits_memory
from areal_dta.simulation.settings import SimulationError
from areal_dta.simulation.speeds import ServerSpeed, TrainerSpeed
from areal_dta.simulation.workload import LengthWorkload, WorkloadError, read_traces
from areal_dta.tree.cost import TREE_TOKENS
from areal_dta.tree.timing import TimeModel
from launcher import cli
from launcher.simulate_command import measure, simulation_settings
from tests.unit.test_launcher_cli import QUICKSTART, error_of

AIRLINE = QUICKSTART.parents[1] / "tau2" / "qwen3_8b_airline_8gpu.yaml"
GIVEN = (
    "server.tokens_per_s=1:95,64:3600", "server.prefill_tokens_per_s=18000", "server.update_s=2", "env.latency_s=1",
    "trainer.tokens_per_s=9000", "lengths.prompt_tokens=2000", "lengths.system_tokens=1500", "lengths.turns=4",
    "lengths.generated_tokens=100", "lengths.observation_tokens=50", "lengths.turns_spread=0.5",
)  # fmt: skip
SMALLER = ("train_dataset.batch_size=4", "gconfig.n_samples=4")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object, given: tuple[str, ...] = GIVEN) -> dict[str, Any]:
    assumed = [word for pair in given for word in ("--assume", pair)]
    assert cli.main(["plan", "--simulate", *map(str, arguments), *assumed, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_configuration_is_simulated_with_given_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, AIRLINE, "--steps", 8, *SMALLER)
    assert found["settings"]["servers"] == 4 and (found["settings"]["dp"], found["settings"]["tp"]) == (2, 2)
    assert found["settings"]["eta"] == 2 and found["settings"]["batch_groups"] == 4
    assert found["steps"] == 6 and found["trajectories_per_s"] == pytest.approx(16 / found["step_s"])
    assert found["staleness_max"] <= 2
    assert simulated(capsys, AIRLINE, "--steps", 8, *SMALLER) == found


def test_the_table_says_who_waits_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = [word for pair in GIVEN for word in ("--assume", pair)]
    assert cli.main(["plan", "--simulate", str(AIRLINE), "--steps", "6", *assumed, *SMALLER]) == 0
    text = capsys.readouterr().out
    for words in ("waiting for rollout", "waiting for the trainer", "trajectories/s", "staleness", "bounded by"):
        assert words in text


def test_a_search_finds_splits_that_use_all_gpus_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = simulated(capsys, AIRLINE, "--search", 8, "--steps", 5, *SMALLER)
    assert "assumed: a doubling of tensor parallelism keeps 88% of its speed-up" in said["notes"][0]
    found = said["candidates"]
    assert len(found) > 4
    for candidate in found:
        s = candidate["settings"]
        assert s["servers"] * s["server_tp"] + s["dp"] * s["tp"] * s["pp"] == 8
        assert s["tp"] >= 2  # the configuration's: whether less fits is not known
    rates = [candidate["trajectories_per_s"] for candidate in found]
    assert rates == sorted(rates, reverse=True)


def test_a_search_with_the_models_size_leaves_out_what_does_not_fit() -> None:
    settings = simulation_settings(load_config(AIRLINE, list(SMALLER)), 4)
    speeds = Assumptions.parse(GIVEN).speeds(None, None, None, (1, 1, 1), 64)
    workload = LengthWorkload(prompt_tokens=100, generated_tokens=10)
    shapes = {(s.dp, s.tp * s.pp) for s in candidates(8, settings, speeds, workload, fits_memory(8e9, 80 * 2**30))}
    assert shapes and all(8e9 * (6 + 12 / dp) / parts <= 0.8 * 80 * 2**30 for dp, parts in shapes)
    assert not list(candidates(8, settings, speeds, workload, fits_memory(8e11, 80 * 2**30)))
    with pytest.raises(SimulationError, match="at least 2"):
        list(candidates(1, settings, speeds, workload))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulate", QUICKSTART), "--from-run RUN, --trace FILE, or --assume lengths.prompt_tokens"),
        (("--simulate", QUICKSTART, "--assume", "server.tokns_per_s=1"), "did you mean server.tokens_per_s"),
        (("--simulate", QUICKSTART, "--assume", "server.tokens_per_s=fast"), "'fast' is not of that form"),
        (("--simulate", QUICKSTART, "--ranks", "2"), "--ranks is for traces"),
        ((QUICKSTART, "--search", "8"), "add --simulate"),
        (("--simulate", QUICKSTART, "--from-run", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_told(
    arguments: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "plan", *map(str, arguments))


@pytest.mark.parametrize("left_out", ["server.tokens_per_s", "server.prefill_tokens_per_s", "trainer.tokens_per_s"])
def test_a_speed_that_nobody_gives_is_asked_for(left_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assumed = [word for pair in GIVEN if not pair.startswith(left_out) for word in ("--assume", pair)]
    assert f"--assume {left_out}" in error_of(capsys, "plan", "--simulate", str(AIRLINE), *assumed)


def test_a_speed_curve_becomes_a_step_and_a_sequence() -> None:
    running = (1, 8, 64)
    step_s, sequence_s = ServerSpeed.fit_steps(running, [r / (0.02 + r * 0.0003) for r in running])
    assert (step_s, sequence_s) == pytest.approx((0.02, 0.0003))
    assert ServerSpeed.fit_steps([4], [100]) == pytest.approx((0.04, 0.0))
    with pytest.raises(ValueError, match="positive"):
        ServerSpeed.fit_steps([0], [1])


def test_a_calibration_charges_forward_and_backward_of_a_token() -> None:
    time = TimeModel((1.0, 2.0, 3.0, 0, 0, 0), (10.0, 20.0, 30.0, 0, 0, 0), (0.0, 5.0), (0.0, 7.0))
    trainer = TrainerSpeed.of_time_model(time, 100)
    assert trainer.cost_model.per_token == pytest.approx((2 + 20 + 7) + (2 + 5) + (2 * 1 + 10) / 100)
    assert trainer.cost_model.per_pair == pytest.approx(3 + 30 + 3)
    once = TrainerSpeed.of_time_model(time, 100, logprob_pass=False)
    assert once.cost_model.per_token == pytest.approx((2 + 20 + 7) + (1 + 10) / 100)


# ---- lengths ----


def episode(group: int, sample: int, turns: int, version: int = 0) -> Trajectory:
    """A system prompt of 40, a task's of 20 more, then turns of 8 generated and 4 observed tokens; one row per turn."""
    rng = np.random.default_rng([group, sample])
    task = np.random.default_rng(group).integers(100, 200, 20)
    tokens = np.concatenate([np.arange(40), task, rng.integers(200, 900, 12 * turns)])
    ends = [60 + 12 * turn + 8 for turn in range(turns)]
    rows = [tokens[:end] for end in ends]
    loss = np.concatenate([(np.arange(end) >= end - 8) for end in ends])
    return Trajectory(
        lease_id=f"e0.g{group}.s{sample}.a0", group_id=group, sample=sample, task_id=f"task{group}", reward=1.0,
        input_ids_T=np.concatenate(rows).astype(np.int32), offsets_S1=np.cumsum([0, *ends]),
        loss_mask_T=loss.astype(np.uint8), logprobs_T=np.zeros(len(loss), np.float32),
        versions_T=np.where(loss, version, -1).astype(np.int32), rewards_S=np.ones(turns, np.float32),
    )  # fmt: skip


def test_episodes_of_a_trace_keep_their_turns_and_what_they_share(tmp_path: Path) -> None:
    episodes = [episode(group, sample, turns=1 + sample) for group in range(3) for sample in range(2)]
    write_trace(tmp_path / "a.npz", episodes[:4], "mock", 0)
    write_trace(tmp_path / "b.npz", episodes[4:], "mock", 1)
    workload = read_traces([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert (workload.num_episodes, workload.num_tasks) == (6, 3)
    groups = [workload.group(g, 2) for g in range(3)]
    assert sorted(len({e.source for e in group}) for group in groups) == [2, 2, 2]
    for script in (s for group in groups for s in group):
        assert script.prompts == tuple(60 + 12 * turn for turn in range(script.num_turns))
        assert set(script.generated) == {8} and (script.system_tokens, script.shared_tokens) == (40, 60)
    rows = workload.rows(groups)
    assert rows.num_rows == 9 and TREE_TOKENS.tree(rows) == 40 + 3 * (20 + 8 + 20)


def test_an_episode_drawn_twice_is_charged_like_another_sample(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.npz", [episode(0, 0, 1), episode(0, 1, 1)], "mock", 0)
    workload = read_traces([tmp_path / "a.npz"])
    assert TREE_TOKENS.tree(workload.rows([workload.group(0, 2)])) == 60 + 2 * 8
    assert TREE_TOKENS.tree(workload.rows([workload.group(0, 4)])) == pytest.approx(60 + 4 * 8, abs=60)


def test_lengths_and_traces_that_make_no_episode_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="system_tokens=20"):
        LengthWorkload(prompt_tokens=10, generated_tokens=5, system_tokens=20)
    with pytest.raises(WorkloadError, match="at least 1"):
        LengthWorkload(prompt_tokens=10, generated_tokens=0)
    np.savez(tmp_path / "flat.npz", ids=np.arange(4), offsets=np.asarray([0, 4]))
    with pytest.raises(WorkloadError, match="turn_traj"):
        read_traces([tmp_path / "flat.npz"])


# ---- a recorded run ----

STEPS, COMPUTE_S, WAIT_S, PUBLISH_S, DECODE_STEP_S, SEQUENCE_S, TURN_S = 6, 2.0, 3.0, 0.25, 0.004, 0.0005, 0.01
SIZES = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "torch_dtype": "float32", "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of 6 steps of 4 groups of 2 episodes of 2 turns: its server is busy while the trainer waits."""
    run = tmp_path / "run"
    for folder in ("traces", "model"):
        (run / folder).mkdir(parents=True)
    (run / "model" / "config.json").write_text(json.dumps(SIZES))
    config = load_config(QUICKSTART, [f"total_train_steps={STEPS}", "train_dataset.batch_size=4", "gconfig.n_samples=2",
                                      "actor.backend=megatron:d1", f"cluster.fileroot={tmp_path}"])  # fmt: skip
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "state.json").write_text(json.dumps({"phase": "finished"}))
    records: list[MetricRecord] = []
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in ("server.0", "worker.0", "trainer.0")}
    now_s, served_s, worked_s, trained_s, made = 1000.0, 0.0, 0.0, 0.0, 0.0

    def say(proc: str, name: str, value: float, step: int | None = None, kind: str = "value") -> None:
        records.append(MetricRecord(now_s, proc, kind, name, value, step))

    for step in range(STEPS):
        write_trace(run / "traces" / f"batch_{step:06d}.npz",
                    [episode(4 * step + g, s, 2, step) for g in range(4) for s in range(2)], "mock", step)  # fmt: skip
        for tenth in range(int(WAIT_S * 10)):  # the server decodes for WAIT_S, with ever fewer sequences
            running = 1 + 7 * (tenth % 10 < 5)
            num_steps = 0.1 / (DECODE_STEP_S + running * SEQUENCE_S)
            for name, used_s in (("server.0", served_s), ("worker.0", worked_s), ("trainer.0", trained_s)):
                cpu[name].append((now_s, used_s))
            say("server.0", "server/running", running)
            say("server.0", "server/generated_tokens", made)
            now_s, served_s, made = now_s + 0.1, served_s + 0.1, made + num_steps * running
            worked_s += 8 * 3 * TURN_S / (WAIT_S * 10)
        say("trainer.0", "time/wait_batch", WAIT_S, step, "span")
        for _ in range(8):
            say("worker.0", "rollout/episode_s", 2.5)
            say("worker.0", "rollout/turns", 2)
        say("batcher", "batch/staleness_mean", 0.5, step)
        say("batcher", "batch/episodes", 8, step)
        cpu["trainer.0"].append((now_s, trained_s))
        now_s, trained_s = now_s + COMPUTE_S, trained_s + COMPUTE_S
        say("trainer.0", "time/logprob", COMPUTE_S / 4, step, "span")
        cpu["trainer.0"].append((now_s, trained_s))
        now_s += PUBLISH_S
        cpu["trainer.0"].append((now_s, trained_s))
        say("trainer.0", "time/publish", PUBLISH_S, step, "span")
        say("router", "router/pause_s", PUBLISH_S)
        say("trainer.0", "train/load", 1e9, step)
        say("trainer.0", "train/tree_tokens", 1000, step)
        say("trainer.0", "time/step", WAIT_S + COMPUTE_S + PUBLISH_S, step, "span")
    (run / "metrics.jsonl").write_text("".join(json.dumps(r.to_wire()) + "\n" for r in records))
    (run / "usage.json").write_text(json.dumps({"samples": cpu, "cores": 2}))
    return run


def test_a_recorded_run_gives_its_speeds_back(recorded: Path) -> None:
    seen = observe(recorded)
    assert (seen.steps, seen.step_s) == (STEPS - 1, pytest.approx(WAIT_S + COMPUTE_S + PUBLISH_S))
    assert (seen.wait_s, seen.compute_s) == pytest.approx((WAIT_S, COMPUTE_S))
    assert seen.staleness_mean == 0.5
    measured = measure(recorded)
    server, environment, trainer = measured.speeds.server, measured.speeds.environment, measured.speeds.trainer
    assert server.step_s == pytest.approx(DECODE_STEP_S, rel=0.35)  # intervals mix two numbers of sequences
    assert server.sequence_s == pytest.approx(SEQUENCE_S, rel=0.35)
    assert environment.turn_s == pytest.approx(TURN_S, rel=0.02)
    assert trainer.fixed_s + 1e9 * trainer.seconds_per_cost == pytest.approx(COMPUTE_S, rel=0.02)
    assert server.update_s == PUBLISH_S and trainer.publish_s == pytest.approx(0.0, abs=1e-6)
    assert measured.settings.cores == 2 and measured.settings.background == 0


def test_the_turn_latency_makes_the_simulated_run_as_long_as_the_recorded_one(recorded: Path) -> None:
    measured = measure(recorded)
    assert measured.speeds.environment.latency_s > 0
    assert measured.fitted.step_s == pytest.approx(measured.observed.step_s, rel=0.1)  # step times jump with latency


def test_without_processor_times_nothing_shares_a_core(recorded: Path) -> None:
    (recorded / "usage.json").unlink()
    measured = measure(recorded)
    assert measured.settings.cores is None and measured.speeds.environment.turn_s == 0
    assert "wall seconds" in measured.speeds.basis


def test_a_run_is_simulated_with_other_settings(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, QUICKSTART, "--from-run", recorded, "--steps", 6, "gconfig.n_samples=2",
                      "train_dataset.batch_size=4", "rollout.max_head_offpolicyness=3", given=())  # fmt: skip
    assert found["settings"]["cores"] == 2 and found["settings"]["eta"] == 3
    assert found["calibration"]["observed"]["step_s"] == pytest.approx(WAIT_S + COMPUTE_S + PUBLISH_S)
    with_more = simulated(capsys, QUICKSTART, "--from-run", recorded, "--steps", 6, "gconfig.n_samples=2",
                          "train_dataset.batch_size=4", "rollout.max_head_offpolicyness=3",
                          given=("machine.background=6",))  # fmt: skip
    assert with_more["step_s"] > found["step_s"]


def test_a_run_too_short_to_measure_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trace in sorted((recorded / "traces").glob("*.npz"))[2:]:
        trace.unlink()
    assert "a calibration needs 3" in error_of(capsys, "plan", "--simulate", str(QUICKSTART), "--from-run",
                                               str(recorded))  # fmt: skip

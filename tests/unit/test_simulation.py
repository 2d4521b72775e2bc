"""The pipeline simulator: what holds for every simulation, and what can be worked out by hand.

The pool against the real batcher: `test_simulation_pool`.
Not covered: whether speeds measured on a run predict others; `scripts/bench.py simulate` does that with real runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_dta.simulation.clock import Clock, Station
from areal_dta.simulation.from_run import no_slower
from areal_dta.simulation.pipeline import Simulation
from areal_dta.simulation.report import simulate
from areal_dta.simulation.settings import SimulationError, SimulationSettings
from areal_dta.simulation.speeds import EnvironmentSpeed, Scaling, ServerSpeed, Speeds, TrainerSpeed
from areal_dta.simulation.workload import LengthWorkload
from areal_dta.tree.cost import TREE_TOKENS

SMALL = SimulationSettings(servers=1, batch_groups=2, group_size=4, eta=1, steps=6, warmup_steps=2)
LENGTHS = LengthWorkload(
    prompt_tokens=100, system_tokens=50, generated_tokens=20, observation_tokens=10, turns=3, generated_spread=0.8,
    turns_spread=0.5, task_spread=0.5,
)  # fmt: skip
QUICK = dataclasses.replace(SMALL, batch_groups=4)


def speeds(**values: Any) -> Speeds:
    server = ServerSpeed(
        step_s=values.pop("step_s", 0.02),
        sequence_s=values.pop("sequence_s", 0.001),
        prefill_token_s=values.pop("prefill_token_s", 1e-4),
        update_s=values.pop("update_s", 0.1),
        max_batch=values.pop("max_batch", 64),
    )
    environment = EnvironmentSpeed(
        turn_s=values.pop("turn_s", 0.0),
        latency_s=values.pop("latency_s", 0.0),
        latency_spread=values.pop("latency_spread", 0.0),
    )
    trainer = TrainerSpeed(
        fixed_s=values.pop("fixed_s", 0.5),
        seconds_per_cost=values.pop("per_token_s", 1e-4),
        cost_model=TREE_TOKENS,
        publish_s=values.pop("publish_s", 0.05),
    )
    return Speeds(server=server, environment=environment, trainer=trainer, **values)


def finished_run(settings_: SimulationSettings, speeds_: Speeds, workload: LengthWorkload = LENGTHS) -> Simulation:
    simulation = Simulation(settings_, speeds_, workload)
    simulation.run()
    return simulation


any_settings = st.builds(
    SimulationSettings,
    servers=st.integers(1, 4),
    workers=st.integers(1, 3),
    batch_groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    eta=st.integers(0, 4),
    dp=st.integers(1, 3),
    max_concurrent=st.none() | st.integers(1, 40),
    policy=st.sampled_from(("wait", "drop", "mask", "keep")),
    steps=st.just(6),
    warmup_steps=st.just(1),
    total_steps=st.none() | st.just(6) | st.just(8),
    seed=st.integers(0, 99),
    cores=st.none() | st.sampled_from((1.0, 2.0)),
    failure_rate=st.sampled_from((0.0, 0.2)),
)
any_speeds = st.builds(
    speeds,
    latency_s=st.sampled_from((0.0, 0.5, 5.0)),
    latency_spread=st.sampled_from((0.0, 1.0)),
    turn_s=st.sampled_from((0.0, 0.02)),
    fixed_s=st.sampled_from((0.0, 0.5, 20.0)),
    step_s=st.sampled_from((0.0, 0.02)),
    sequence_s=st.sampled_from((0.0, 0.001)),
    update_s=st.sampled_from((0.0, 1.0)),
    max_batch=st.sampled_from((2, 64)),
)
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---- what always holds ----


@PROPERTY
@given(any_settings, any_speeds)
def test_every_admitted_episode_is_running_pooled_trained_dropped_or_failed(
    given_settings: SimulationSettings, given_speeds: Speeds
) -> None:
    simulation = Simulation(given_settings, given_speeds, LENGTHS)
    with contextlib.suppress(SimulationError):  # `drop` may throw away more than a bounded run can replace
        simulation.run()
    counts = simulation.counts
    assert counts.granted == counts.running + simulation.pool.pooled + counts.trained + counts.dropped + counts.failed
    assert counts.running == sum(s.term is not None for g in simulation.pool.groups.values() for s in g.samples)
    assert counts.running <= given_settings.concurrent
    assert counts.trained == sum(step.episodes for step in simulation.steps) + simulation.num_in_training


@PROPERTY
@given(any_settings, any_speeds)
def test_no_token_is_trained_staler_than_eta_where_the_policy_bounds_it(
    given_settings: SimulationSettings, given_speeds: Speeds
) -> None:
    bounded = dataclasses.replace(given_settings, policy="wait", failure_rate=0.0)
    report = simulate(bounded, given_speeds, LENGTHS)
    assert report.staleness_max <= bounded.eta
    assert sum(report.staleness.values()) == pytest.approx(1.0)
    assert 0.0 <= report.staleness_mean <= bounded.eta


@PROPERTY
@given(any_settings, any_speeds)
def test_generated_tokens_are_those_of_the_episodes(given_settings: SimulationSettings, given_speeds: Speeds) -> None:
    simulation = finished_run(dataclasses.replace(given_settings, policy="keep", failure_rate=0.0), given_speeds)
    for step in simulation.steps:
        assert sum(step.staleness.values()) == step.tokens
        assert step.step_s == pytest.approx(step.wait_s + step.compute_s + step.publish_s + step.checkpoint_s)
    for times in simulation.server_times:
        shares = (times.prefill_s, times.decode_s, times.paused_s, times.idle_open_s, times.idle_closed_s)
        wall_s = sum(step.step_s for step in simulation.steps[given_settings.warmup_steps :])
        assert min(shares) >= 0 and sum(shares) == pytest.approx(wall_s)


@PROPERTY
@given(any_settings, any_speeds)
def test_the_same_seed_gives_the_same_run(given_settings: SimulationSettings, given_speeds: Speeds) -> None:
    kept = dataclasses.replace(given_settings, policy="keep", failure_rate=0.0)
    assert finished_run(kept, given_speeds).steps == finished_run(kept, given_speeds).steps


def test_another_seed_gives_another_run() -> None:
    one, other = (simulate(SMALL, speeds(), dataclasses.replace(LENGTHS, seed=seed)) for seed in (1, 2))
    assert one.step_s != other.step_s


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_more_servers_never_slow_a_rollout_bound_run(eta: int) -> None:
    """Monotone up to the noise of who is served with whom."""
    slow_rollout = speeds(step_s=0.5, sequence_s=0.05, fixed_s=0.1)
    base = dataclasses.replace(QUICK, eta=eta, steps=12)
    rates = [simulate(dataclasses.replace(base, servers=n), slow_rollout, LENGTHS).trajectories_per_s
             for n in (1, 2, 4, 8)]  # fmt: skip
    for fewer, more in itertools.pairwise(rates):
        assert more >= fewer * 0.99
    assert rates[-1] > 1.5 * rates[0]


def test_more_staleness_never_slows_a_balanced_run() -> None:
    balanced = speeds(step_s=0.05, fixed_s=4.0)
    base = dataclasses.replace(QUICK, steps=16, max_concurrent=64)
    rates = [simulate(dataclasses.replace(base, eta=eta), balanced, LENGTHS).trajectories_per_s for eta in (0, 1, 4)]
    assert rates[0] < rates[1] * 1.001 <= rates[2] * 1.01
    assert rates[2] > 1.2 * rates[0]


# ---- closed forms ----

EQUAL = LengthWorkload(prompt_tokens=100, generated_tokens=50, turns=2, observation_tokens=10)


def test_one_server_with_equal_episodes_takes_what_the_formula_says() -> None:
    """Synchronous (eta 0): a step is the rollout of its batch, then training, then publishing."""
    given_speeds = speeds(step_s=0.02, sequence_s=0.001, prefill_token_s=0.0, update_s=0.25, latency_s=1.0, fixed_s=3.0,
                          per_token_s=0.0, publish_s=0.5)  # fmt: skip
    report = simulate(dataclasses.replace(SMALL, eta=0), given_speeds, EQUAL)
    rollout_s = 2 * (1.0 + 50 * (0.02 + 8 * 0.001))
    assert report.wait_s == pytest.approx(rollout_s)
    assert report.compute_s == pytest.approx(3.0)
    assert report.publish_s == pytest.approx(0.75)
    assert report.step_s == pytest.approx(rollout_s + 3.75)
    assert report.staleness == {0: 1.0}
    assert report.trajectories_per_s == pytest.approx(8 / report.step_s)
    assert report.running_per_server == pytest.approx(8.0)
    assert report.episode_s == pytest.approx(rollout_s)
    assert report.server_paused_share == pytest.approx(0.25 / report.step_s)


def test_prompts_cost_their_tokens_that_nobody_has_computed() -> None:
    """One group of two samples: the prompt once (but for the last token), then what each turn adds."""
    given_speeds = speeds(step_s=0.0, sequence_s=0.0, prefill_token_s=1.0, update_s=0.0, fixed_s=0.0, per_token_s=0.0,
                          publish_s=0.0)  # fmt: skip
    settings_ = dataclasses.replace(SMALL, eta=0, batch_groups=1, group_size=2)
    simulation = finished_run(settings_, given_speeds, EQUAL)
    first_turns, second_turns = 100 + 1, 2 * 10
    steps = settings_.steps - settings_.warmup_steps
    assert simulation.server_times[0].prefill_tokens == steps * (first_turns + second_turns)


def test_a_trainer_bound_run_takes_the_trainers_time_and_is_as_stale_as_allowed() -> None:
    slow_training = speeds(fixed_s=100.0, per_token_s=0.0, publish_s=1.0, update_s=1.0)
    report = simulate(dataclasses.replace(SMALL, eta=2, steps=10, warmup_steps=4), slow_training, EQUAL)
    assert report.step_s == pytest.approx(102.0)
    assert report.trainer_waits_share == pytest.approx(0.0)
    assert report.bounding_stage == "training"
    assert report.staleness == {2: 1.0}
    assert report.server_waits_trainer_share > 0.9


def test_trainer_seconds_follow_the_tree_and_its_ranks() -> None:
    """100 tokens shared, then 50 + 10 + 50 of each of 8 episodes; a second rank halves all but the prompt."""
    given_speeds = speeds(fixed_s=0.0, per_token_s=1.0, publish_s=0.0, update_s=0.0)
    shared = dataclasses.replace(EQUAL, system_tokens=100)
    one = simulate(SMALL, given_speeds, shared)
    assert one.tree_tokens_per_step == 100 + 8 * 110
    assert one.compute_s == pytest.approx(100 + 8 * 110)
    two = simulate(dataclasses.replace(SMALL, dp=2), given_speeds, shared)
    assert two.compute_s == pytest.approx(100 + 4 * 110)
    scaled = dataclasses.replace(given_speeds, scaling=Scaling(tp_efficiency=0.8))
    four = simulate(dataclasses.replace(SMALL, tp=4), scaled, shared)
    assert four.compute_s == pytest.approx((100 + 8 * 110) / (4 * 0.64))


def test_weights_that_change_under_a_sequence_split_its_tokens_by_version() -> None:
    long = LengthWorkload(prompt_tokens=10, generated_tokens=400)
    given_speeds = speeds(step_s=0.1, sequence_s=0.0, prefill_token_s=0.0, fixed_s=25.0, per_token_s=0.0, publish_s=0.0,
                          update_s=0.0)  # fmt: skip
    simulation = finished_run(dataclasses.replace(SMALL, eta=1), given_speeds, long)
    mixed = [step.staleness for step in simulation.steps if len(step.staleness) > 1]
    assert mixed and all(sum(ages.values()) == 8 * 400 for ages in mixed)


# ---- shared cores ----


def test_work_shares_the_cores_there_are() -> None:
    clock = Clock(cores=2)
    ended: list[tuple[str, float]] = []
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 4.0)):
        clock.work(seconds, lambda name=name: ended.append((name, clock.now_s)))  # type: ignore[misc]
    while clock.step():
        pass
    times = dict(ended)
    assert times == pytest.approx({"a": 2.0, "b": 3.5, "c": 3.5, "d": 5.5})  # rates 1/2, 2/3, 1
    assert clock.got_s == pytest.approx(9.0)
    assert clock.wanted_s == pytest.approx(2 + 3.5 + 3.5 + 5.5)


def test_background_threads_take_their_share_of_the_cores() -> None:
    clock = Clock(cores=1, background=3)
    clock.work(1.0, lambda: None)
    while clock.step():
        pass
    assert clock.now_s == pytest.approx(4.0)


def test_a_calibrated_background_never_makes_the_run_slower_than_it_was() -> None:
    calm = dataclasses.replace(QUICK, cores=2.0, background=0.2)
    busy = dataclasses.replace(calm, background=1.5)
    step_s = simulate(calm, speeds(), LENGTHS).step_s
    fitted = no_slower(busy, speeds(), LENGTHS, step_s)  # type: ignore[arg-type]
    assert fitted.background < 1.0
    assert simulate(fitted, speeds(), LENGTHS).step_s == pytest.approx(step_s, rel=0.03)
    assert no_slower(busy, speeds(), LENGTHS, 1e9).background == 1.5  # type: ignore[arg-type]
    assert no_slower(busy, speeds(), LENGTHS, 1e-9).background == 0.0  # type: ignore[arg-type]


def test_cancelled_work_says_what_was_left_and_frees_its_core() -> None:
    clock = Clock(cores=1)
    ended: list[float] = []
    first = clock.work(10.0, lambda: ended.append(-1.0))
    clock.work(3.0, lambda: ended.append(clock.now_s))
    left: list[float] = []
    clock.after(2.0, lambda: left.append(clock.cancel(first)))
    while clock.step():
        pass
    assert left == pytest.approx([9.0]) and ended == pytest.approx([4.0])
    with pytest.raises(ValueError, match="ended already"):
        clock.cancel(first)


def test_a_station_serves_in_order_of_arrival() -> None:
    clock, ended = Clock(), []
    station = Station(clock)
    for name in ("a", "b"):
        station.submit(1.0, lambda name=name: ended.append((name, clock.now_s)))  # type: ignore[misc]
    while clock.step():
        pass
    assert ended == [("a", 1.0), ("b", 2.0)] and station.busy_s == 2.0


def test_servers_on_one_core_are_as_fast_as_their_steps_are_full() -> None:
    """What a step costs whatever it holds is paid twice as often by two servers that share a core."""
    given_speeds = speeds(step_s=0.1, sequence_s=0.0, prefill_token_s=0.0, fixed_s=0.0, per_token_s=0.0, publish_s=0.0,
                          update_s=0.0)  # fmt: skip
    base = dataclasses.replace(SMALL, eta=0, cores=1.0, batch_groups=4)
    one, two = (simulate(dataclasses.replace(base, servers=n), given_speeds, EQUAL) for n in (1, 2))
    assert two.step_s == pytest.approx(2 * one.step_s)
    apart = simulate(dataclasses.replace(base, servers=2, cores=None), given_speeds, EQUAL)
    assert apart.step_s == pytest.approx(one.step_s)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eta": -1}, "eta is -1"),
        ({"servers": 0}, "servers is 0"),
        ({"policy": "hope"}, "wait, drop, mask, keep"),
        ({"warmup_steps": 6}, "must be below steps=6"),
        ({"total_steps": 3}, "ends before steps=6"),
        ({"failure_rate": 1.0}, "below 1"),
    ],
)
def test_settings_that_make_no_run_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        dataclasses.replace(SMALL, **change)

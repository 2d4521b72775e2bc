"""The tuner on simulated machines: it finds what is fastest, pays little for it, and follows changes.

Not covered: real latencies; `scripts/bench.py spec` measures those.
"""

from __future__ import annotations

import math
import random

import pytest

from areal_dta.drafter.arm_stats import ArmStats
from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm, available_arms
from areal_dta.drafter.step_model import Acceptance, RowCost, StepCosts, measure_steps
from areal_dta.drafter.tuner import Tuner, TunerSettings
from tests.unit.tuner_machine import CPU_COSTS, GPU_COSTS, Machine, play, tuner_for

BATCHES = (1, 2, 4, 8, 16, 32, 48)
CHAIN = Arm("eagle", 3, 1, 3)

# Different arms win at different batch sizes: from five tokens ahead to plain decoding.
MIXED = [
    (CPU_COSTS, {"eagle": 0.75, "ngram": 0.35}),
    (CPU_COSTS, {"eagle": 0.4, "ngram": 0.7}),
    (GPU_COSTS, {"eagle": 0.75, "ngram": 0.3}),
]
USELESS = [(CPU_COSTS, {"eagle": 0.05, "ngram": 0.02}), (GPU_COSTS, {"eagle": 0.03})]


@pytest.mark.parametrize(("costs", "rates"), MIXED)
def test_after_a_warm_up_every_bucket_is_within_5_percent_of_its_best_arm(
    costs: dict[int, float], rates: dict[str, float]
) -> None:
    machine = Machine(costs, rates, noise=0.1, outliers=0.01)
    tuner = tuner_for(machine)
    assert len({max(DEFAULT_ARMS, key=lambda a: machine.speed(a, b)) for b in BATCHES}) >= 2
    for batch in BATCHES:
        warm_up = play(tuner, machine, [batch] * 1200)
        after = play(tuner, machine, [batch] * 500)
        print(batch, f"warm-up {warm_up.to_best:.3f} (low {warm_up.lowest:.3f}), then {after.to_best:.3f}", after.arms)
        assert after.to_best >= 0.95
        assert warm_up.to_plain >= 0.98


@pytest.mark.parametrize(("costs", "rates"), USELESS)
@pytest.mark.parametrize("seed", range(3))
def test_where_no_arm_helps_the_loss_stays_below_3_percent_from_the_first_step_on(
    costs: dict[int, float], rates: dict[str, float], seed: int
) -> None:
    for batch in (1, 4, 32):
        machine = Machine(costs, rates, noise=0.1, outliers=0.01, rng=random.Random(seed))
        outcome = play(tuner_for(machine, seed), machine, [batch] * 1000)
        print(batch, f"lowest {outcome.lowest:.3f}, in all {outcome.to_plain:.3f}", outcome.arms)
        assert max(machine.speed(a, batch) for a in DEFAULT_ARMS) == machine.speed(OFF, batch)
        assert outcome.lowest >= 0.97
        assert outcome.to_plain >= 0.97


def test_it_leaves_a_drafter_that_a_policy_update_spoilt_and_returns_when_it_recovers() -> None:
    machine = Machine(CPU_COSTS, {"eagle": 0.75})
    tuner = tuner_for(machine)
    play(tuner, machine, [4] * 800)
    assert play(tuner, machine, [4] * 200).to_best > 0.95
    machine.rates = {"eagle": 0.1}  # plain decoding is fastest now
    tuner.new_version()
    drop = play(tuner, machine, [4] * 150)
    after_drop = play(tuner, machine, [4] * 500)
    print(f"after the update {drop.to_plain:.3f}, then {after_drop.to_plain:.3f}", drop.arms)
    assert drop.to_plain > 0.8 and after_drop.to_plain > 0.97
    machine.rates = {"eagle": 0.75}
    tuner.new_version("eagle")
    play(tuner, machine, [4] * 800)
    assert play(tuner, machine, [4] * 300).to_best > 0.95


def test_a_change_without_notice_is_found_out_too() -> None:
    machine = Machine(CPU_COSTS, {"eagle": 0.75})
    tuner = tuner_for(machine)
    play(tuner, machine, [4] * 800)
    machine.rates = {"eagle": 0.05}
    play(tuner, machine, [4] * 150)
    assert play(tuner, machine, [4] * 500).to_plain > 0.97
    machine.rates = {"eagle": 0.75}
    play(tuner, machine, [4] * 4000)
    assert play(tuner, machine, [4] * 300).to_best > 0.95


def test_heavy_tails_and_tenfold_outliers_do_not_mislead() -> None:
    machine = Machine(CPU_COSTS, {"eagle": 0.75, "ngram": 0.35}, noise=0.3, outliers=0.05)
    tuner = tuner_for(machine)
    outcome = play(tuner, machine, [8] * 1500)
    after = play(tuner, machine, [8] * 500)
    print(f"low {outcome.lowest:.3f}, after {after.to_best:.3f}")
    assert outcome.lowest >= 0.96 and after.to_best >= 0.95


def test_a_batch_that_shrinks_as_in_a_long_tailed_step_is_followed() -> None:
    machine = Machine(CPU_COSTS, {"eagle": 0.75, "ngram": 0.35}, noise=0.1, outliers=0.01)
    tuner = tuner_for(machine)
    sweep = [b for b in (32, 24, 16, 12, 8, 6, 4, 3, 2, 1) for _ in range(60)]
    first = play(tuner, machine, sweep)
    for _ in range(4):
        play(tuner, machine, sweep)
    last = play(tuner, machine, sweep)
    print(f"first {first.to_plain:.3f} (low {first.lowest:.3f}), sixth {last.to_best:.3f} of the best")
    assert first.lowest >= 0.97 and first.to_plain > 1.05
    assert last.to_best >= 0.95


def test_choices_repeat_with_the_seed_and_differ_without() -> None:
    def run(seed: int) -> list[Arm]:
        machine = Machine(CPU_COSTS, {"eagle": 0.75})
        tuner, chosen = tuner_for(machine, seed), []
        for _ in range(200):
            chosen.append(tuner.choose(2, 100))
            seconds, counts = machine.step(chosen[-1], 2)
            tuner.record(chosen[-1], 2, 100, 2 + sum(counts), seconds, counts)
        return chosen

    assert run(0) == run(0) != run(1)


def test_a_fixed_threshold_and_missing_drafters_are_respected() -> None:
    machine = Machine(GPU_COSTS, {"eagle": 0.9, "ngram": 0.3})
    tuner = tuner_for(machine, max_batch=4)
    assert set(play(tuner, machine, [5] * 300).arms) == {"off"}
    assert "eagle-d5-k1-v5" in play(tuner, machine, [4] * 300).arms
    tuner.set_arms(available_arms(DEFAULT_ARMS, ["ngram"]))
    assert not any(name.startswith("eagle") for name in play(tuner, machine, [4] * 300).arms)


def test_what_plain_steps_teach_by_drafting_unverified_makes_the_first_trial_hit() -> None:
    machine = Machine(CPU_COSTS, {"ngram": 0.8})
    tuner = tuner_for(machine)
    chain = Arm("ngram", 7, 1, 7)
    for _ in range(200):  # drafts compared with what plain decoding produced
        tuner.acceptance.learn(chain, 1, machine.step(chain, 1)[1])
    outcome = play(tuner, machine, [1] * 100)
    assert outcome.arms["ngram-d7-k1-v7"] > 40 and outcome.to_plain > 1.2


def test_the_snapshot_adds_up() -> None:
    machine = Machine(CPU_COSTS, {"eagle": 0.75, "ngram": 0.35})
    tuner = tuner_for(machine)
    play(tuner, machine, [4] * 600)
    play(tuner, machine, [33] * 100, context=20_000)
    seen = tuner.snapshot()
    assert seen["steps"] == 700
    assert sum(seen["share"].values()) == pytest.approx(1)
    assert sum(seen["time_share"].values()) == pytest.approx(1)
    assert seen["accept_length"]["off"] == 1.0
    assert seen["accept_length"]["eagle-d3-k1-v3"] == pytest.approx(machine.tokens(CHAIN), rel=0.05)
    assert seen["regret"] <= 0.03 and seen["loss_to_plain"] < 0
    assert [(b["batch"], b["context"]) for b in seen["buckets"]] == [("3-4", "1-1024"), ("33+", "16385+")]
    assert seen["buckets"][0]["best"] in seen["buckets"][0]["speeds"]


def test_step_costs_interpolate_extend_and_learn_the_machine() -> None:
    costs = StepCosts({1: 1.0, 4: 2.0, 16: 4.0})
    assert [costs.prior_s(r) for r in (1, 2, 4, 8, 16, 32)] == pytest.approx([1, 2**0.5, 2, 8**0.5, 4, 8])
    assert costs.step_s(CHAIN, 1, 0) == pytest.approx(2.0 + 3 * 0.1)
    costs.observe(CHAIN, 1, 0, 100.0)  # one outlier proves nothing
    for _ in range(40):
        costs.observe(OFF, 1, 0, 3.0)  # the machine is three times slower than calibrated
    assert costs.step_s(OFF, 1, 0) == pytest.approx(3.0)
    assert costs.step_s(CHAIN, 4, 1) == pytest.approx(3 * (4.0 + 3 * 0.1 * 2.0))
    for _ in range(20):
        costs.observe(CHAIN, 4, 1, 12.0, draft_seconds=8.0)
    assert costs.step_s(CHAIN, 4, 1) == pytest.approx(12.0)
    with pytest.raises(ValueError, match="give seconds"):
        StepCosts({})


def test_rows_that_a_drafter_leaves_empty_are_not_charged() -> None:
    arm, costs = Arm("ngram", 7, 1, 7), StepCosts({1: 1.0, 8: 8.0})
    full_s = costs.step_s(arm, 1, 0)
    for _ in range(60):
        costs.observe(arm, 1, 0, 1.0, draft_seconds=0.0, num_rows=1)  # nothing matched: a plain step
    assert costs.step_s(arm, 1, 0) < 0.2 * full_s


def test_calibration_takes_the_fastest_of_its_repeats() -> None:
    times = iter([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    assert measure_steps(lambda _: next(times), rows=(1, 8), repeats=3) == {1: 1.0, 8: 4.0}


def test_acceptance_bounds_close_in_on_the_truth_and_widen_with_age() -> None:
    acceptance = Acceptance()
    low, high = acceptance.tokens(CHAIN)
    assert low == 1.0 and high > 3
    machine = Machine(CPU_COSTS, {"eagle": 0.6})
    for _ in range(200):
        acceptance.learn(CHAIN, 4, machine.step(CHAIN, 4)[1])
    low, high = acceptance.tokens(CHAIN)
    truth = machine.tokens(CHAIN)
    assert low - 0.05 < truth < high + 0.05 and high - low < 0.15
    assert acceptance.tokens(Arm("eagle", 3, 2, 7))[1] < 2.8  # a wider tree is believed to be somewhat better
    assert acceptance.tokens(Arm("ngram", 3, 1, 3))[1] > 3
    for _ in range(8):
        acceptance.age("eagle")
    assert acceptance.tokens(CHAIN)[1] > high + 0.3


def test_speed_is_mean_tokens_over_median_latency() -> None:
    stats = ArmStats()
    for i in range(30):
        stats.add(i, 5.0 if i % 3 == 0 else 1.0, 1.0, 100.0 if i == 7 else 2.0)
    assert stats.speed()[0] == pytest.approx((7 / 3) / 2.0)
    stats.age()
    assert stats.count == 15
    stats.forget_tokens()
    assert stats.count == 0


def test_impossible_settings_and_records_are_refused() -> None:
    with pytest.raises(ValueError, match="burst_steps"):
        TunerSettings(burst_steps=1)
    tuner = Tuner(StepCosts({1: 1.0}))
    with pytest.raises(ValueError, match="positive"):
        tuner.record(OFF, 1, 10, 1, 0.0)


def test_a_rows_cost_is_found_among_steps_of_all_sizes_and_followed_when_it_changes() -> None:
    rng = random.Random(4)
    cost = RowCost(0.01)
    assert cost.row_s == 0.01
    for row_s in (0.02, 0.05):
        for _ in range(1500):
            batch = rng.randint(1, 32)
            drafted = rng.choice([0, rng.randint(1, 7 * batch)])
            cost.observe(batch, drafted, (1 + 0.06 * batch + row_s * drafted) * math.exp(rng.gauss(0, 0.1)))
        assert cost.row_s == pytest.approx(row_s, rel=0.1)
    for _ in range(2000):
        cost.observe(1, 0, 1.0)  # without drafts nothing is known, and it is never free
    assert cost.row_s > 0


def test_the_chance_a_draft_needs_rises_with_what_a_row_takes_of_a_tokens_time() -> None:
    tuner = Tuner(StepCosts({1: 1.0, 64: 1.0 + 63 * 0.05}), [Arm("ngram", 7, 1, 7)])
    small, large = (tuner.least_chance(batch, 100) for batch in (1, 32))
    assert small == pytest.approx(0.05) and small < large < 1
    for _ in range(40):  # three tokens in the time of one: the same row must now bring more
        tuner.record(Arm("ngram", 7, 1, 7), 1, 100, 3, 1.0, [1, 1], num_rows=4)
        tuner.record(OFF, 1, 100, 1, 1.0, num_rows=1)
    tuner.choose(1, 100)
    row_s = tuner.costs.row_s
    assert tuner.least_chance(1, 100) == pytest.approx(3 * row_s, rel=0.05)


def test_drafts_on_paper_tell_what_a_strategy_yields_before_it_is_tried() -> None:
    arm, tuner = (
        Arm("ngram", 7, 1, 7),
        Tuner(StepCosts({1: 1.0, 64: 10.0}), [Arm("ngram", 3, 1, 3), Arm("ngram", 7, 1, 7)]),
    )
    before = tuner.costs.step_s(arm, 8, 0)
    for _ in range(100):
        tuner.on_paper("ngram", 2, 1)
    assert tuner.acceptance.tokens(arm)[0] == pytest.approx(2, abs=0.1)
    assert tuner.costs.step_s(arm, 8, 0) < 0.6 * before  # two rows of seven are filled
    tuner.remove("ngram")
    tuner.on_paper("ngram", 2, 1)


def test_running_sums_give_the_speed_of_the_window() -> None:
    rng = random.Random(5)
    stats = ArmStats()
    values: list[float] = []
    for step in range(700):
        values.append(rng.choice([1.0, 1.5, 4.0]))
        stats.add(step, values[-1], 1.0, 2.0)
        if step == 300:
            stats.age()
    values = values[-256:]
    mean = sum(values) / 256
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 256 / 256)
    assert stats.speed() == (pytest.approx(mean / 2), pytest.approx(spread / 2))


def test_an_ngram_arm_is_a_chain() -> None:
    with pytest.raises(ValueError, match="write ngram-d6-k1-v6"):
        Arm.parse("ngram-d6-k2-v9")

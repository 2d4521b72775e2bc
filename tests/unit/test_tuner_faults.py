"""The tuner on a machine that misleads it, and asked from other threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.tuner import Tuner
from tests.unit.tuner_machine import Machine, tuner_for


def choices(machine: Machine, tuner: Tuner, batches: Sequence[int], slow: range, factor: float) -> list[Arm]:
    """What the tuner chooses, while steps of ``slow`` take ``factor`` times as long."""
    chosen = []
    for step, batch in enumerate(batches):
        chosen.append(tuner.choose(batch, 500))
        seconds, counts = machine.step(chosen[-1], batch)
        tuner.record(chosen[-1], batch, 500, batch + sum(counts), seconds * (factor if step in slow else 1), counts)
    return chosen


def test_what_was_measured_in_a_slow_minute_is_measured_again() -> None:
    """Plain decoding is measured while the machine is slow, the arms when it is fast again: that is not their merit."""
    for seed in range(4):
        machine = Machine(rates={"eagle": 0.25, "ngram": 0.1}, noise=0.03)
        assert choices(machine, tuner_for(machine, seed), [1] * 1500, range(30), 4)[-500:].count(OFF) > 450


def test_an_arm_that_was_only_tried_in_a_slow_minute_is_tried_again() -> None:
    machine = Machine(rates={"eagle": 0.8, "ngram": 0.3}, noise=0.03)
    chosen = choices(machine, tuner_for(machine), [1] * 5000, range(1000, 1020), 10)
    best = max(machine.speed(arm, 1) for arm in DEFAULT_ARMS)
    assert sum(machine.speed(a, 1) for a in chosen[-500:]) > 0.97 * 500 * best


def test_arms_are_proven_too_where_every_other_step_is_plain() -> None:
    machine = Machine(rates={"eagle": 0.8, "ngram": 0.3}, noise=0.03)
    chosen = choices(machine, tuner_for(machine, max_batch=8), [4, 16] * 1500, range(0), 1)
    best = max(machine.speed(arm, 4) for arm in DEFAULT_ARMS)
    assert sum(machine.speed(a, 4) for a in chosen[-1000::2]) > 0.95 * 500 * best


def test_a_snapshot_may_be_asked_for_while_steps_are_recorded() -> None:
    machine = Machine()
    tuner = tuner_for(machine)
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            tuner.snapshot()

    asking = ThreadPoolExecutor(1).submit(ask)
    rng = random.Random(0)
    for _ in range(1000):
        batch, context, arm = rng.randint(1, 40), rng.choice((10, 2000, 9000, 20000)), rng.choice(DEFAULT_ARMS)
        tuner.choose(batch, context)
        tuner.record(arm, batch, context, batch, 0.01 * rng.random() + 1e-3, [0] * arm.depth)
    stop.set()
    asking.result(10)


def test_a_trial_for_which_nobody_had_room_does_not_break_the_snapshot() -> None:
    machine = Machine(rates={"eagle": 0.9})
    tuner = tuner_for(machine)
    for _ in range(400):  # every arm but plain decoding goes without pages
        tuner.choose(8, 500)
        tuner.record(OFF, 8, 500, 8, machine.step(OFF, 8)[0])
        assert set(tuner.snapshot()["accept_length"]) == {"off"}

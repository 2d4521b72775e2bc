"""Leader and followers in threads of one process, with a stand-in for the network: what they agree on, and when not.

Not covered: real gradients (see tests/e2e/test_spot_training.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from areal_dta.drafter.averaging import Hub, Message, Share, checksum, decode_share, encode_share
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.learner import Learner
from areal_dta.drafter.losses import DraftScores
from areal_dta.drafter.spot_follower import Follower
from areal_dta.drafter.spot_leader import Leader
from areal_dta.drafter.spot_state import SpotSettings, TrainingState, accumulate
from areal_dta.drafter.states import Assignment
from areal_dta.drafter.trainer_step import NonFiniteGradient
from areal_dta.wire import ChannelError

SIZE = 6
SETTINGS = SpotSettings(step_tokens=4, collect_s=0.5, sync_timeout_s=1.0, join_retry_s=0.3, check_steps=1)
REST = Assignment(reason="over")


class VectorTrainer:
    """Plain gradient descent on one vector."""

    num_trained = SIZE

    def __init__(self, start: float) -> None:
        self.value = torch.full((SIZE,), start)

    def state_dict(self, copy: bool = True) -> dict[str, torch.Tensor]:
        return {"trained_P": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state["trained_P"].shape != (SIZE,):
            raise DrafterMismatch("another drafter's")
        self.value = state["trained_P"].clone()


class VectorLearner:
    """Every micro-step is ``gradient`` on two rows and two tokens."""

    last_tokens = 2

    rest_s = 0.0

    def __init__(self, start: float, gradient: float) -> None:
        self.trainer = VectorTrainer(start)
        self.gradient = gradient
        self.before_micro: Callable[[], None] = lambda: None

    def micro_step(self, limit_s: float = math.inf) -> Share | None:
        self.before_micro()
        return Share(torch.full((SIZE,), 2 * self.gradient), 2, 2.0, DraftScores())

    def apply(self, share: Share) -> None:
        if not bool(torch.isfinite(share.sum_P).all()):
            raise NonFiniteGradient("not finite")
        self.trainer.value = self.trainer.value - share.sum_P / share.num_rows


class Control:
    """A control link whose assignment the test sets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.assignment = REST

    def current(self) -> Assignment:
        return self.assignment

    def left(self, assignment: Assignment) -> bool:
        now = self.assignment
        return (now.round_id, now.leader) != (assignment.round_id, assignment.leader)

    def wait(self, timeout_s: float) -> Assignment:
        time.sleep(timeout_s)
        return self.assignment

    def report(self, **said: Any) -> None:
        """Nobody listens."""


class Member:
    def __init__(self, name: str, start: float, gradient: float) -> None:
        self.learner = VectorLearner(start, gradient)
        self.control = Control(name)
        self.state = TrainingState(cast(Learner, self.learner))
        self.hub = Hub(name)
        self.leader = Leader(self.state, cast(ControlLink, self.control), self.hub, SETTINGS)
        self.follower = Follower(self.state, cast(ControlLink, self.control), SETTINGS)
        self._threads: list[threading.Thread] = []

    def follow(self, assignment: Assignment, until_step: int) -> None:
        self.control.assignment = assignment
        deadline_s = time.monotonic() + 5

        def run() -> None:
            while self.state.step < until_step and time.monotonic() < deadline_s and self.control.assignment.train:
                self.follower.step(assignment)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def lead(self, assignment: Assignment, num_steps: int, members: int) -> list[int]:
        """Take ``num_steps`` steps in which ``members`` take part; how many did in each."""
        self.control.assignment = assignment
        taken: list[int] = []
        deadline_s = time.monotonic() + 5
        while sum(n == members for n in taken) < num_steps and time.monotonic() < deadline_s:
            self.learner.before_micro = lambda: time.sleep(0.01)
            found = self.leader.step(assignment)
            if found is not None:
                taken.append(found[1])
        return taken

    def end(self) -> None:
        self.control.assignment = REST
        for thread in self._threads:
            thread.join(3)
            assert not thread.is_alive()
        self.follower.leave()
        self.hub.close()


def round_of(leader: Member, *others: Member) -> Assignment:
    names = tuple(m.control.name for m in (leader, *others))
    return Assignment("round", leader.control.name, leader.hub.address, names)


def test_a_follower_takes_over_the_leaders_state_and_both_apply_the_same_mean() -> None:
    leader, follower = Member("a", 10.0, 1.0), Member("b", -3.0, 0.5)
    assignment = round_of(leader, follower)
    follower.follow(assignment, 10**6)
    taken = leader.lead(assignment, 3, 2)
    deadline_s = time.monotonic() + 3
    while follower.state.step < leader.state.step and time.monotonic() < deadline_s:
        time.sleep(0.01)
    follower.end()
    assert follower.state.lineage == leader.state.lineage
    assert torch.equal(leader.learner.trainer.value, follower.learner.trainer.value)
    assert leader.leader.counters["states_sent"] == 1
    assert follower.follower.counters == Counter()
    assert leader.state.step == len(taken)
    assert float(leader.learner.trainer.value[0]) < 10 - 0.5 * len(taken)
    leader.end()


def test_a_member_that_never_sends_costs_the_leader_its_deadline_only() -> None:
    leader, silent = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0)
    assignment = round_of(leader, silent)
    link = silent.follower._connect(assignment)
    link.send("join", {"nonce": "n", "lineage": silent.state.lineage})
    deadline_s = time.monotonic() + 3
    while not leader.leader._peers and time.monotonic() < deadline_s:
        leader.leader.hear()
    start_s = time.monotonic()
    assert leader.lead(assignment, 1, 1) == [1]
    assert 0.4 < time.monotonic() - start_s < 1.5
    assert leader.leader.counters["missed"] == 1
    gone = Assignment("round", "a", leader.hub.address, ("a",))
    start_s = time.monotonic()
    assert leader.lead(gone, 1, 1) == [1]  # no longer assigned: not waited for at all
    assert time.monotonic() - start_s < 0.3
    leader.end()
    silent.end()


def test_a_member_that_joins_while_the_step_is_being_closed_is_not_waited_for() -> None:
    leader, silent, late = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0), Member("c", 1.0, 1.0)
    assignment = round_of(leader, silent, late)
    leader.control.assignment = assignment
    silent.follower._connect(assignment)
    silent.follower.hear()
    assert leader.hub.poll(3)
    leader.leader.hear()

    def join(member: Member = late) -> None:
        member.follower._connect(assignment)
        member.follower.hear()

    timer = threading.Timer(0.15, join)
    leader.learner.before_micro = lambda: None if timer.is_alive() or timer.finished.is_set() else timer.start()
    found = leader.leader.step(assignment)
    timer.join(3)
    assert found is not None and found[1] == 1
    assert leader.leader._peers == {"b", "c"}
    assert leader.leader.counters["missed"] == 1
    for member in (leader, silent, late):
        member.end()


def test_a_member_that_joined_before_the_leader_was_told_of_it_is_not_left_behind() -> None:
    leader, early = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0)
    leader.control.assignment = alone = round_of(leader)
    link = early.follower._connect(round_of(leader, early))
    early.follower.hear()
    assert leader.hub.poll(3)
    leader.leader.hear()
    assert leader.leader.step(alone) is not None
    assert link.poll(3)
    early.follower.hear()
    assert early.state.step == 1 or link.poll(3)
    early.follower.hear()
    assert (early.state.step, early.state.lineage) == (1, leader.state.lineage)
    for member in (leader, early):
        member.end()


def test_gradients_of_a_state_that_is_over_or_of_another_drafter_are_left_out() -> None:
    leader, other = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0)
    assignment = round_of(leader, other)
    link = other.follower._connect(assignment)
    share = Share(torch.ones(SIZE), 2, 1.0, DraftScores())
    body, values = encode_share(share)
    link.send("gradients", {**body, "lineage": "long ago"}, values)
    link.send("gradients", {**body, "lineage": leader.state.lineage}, values[:-1])
    link.send("gradients", {**body, "lineage": leader.state.lineage}, values * np.float32("nan"))
    deadline_s = time.monotonic() + 3
    while leader.leader.counters["refused"] < 2 and time.monotonic() < deadline_s:
        leader.leader.hear()
    assert leader.leader.counters == Counter(late=1, refused=2)
    answer = link.receive(1.0)
    assert answer is not None and answer.kind == "rejoin"
    leader.end()
    other.end()


def test_an_interrupted_leader_keeps_its_part_of_the_step() -> None:
    leader = Member("a", 1.0, 1.0)
    assignment = round_of(leader)
    leader.control.assignment = assignment

    def interrupt() -> None:
        leader.control.assignment = REST

    leader.learner.before_micro = interrupt
    assert leader.leader.step(assignment) is None
    assert leader.state.share is not None and leader.state.step == 0
    leader.learner.before_micro = lambda: None
    leader.control.assignment = assignment
    found = leader.leader.step(assignment)
    assert found is not None and found[0].num_rows == 4  # two micro-steps: one from before, one from now
    leader.end()


def test_a_step_that_is_not_finite_is_left_out_by_all() -> None:
    leader = Member("a", 1.0, float("nan"))
    assignment = round_of(leader)
    leader.control.assignment = assignment
    lineage = leader.state.lineage
    assert leader.leader.step(assignment) is None
    assert (leader.state.lineage, leader.state.step, leader.state.share) == (lineage, 0, None)
    assert leader.leader.counters["non_finite"] == 1
    assert torch.equal(leader.learner.trainer.value, torch.ones(SIZE))
    leader.end()


def test_a_follower_of_a_dead_leader_does_not_wait_for_ever() -> None:
    leader, follower = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0)
    assignment = round_of(leader, follower)
    leader.hub.close()
    follower.control.assignment = assignment
    start_s = time.monotonic()
    follower.follower.step(assignment)
    assert time.monotonic() - start_s < 1.0
    follower.end()


def test_a_follower_that_asked_to_join_is_not_put_off_by_the_steps_it_misses_meanwhile() -> None:
    leader, follower = Member("a", 1.0, 1.0), Member("b", 2.0, 1.0)
    link = follower.follower._connect(round_of(leader, follower))
    follower.follower.hear()
    for i in range(3):  # of a leader that still counts it in
        follower.follower._heed(Message("a", "average", {"before": f"{i}", "lineage": f"{i + 1}", "step": i}, None))
        assert follower.follower.hear() == math.inf
    assert leader.hub.poll(3)
    leader.leader.hear()  # one request, one answer
    assert leader.leader.counters["states_sent"] == 1
    assert link.poll(3)
    follower.follower.hear()
    assert follower.state.lineage == leader.state.lineage
    assert follower.follower.counters == Counter()
    leader.end()
    follower.end()


def test_a_follower_goes_on_until_the_leader_needs_its_part_and_fits_the_last_micro_step_in() -> None:
    leader, follower = Member("a", 1.0, 1.0), Member("b", 1.0, 1.0)
    follower.control.assignment = assignment = round_of(leader, follower)
    follower.follower._connect(assignment)
    follower.follower._joined = True
    limits: list[float] = []

    def micro_step(limit_s: float = math.inf) -> Share:
        limits.append(limit_s)
        time.sleep(min(0.03, limit_s))
        if len(limits) == 3:  # beyond what the leader learns from itself
            close = {"lineage": follower.state.lineage, "at_s": time.monotonic() + 0.05}
            follower.follower._heed(Message("a", "close", close, None))
        return Share(torch.ones(SIZE), 1, 1.0, DraftScores())

    follower.learner.micro_step = micro_step  # type: ignore[method-assign]
    follower.learner.last_tokens = 1
    start_s = time.monotonic()
    assert accumulate(follower.state, cast(ControlLink, follower.control), assignment, 200, follower.follower)
    assert limits[:3] == [math.inf] * 3
    assert 0 < limits[-1] <= 0.05 and len(limits) in (4, 5)
    assert time.monotonic() - start_s < 1.0
    leader.end()
    follower.end()


def test_waiting_for_others_is_a_rest_as_long_as_one_is_owed() -> None:
    member = Member("a", 1.0, 1.0)
    member.learner.rest_s = 0.05
    member.state.micro_step()
    member.state.phases.begin()
    for _ in range(8):
        with member.state.waiting():
            time.sleep(0.02)
    member.state.phases.end()
    seconds = member.state.phases.seconds
    assert 0.03 < seconds["rest"] < 0.12 < 0.16 - 0.02 < seconds["rest"] + seconds["wait"]
    assert member.state.phases.cpu_seconds["wait"] < 0.02
    member.end()


def test_adding_shares_is_what_one_larger_batch_gives() -> None:
    scores = DraftScores((2.0,), (1.0,), (2.0,), (0.5,), (3.0,), 2.0, 1.0)
    a, b = Share(torch.tensor([1.0, 2.0]), 2, 3.0, scores), Share(torch.tensor([0.5, -1.0]), 6, 1.0, scores)
    total = a + b
    assert (total.num_rows, total.loss, total.scores.num_rows) == (8, 4.0, (4.0,))
    back = decode_share(*encode_share(total), 2)
    assert torch.equal(back.sum_P, total.sum_P) and back.scores == total.scores
    with pytest.raises(ChannelError, match="without"):
        decode_share({"num_rows": 1}, np.zeros(2, np.float32), 2)
    assert checksum(a.sum_P) != checksum(b.sum_P)

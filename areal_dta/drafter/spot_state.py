"""What the members of a training round share: the state that a ``lineage`` names, and a worker's own part of a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from areal_dta.drafter.averaging import Share, checksum
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.learner import Learner
from areal_dta.drafter.states import Assignment

__all__ = ["MOST_STEP_TOKENS", "PHASES", "SLICE_S", "Others", "Phases", "SpotSettings", "TrainingState", "accumulate"]

SLICE_S = 0.02  # how long a wait for others lasts before the assignment is looked at again
REST_SLICE_S = 0.05  # the same of a rest, in which nobody else is kept waiting
MOST_STEP_TOKENS = 2  # a follower without a leader must not go on for ever
LEAST_MICRO_STEP = 0.2  # of a whole one; for less than that before the own part is expected none is begun
PHASES = ("learn", "rest", "wait", "exchange", "update", "other")


@dataclass(frozen=True)
class SpotSettings:
    """``step_tokens``: the leader closes a step when it has learned from about so many. Until then the others go on, to
    ``MOST_STEP_TOKENS`` times as many at most, so that nobody waits for a slower one."""

    step_tokens: int = 4096
    collect_s: float = 1.0  # how long the leader waits for the others' gradients
    sync_timeout_s: float = 5.0  # how long a follower waits for the average before it joins again
    join_retry_s: float = 1.0
    refresh_s: float = 2.0  # how often the buffer is listed
    min_samples: int = 8  # with fewer this worker does not ask to train
    checkpoint_steps: int = 100
    publish_steps: int = 100
    publish_s: float = 600.0  # whichever comes first
    publish_tolerance: float = 0.0  # held-out top-3 accuracy may fall by this much
    check_steps: int = 50  # how often followers compare the weights' checksum with the leader's


class Phases:
    """Where the time of a round goes: ``learn`` (micro-steps), ``rest`` (owed after them, whatever else is waited for
    meanwhile), ``wait`` (for other members, beyond that), ``exchange`` (packing, sending, checking, adding up),
    ``update`` (the optimizer's step) and ``other``. An inner phase interrupts the outer one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """From zero."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.cpu_seconds = dict.fromkeys(PHASES, 0.0)  # of the whole process
        self._phase = "other"
        self._since = self._now()

    def end(self) -> None:
        """Count what has passed since the last change of phase."""
        self._turn(self._phase)

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        outer = self._turn(phase)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, phase: str) -> str:
        before, since, self._since = self._phase, self._since, self._now()
        self.seconds[before] += self._since[0] - since[0]
        self.cpu_seconds[before] += self._since[1] - since[1]
        self._phase = phase
        return before

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), time.process_time()


class TrainingState:
    """Weights and optimiser with their step and lineage, and the gradients that belong to exactly this lineage."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.phases = Phases()
        self.step = 0
        self.lineage = f"start-{self.checksum():08x}"
        self.share: Share | None = None
        self.share_tokens = 0
        self.micro_step_s = 0.0  # what the last whole one took
        self._rested_s = 0.0  # when the rest owed for it is over

    @property
    def rest_s(self) -> float:
        """What is left of the rest owed for the last micro-step."""
        return max(0.0, self._rested_s - time.monotonic())

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The phase of a wait for others: it costs nothing as long as a rest is owed anyway."""
        return self.phases.of("rest" if self.rest_s > 0 else "wait")

    def checksum(self) -> int:
        return checksum(self.learner.trainer.state_dict(copy=False)["trained_P"])

    def micro_step(self, limit_s: float = math.inf) -> bool:
        """Add a micro-batch to the own part, a smaller one to be ready in ``limit_s``; False: there is nothing to learn
        from."""
        start_s = time.monotonic()
        with self.phases.of("learn"):
            micro = self.learner.micro_step(limit_s)
            if micro is None:
                return False
            self.share = micro if self.share is None else self.share + micro
        self.share_tokens += self.learner.last_tokens
        now_s = time.monotonic()
        self._rested_s = now_s + self.learner.rest_s
        if limit_s > self.micro_step_s:
            self.micro_step_s = now_s - start_s
        return True

    def drop_share(self) -> None:
        self.share, self.share_tokens = None, 0

    def apply(self, total: Share, step: int, lineage: str) -> None:
        """Move on; raises NonFiniteGradient or DrafterMismatch, with the state as before."""
        self.drop_share()
        with self.phases.of("update"):
            self.learner.apply(total)
        self.step, self.lineage = step, lineage

    def load(self, state: object, step: int, lineage: str) -> None:
        """Become another's state; raises DrafterMismatch when it is of another drafter."""
        if not isinstance(state, dict):
            raise DrafterMismatch(f"state is a {type(state).__name__}, not a drafter's")
        self.learner.trainer.load_state_dict(state)
        self.step, self.lineage = step, lineage
        self.drop_share()


class Others(Protocol):
    """The other members, as a worker sees them while it learns its own part of a step."""

    def hear(self) -> float:
        """Do what they say; seconds until the own part is expected, infinite where nobody waits for it."""

    def pause(self, timeout_s: float) -> object:
        """Up to ``timeout_s``, less when somebody says something."""

    def begin_last(self, micro_step_s: float) -> object:
        """The last micro-step of the part begins, and will take about ``micro_step_s``."""


def accumulate(
    state: TrainingState, control: ControlLink, assignment: Assignment, step_tokens: int, others: Others
) -> bool:
    """Micro-steps until the own part has about ``step_tokens`` or is expected; False: interrupted, overtaken, nothing
    to learn from. The rest after the last micro-step is left to be taken while the others are waited for."""
    lineage, is_last = state.lineage, False
    while state.share_tokens < step_tokens and not is_last:
        with state.phases.of("exchange"):
            left_s = others.hear()
        if state.lineage != lineage or (state.share is not None and left_s < LEAST_MICRO_STEP * state.micro_step_s):
            break
        if control.left(assignment):
            return False
        if state.rest_s > 0:
            with state.phases.of("rest"):
                others.pause(min(state.rest_s, REST_SLICE_S))
            continue
        is_last = state.share_tokens + state.learner.last_tokens >= step_tokens
        if is_last:
            others.begin_last(state.micro_step_s)
        if not state.micro_step(left_s):
            control.report(num_samples=0)
            control.wait(SLICE_S)
            break
    return state.share is not None and state.lineage == lineage

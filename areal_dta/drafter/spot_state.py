"""What the members of a training round share: the state that a ``lineage`` names, and a worker's own part of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_dta.drafter.averaging import Share, checksum
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.learner import Learner
from areal_dta.drafter.states import Assignment

__all__ = ["SLICE_S", "SpotSettings", "TrainingState", "accumulate"]

SLICE_S = 0.02  # how long a wait for others lasts before the assignment is looked at again


@dataclass(frozen=True)
class SpotSettings:
    """``step_tokens``: what one worker contributes to a step at most; the leader closes it when it has its own."""

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


class TrainingState:
    """Weights and optimiser with their step and lineage, and the gradients that belong to exactly this lineage."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.step = 0
        self.lineage = f"start-{self.checksum():08x}"
        self.share: Share | None = None
        self.share_tokens = 0

    def checksum(self) -> int:
        return checksum(self.learner.trainer.state_dict(copy=False)["trained_P"])

    def micro_step(self) -> bool:
        """Add a micro-batch to the own part; False: there is nothing to learn from."""
        micro = self.learner.micro_step()
        if micro is None:
            return False
        self.share = micro if self.share is None else self.share + micro
        self.share_tokens += self.learner.last_tokens
        return True

    def drop_share(self) -> None:
        self.share, self.share_tokens = None, 0

    def apply(self, total: Share, step: int, lineage: str) -> None:
        """Move on; raises NonFiniteGradient or DrafterMismatch, with the state as before."""
        self.drop_share()
        self.learner.apply(total)
        self.step, self.lineage = step, lineage

    def load(self, state: object, step: int, lineage: str) -> None:
        """Become another's state; raises DrafterMismatch when it is of another drafter."""
        if not isinstance(state, dict):
            raise DrafterMismatch(f"state is a {type(state).__name__}, not a drafter's")
        self.learner.trainer.load_state_dict(state)
        self.step, self.lineage = step, lineage
        self.drop_share()


def accumulate(
    state: TrainingState,
    control: ControlLink,
    assignment: Assignment,
    step_tokens: int,
    between: Callable[[], bool],
) -> bool:
    """Micro-steps until the own part has ``step_tokens``; False: interrupted, overtaken, or nothing to learn from.

    ``between`` two micro-steps hears the others; it returns True to end the part with what there is.
    """
    lineage = state.lineage
    while state.share_tokens < step_tokens:
        if control.left(assignment):
            return False
        if between() or state.lineage != lineage:
            break
        if not state.micro_step():
            control.report(num_samples=0)
            control.wait(SLICE_S)
            break
        if state.learner.rest_s > 0:
            control.wait(state.learner.rest_s)
    return state.share is not None and state.lineage == lineage

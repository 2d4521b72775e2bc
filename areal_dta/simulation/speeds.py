"""How fast the parts are, and how many of them there are. Seconds are processor seconds where cores are shared.

Legend: P points of a measured curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from areal_dta.tree.cost import CostModel
from areal_dta.tree.timing import TimeModel, nnls

__all__ = ["EnvironmentSpeed", "Scaling", "ServerSpeed", "Speeds", "TrainerSpeed"]


class _NotNegative:
    """Every number of these records is finite and not negative."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{type(self).__name__}.{field.name} is {value}; it must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class ServerSpeed(_NotNegative):
    """One decoding step of r running sequences takes ``step_s + r * sequence_s + context * context_token_s``, where
    context counts the tokens of all r. Prompt tokens that are not cached cost ``prefill_token_s`` each and stop
    decoding meanwhile (as chunks between or within steps do); a request costs ``request_s`` on top. While weights are
    changed a server is still for ``update_s``.
    """

    step_s: float
    sequence_s: float
    prefill_token_s: float
    context_token_s: float = 0.0
    request_s: float = 0.0
    update_s: float = 0.0
    max_batch: int = 128

    def decode_step_s(self, running: int, context_tokens: float = 0.0) -> float:
        return self.step_s + running * self.sequence_s + context_tokens * self.context_token_s

    @staticmethod
    def fit_steps(running_P: Sequence[float], tokens_per_s_P: Sequence[float]) -> tuple[float, float]:
        """(``step_s``, ``sequence_s``) of tokens per second measured at numbers of running sequences."""
        running, rate = np.asarray(running_P, np.float64), np.asarray(tokens_per_s_P, np.float64)
        if len(running) != len(rate) or not len(running) or (running <= 0).any() or (rate <= 0).any():
            raise ValueError("a speed curve needs pairs of positive numbers: running sequences, tokens per second")
        times = running / rate
        design = np.stack([np.ones_like(running), running], axis=1) / times[:, None]
        if len(running) == 1:  # one point does not tell them apart: all of it is the step's
            return float(times[0]), 0.0
        step_s, sequence_s = nnls(design, np.ones_like(times))
        return float(step_s), float(sequence_s)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpeed(_NotNegative):
    """A turn keeps its worker process busy for ``turn_s`` (one thing at a time) and then waits ``latency_s``, together
    with all others (tools, user simulators). ``relay_s`` is the router's part of a turn, ``delivery_s`` the batcher's
    of an episode. With ``latency_spread`` latencies are gamma-distributed, that being their relative deviation.
    """

    turn_s: float = 0.0
    latency_s: float = 0.0
    latency_spread: float = 0.0
    relay_s: float = 0.0
    delivery_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed(_NotNegative):
    """A step of a rank takes ``fixed_s + seconds_per_cost * cost``, cost being that of its rows as a prefix tree by
    `cost_model`; then all ranks have waited for each other, publishing takes ``publish_s``, and every
    ``checkpoint_every`` steps a checkpoint ``checkpoint_s``. ``assemble_s`` is the batcher's time to cut a batch.
    """

    fixed_s: float = 0.0
    seconds_per_cost: float = 1.0
    cost_model: CostModel
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_every: int = 0
    assemble_s: float = 0.0

    @classmethod
    def of_time_model(cls, time: TimeModel, max_block_tokens: int, *, logprob_pass: bool = True) -> TrainerSpeed:
        """From a calibration: forward and backward per tree token and pair, what a block costs spread over the tokens
        of a full block, tiles left out; with ``logprob_pass`` one forward more.
        """
        base, block, token, pair = time.cost_model(), 0, 1, 2
        passes = 2 if logprob_pass else 1
        per_block_s = passes * time.forward_F[block] + time.backward_F[block]
        per_token = base.per_token + per_block_s / max_block_tokens
        per_pair = base.per_pair
        if logprob_pass:
            per_token += time.forward_F[token] + time.head_forward_H[1]
            per_pair += time.forward_F[pair]
        return cls(cost_model=CostModel(per_token, per_pair))


@dataclass(frozen=True, kw_only=True)
class Scaling(_NotNegative):
    """Assumptions about model parallelism: every doubling of a degree keeps this share of the ideal speed-up."""

    tp_efficiency: float = 0.88
    pp_efficiency: float = 0.9
    server_tp_efficiency: float = 0.8

    def speedup(self, tp: int, pp: int) -> float:
        return tp * pp * self.tp_efficiency ** math.log2(tp) * self.pp_efficiency ** math.log2(pp)

    def server_speedup(self, tp: int) -> float:
        return tp * self.server_tp_efficiency ** math.log2(tp)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """``basis`` says in words where the numbers come from. Trainer and server numbers are those of the parallel
    degrees ``tp``, ``pp`` and ``server_tp``.
    """

    server: ServerSpeed
    environment: EnvironmentSpeed
    trainer: TrainerSpeed
    scaling: Scaling = Scaling()
    tp: int = 1
    pp: int = 1
    server_tp: int = 1
    basis: str = "given"

    def trainer_factor(self, tp: int, pp: int) -> float:
        """Seconds at these degrees per second at those of the numbers."""
        return self.scaling.speedup(self.tp, self.pp) / self.scaling.speedup(tp, pp)

    def server_factor(self, tp: int) -> float:
        return self.scaling.server_speedup(self.server_tp) / self.scaling.server_speedup(tp)

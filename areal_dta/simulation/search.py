"""The best split of a number of GPUs between rollout and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from areal_dta.simulation.report import SimulationReport, simulate
from areal_dta.simulation.settings import SimulationError, SimulationSettings
from areal_dta.simulation.speeds import Speeds
from areal_dta.simulation.workload import Workload
from areal_dta.tree.cost import lower_bound

__all__ = ["Candidate", "candidates", "fits_memory", "search"]

MAX_DEGREE = 8  # of tensor parallelism and of pipeline stages
MAX_SPLITS = 16  # of the GPUs between trainer and servers that are simulated
_BYTES_PER_WEIGHT = 2 + 4  # weights in 16 bits, gradients in 32
_OPTIMIZER_BYTES_PER_WEIGHT = 12  # master weights and two moments, cut over data-parallel ranks
_STATE_SHARE = 0.8  # of a GPU's memory that all this may take; the rest is for activations

Fits = Callable[[int, int, int], bool]  # (dp, tp, pp) -> whether a trainer of that shape fits its GPUs


@dataclass(frozen=True)
class Candidate:
    """A way to use the GPUs, and what it achieves."""

    settings: SimulationSettings
    report: SimulationReport

    @property
    def rate(self) -> float:
        return self.report.trajectories_per_s


def fits_memory(num_weights: float, gpu_bytes: float) -> Fits:
    """Whether weights, gradients and optimizer state fit: 6 bytes per weight, and 12 cut over data-parallel ranks."""

    def fits(dp: int, tp: int, pp: int) -> bool:
        per_weight = _BYTES_PER_WEIGHT + _OPTIMIZER_BYTES_PER_WEIGHT / dp
        return num_weights * per_weight / (tp * pp) <= _STATE_SHARE * gpu_bytes

    return fits


def candidates(
    gpus: int, settings: SimulationSettings, speeds: Speeds, workload: Workload, fits: Fits | None = None
) -> Iterator[SimulationSettings]:
    """Splits worth simulating: per number of trainer GPUs the shape whose costliest rank is done first among those
    that fit, with every tensor-parallel degree of servers from the configured one on that divides the rest.

    Raises SimulationError for fewer than two GPUs.
    """
    if gpus < 2:
        raise SimulationError(f"{gpus} GPU cannot be split between rollout and training; give at least 2")
    for trainer_gpus in sorted({round(x) for x in np.linspace(1, gpus - 1, min(gpus - 1, MAX_SPLITS))}):
        shape = _best_shape(trainer_gpus, settings, speeds, workload, fits)
        if shape is None:
            continue
        dp, tp, pp = shape
        server_tp = settings.server_tp
        while server_tp <= min(MAX_DEGREE, gpus - trainer_gpus):
            servers, rest = divmod(gpus - trainer_gpus, server_tp)
            if rest == 0:
                yield dataclasses.replace(settings, servers=servers, server_tp=server_tp, dp=dp, tp=tp, pp=pp)
            server_tp *= 2


def _best_shape(
    gpus: int, settings: SimulationSettings, speeds: Speeds, workload: Workload, fits: Fits | None
) -> tuple[int, int, int] | None:
    """(dp, tp, pp) of all these GPUs. Without a memory test model parallelism is at least the configured one."""
    groups = [workload.group(g, settings.group_size) for g in range(settings.batch_groups)]
    rows = workload.rows(groups)
    best: tuple[float, tuple[int, int, int]] | None = None
    degrees = [2**i for i in range(MAX_DEGREE.bit_length())]
    for tp in degrees:
        for pp in degrees:
            dp, rest = divmod(gpus, tp * pp)
            if rest or dp == 0 or (fits is None and (tp < settings.tp or pp < settings.pp)):
                continue
            if fits is not None and not fits(dp, tp, pp):
                continue
            trainer = speeds.trainer
            cost = lower_bound(rows, dp, trainer.cost_model)[0] * trainer.seconds_per_cost + trainer.fixed_s
            seconds = cost * speeds.trainer_factor(tp, pp)
            if best is None or seconds < best[0]:
                best = seconds, (dp, tp, pp)
    return None if best is None else best[1]


def search(
    gpus: int, settings: SimulationSettings, speeds: Speeds, workload: Workload, fits: Fits | None = None
) -> list[Candidate]:
    """All candidates, the fastest first; ties go to the shorter episode. Raises SimulationError when none fits."""
    found = [Candidate(s, simulate(s, speeds, workload)) for s in candidates(gpus, settings, speeds, workload, fits)]
    if not found:
        raise SimulationError(
            f"no way to train on {gpus - 1} GPUs or fewer fits; give more with --search, or raise gpu.memory_gib"
        )
    return sorted(found, key=lambda c: (-c.rate, c.report.episode_s))

"""What a simulation says: throughput, seconds of a step, who waits for whom, staleness."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from areal_dta.simulation.pipeline import Simulation
from areal_dta.simulation.pool import Counts
from areal_dta.simulation.settings import SimulationSettings
from areal_dta.simulation.speeds import Speeds
from areal_dta.simulation.workload import Workload

__all__ = ["SimulationReport", "simulate"]


@dataclass(frozen=True)
class SimulationReport:
    """Averages over the steps after the warm-up. Shares are of wall time.

    ``work_s``: processor seconds of all processes per step; ``core_share``: of the cores they wanted, those they had;
    ``stretch``: wall seconds of a training step's computing per second of its work, above 1 where cores are short.
    ``trainer_waits_share``: the trainer waits for a batch. ``server_*_share`` over all servers: decoding, computing
    prompts, paused for new weights, idle because admission is closed (the servers wait for the trainer), idle because
    all episodes are in their environments. ``staleness`` is the share of trained tokens by age in versions,
    ``staleness_mean`` the mean over steps of their mean age.
    """

    steps: int
    wall_s: float
    step_s: float
    wait_s: float
    compute_s: float
    stretch: float
    work_s: float
    publish_s: float
    trajectories_per_s: float
    generated_tokens_per_s: float
    row_tokens_per_s: float
    tree_tokens_per_step: float
    trainer_waits_share: float
    trainer_compute_share: float
    server_decode_share: float
    server_prefill_share: float
    server_paused_share: float
    server_waits_trainer_share: float
    server_waits_environment_share: float
    worker_busy_share: float
    core_share: float
    running_per_server: float
    episode_s: float
    episode_p90_s: float
    staleness: dict[int, float]
    staleness_mean: float
    staleness_max: int
    bounding_stage: str
    counts: Counts

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def simulate(settings: SimulationSettings, speeds: Speeds, workload: Workload) -> SimulationReport:
    """Run one simulation. Raises SimulationError."""
    simulation = Simulation(settings, speeds, workload)
    simulation.run()
    return summarise(simulation)


def summarise(simulation: Simulation) -> SimulationReport:
    steps = simulation.steps[simulation.settings.warmup_steps :]
    wall_s = sum(step.step_s for step in steps)
    per_s = 1.0 / max(wall_s, 1e-12)
    tokens: Counter[int] = Counter()
    for step in steps:
        tokens.update(step.staleness)
    total = max(1, sum(tokens.values()))
    times = simulation.server_times
    server_s = max(sum(t.busy_s + t.paused_s + t.idle_closed_s + t.idle_open_s for t in times), 1e-12)
    decode_s = sum(t.decode_s for t in times)
    wait_share = sum(step.wait_s for step in steps) * per_s
    waits_trainer = sum(t.idle_closed_s for t in times) / server_s
    return SimulationReport(
        steps=len(steps),
        wall_s=wall_s,
        step_s=wall_s / len(steps),
        wait_s=float(np.mean([step.wait_s for step in steps])),
        compute_s=float(np.mean([step.compute_s for step in steps])),
        work_s=simulation.work_s / len(steps),
        stretch=sum(step.compute_s for step in steps) / max(sum(step.work_s for step in steps), 1e-12),
        publish_s=float(np.mean([step.publish_s for step in steps])),
        trajectories_per_s=sum(step.episodes for step in steps) * per_s,
        generated_tokens_per_s=sum(step.tokens for step in steps) * per_s,
        row_tokens_per_s=sum(step.row_tokens for step in steps) * per_s,
        tree_tokens_per_step=float(np.mean([step.tree_tokens for step in steps])),
        trainer_waits_share=wait_share,
        trainer_compute_share=sum(step.compute_s for step in steps) * per_s,
        server_decode_share=decode_s / server_s,
        server_prefill_share=sum(t.prefill_s for t in times) / server_s,
        server_paused_share=sum(t.paused_s for t in times) / server_s,
        server_waits_trainer_share=waits_trainer,
        server_waits_environment_share=sum(t.idle_open_s for t in times) / server_s,
        worker_busy_share=float(np.mean(simulation.worker_busy_s)) * per_s,
        core_share=simulation.clock.got_s / max(simulation.clock.wanted_s, 1e-12),
        running_per_server=sum(t.sequence_s for t in times) / decode_s if decode_s else 0.0,
        episode_s=float(np.mean(simulation.episode_s)),
        episode_p90_s=float(np.quantile(simulation.episode_s, 0.9)),
        staleness={age: tokens[age] / total for age in sorted(tokens)},
        staleness_mean=float(np.mean([step.staleness_mean for step in steps])),
        staleness_max=max(tokens, default=0),
        bounding_stage="rollout" if wait_share > waits_trainer else "training",
        counts=simulation.counts,
    )

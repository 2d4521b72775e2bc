"""Speeds measured from one recorded run directory: its metrics, its traces, and its processor times where it has them.

Seconds are processor seconds if the run was recorded with ``usage.json`` (`areal_dta.simulation.usage`), and the run is
then simulated on as many cores as the machine had; otherwise wall times are taken as they are and nothing shares a
processor. Two numbers are chosen so that simulating the recorded run gives what was recorded: the load of other
programs by how far training steps stretched beyond their processor seconds, and the wait of a turn outside all
processes, which no metric tells, by the mean step time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_dta.metrics import MetricRecord, read_metrics
from areal_dta.simulation.report import SimulationReport, simulate
from areal_dta.simulation.settings import SimulationError, SimulationSettings
from areal_dta.simulation.speeds import EnvironmentSpeed, ServerSpeed, Speeds, TrainerSpeed
from areal_dta.simulation.usage import Usage, read_usage
from areal_dta.simulation.workload import TraceWorkload, read_traces
from areal_dta.tree.cost import CostModel
from areal_dta.tree.timing import nnls

__all__ = ["MeasuredRun", "Observed", "calibrate", "no_slower", "observe", "with_background"]

SKIPPED_STEPS = 1  # the first one fills pools and compiles
_INTERVAL_S = 0.6  # of server samples taken together
_FIT_ROUNDS = 12
_MAX_BACKGROUND = 64.0  # threads


@dataclass(frozen=True)
class Observed:
    """What a run did, averaged over its steps but the first ``SKIPPED_STEPS``; to be compared with a simulation."""

    steps: int
    step_s: float
    wait_s: float
    compute_s: float
    publish_s: float
    staleness_mean: float
    episode_s: float
    trajectories_per_s: float
    work_s: float  # processor seconds of all processes per step; 0 where not recorded
    stretch: float  # wall seconds of a training step's computing per processor second; 1 where these are not recorded


@dataclass(frozen=True)
class MeasuredRun:
    """Everything for simulating variations of a recorded run. ``fitted`` is the simulation of the run itself."""

    settings: SimulationSettings
    speeds: Speeds
    workload: TraceWorkload
    observed: Observed
    fitted: SimulationReport


class _Run:
    """The records of a run by name, with times."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir
        self.usage: Usage | None = read_usage(run_dir)
        self.by_name: dict[str, list[MetricRecord]] = {}
        self._by_step: dict[tuple[str, str], dict[int, MetricRecord]] = {}
        for record in read_metrics(run_dir / "metrics.jsonl"):
            if record.value is not None:
                self.by_name.setdefault(record.name, []).append(record)
                if record.step is not None:
                    self._by_step.setdefault((record.name, record.proc), {})[record.step] = record
        steps = self.of_trainer("time/step")
        if len(steps) < SKIPPED_STEPS + 2:
            raise SimulationError(
                f"{run_dir} holds {len(steps)} finished steps; a calibration needs at least {SKIPPED_STEPS + 2}"
            )
        self.steps = sorted(steps)[SKIPPED_STEPS:]
        self.start_s = steps[self.steps[0]].t - _value(steps[self.steps[0]])
        self.end_s = steps[self.steps[-1]].t

    def of_trainer(self, name: str, rank: int = 0) -> dict[int, MetricRecord]:
        """By step; the last record of a step counts."""
        return self._by_step.get((name, f"trainer.{rank}"), {})

    def mean(self, name: str, rank: int = 0, default: float | None = None) -> float:
        found = self.of_trainer(name, rank)
        values = [_value(found[step]) for step in self.steps if step in found]
        if not values:
            if default is not None:
                return default
            raise SimulationError(f"{self.path} has no metric {name} of trainer.{rank}")
        return float(np.mean(values))

    def within(self, name: str) -> list[MetricRecord]:
        """Records of the steps that count, by time."""
        return [r for r in self.by_name.get(name, ()) if self.start_s <= r.t <= self.end_s]

    def cpu_or_wall(self, proc: str, start_s: float, end_s: float) -> float:
        wall_s = max(0.0, end_s - start_s)
        return wall_s if self.usage is None else min(wall_s, self.usage.between(proc, start_s, end_s))


def _value(record: MetricRecord) -> float:
    assert record.value is not None
    return record.value


def observe(run_dir: Path) -> Observed:
    """The averages of a run. Raises SimulationError for one without enough steps."""
    return _observed(_Run(run_dir))


def _observed(run: _Run) -> Observed:
    episodes = [r for r in run.within("rollout/episode_s") if not r.labels.get("eval")]
    staleness = {r.step: _value(r) for r in run.by_name.get("batch/staleness_mean", ())}
    trained = {r.step: _value(r) for r in run.by_name.get("batch/episodes", ())}
    if missing := [step for step in run.steps if step not in staleness or step not in trained]:
        raise SimulationError(
            f"{run.path} has no batch/staleness_mean or batch/episodes of step {missing[0]}; calibrate on another run"
        )
    step_s = run.mean("time/step")
    other_s = sum(run.mean(f"time/{part}") for part in ("wait_batch", "publish"))
    checkpoint_s = sum(_value(r) for s, r in run.of_trainer("time/checkpoint").items() if s in run.steps)
    compute_s = step_s - other_s - checkpoint_s / len(run.steps)
    ranks = {r.proc for r in run.by_name["time/step"]}
    used_s = [sum(_rank_seconds(run, int(proc.partition(".")[2]), step)) for proc in ranks for step in run.steps]
    return Observed(
        steps=len(run.steps),
        step_s=step_s,
        wait_s=run.mean("time/wait_batch"),
        compute_s=compute_s,
        work_s=0.0 if run.usage is None else run.usage.total("", run.start_s, run.end_s) / len(run.steps),
        stretch=1.0 if run.usage is None else max(1.0, compute_s / max(float(np.mean(used_s)), 1e-9)),
        publish_s=run.mean("time/publish"),
        staleness_mean=float(np.mean([staleness[s] for s in run.steps])),
        episode_s=float(np.mean([_value(r) for r in episodes])) if episodes else 0.0,
        trajectories_per_s=float(sum(trained[s] for s in run.steps) / (step_s * len(run.steps))),
    )


def calibrate(
    run_dir: Path,
    settings: SimulationSettings,
    flops: CostModel,
    max_batch: int,
    *,
    seed: int = 0,
) -> MeasuredRun:
    """Measure a run that had these settings. ``flops`` is the cost its batcher balanced. Raises SimulationError,
    WorkloadError.
    """
    run = _Run(run_dir)
    observed = _observed(run)
    workload = read_traces(sorted((run_dir / "traces").glob("batch_*.npz")), seed)
    cores = None if run.usage is None else float(run.usage.cores)
    settings = dataclasses.replace(settings, cores=cores, background=0.0, warmup_steps=SKIPPED_STEPS)
    turns = sum(_value(r) for r in run.within("rollout/turns"))
    episodes = len(run.within("rollout/turns"))
    if not episodes:
        raise SimulationError(f"{run_dir} finished no episode after step {SKIPPED_STEPS - 1}")
    speeds = Speeds(
        server=_server(run, settings, max_batch),
        environment=_environment(run, settings, turns, episodes),
        trainer=_trainer(run, settings, flops, workload),
        tp=settings.tp,
        pp=settings.pp,
        server_tp=settings.server_tp,
        basis=f"measured from {run_dir}: {'processor' if run.usage else 'wall'} seconds of {observed.steps} steps",
    )
    if run.usage is not None:
        settings = with_background(settings, speeds, workload, observed.stretch)
        settings = no_slower(settings, speeds, workload, observed.step_s)
    speeds = _fit_latency(settings, speeds, workload, observed.step_s)
    return MeasuredRun(settings, speeds, workload, observed, simulate(settings, speeds, workload))


# ---- the trainer ----


def _trainer(run: _Run, settings: SimulationSettings, flops: CostModel, workload: TraceWorkload) -> TrainerSpeed:
    """Seconds of a step that are neither waiting nor publishing nor checkpoint, by the cost of the rank's rows."""
    costs, seconds, publish = [], [], []
    for rank in range(settings.trainer_gpus):
        load, published = run.of_trainer("train/load", rank), run.of_trainer("time/publish", rank)
        for step in run.steps:
            parts = _rank_seconds(run, rank, step)
            if parts and step in load:
                costs.append(_value(load[step]))
                seconds.append(sum(parts))
                end_s = published[step].t
                publish.append(run.cpu_or_wall(f"trainer.{rank}", end_s - _value(published[step]), end_s))
    if not costs:
        raise SimulationError(f"{run.path} has no complete step of {settings.trainer_gpus} trainer ranks")
    design = np.stack([np.ones(len(costs)), np.asarray(costs)], axis=1)
    fixed_s, per_cost = _robust(design, np.asarray(seconds))
    checkpoints = run.of_trainer("time/checkpoint")
    saved_s = [_value(r) for s, r in checkpoints.items() if s in run.steps]
    assemble = [_value(r) for r in run.within("time/assemble")]
    pause = [_value(r) for r in run.within("router/pause_s")]
    every = len(run.steps) // len(saved_s) if len(saved_s) > 1 else 0
    return TrainerSpeed(
        fixed_s=fixed_s,
        seconds_per_cost=per_cost,
        cost_model=flops,
        publish_s=max(0.0, float(np.median(publish)) - (float(np.median(pause)) if pause and not run.usage else 0.0)),
        checkpoint_s=float(np.median(saved_s)) if saved_s else 0.0,
        checkpoint_every=every,
        assemble_s=float(np.median(assemble)) if assemble else 0.0,
    )


def _rank_seconds(run: _Run, rank: int, step: int) -> tuple[float, ...]:
    """Seconds before and after publishing that a rank computed, neither waiting nor writing a checkpoint; () where a
    metric is missing.
    """
    found = [run.of_trainer(f"time/{name}", rank).get(step) for name in ("wait_batch", "publish", "step")]
    if any(record is None for record in found):
        return ()
    wait, publish, whole = (record for record in found if record is not None)
    saved = run.of_trainer("time/checkpoint", rank).get(step)
    proc = f"trainer.{rank}"
    checkpoint_s = 0.0 if saved is None else run.cpu_or_wall(proc, saved.t - _value(saved), saved.t)
    before_s = run.cpu_or_wall(proc, wait.t, publish.t - _value(publish))
    return before_s, max(0.0, run.cpu_or_wall(proc, publish.t, whole.t) - checkpoint_s)


def _robust(design: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Not negative (fixed, slope). Costs that hardly differ cannot tell them apart: then all is the slope's."""
    costs = design[:, 1]
    if np.ptp(costs) < 0.3 * costs.mean():
        return 0.0, float(seconds.mean() / costs.mean())
    fixed_s, per_cost = nnls(design, seconds)
    return float(fixed_s), float(per_cost)


# ---- servers ----


def _server(run: _Run, settings: SimulationSettings, max_batch: int) -> ServerSpeed:
    """From the servers' own samples: seconds of an interval are so many steps (tokens over running sequences) and so
    many tokens. Prompts are charged at the speed of the trainer's forward pass over the same tokens.
    """
    prefill_token_s = _forward_token_s(run, settings)
    samples = [part for index in range(settings.servers) for part in _server_intervals(run, f"server.{index}")]
    if len(samples) < 4:
        raise SimulationError(
            f"{run.path} holds {len(samples)} samples of busy servers; run it longer, or with telemetry.interval_s=0.2"
        )
    measured = np.asarray(samples)
    step_s, sequence_s, _ = (float(x) for x in nnls(measured[:, :3], measured[:, 3]))
    pause = [_value(r) for r in run.within("router/pause_s")]
    return ServerSpeed(
        step_s=step_s,
        sequence_s=sequence_s,
        prefill_token_s=prefill_token_s,
        update_s=float(np.median(pause)) if pause else 0.0,
        max_batch=max_batch,
    )


def _forward_token_s(run: _Run, settings: SimulationSettings) -> float:
    values = []
    for rank in range(settings.dp):
        logprob, tokens = run.of_trainer("time/logprob", rank), run.of_trainer("train/tree_tokens", rank)
        values += [
            run.cpu_or_wall(f"trainer.{rank}", logprob[k].t - _value(logprob[k]), logprob[k].t) / _value(tokens[k])
            for k in run.steps
            if k in logprob and k in tokens and _value(tokens[k]) > 0
        ]
    if not values:
        raise SimulationError(f"{run.path} has no metric time/logprob; give server.prefill_tokens_per_s")
    return float(np.mean(values))


def _server_intervals(run: _Run, proc: str) -> list[tuple[float, float, float, float]]:
    """(decoding steps, tokens, weight updates, seconds) of intervals in which a server made tokens."""
    made = [r for r in run.within("server/generated_tokens") if r.proc == proc]
    running = [r for r in run.within("server/running") if r.proc == proc]
    swaps = [r.t for r in run.within("time/server_update") if r.proc == proc]
    out = []
    last, steps = 0, 0.0
    for i in range(1, min(len(made), len(running))):
        tokens = _value(made[i]) - _value(made[i - 1])
        sequences = (_value(running[i - 1]) + _value(running[i])) / 2
        steps += tokens / max(1.0, sequences)
        start_s, end_s = made[last].t, made[i].t
        if end_s - start_s < _INTERVAL_S:
            continue
        tokens = _value(made[i]) - _value(made[last])
        idle = run.usage is None and any(_value(r) < 1 for r in running[last : i + 1])  # wall seconds count waiting
        if tokens > 0 and not idle:
            num_swaps = sum(start_s < t <= end_s for t in swaps)
            out.append((steps, tokens, float(num_swaps), run.cpu_or_wall(proc, start_s, end_s)))
        last, steps = i, 0.0
    return out


# ---- workers ----


def _environment(run: _Run, settings: SimulationSettings, turns: float, episodes: int) -> EnvironmentSpeed:
    """Processor seconds of workers, router and batcher over the turns they served; nothing of it without a record."""
    usage = run.usage
    if usage is None:
        return EnvironmentSpeed()
    worker_s, router_s, batcher_s = (usage.total(r, run.start_s, run.end_s) for r in ("worker", "router", "batcher"))
    return EnvironmentSpeed(
        turn_s=worker_s / (turns + episodes),
        relay_s=router_s / max(1.0, turns),
        delivery_s=batcher_s / episodes,
    )


def with_background(
    settings: SimulationSettings, speeds: Speeds, workload: TraceWorkload, stretch: float
) -> SimulationSettings:
    """With so much background that simulated training steps stretch so far; none if they do anyhow."""

    def excess(background: float) -> float:
        return simulate(dataclasses.replace(settings, background=background), speeds, workload).stretch - stretch

    low, high = 0.0, _MAX_BACKGROUND
    if excess(low) >= 0:
        return dataclasses.replace(settings, background=0.0)
    for _ in range(_FIT_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return dataclasses.replace(settings, background=(low + high) / 2)


def no_slower(
    settings: SimulationSettings, speeds: Speeds, workload: TraceWorkload, step_s: float
) -> SimulationSettings:
    """With no more background than the recorded step time allows. Training steps stretch for other reasons as well
    (bursts of a run's own processes), which the even sharing of cores does not show."""

    def excess(background: float) -> float:
        return simulate(dataclasses.replace(settings, background=background), speeds, workload).step_s - step_s

    most = settings.background
    if most == 0.0 or excess(most) <= 0:
        return settings
    return dataclasses.replace(settings, background=_nearest_zero(excess, most))


def _nearest_zero(excess: Callable[[float], float], high: float) -> float:
    """Where rising `excess` is nearest to 0 of the tried values of [0, `high`); 0 where it begins above."""
    low = 0.0
    tried = {low: excess(low)}
    for _ in range(_FIT_ROUNDS if tried[low] < 0 else 0):
        middle = (low + high) / 2
        tried[middle] = excess(middle)
        low, high = (middle, high) if tried[middle] < 0 else (low, middle)
    return min(tried, key=lambda value: abs(tried[value]))  # step times jump: the nearest


def _fit_latency(settings: SimulationSettings, speeds: Speeds, workload: TraceWorkload, step_s: float) -> Speeds:
    """The turn latency with which the simulated run has the recorded step time; 0 when it is slower without any."""

    def with_latency(latency_s: float) -> Speeds:
        environment = dataclasses.replace(speeds.environment, latency_s=latency_s)
        return dataclasses.replace(speeds, environment=environment)

    def excess(latency_s: float) -> float:
        return simulate(settings, with_latency(latency_s), workload).step_s - step_s

    return with_latency(_nearest_zero(excess, step_s))

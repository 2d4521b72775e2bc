"""`areal-dta plan --simulate CONFIG`: the whole asynchronous pipeline in simulated time, before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_dta.config import Config, ConfigError, load_config, load_run_config
from areal_dta.simulation.assumptions import Assumptions
from areal_dta.simulation.from_run import MeasuredRun, calibrate
from areal_dta.simulation.report import SimulationReport, simulate
from areal_dta.simulation.search import Candidate, Fits, fits_memory, search
from areal_dta.simulation.settings import SimulationSettings
from areal_dta.simulation.speeds import ServerSpeed, Speeds, TrainerSpeed
from areal_dta.simulation.workload import Workload, read_traces
from areal_dta.tree.sizes import ModelSizes
from launcher.rundir import RunDir, RunError
from launcher.trace_plan import read_calibration

__all__ = ["measure", "simulate_config", "simulation_settings", "table"]

DEFAULT_STEPS = 20
WARMUP_STEPS = 2
SHOWN = 12  # candidates of a search


@dataclass(frozen=True)
class _Inputs:
    """Everything a simulation needs."""

    settings: SimulationSettings
    speeds: Speeds
    workload: Workload
    measured: MeasuredRun | None
    fits: Fits | None
    limits: tuple[str, ...]  # what of the configuration is not simulated


def simulate_config(args: argparse.Namespace) -> int:
    """Raises RunError or ConfigError for what cannot be simulated."""
    try:
        inputs = _inputs(args)
        if args.search:
            found = search(args.search, inputs.settings, inputs.speeds, inputs.workload, inputs.fits)
            print(json.dumps(_search_json(found, inputs)) if args.json else _search_text(args.search, found, inputs))
            return 0
        report = simulate(inputs.settings, inputs.speeds, inputs.workload)
    except ValueError as error:  # settings, speeds, lengths, traces; the messages say what to change
        raise error if isinstance(error, ConfigError) else RunError(str(error)) from error
    print(json.dumps(_json(report, inputs)) if args.json else _text(report, inputs))
    return 0


# ---- what is simulated ----


def simulation_settings(config: Config, steps: int) -> SimulationSettings:
    """The sizes and bounds of a configuration. Its length does not count: the run is taken to go on after ``steps``."""
    train, rollout = config.train_allocation, config.rollout_allocation
    return SimulationSettings(
        servers=rollout.dp,
        server_tp=rollout.tp * rollout.pp,
        workers=config.runtime.num_workers,
        dp=train.dp,
        tp=train.tp,
        pp=train.pp,
        batch_groups=config.train_dataset.batch_size,
        group_size=config.gconfig.n_samples,
        eta=config.rollout.max_head_offpolicyness,
        policy=config.batcher.staleness_policy,
        max_concurrent=config.rollout.max_concurrent_rollouts,
        max_attempts=config.batcher.max_attempts,
        min_group_size=config.batcher.min_group_size,
        stale_reissues=config.batcher.stale_reissues,
        steps=steps,
        warmup_steps=min(WARMUP_STEPS, steps - 1),
        seed=config.seed,
    )


def _inputs(args: argparse.Namespace) -> _Inputs:
    config = load_config(args.file, args.overrides)
    assumed = Assumptions.parse(args.assume)
    settings = simulation_settings(config, args.steps or DEFAULT_STEPS)
    sizes = ModelSizes.from_folder(args.model) if args.model else None
    measured = measure(args.from_run) if args.from_run else None
    if measured is not None:
        settings = dataclasses.replace(settings, cores=measured.settings.cores)
    settings = assumed.settings(settings)
    workload: Workload
    if args.trace:
        workload = read_traces(args.trace, config.seed)
    elif measured is not None and not assumed.has_lengths():
        workload = measured.workload
    else:
        workload = assumed.workload(config.gconfig.max_tokens, config.seed)
    speeds = assumed.speeds(
        None if measured is None else measured.speeds,
        _calibrated(args.calibration, config) if args.calibration else None,
        sizes.flops() if sizes else None,
        (settings.tp, settings.pp, settings.server_tp),
        config.embedded.max_batch if config.rollout_allocation.backend == "embedded" else ServerSpeed.max_batch,
    )
    fits = None
    if (memory_gib := assumed.values.get("gpu.memory_gib")) is not None:
        if sizes is None:
            raise RunError("--assume gpu.memory_gib needs --model FOLDER to count weights")
        fits = fits_memory(sizes.num_layers * sizes.layer_weights + sizes.hidden_size * sizes.vocab_size,
                           memory_gib * 2**30)  # fmt: skip
    limits = ("batcher.filter_equal_rewards is not simulated: all complete groups are trained",)
    return _Inputs(settings, speeds, workload, measured, fits, limits if config.batcher.filter_equal_rewards else ())


def measure(run_dir: Path) -> MeasuredRun:
    """Calibrate on a finished run. Raises RunError, SimulationError, WorkloadError."""
    run = RunDir(run_dir).require()
    config = load_run_config(run.path)
    settings = simulation_settings(config, _num_steps(run.path))
    settings = dataclasses.replace(settings, total_steps=settings.steps)
    flops = ModelSizes.from_folder(run.path / "model").flops()
    return calibrate(run.path, settings, flops, config.embedded.max_batch, seed=config.seed)


def _num_steps(run_dir: Path) -> int:
    traces = list((run_dir / "traces").glob("batch_*.npz"))
    if len(traces) < 3:
        raise RunError(
            f"{run_dir} holds traces of {len(traces)} steps; a calibration needs 3: set batcher.dump_traces=true"
        )
    return len(traces)


def _calibrated(path: Path, config: Config) -> TrainerSpeed:
    calibration = read_calibration(path)
    return TrainerSpeed.of_time_model(
        calibration.time, config.dta.max_block_tokens, logprob_pass=config.actor.recompute_logprob
    )


# ---- output ----


def _json(report: SimulationReport, inputs: _Inputs) -> dict[str, Any]:
    out = {
        "settings": dataclasses.asdict(inputs.settings),
        "speeds": dataclasses.asdict(inputs.speeds),
        **report.to_dict(),
        "notes": [*_notes(inputs), *inputs.limits],
    }
    if inputs.measured is not None:
        out["calibration"] = {
            "observed": dataclasses.asdict(inputs.measured.observed),
            "simulated": inputs.measured.fitted.to_dict(),
        }
    return out


def _search_json(found: Sequence[Candidate], inputs: _Inputs) -> dict[str, Any]:
    return {
        "speeds": dataclasses.asdict(inputs.speeds),
        "candidates": [{"settings": dataclasses.asdict(c.settings), **c.report.to_dict()} for c in found],
        "notes": [_scaling_note(inputs.speeds), *inputs.limits],
    }


def _text(report: SimulationReport, inputs: _Inputs) -> str:
    s, r = inputs.settings, report
    staleness = "   ".join(f"{age}: {share:.1%}" for age, share in r.staleness.items())
    lines = [
        f"{s.servers} server{'s' * (s.servers > 1)} (tp {s.server_tp}), {s.workers} worker{'s' * (s.workers > 1)} of "
        f"{s.concurrent} episodes, trainer dp {s.dp} tp {s.tp} pp {s.pp}; {s.batch_groups} x {s.group_size} episodes a "
        f"step, eta {s.eta} ({s.policy}); {r.steps} steps after {s.warmup_steps}",
        "",
        f"  step          {r.step_s:>10,.2f} s    waiting {r.wait_s:,.2f}, computing {r.compute_s:,.2f}, "
        f"publishing {r.publish_s:,.2f}",
        f"  throughput    {r.trajectories_per_s:>10,.3f} trajectories/s   {r.generated_tokens_per_s:,.0f} generated, "
        f"{r.row_tokens_per_s:,.0f} row tokens/s",
        f"  episode       {r.episode_s:>10,.2f} s    90% within {r.episode_p90_s:,.2f}",
        f"  staleness     {r.staleness_mean:>10,.2f}      {staleness}   (share of trained tokens by age)",
        "",
        f"  trainer       {r.trainer_compute_share:>10.1%} computing   {r.trainer_waits_share:.1%} waiting for rollout",
        f"  servers       {r.server_decode_share:>10.1%} decoding ({r.running_per_server:.1f} sequences)   "
        f"{r.server_prefill_share:.1%} prompts   {r.server_paused_share:.1%} new weights",
        f"  {'':13} {r.server_waits_trainer_share:>10.1%} waiting for the trainer (admission closed)   "
        f"{r.server_waits_environment_share:.1%} for environments",
        f"  workers       {r.worker_busy_share:>10.1%} busy",
        "",
        f"bounded by {r.bounding_stage}; speeds {inputs.speeds.basis}",
    ]
    if s.cores is not None:
        others = f" with {s.background:g} threads of other programs" if s.background else ""
        lines.append(f"all processes share {s.cores:g} cores{others}: they had {r.core_share:.0%} of what they wanted")
    return "\n".join([*lines, *_notes(inputs), *inputs.limits])


def _notes(inputs: _Inputs) -> list[str]:
    notes = []
    if inputs.measured is not None:
        seen, again = inputs.measured.observed, inputs.measured.fitted
        notes.append(
            f"that run: step {seen.step_s:.2f} s measured, {again.step_s:.2f} simulated; "
            f"staleness {seen.staleness_mean:.2f} measured, {again.staleness_mean:.2f} simulated"
        )
    s, speeds = inputs.settings, inputs.speeds
    if (s.tp, s.pp, s.server_tp) != (speeds.tp, speeds.pp, speeds.server_tp):
        notes.append(_scaling_note(speeds))
    return notes


def _scaling_note(speeds: Speeds) -> str:
    x = speeds.scaling
    return (
        f"assumed: a doubling of tensor parallelism keeps {x.tp_efficiency:.0%} of its speed-up, of pipeline stages "
        f"{x.pp_efficiency:.0%}, of server tensor parallelism {x.server_tp_efficiency:.0%}"
    )


def _search_text(gpus: int, found: Sequence[Candidate], inputs: _Inputs) -> str:
    head = (
        "trainer",
        "dp",
        "tp",
        "pp",
        "servers",
        "tp",
        "traj/s",
        "step",
        "trainer waits",
        "servers wait",
        "staleness",
    )
    rows = [head]
    for c in found[:SHOWN]:
        s, r = c.settings, c.report
        idle = r.server_waits_trainer_share + r.server_waits_environment_share
        rows.append(
            (
                str(s.trainer_gpus), str(s.dp), str(s.tp), str(s.pp), str(s.servers), str(s.server_tp),
                f"{c.rate:,.3f}",
                f"{r.step_s:,.2f} s", f"{r.trainer_waits_share:.0%}", f"{idle:.0%}", f"{r.staleness_mean:.2f}",
            )
        )  # fmt: skip
    more = [f"  and {len(found) - SHOWN} slower ones"] if len(found) > SHOWN else []
    memory = "the model is tested for fitting" if inputs.fits else "whether the model fits is not tested"
    return "\n".join(
        [f"{gpus} GPUs, {len(found)} splits simulated", *table(rows), *more, "", f"speeds {inputs.speeds.basis}",
         _scaling_note(inputs.speeds), memory, *inputs.limits]
    )  # fmt: skip


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the cells of each column flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]

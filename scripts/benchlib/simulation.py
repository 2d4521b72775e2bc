"""`bench.py simulate`: calibrate the pipeline simulator on one real run and predict others, with other numbers of
servers and other staleness bounds.

Runs of the quickstart configuration, made smaller, one after the other on this machine; their processor times are
recorded (`scripts.benchlib.usage`). Runs that the folder already holds are used again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from areal_dta.config import load_run_config
from areal_dta.simulation.from_run import MeasuredRun, Observed, observe, with_background
from areal_dta.simulation.report import SimulationReport, simulate
from launcher.simulate_command import measure, simulation_settings
from scripts.benchlib.report import UsageError, commit, progress
from scripts.benchlib.usage import run_recorded

__all__ = ["add_arguments", "run"]

_ROOT = Path(__file__).resolve().parents[2]
_CALIBRATION = "calibration"
VARIANTS = {
    _CALIBRATION: (),
    "two_servers": ("rollout.backend=embedded:d2",),
    "eta_0": ("rollout.max_head_offpolicyness=0",),
    "eta_3": ("rollout.max_head_offpolicyness=3",),
    "two_servers_eta_2": ("rollout.backend=embedded:d2", "rollout.max_head_offpolicyness=2"),
}
_SMALLER = (
    "train_dataset.batch_size=6",
    "gconfig.n_samples=8",
    "rollout.max_concurrent_rollouts=96",
    "evaluator.eval_before_train=false",
    "recover.freq_steps=1000",
    "telemetry.interval_s=0.2",
    "batcher.dump_traces=true",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="of the run directories")
    parser.add_argument("--config", type=Path, default=_ROOT / "experiments" / "quickstart" / "quickstart.yaml")
    parser.add_argument("--steps", type=int, default=10, help="of each run; the first is left out of all figures")
    parser.add_argument("--only", default=",".join(VARIANTS), metavar="NAME,NAME", help="variants besides calibration")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    unknown = [name for name in args.only.split(",") if name not in VARIANTS]
    if unknown:
        raise UsageError(f"no variant {unknown[0]!r}; known are {', '.join(VARIANTS)}")
    names = [_CALIBRATION, *(name for name in args.only.split(",") if name != _CALIBRATION)]
    for name in names:
        _make(args, name)
    measured = measure(args.runs / _CALIBRATION)
    return {
        "commit": commit(),
        "steps": args.steps - 1,
        "cores": os.cpu_count(),
        "speeds": dataclasses.asdict(measured.speeds),
        "runs": {name: _compared(args.runs / name, measured) for name in names},
    }


def _make(args: argparse.Namespace, name: str) -> None:
    run_dir = args.runs / name
    if (run_dir / "summary.json").is_file():
        progress(f"{name}: there already")
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    progress(f"{name}: running, load average {before:.1f}")
    launcher = str(Path(sys.executable).with_name("areal-dta"))
    command = [launcher, "run", str(args.config), "--run-dir", str(run_dir), "--json", "--no-progress"]
    command += [f"total_train_steps={args.steps}", *_SMALLER, *VARIANTS[name]]
    log = args.runs / f"{name}.log"
    code = run_recorded(command, run_dir, log, args.timeout)
    if code:
        raise UsageError(f"the run {name} ended with code {code}; see {log}, or raise --timeout if it was cut off")
    loads = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
    (run_dir / "load_average.json").write_text(json.dumps(loads))


def _compared(run_dir: Path, measured: MeasuredRun) -> dict[str, Any]:
    """A run and its prediction, twice: with the calibration run's background load, and with as much as the
    stretch of this run's training steps (their wall over their processor seconds) tells.
    """
    config, observed = load_run_config(run_dir), observe(run_dir)
    settings = simulation_settings(config, observed.steps + 1)
    settings = dataclasses.replace(
        settings,
        total_steps=settings.steps,
        warmup_steps=measured.settings.warmup_steps,
        cores=measured.settings.cores,
        background=measured.settings.background,
    )
    same = simulate(settings, measured.speeds, measured.workload)
    own = with_background(settings, measured.speeds, measured.workload, observed.stretch)
    loads = run_dir / "load_average.json"
    return {
        "load_average": json.loads(loads.read_text()) if loads.is_file() else None,
        "observed": dataclasses.asdict(observed),
        "predicted": _figures(same, observed, settings.background),
        "predicted_own_background": _figures(simulate(own, measured.speeds, measured.workload), observed,
                                             own.background),
    }  # fmt: skip


def _figures(report: SimulationReport, observed: Observed, background: float) -> dict[str, float]:
    return {
        "step_s": report.step_s,
        "step_error": report.step_s / observed.step_s - 1,
        "staleness_mean": report.staleness_mean,
        "staleness_error": report.staleness_mean - observed.staleness_mean,
        "wait_s": report.wait_s,
        "compute_s": report.compute_s,
        "episode_s": report.episode_s,
        "stretch": report.stretch,
        "work_s": report.work_s,
        "work_error": report.work_s / observed.work_s - 1,
        "background": background,
    }

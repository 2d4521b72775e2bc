"""What `run`, `resume`, `status` and `stop` do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from areal_dta.config import Config, ConfigError, load_config, load_run_config
from areal_dta.config_schema import RuntimeConfig
from areal_dta.metrics import MetricRecord, last_value, read_metrics
from launcher import plan as planning
from launcher.inputs import precheck
from launcher.launch import Outcome, execute
from launcher.newrun import new_run, run_path
from launcher.redact import redact_values
from launcher.run_files import RunFiles, living_state
from launcher.rundir import RunDir, RunError, read_json_map
from launcher.steps import StepTable, tokens_per_s
from launcher.supervise import wait_for_end

__all__ = ["resume", "run", "status", "stop"]

_STATUS_METRICS = (
    "batch/reward_mean",
    "train/loss",
    "batch/tree_ratio",
    "batch/staleness_max",
    "train/logprob_mismatch_max",
)
_STOP_MARGIN_S = 30.0


def run(
    config_file: Path, overrides: Sequence[str], dry_run: bool, as_json: bool, where: Path | None, live: bool
) -> int:
    """Check everything that can be checked at once, then run in the foreground."""
    config = load_config(config_file, overrides)
    out = sys.stderr if as_json else sys.stdout
    if dry_run:
        return _dry_run(config, where, as_json)
    _say_notices(config, out)
    precheck(config)
    config, run_dir = new_run(config, where, time.time())
    print(f"run directory: {run_dir.path}", file=out, flush=True)
    return _finish(execute(config, run_dir, 0, None, out, live and out.isatty()), out, as_json)


def resume(path: Path, as_json: bool, live: bool) -> int:
    """Start a run again from its last checkpoint, under a new epoch."""
    run_dir = RunDir(path.resolve()).require()
    if run_dir.is_locked():
        raise RunError(f"{path} is running; stop it first: areal-dta stop {path}")
    state = run_dir.read_state()
    if state.status == "finished":
        raise RunError(f"{path} is finished after {state.step} steps; start a new run to train on")
    config = load_run_config(run_dir.path)
    precheck(config)
    step = run_dir.latest_checkpoint()
    out = sys.stderr if as_json else sys.stdout
    origin = "the start (there is no checkpoint)" if step is None else f"the checkpoint of step {step}"
    print(f"resuming {run_dir.path} as epoch {state.epoch + 1} from {origin}", file=out, flush=True)
    return _finish(execute(config, run_dir, state.epoch + 1, step, out, live and out.isatty()), out, as_json)


def _finish(outcome: Outcome, out: TextIO, as_json: bool) -> int:
    """Say how it ended; with --json as one line, the last on stdout."""
    state = outcome.state
    if outcome.summary:
        from launcher.summary import render

        print(render(outcome.summary), file=out, flush=True)
    if state.cause:
        can_go_on = state.status == "stopped" or state.total_steps  # a failed preparation fails again
        hint = f"\ncontinue with: areal-dta resume {outcome.run_dir}" if can_go_on else ""
        print(f"{state.status}: {state.cause}{hint}", file=sys.stderr, flush=True)
    if as_json:
        ended = {"status": state.status, "cause": state.cause, "run_dir": str(outcome.run_dir)}
        print(json.dumps({**outcome.summary, **ended}), flush=True)
    return outcome.exit_code


def _say_notices(config: Config, out: TextIO) -> None:
    for notice in config.notices:
        print(f"note: {notice}", file=out)


def _dry_run(config: Config, where: Path | None, as_json: bool) -> int:
    """Print what `run` would start, without keys. Touches neither disk nor network."""
    path = run_path(config, where, time.time())
    chosen = planning.planned_ports(config)
    plan = planning.launch_plan(config, path, chosen, 0, None)
    rows = [planning.describe(spec) for spec in planning.process_table(config, plan, chosen)]
    values = redact_values(config.raw)
    if as_json:
        shown = {"run_dir": str(path), "notices": list(config.notices), "processes": rows, "config": values}
        print(json.dumps(shown))
        return 0
    _say_notices(config, sys.stdout)
    print(f"run directory: {path}\n\nprocesses:")
    for row in rows:
        where_to = f"{row['host']} " + (f"gpu {','.join(map(str, row['devices']))}" if row["devices"] else "cpu")
        port = "" if row["port"] is None else f"port {row['port'] or 'any free'}"
        print(f"  {row['name']:<12} {where_to:<20} {port:<14} {' '.join(row['command'])}")
    print(f"\nvalues:\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}", end="")
    return 0


def status(path: Path, as_json: bool) -> int:
    """Print the state of a run, its processes and its latest metrics."""
    run_dir = RunDir(path.resolve()).require()
    shown = describe_run(run_dir)
    if as_json:
        print(json.dumps(shown))
        return 0
    print(f"{run_dir.path}: {shown['status']}, step {shown['step']}/{shown['total_steps']}, epoch {shown['epoch']}")
    if shown["cause"]:
        print(f"cause: {shown['cause']}")
    for name, process in shown["processes"].items():
        past = f"  ({'; '.join(process['history'])})" if process["history"] else ""
        print(f"  {name:<12} {process['status']:<11} pid {process['pid']:<8} restarts {process['restarts']}{past}")
    for name, value in shown["metrics"].items():
        print(f"  {name:<28} {value:.6g}")
    return 0


def describe_run(run_dir: RunDir) -> dict[str, Any]:
    """The state of a run as plain values; a run whose launcher is gone is reported as failed."""
    locked = run_dir.is_locked()  # before the state: a launcher that ends in between has written its last one
    state = living_state(dataclasses.asdict(run_dir.read_state()), locked)
    processes: dict[str, Any] = {}
    if run_dir.processes_file.is_file():
        processes = read_json_map(run_dir.processes_file)
    if not locked:
        for process in processes.values():
            process["status"] = "ended"
    records = read_metrics(run_dir.metrics_file)
    values = {name: last_value(records, name) for name in _STATUS_METRICS}
    values["tokens_per_s"] = _latest_speed(records, run_dir)
    return state | {"processes": processes, "metrics": {k: v for k, v in values.items() if v is not None}}


def _latest_speed(records: Sequence[MetricRecord], run_dir: RunDir) -> float | None:
    """`launcher.steps.tokens_per_s` of the latest step that every rank has finished."""
    plan = read_json_map(run_dir.launch_file) if run_dir.launch_file.is_file() else {}
    files = RunFiles(run_dir.path, launch=plan)
    return tokens_per_s(StepTable(records).complete(files.num_ranks)[-1:], files.num_dp_ranks)


def stop(path: Path) -> int:
    """SIGTERM to the launcher, then wait until it and all its processes are gone."""
    run_dir = RunDir(path.resolve()).require()
    if not run_dir.is_locked():
        print(f"{path} is not running ({describe_run(run_dir)['status']})")
        return 0
    holder = run_dir.lock.holder()
    fd = None if holder is None else holder.open()
    if holder is None or fd is None:  # it is only now starting or ending; never signal whoever has the number now
        raise RunError(f"{path} is locked, but not by a process named in {run_dir.lock.path}; try again in a moment")
    # Two waves of processes, each with its grace.
    limit_s = 2 * _stop_timeout_s(run_dir) + _STOP_MARGIN_S
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
        ended = wait_for_end(fd, limit_s)
    finally:
        os.close(fd)
    if not ended:
        raise RunError(
            f"launcher {holder.pid} of {path} did not end within {limit_s:g} s; a second `stop` kills at once"
        )
    print(f"{path} is stopped")
    return 0


def _stop_timeout_s(run_dir: RunDir) -> float:
    try:
        return load_run_config(run_dir.path).runtime.stop_timeout_s
    except ConfigError:  # a damaged file must not keep a run from being stopped
        return RuntimeConfig().stop_timeout_s

"""Processor seconds of a run's processes over time, read from /proc while the run is going.

On a machine that is shared, wall times say what the others did; processor times say what the run did. The record goes
to ``RUN/usage.json``, where `areal_dta.simulation` finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from areal_dta.simulation.usage import USAGE_FILE
from scripts.benchlib.report import end

__all__ = ["run_recorded"]

POLL_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_recorded(command: Sequence[str], run_dir: Path, log: Path, timeout_s: float) -> int:
    """Run a command that makes the run directory, recording until it ends; returns its exit code."""
    samples: dict[str, list[tuple[float, float]]] = {}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                for name, pid in _pids(run_dir).items():
                    used_s = _cpu_s(pid)
                    if used_s is not None:
                        samples.setdefault(name, []).append((time.time(), used_s))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            if process.poll() is None:
                end(process)
    if run_dir.is_dir():  # otherwise the command failed before it made one; its exit code tells
        (run_dir / USAGE_FILE).write_text(json.dumps({"samples": samples, "cores": os.cpu_count()}))
    return process.returncode


def _pids(run_dir: Path) -> dict[str, int]:
    try:
        found = json.loads((run_dir / "processes.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or being written
        return {}
    listed = found.get("processes", found)
    return {name: entry["pid"] for name, entry in listed.items() if isinstance(entry, dict) and "pid" in entry}


def _cpu_s(pid: int) -> float | None:
    """User and system seconds of a process and its reaped children; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) / _TICKS_PER_S

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

__all__ = ["run_recorded"]

POLL_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_recorded(command: Sequence[str], run_dir: Path, log: Path, timeout_s: float) -> int:
    """Run a command that makes the run directory, recording until it ends; returns its exit code."""
    times: list[float] = []
    others: list[int] = []
    cpu: dict[str, list[tuple[int, float]]] = {}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                own = 1  # this process
                for name, pid in _pids(run_dir).items():
                    used_s = _cpu_s(pid)
                    if used_s is not None:
                        cpu.setdefault(name, []).append((len(times), used_s))
                        own += _runnable_threads(pid)
                times.append(time.time())
                others.append(max(0, _runnable() - own))
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    record = {
        "t": times,
        "others_runnable": others,
        "load_average": os.getloadavg()[0],
        "cpu_s": cpu,
        "cores": os.cpu_count(),
    }
    (run_dir / USAGE_FILE).write_text(json.dumps(record))
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


def _runnable() -> int:
    """Threads of the whole machine that run or want to."""
    text = Path("/proc/stat").read_text()
    return int(text[text.index("procs_running") :].split(maxsplit=2)[1])


def _runnable_threads(pid: int) -> int:
    count = 0
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            count += task.read_text().rpartition(")")[2].split()[0] == "R"
    return count

"""Processor seconds of a run's processes over time: ``RUN/usage.json``, recorded by `scripts/bench.py simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["USAGE_FILE", "Usage", "read_usage"]

USAGE_FILE = "usage.json"


@dataclass(frozen=True, eq=False)
class Usage:
    """Cumulative processor seconds by process, and at unix times ``t`` (ascending) how many threads of other programs
    ran or wanted to.
    """

    t: np.ndarray
    others_runnable: np.ndarray
    cpu: Mapping[str, tuple[np.ndarray, np.ndarray]]  # name -> (unix times, seconds)
    cores: int

    def between(self, name: str, start_s: float, end_s: float) -> float:
        """Processor seconds of a process (0 of an unknown one) between two unix times, linear in between."""
        if name not in self.cpu:
            return 0.0
        t, used_s = self.cpu[name]
        return float(np.diff(np.interp([start_s, end_s], t, used_s))[0])

    def total(self, role: str, start_s: float, end_s: float) -> float:
        """Of all processes of a role (the name before the dot)."""
        names = [name for name in self.cpu if name.partition(".")[0] == role]
        return sum(self.between(name, start_s, end_s) for name in names)

    def background(self, start_s: float, end_s: float) -> float:
        """Other programs' threads that competed for the cores, on average."""
        inside = (self.t >= start_s) & (self.t <= end_s)
        return float(self.others_runnable[inside].mean()) if inside.any() else 0.0


def read_usage(run_dir: Path) -> Usage | None:
    """The record of a run, or None where there is none."""
    path = run_dir / USAGE_FILE
    if not path.is_file():
        return None
    raw = json.loads(path.read_text())
    times = np.asarray(raw["t"], np.float64)
    cpu = {}
    for name, samples in raw["cpu_s"].items():
        index = np.asarray([int(i) for i, _ in samples])
        cpu[name] = (times[index], np.asarray([used_s for _, used_s in samples], np.float64))
    return Usage(times, np.asarray(raw["others_runnable"], np.float64), cpu, int(raw["cores"]))

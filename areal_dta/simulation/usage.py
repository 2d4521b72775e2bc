"""Processor seconds of a run's processes over time: ``RUN/usage.json``, recorded by `scripts/bench.py simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_dta.simulation.settings import SimulationError

__all__ = ["USAGE_FILE", "Usage", "read_usage"]

USAGE_FILE = "usage.json"


@dataclass(frozen=True, eq=False)
class Usage:
    """Of every process ``samples`` (unix times ascending, cumulative processor seconds)."""

    samples: Mapping[str, tuple[np.ndarray, np.ndarray]]
    cores: int

    def between(self, name: str, start_s: float, end_s: float) -> float:
        """Processor seconds of a process (0 of an unknown one) between two unix times, linear in between."""
        if name not in self.samples:
            return 0.0
        t, used_s = self.samples[name]
        return float(np.diff(np.interp([start_s, end_s], t, used_s))[0])

    def total(self, role: str, start_s: float, end_s: float) -> float:
        """Of all processes of a role (the name before the dot); of all at all for ""."""
        names = [name for name in self.samples if role in ("", name.partition(".")[0])]
        return sum(self.between(name, start_s, end_s) for name in names)


def read_usage(run_dir: Path) -> Usage | None:
    """The record of a run, or None where there is none. Raises SimulationError for one that cannot be read."""
    path = run_dir / USAGE_FILE
    if not path.is_file():
        return None
    samples = {}
    try:
        raw = json.loads(path.read_text())
        for name, rows in raw["samples"].items():
            columns = np.asarray(rows, np.float64).T
            samples[name] = (columns[0], columns[1])
        return Usage(samples, int(raw["cores"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SimulationError(
            f"{path} is no record of processor times: {error!r}; remove it to calibrate on wall times"
        ) from error

"""Reads a run directory for the page: keeps a model up to date with the files as they grow."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from areal_dta.metrics import MetricsTail
from launcher.dashboard.model import RunModel
from launcher.run_files import RunFileError, RunFiles, read_run_files

__all__ = ["RunSource"]


class RunSource:
    """`view` may be called from any thread; each call reads only what was appended since the last."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._files: RunFiles = read_run_files(run_dir)
        self._tail = MetricsTail(run_dir / "metrics.jsonl")
        self._model = RunModel()

    def view(self, since: str | None = None) -> dict[str, Any]:
        """The view of the model after reading on, with ``warnings`` about files that could not be read."""
        with self._lock:
            warnings = []
            try:
                self._files = read_run_files(self._run_dir)
            except RunFileError as error:  # shown on the page; what was read before stays
                warnings.append(str(error))
            self._model.add(self._tail.read_new())
            if self._tail.bad_lines:
                warnings.append(f"{self._tail.bad_lines} damaged lines of metrics.jsonl were skipped")
            return {**self._model.view(self._files, time.time(), since), "warnings": warnings}

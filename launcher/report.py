"""A run as one HTML file: the dashboard's page with its data inside; needs no server and no network."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from launcher.dashboard.page import standalone
from launcher.dashboard.source import RunSource
from launcher.rundir import RunError

__all__ = ["write_report"]


def write_report(run_dir: Path, out: Path) -> None:
    """Write the report of a run (finished or not) to ``out``.

    Raises RunFileError where there is no run directory or one of its files is damaged, RunError where ``out`` cannot be
    written.
    """
    html = standalone(RunSource(run_dir).view())
    tmp = out.with_name(out.name + ".tmp")
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        out.parent.mkdir(parents=True, exist_ok=True)
        tmp.write_text(html, encoding="utf-8")
        tmp.replace(out)
    except OSError as error:
        raise RunError(f"the report cannot be written to {out}: {error.strerror}; choose another --out") from error

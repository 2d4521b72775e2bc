"""A run as one HTML file: the dashboard's page with its data inside; needs no server and no network."""

from __future__ import annotations

from pathlib import Path

from launcher.dashboard.page import standalone
from launcher.dashboard.source import RunSource

__all__ = ["write_report"]


def write_report(run_dir: Path, out: Path) -> None:
    """Write the report of a run (finished or not) to ``out``; raises RunFileError where there is no run directory."""
    html = standalone(RunSource(run_dir).view())
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.with_name(out.name + ".tmp")
    tmp.write_text(html, encoding="utf-8")
    tmp.replace(out)

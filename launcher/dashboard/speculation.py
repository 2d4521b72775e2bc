"""Records of speculative decoding and of the drafter's training, folded into the page's time axis and header."""

from __future__ import annotations

from typing import Any

from areal_dta.metrics import MetricRecord
from launcher.dashboard.timeline import Timeline
from launcher.run_files import RunFiles
from launcher.speculation import SECONDS, SpeculationTotals

__all__ = ["ROUTINE_EVENTS", "SpeculationModel"]

# They come with every idle moment and would push everything else out of the list of events.
ROUTINE_EVENTS = frozenset(f"drafter/{name}" for name in ("training", "resting", "round_started", "round_ended"))
COUNTS = {"tlt/draft_steps": "drafts", "tlt/accepted_tokens": "accepted"}
ARM = "arm "  # + name: seconds of decoding per second
# Levels of one process at a time: the coordinator, or the worker that leads.
LEVELS = {
    "drafter/loss": "drafter_loss",
    "drafter/top3": "drafter_top3",
    "drafter/held_out_top3": "drafter_held_out",
    "drafter/held_out_top3_served": "drafter_served",
}
SUMS = {"drafter/buffer_bytes": "buffer_bytes", "drafter/buffer_samples": "buffer_samples"}  # one value per worker


class SpeculationModel:
    """Its ticks: `COUNTS` per second, seconds by arm, ``speedup`` (so far), ``servers_STATE``, `LEVELS`, `SUMS`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._totals = SpeculationTotals()
        self._sums: dict[str, dict[str, float]] = {}
        self._version: dict[str, Any] = {}
        self._steps = 0

    def add(self, record: MetricRecord, at_s: float, revision: int) -> None:
        name, value = record.name, record.value
        if name == "drafter/published" and record.message:
            servers = [server for server in record.message.split(",") if server]
            self._version = {"version": str(record.labels.get("version", "?")), "servers": servers}
        if value is None:
            return
        self._totals.add(record)
        if name in COUNTS:
            self._timeline.count(at_s, COUNTS[name], record.proc, value, revision)
        elif name == SECONDS:  # the last of a report
            self._timeline.count(at_s, f"{ARM}{record.labels.get('arm')}", record.proc, value, revision)
            found = self._totals.result()
            if found is not None:
                self._timeline.gauge(at_s, "speedup", found["speedup"], revision)
        elif name == "drafter/servers":
            self._timeline.gauge(at_s, f"servers_{record.labels.get('state')}", value, revision)
        elif name in LEVELS:
            self._steps = max(self._steps, record.step or 0)
            self._timeline.gauge(at_s, LEVELS[name], value, revision)
        elif name in SUMS:
            levels = self._sums.setdefault(name, {})
            levels[record.proc] = value
            self._timeline.gauge(at_s, SUMS[name], sum(levels.values()), revision)

    def view(self, files: RunFiles) -> dict[str, Any]:
        """``enabled``, ``train``: what the run's configuration asks for; then what was measured, None before."""
        embedded = str(files.setting("rollout.backend") or "").startswith("embedded")
        enabled = embedded and files.setting("tlt.enabled") is True
        found = self._totals.result()
        return {
            "enabled": enabled or found is not None,
            "train": embedded and files.setting("tlt.train") is True,
            "accept_length": found and found["accept_length"],
            "speedup": found and found["speedup"],
            "arms": found["arms"] if found else {},
            "steps": self._steps,
            "version": self._version.get("version"),
            "servers": self._version.get("servers", []),
        }

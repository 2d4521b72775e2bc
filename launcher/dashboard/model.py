"""Metric records folded into what the page shows. Pure: no file, no socket; the clock is passed in.

The view is plain data (`RunModel.view`): `run` and `now` are whole each time, `steps` and `ticks` hold only what
changed after the cursor that the page sends back. To show something new, add a field to a row here and a panel to the
page.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from areal_dta.metrics import MetricRecord
from launcher.dashboard.speculation import ROUTINE_EVENTS, SpeculationModel
from launcher.dashboard.timeline import Timeline
from launcher.run_files import RunFiles
from launcher.steps import (
    STAGES,
    StepRow,
    StepTable,
    bounding_stage,
    mean_stage_seconds,
    stage_seconds,
    tokens_per_s,
)

__all__ = ["RunModel"]

VIEW_VERSION = 1
EVENTS_KEPT = 200
RECENT_STEPS = 5
# Levels that are summed over the processes that report them.
GAUGES = {
    "server/running": "running",
    "server/waiting": "waiting",
    "batch/in_flight": "in_flight",
    "batch/ready": "ready",
}
# Step values that every source reports alike: page name -> published name.
_PLAIN = {
    "reward": "batch/reward_mean",
    "episodes": "batch/episodes",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "entropy": "train/entropy",
    "clip_ratio": "train/clip_ratio",
    "approx_kl": "train/approx_kl",
    "batch_ratio": "batch/tree_ratio",
    "staleness_max": "batch/staleness_max",
    "staleness_mean": "batch/staleness_mean",
    "mixed_share": "batch/mixed_version_share",
    "mismatch_max": "train/logprob_mismatch_max",
    "mismatch_mean": "train/logprob_mismatch_mean",
    "mismatch_tokens": "train/logprob_mismatch_tokens",
}


@dataclass
class ProcessView:
    """One process as the launcher's events tell it."""

    name: str
    state: str = "starting"
    pid: int | None = None
    starts: int = 0
    restarts: int = 0
    last_exit: str = ""


@dataclass
class _Episodes:
    """Running means over finished training episodes."""

    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)


class RunModel:
    """Feed it records in file order with `add`; ask for what changed with `view`."""

    def __init__(self) -> None:
        self.table = StepTable()
        self.timeline = Timeline()
        self._speculation = SpeculationModel(self.timeline)
        self.instance = uuid.uuid4().hex[:8]  # a cursor of another model is worth nothing
        self._revision = 0
        self._step_revisions: dict[int, int] = {}
        self._step_end_s: dict[int, float] = {}
        self._levels: dict[str, dict[str, float]] = {}
        self._evals: dict[str, dict[str, Any]] = {}
        self._rejected: dict[str, float] = {}
        self._processes: dict[str, ProcessView] = {}
        self._events: list[dict[str, Any]] = []
        self._episodes = _Episodes()
        self._phase: str | None = None
        self._last_t: float | None = None
        self._first_t: float | None = None
        self._dropped: dict[str, float] = {}

    def add(self, records: Iterable[MetricRecord]) -> None:
        """Account for new records, in the order in which they were stored."""
        for record in records:
            self._revision += 1
            at_s = self.timeline.place(record.t)
            self._first_t = record.t if self._first_t is None else self._first_t
            self._last_t = record.t
            self._add_one(record, at_s)

    def _add_one(self, record: MetricRecord, at_s: float) -> None:
        row = self.table.add(record)
        if row is not None:
            self._step_revisions[row.step] = self._revision
            if record.name == "time/step":
                self._step_end_s[row.step] = at_s
        self._speculation.add(record, at_s, self._revision)
        if record.kind == "event":
            self._add_event(record)
        elif record.name in GAUGES and record.value is not None:
            levels = self._levels.setdefault(record.name, {})
            levels[record.proc] = record.value
            self.timeline.gauge(at_s, GAUGES[record.name], sum(levels.values()), self._revision)
        elif record.name == "server/generated_tokens" and record.value is not None:
            self.timeline.count(at_s, "generated", record.proc, record.value, self._revision)
        elif record.name == "eval/reward":
            tag = str(record.labels.get("tag"))
            self._evals[tag] = {"tag": tag, "step": record.step, "reward": record.value}
        elif record.name == "batch/rejected" and record.value is not None:
            self._rejected[str(record.labels.get("cause", "unknown"))] = record.value
        elif record.name == "metrics/dropped" and record.value is not None:
            self._dropped[record.proc] = record.value
        elif record.name.startswith("rollout/") and record.value is not None and not record.labels.get("eval"):
            self._add_episode(record.name.removeprefix("rollout/"), record.value)

    def _add_episode(self, name: str, value: float) -> None:
        self._episodes.count += name == "reward"
        self._episodes.sums[name] = self._episodes.sums.get(name, 0.0) + value

    def _add_event(self, record: MetricRecord) -> None:
        if record.name in ROUTINE_EVENTS:
            return
        name = str(record.labels.get("process") or record.labels.get("name") or record.proc)
        event = {"t": record.t, "name": record.name, "process": name, "message": record.message or ""}
        self._events = [*self._events[-EVENTS_KEPT + 1 :], event]
        if record.name == "run/phase":
            self._phase = record.message or str(record.labels.get("phase") or "") or None
        if not record.name.startswith("process/"):
            return
        view = self._processes.setdefault(name, ProcessView(name))
        pid = record.labels.get("pid")
        if record.name == "process/exit":
            on_purpose = record.labels.get("code") == 0 or record.labels.get("stopped") is True
            view.state = "ended" if on_purpose else "died"
            view.last_exit = record.message or ""
        else:
            view.state, view.pid = "running", pid if isinstance(pid, int) else None
            view.starts += record.name == "process/start"
            view.restarts += record.name == "process/restart"

    # ---- the view ----

    def view(self, files: RunFiles, now: float, since: str | None = None) -> dict[str, Any]:
        """What the page draws; ``since`` is the ``cursor`` of an earlier view, ``now`` unix seconds.

        With a cursor of this model only steps and ticks that changed after it are included, and ``full`` is False.
        """
        after, complete = self._parse_cursor(since)
        trained, dp = self.table.trained(), files.num_dp_ranks
        return {
            "version": VIEW_VERSION,
            "cursor": f"{self.instance}:{self._revision}:{self._complete_ticks()}",
            "full": after == 0,
            "run": self._run(files, now, len(trained)),
            "now": self._now(trained[-RECENT_STEPS:], dp),
            "stages": list(STAGES),
            "steps": [self._step(row, dp) for row in self.table.ordered() if self._step_revisions[row.step] > after],
            "tick_s": self.timeline.width_s,
            "ticks": self._ticks(after, complete),
            "evals": sorted(self._evals.values(), key=lambda e: (e["step"] is None, e["step"] or 0)),
            "speculation": self._speculation.view(files),
            "rejected": dict(sorted(self._rejected.items())),
            "processes": self._process_rows(files.state.get("status")),
            "events": self._events[-EVENTS_KEPT:],
        }

    def _parse_cursor(self, since: str | None) -> tuple[int, int]:
        """(revision, complete ticks) that the page has; zeros for a cursor of another model or none."""
        parts = (since or "").split(":")
        if len(parts) != 3 or parts[0] != self.instance or not (parts[1].isdigit() and parts[2].isdigit()):
            return 0, 0
        return int(parts[1]), int(parts[2])

    def _complete_ticks(self) -> int:
        """Rates of the newest two buckets are not shown yet: some server has not reported for them."""
        return max(0, int(self.timeline.now_s // self.timeline.width_s) - 1)

    def _run(self, files: RunFiles, now: float, num_trained: int) -> dict[str, Any]:
        state = files.state
        status = state.get("status")
        started = state.get("started_at") or self._first_t
        ended = now if status in ("preparing", "running") else state.get("updated_at") or self._last_t
        return {
            "name": files.name,
            "dir": str(files.run_dir),
            "status": status,
            "cause": state.get("cause"),
            "phase": self._phase,
            "epoch": state.get("epoch"),
            "step": num_trained,
            "total_steps": state.get("total_steps") or files.setting("total_train_steps"),
            "elapsed_s": None if started is None or ended is None else max(0.0, ended - started),
            "quiet_s": None if self._last_t is None else max(0.0, now - self._last_t),
            "staleness_bound": files.staleness_bound,
            "staleness_policy": files.setting("batcher.staleness_policy"),
            "cost_unit": files.setting("batcher.cost"),
            "dp": files.num_dp_ranks,
            "restarts": sum(view.restarts for view in self._processes.values()),
            "metrics_dropped": sum(self._dropped.values()),
        }

    def _now(self, recent: list[StepRow], dp: int | None) -> dict[str, Any]:
        """Means over the latest steps, for the header."""
        stages = mean_stage_seconds(recent)
        count = max(1, self._episodes.count)
        return {
            "bound": bounding_stage(stages),
            "stages": _rounded(stages),
            "tokens_per_s": _round(tokens_per_s(recent, dp)),
            "episodes": self._episodes.count,
            "episode_means": {name: _round(total / count) for name, total in self._episodes.sums.items()},
        }

    def _step(self, row: StepRow, dp: int | None) -> dict[str, Any]:
        stages = stage_seconds(row)
        row_tokens, tree_tokens = row.total("train/row_tokens", dp), row.total("train/tree_tokens", dp)
        step_s, end_s = row.largest("time/step"), self._step_end_s.get(row.step)
        return {
            "step": row.step,
            "end_s": _round(end_s),
            "step_s": _round(step_s),
            **{key: _round(row.any(name)) for key, name in _PLAIN.items()},
            "row_tokens": row_tokens,
            "tree_tokens": tree_tokens,
            "tree_ratio": _round(row_tokens / tree_tokens) if row_tokens and tree_tokens else None,
            "tokens_per_s": _round(tokens_per_s([row], dp)),
            "step_tokens_per_s": _round(row_tokens / step_s) if row_tokens is not None and step_s else None,
            "stage_s": _rounded(stages),
            "bound": bounding_stage(stages),
            "loads": _rounded(row.by_source("batch/rank_cost") or row.by_source("train/load")),
        }

    def _process_rows(self, status: str | None) -> list[dict[str, Any]]:
        """After the end of a run nothing runs any more, also where a launcher that was killed could not say so."""
        rows = [asdict(view) for _, view in sorted(self._processes.items())]
        if status in ("finished", "failed", "stopped"):
            rows = [{**row, "state": "ended" if row["state"] == "running" else row["state"]} for row in rows]
        return rows

    def _ticks(self, after: int, complete_before: int) -> list[dict[str, Any]]:
        """Buckets that changed or whose rates became complete since the page's cursor."""
        width_s, complete = self.timeline.width_s, self._complete_ticks()
        ticks = []
        for index, bucket in sorted(self.timeline.buckets.items()):
            if bucket.revision > after or complete_before <= index < complete:
                rates = {name: _round(amount / width_s) for name, amount in bucket.amounts.items()}
                ticks.append({"i": index, **_rounded(bucket.gauges), **(rates if index < complete else {})})
        return ticks


def _round(value: float | None) -> float | None:
    """Six significant digits: what a chart can show."""
    return None if value is None else float(f"{value:.6g}")


def _rounded(values: dict[str, float]) -> dict[str, float | None]:
    return {name: _round(value) for name, value in values.items()}

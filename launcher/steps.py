"""What happened in each training step, reduced over ranks, and which stage bounds it. Pure: records in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from areal_dta.metrics import MetricRecord

__all__ = [
    "STAGES",
    "StepRow",
    "StepTable",
    "bounding_stage",
    "compute_seconds",
    "mean_stage_seconds",
    "rank_number",
    "stage_seconds",
    "tokens_per_s",
]

# In the order in which a step goes through them. The first two are what a trainer waits for.
STAGES = ("rollout", "batcher", "logprob", "advantages", "update", "publish", "checkpoint")
_COMPUTE = STAGES[2:]
_TRAINING = ("time/logprob", "time/advantages", "time/update")
_PREFIXES = ("train/", "batch/", "time/")


@dataclass
class StepRow:
    """All that was published for one step: ``values[name][source]``, the source being a rank label or else the process.

    A step trained twice (a resumed run) overwrites its first values.
    """

    step: int
    values: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def put(self, record: MetricRecord) -> None:
        source = record.labels.get("rank")
        self.values.setdefault(record.name, {})[record.proc if source is None else str(source)] = record.value

    def by_source(self, name: str) -> dict[str, float]:
        """Finite values of ``name`` by rank or process, ordered by rank number."""
        found = sorted(self.values.get(name, {}).items(), key=lambda item: rank_number(item[0]))
        return {source: value for source, value in found if value is not None}

    def any(self, name: str) -> float | None:
        """The value of a quantity that every rank reports alike (the loss), or that one process reports."""
        return next(iter(self.by_source(name).values()), None)

    def largest(self, name: str) -> float | None:
        return max(self.by_source(name).values(), default=None)

    def smallest(self, name: str) -> float | None:
        return min(self.by_source(name).values(), default=None)

    def total(self, name: str, num_dp_ranks: int | None = None) -> float | None:
        """Sum over data-parallel ranks; where more ranks than those report, each share counts once."""
        found = self.by_source(name)
        replicas = max(1, len(found) // num_dp_ranks) if num_dp_ranks else 1
        return sum(found.values()) / replicas if found else None


def rank_number(source: str) -> tuple[int, str]:
    """Sort key of ranks: "10" and "trainer.10" come after "2" and "trainer.2"."""
    digits = source.rpartition(".")[2]
    return (int(digits) if digits.isdigit() else 0, source)


class StepTable:
    """Rows by step, filled record by record in the order of the file."""

    def __init__(self, records: Iterable[MetricRecord] = ()) -> None:
        self.rows: dict[int, StepRow] = {}
        for record in records:
            self.add(record)

    def add(self, record: MetricRecord) -> StepRow | None:
        """The row that the record went to, or None for one that belongs to no step or is a span cut short."""
        if record.step is None or record.kind == "event" or not record.name.startswith(_PREFIXES):
            return None
        if record.labels.get("failed"):
            return None
        row = self.rows.setdefault(record.step, StepRow(record.step))
        row.put(record)
        return row

    def ordered(self) -> list[StepRow]:
        return [self.rows[step] for step in sorted(self.rows)]

    def trained(self) -> list[StepRow]:
        """Steps whose training reported something: a loss (also one that is not finite) or the length of the step."""
        return [row for row in self.ordered() if "train/loss" in row.values or "time/step" in row.values]

    def complete(self, num_ranks: int) -> list[StepRow]:
        """Steps of which every trainer rank has reported the end."""
        return [row for row in self.ordered() if len(row.by_source("time/step")) >= num_ranks]


def stage_seconds(row: StepRow) -> dict[str, float]:
    """Seconds of each stage of `STAGES` that the step reported.

    Ranks meet at barriers, so a stage takes as long as its slowest rank. Waiting is the other way round: only what
    every rank waited is owed to the stages before training. Of that, the batcher answers for at most its time of
    assembling.
    """
    seconds: dict[str, float] = {}
    wait_s = row.smallest("time/wait_batch")
    if wait_s is not None:
        seconds["batcher"] = min(wait_s, row.largest("time/assemble") or 0.0)
        seconds["rollout"] = wait_s - seconds["batcher"]
    for stage in _COMPUTE:
        longest_s = row.largest(f"time/{stage}")
        if longest_s is not None:
            seconds[stage] = longest_s
    return {stage: seconds[stage] for stage in STAGES if stage in seconds}


def compute_seconds(row: StepRow) -> float | None:
    """Seconds that the slowest rank spent on log-probs, advantages and update; None where none was reported."""
    by_rank: dict[str, float] = {}
    for name in _TRAINING:
        for source, seconds in row.by_source(name).items():
            by_rank[source] = by_rank.get(source, 0.0) + seconds
    return max(by_rank.values(), default=None)


def tokens_per_s(rows: Iterable[StepRow], num_dp_ranks: int | None) -> float | None:
    """The training throughput that every view of a run shows: row tokens of all data-parallel ranks per second of
    `compute_seconds`. Waiting, publishing and checkpoints are not in it. None where nothing was measured.
    """
    pairs = [(row.total("train/row_tokens", num_dp_ranks), compute_seconds(row)) for row in rows]
    known = [(tokens, seconds) for tokens, seconds in pairs if tokens is not None and seconds]
    return sum(tokens for tokens, _ in known) / sum(seconds for _, seconds in known) if known else None


def bounding_stage(seconds: Mapping[str, float]) -> str | None:
    """The stage to speed up first: what the trainers wait for if they wait longer than any stage of theirs takes.

    None where no stage took any time.
    """
    rollout_s, batcher_s = seconds.get("rollout", 0.0), seconds.get("batcher", 0.0)
    slowest = max(_COMPUTE, key=lambda stage: seconds.get(stage, 0.0))
    slowest_s = seconds.get(slowest, 0.0)
    if rollout_s + batcher_s > slowest_s:
        return "batcher" if batcher_s > rollout_s else "rollout"
    return slowest if slowest_s > 0 else None


def mean_stage_seconds(rows: Iterable[StepRow]) -> dict[str, float]:
    """Mean seconds of each stage per step; a stage that a step did not report (no checkpoint then) counts as 0."""
    totals: dict[str, float] = {}
    num_steps = 0
    for row in rows:
        seconds = stage_seconds(row)
        num_steps += bool(seconds)
        for stage, value in seconds.items():
            totals[stage] = totals.get(stage, 0.0) + value
    return {stage: totals[stage] / num_steps for stage in STAGES if stage in totals}

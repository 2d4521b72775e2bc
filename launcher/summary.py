"""What a run achieved, as one map of numbers (`--json`) and as text for the terminal. What was not measured is None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_dta.metrics import MetricRecord, last_by_label, read_metrics
from launcher.run_files import RunFiles, read_run_files
from launcher.speculation import speculation_text, summarise_drafter, summarise_speculation, training_text
from launcher.steps import (
    STAGES,
    StepRow,
    StepTable,
    bounding_stage,
    mean_stage_seconds,
    rank_number,
    tokens_per_s,
)

__all__ = ["render", "summarise", "summarise_records"]

WINDOW_STEPS = 5


def summarise(run_dir: Path) -> dict[str, Any]:
    """The summary of a finished, failed or still running run; raises RunFileError if ``run_dir`` is none."""
    files = read_run_files(run_dir)
    return summarise_records(read_metrics(run_dir / "metrics.jsonl"), files)


def summarise_records(records: Sequence[MetricRecord], files: RunFiles) -> dict[str, Any]:
    """Pure core of `summarise`: JSON-able, every key always present, None where nothing was measured.

    Rewards are of episodes (0..1 in tau2), times are seconds, ``wall_s`` is of the last launch,
    ``tokens_per_s`` is `launcher.steps.tokens_per_s` over all steps, ``rank_loads`` are mean partition costs by
    data-parallel rank in the unit of ``batcher.cost``.
    """
    table = StepTable(records)
    trained = table.trained()
    rewards = [value for row in table.ordered() if (value := row.any("batch/reward_mean")) is not None]
    stages = mean_stage_seconds(trained)
    counters = files.batcher
    return {
        "steps": len(trained),
        "reward_first5": _mean(rewards[:WINDOW_STEPS]),
        "reward_last5": _mean(rewards[-WINDOW_STEPS:]),
        "eval_before": _evaluation(records, "before"),
        "eval_after": _evaluation(records, "after"),
        "max_staleness": _max_staleness(table, counters),
        "mixed_version_share": _mixed_share(table, counters),
        **_mismatch(trained),
        "tree_ratio": _tree_ratio(table, trained),
        "rank_loads": _rank_loads(table, files.num_dp_ranks),
        "tokens_per_s": tokens_per_s(trained, files.num_dp_ranks),
        "lost": counters.get("lost"),
        "duplicated": counters.get("duplicated"),
        "wall_s": _wall_s(files.state, records),
        "run_dir": str(files.run_dir),
        "status": files.state.get("status"),
        "cause": files.state.get("cause"),
        "total_steps": files.state.get("total_steps"),
        "staleness_bound": files.staleness_bound,
        "acknowledged": counters.get("acknowledged"),
        "trained": counters.get("trained"),
        "rejected": counters.get("rejected") or last_by_label(records, "batch/rejected", "cause"),
        "dropped": counters.get("dropped") or {},
        "restarts": _restarts(records),
        "speculation": summarise_speculation(records),
        "drafter_training": summarise_drafter(records),
        "metrics_dropped": sum(_last_by_process(records, "metrics/dropped").values()),
        "stage_s": stages,
        "step_s": _mean([value for row in trained if (value := row.largest("time/step")) is not None]),
        "bounding_stage": bounding_stage(stages),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _evaluation(records: Iterable[MetricRecord], tag: str) -> float | None:
    """Mean reward of the greedy evaluation so tagged; repeated after a resumption, the last one counts."""
    return last_by_label(records, "eval/reward", "tag").get(tag)


def _max_staleness(table: StepTable, counters: Mapping[str, Any]) -> int | None:
    seen = [value for row in table.ordered() if (value := row.largest("batch/staleness_max")) is not None]
    if counters.get("max_staleness") is not None:
        seen.append(counters["max_staleness"])
    return int(max(seen)) if seen else None


def _mixed_share(table: StepTable, counters: Mapping[str, Any]) -> float | None:
    """Share of trained episodes that span two policy versions, from the steps; else as the batcher counted it."""
    pairs = [(row.any("batch/mixed_version_share"), row.any("batch/episodes")) for row in table.ordered()]
    known = [(share, episodes) for share, episodes in pairs if share is not None and episodes]
    if not known:
        return counters.get("mixed_version_share")
    return sum(share * episodes for share, episodes in known) / sum(episodes for _, episodes in known)


def _mismatch(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Largest |server - trainer| log-prob difference over tokens of one version; None while no token was compared.

    Rank 0 publishes both, reduced over all ranks.
    """
    largest: list[float] = []
    num_tokens = 0.0
    for row in rows:
        compared = row.largest("train/logprob_mismatch_tokens")
        found = row.largest("train/logprob_mismatch_max")
        if compared and found is not None:
            largest.append(found)
            num_tokens += compared
    return {"logprob_mismatch": max(largest, default=None), "logprob_mismatch_tokens": round(num_tokens)}


def _tree_ratio(table: StepTable, trained: Sequence[StepRow]) -> float | None:
    """Row tokens per token computed, as trained (prefixes cut between ranks count twice), else as batched."""
    for rows, name in ((trained, "train/row_tokens"), (table.ordered(), "batch/tokens")):
        tree_name = "train/tree_tokens" if name.startswith("train/") else "batch/tree_tokens"
        pairs = [(row.total(name), row.total(tree_name)) for row in rows]
        known = [(tokens, tree) for tokens, tree in pairs if tokens and tree]
        if known:
            return sum(tokens for tokens, _ in known) / sum(tree for _, tree in known)
    return None


def _rank_loads(table: StepTable, num_dp_ranks: int | None) -> list[float] | None:
    """Mean cost by data-parallel rank, as the batcher cut it, else as the trainers report it, one per rank."""
    for name in ("batch/rank_cost", "train/load"):
        loads: dict[str, list[float]] = {}
        for row in table.ordered():
            for source, value in row.by_source(name).items():
                loads.setdefault(source, []).append(value)
        if loads and (name.startswith("batch/") or num_dp_ranks in (None, len(loads))):
            return [sum(loads[source]) / len(loads[source]) for source in sorted(loads, key=rank_number)]
    return None


def _wall_s(state: Mapping[str, Any], records: Sequence[MetricRecord]) -> float | None:
    started, updated = state.get("started_at"), state.get("updated_at")
    if isinstance(started, int | float) and isinstance(updated, int | float):
        return float(updated - started)
    return records[-1].t - records[0].t if records else None


def _restarts(records: Iterable[MetricRecord]) -> int:
    return sum(record.name == "process/restart" for record in records)


def _last_by_process(records: Iterable[MetricRecord], name: str) -> dict[str, float]:
    return {record.proc: record.value for record in records if record.name == name and record.value is not None}


def render(summary: Mapping[str, Any]) -> str:
    """The summary as aligned lines of text for a terminal."""
    lines = [f"{label:<22} {text}" for label, text in _lines(summary)]
    return "\n".join(lines)


def _lines(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    of_total = f" of {s['total_steps']}" if s["total_steps"] is not None else ""
    bound = f", bound {s['staleness_bound']}" if s["staleness_bound"] is not None else ""
    lines = [
        ("run", s["run_dir"]),
        ("status", f"{s['status'] or 'unknown'}{': ' + str(s['cause']) if s['cause'] else ''}"),
        ("steps", f"{s['steps']}{of_total}; this launch took {_number(s['wall_s'], '.0f')} s"),
        ("reward", f"first five steps {_number(s['reward_first5'])}, last five {_number(s['reward_last5'])}"),
        ("greedy evaluation", f"before {_number(s['eval_before'])}, after {_number(s['eval_after'])}"),
        ("rank loads", _loads_text(s["rank_loads"])),
        ("tree ratio", f"{_number(s['tree_ratio'], '.2f')} row tokens per token computed"),
        ("largest staleness", f"{_number(s['max_staleness'], 'd')}{bound}"),
        ("mixed versions", f"{_number(s['mixed_version_share'], '.1%')} of trained episodes span two versions"),
        (
            "log-prob mismatch",
            f"{_number(s['logprob_mismatch'], '.2e')} at most, {s['logprob_mismatch_tokens']:,} tokens of one version",
        ),
        ("training tokens/s", f"{_number(s['tokens_per_s'], ',.0f')} row tokens of all ranks per second of computing"),
        ("time per step", _stage_text(s["stage_s"], s["step_s"], s["bounding_stage"])),
        ("speculation", speculation_text(s["speculation"])),
        ("drafter training", training_text(s["drafter_training"])),
        ("trajectories", _delivery_text(s)),
        ("rejections", _counts_text(s["rejected"])),
        ("dropped as stale", _counts_text(s["dropped"])),
        ("restarts", str(s["restarts"])),
    ]
    if s["metrics_dropped"]:
        lines.append(("metrics dropped", f"{s['metrics_dropped']:,.0f} records (the numbers above lack them)"))
    return lines


def _number(value: float | None, spec: str = ".3f") -> str:
    return "not measured" if value is None else format(value, spec)


def _loads_text(loads: Sequence[float] | None) -> str:
    if not loads:
        return "not measured"
    mean = sum(loads) / len(loads)
    shares = "  ".join(f"rank {rank}: {load:,.4g}" for rank, load in enumerate(loads))
    return f"{shares}  (heaviest {max(loads) / mean:.3f} x mean)" if mean > 0 else shares


def _stage_text(stages: Mapping[str, float], step_s: float | None, bound: str | None) -> str:
    if not stages:
        return "not measured"
    parts = [f"{name} {stages[name]:.2f}" for name in STAGES if name in stages]
    return f"{_number(step_s, '.2f')} s: {', '.join(parts)}; bounded by {bound or 'nothing'}"


def _delivery_text(s: Mapping[str, Any]) -> str:
    keys = ("acknowledged", "trained", "lost", "duplicated")
    known = [f"{s[key]} {key}" for key in keys if s[key] is not None]
    return ", ".join(known) or "not measured"


def _counts_text(counts: Mapping[str, Any]) -> str:
    known = [f"{cause} {int(count)}" for cause, count in sorted(counts.items()) if count]
    return ", ".join(known) or "none"

"""What the turns of `bench.py tail` add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scripts.benchlib.tail_play import Bench, Turn
from scripts.benchlib.tail_site import Trainers

__all__ = ["ratio", "summary"]

GOAL_SPEEDUP, GOAL_SLOWDOWN = 1.5, 0.10


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of what happened in the same round."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def summary(bench: Bench, skip_first: bool) -> dict[str, Any]:
    """The result; with ``skip_first`` the first step, in which all processes warm up, is left out of its medians."""
    steps = {name: turns.steps[1:] if skip_first else turns.steps for name, turns in bench.turns.items()}
    walls = {name: [t.wall_s for t in turns] for name, turns in steps.items()}
    cpus = {name: [max(t.cpu_s) for t in turns] for name, turns in steps.items()}
    result: dict[str, Any] = {f"{name}_s": statistics.median(values) for name, values in walls.items()}
    result |= _speedups(walls)
    result["cpu"] = {f"{name}_s": statistics.median(values) for name, values in cpus.items()} | _speedups(cpus)
    outputs = {name: turns.outputs for name, turns in bench.turns.items() if name != "plain"}
    result["others_share"] = _others([t for turns in steps.values() for t in turns])
    result["same_outputs"] = all(found.different == 0 for found in outputs.values())
    result["outputs"] = {name: asdict(found) for name, found in outputs.items()}
    result["rounds"] = {name: [_turn(t) for t in turns.steps] for name, turns in bench.turns.items()}
    goals: dict[str, bool] = {}
    if "speedup" in result:
        goals["step_1.5x"] = result["cpu"]["speedup"] >= GOAL_SPEEDUP
    if bench.trainers is not None:
        result |= _training(steps["tlt"], bench.trainers)
        result["tlt"] = [_notes(note) for note in bench.tuner_notes()]
    if bench.pairs:
        result["beside"] = beside = _beside(bench.pairs)
        goals["beside_10%"] = beside["cpu_slowdown"] <= GOAL_SLOWDOWN
    if any(turns.pools for turns in bench.turns.values()):
        result["pool"] = pool = _pool({name: turns.pools for name, turns in bench.turns.items()})
        if "speedup" in pool:
            goals["pool_not_slower"] = pool["cpu"]["speedup"] >= 1.0
    return {**result, "goals": goals, "passed": result["same_outputs"]}


def _speedups(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Against plain, and of TLT against static."""
    found = {}
    for name, key in (("static", "static_speedup"), ("tlt", "speedup")):
        if name in seconds:
            found[key] = ratio(seconds["plain"], seconds[name])
    if "tlt" in seconds and "static" in seconds:
        found["over_static"] = ratio(seconds["static"], seconds["tlt"])
    return found


def _others(turns: Sequence[Turn]) -> float:
    """Cores that processes of others kept busy meanwhile."""
    return sum(t.others_cpu_s for t in turns) / sum(t.wall_s for t in turns)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "wall_s": round(turn.wall_s, 3),
        "cpu_s": [round(s, 2) for s in turn.cpu_s],
        "idle_s": round(turn.idle_s, 3),
    }


def _training(turns: Sequence[Turn], trainers: Trainers) -> dict[str, Any]:
    idle_s, trained_s = (sum(getattr(t, name) for t in turns) for name in ("idle_s", "trained_s"))
    losses, sink = trainers.sink.values("drafter/loss"), trainers.sink
    return {
        "idle_used_share": trained_s / idle_s if idle_s else 0.0,
        "training": {
            "idle_s": idle_s,
            "trained_s": trained_s,
            "worker_cpu_s": sum(t.worker_cpu_s for t in turns),
            "coordinator_cpu_share": sum(t.coordinator_cpu_s for t in turns) / sum(t.wall_s for t in turns),
            "steps": len(losses),
            "first_loss": losses[0] if losses else None,
            "last_loss": statistics.fmean(losses[-5:]) if losses else None,
            "published": sink.count("drafter/published"),
            "not_published": sink.count("drafter/not_published"),
            "preempt_s": max(sink.values("drafter/preempt_s"), default=None),
        },
    }


def _notes(note: dict[str, Any]) -> dict[str, Any]:
    tuner = note["tuner"]
    kept = ("drafter_version", "problem", "accept_length", "starved", "steps_by_arm", "buffer")
    return {
        **{key: note[key] for key in kept},
        "time_share": tuner["time_share"],
        "loss_to_plain": tuner["loss_to_plain"],
        "regret": tuner["regret"],
        "buckets": tuner["buckets"],
    }


def _beside(pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, float]:
    """``slowdown``: by how much a token takes longer beside training, as a share. By wall time it also holds what the
    training keeps others from: processes of others move to the core where the server is."""
    alone, beside = zip(*pairs, strict=True)
    return {
        "alone_tps": statistics.median(t.num_tokens / t.wall_s for t in alone),
        "beside_tps": statistics.median(t.num_tokens / t.wall_s for t in beside),
        "slowdown": ratio([t.wall_s for t in beside], [t.wall_s for t in alone]) - 1,
        "cpu_slowdown": ratio([max(t.cpu_s) for t in beside], [max(t.cpu_s) for t in alone]) - 1,
        "worker_share": sum(t.worker_cpu_s for t in beside) / sum(t.wall_s for t in beside),
        "others_share": _others([*alone, *beside]),
        "rounds": len(pairs),
    }


def _pool(pools: dict[str, list[Turn]]) -> dict[str, Any]:
    walls = {name: [t.wall_s for t in turns] for name, turns in pools.items()}
    cpus = {name: [sum(t.cpu_s) for t in turns] for name, turns in pools.items()}
    tps = {f"{n}_tps": statistics.median(t.num_tokens / t.wall_s for t in turns) for n, turns in pools.items()}
    return {**tps, **_speedups(walls), "cpu": _speedups(cpus), "tokens": sum(t.num_tokens for t in pools["plain"])}

"""`bench.py drift`: does a drafter that keeps learning stay good while reinforcement learning changes the policy?

A tiny policy is improved by policy gradient. After every update the server rolls out with the new weights, speculating
with the adapted drafter and recording, then the drafter trains a fixed number of steps on what was recorded (the
finished part of this step and the long tail of the step before). Beside it: the drafter of the start left as it was
(frozen), the same given as many steps on fresh rollouts of the first policy (extra_first), and drafters trained on the
last policy until held-out accept length stops rising, from the adapted one and from scratch (converged: the better).
Accept lengths are those of real verification on prompts that nothing was trained on, T = 1. Budgets are steps and
tokens, never seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_dta.drafter.arms import Arm
from scripts.benchlib.drift_loop import FINAL_SEED, QUICK, Converged, DriftLoop, DriftSettings, converge
from scripts.benchlib.drift_plot import Line, Panel, svg
from scripts.benchlib.report import UsageError, at_least, commit

__all__ = ["add_arguments", "plot", "run"]

TARGET_SHARE = 0.9  # of the converged drafter's accept length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=20, help="policy updates (default: 20)")
    parser.add_argument("--steps", type=int, default=40, help="drafter steps per update (default: 40)")
    parser.add_argument("--arm", default="eagle-d4-k2-v7", help="the arm every drafter plays (default: eagle-d4-k2-v7)")
    parser.add_argument("--kind", choices=("eagle", "hass"), default="eagle", help="of drafter (default: eagle)")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write the plot there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="little training and few prompts: does it run at all")


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "updates", "steps")
    try:
        arm = Arm.parse(args.arm)
    except ValueError as error:
        raise UsageError(f"--arm: {error}") from error
    if arm.drafter != "eagle":
        raise UsageError(f"--arm {arm.name} does not use a trained drafter; give one such as eagle-d4-k2-v7")
    with tempfile.TemporaryDirectory(prefix="bench-drift-") as folder:
        loop = DriftLoop(QUICK if args.quick else DriftSettings(), arm, args.kind, args.seed, Path(folder))
        for update in range(1, args.updates + 1):
            loop.update(update / args.updates, args.steps)
        loop.close()
        result = _report(loop, converge(loop), args.steps)
    if args.svg is not None:
        args.svg.write_text(plot(result))
    return result


def _report(loop: DriftLoop, converged: dict[str, Converged], steps_per_update: int) -> dict[str, Any]:
    curves, drafters, first_steps = loop.curves, loop.drafters, loop.settings.first_steps
    final = {
        name: loop.measure(getattr(drafters, name), loop.final_prompts, FINAL_SEED).accept_length
        for name in ("frozen", "adapted", "extra_first")
    }
    best = max(run.accept_length for run in converged.values())
    adapted = final["adapted"]
    return {
        "commit": commit(),
        "passed": adapted >= TARGET_SHARE * best and adapted > max(final["frozen"], final["extra_first"]),
        **final,
        "ratio": adapted / final["frozen"],
        "converged": best,
        "of_converged": adapted / best,
        "converged_runs": {name: asdict(run) for name, run in converged.items()},
        "start": loop.start_length,
        "kl_to_start": curves.kl_to_start,
        "reward": curves.reward,
        "top3_before": curves.top3_before,
        "top3_after": curves.top3_after,
        "top3_recovered": curves.top3_recovered,
        "top3_drops": sum(a < b for b, a in zip(curves.top3_before, curves.top3_after, strict=True)),
        "top3_recoveries": sum(r > a for a, r in zip(curves.top3_after, curves.top3_recovered, strict=True)),
        "accept_length": {name: getattr(curves, name) for name in ("served", *final)},
        "different_outputs": loop.num_different,
        "arm": loop.arm.name,
        "kind": loop.kind,
        "settings": {**asdict(loop.settings), "steps_per_update": steps_per_update, "seed": loop.seed},
        "trained_steps": {
            "adapted": loop.adapted.trainer.num_steps - first_steps,
            "extra_first": loop.extra.trainer.num_steps - first_steps,
        },
        "trained_tokens": {
            "first": loop.first_tokens,
            "adapted": loop.adapted.num_tokens,
            "extra_first": loop.extra.num_tokens - loop.first_tokens,
        },
    }


def plot(result: dict[str, Any]) -> str:
    """Three figures as one SVG document."""
    zigzag: list[tuple[float, float]] = []
    steps = range(1, len(result["top3_before"]) + 1)
    for update, before, after, recovered in zip(
        steps, result["top3_before"], result["top3_after"], result["top3_recovered"], strict=True
    ):
        zigzag += [(update, before), (update, after), (update + 0.8, recovered)]
    lengths: dict[str, Sequence[float]] = result["accept_length"]
    curves = [Line(name, list(zip(steps, lengths[name], strict=True))) for name in ("adapted", "frozen", "extra_first")]
    curves.append(Line("converged on the last", [(1, result["converged"]), (len(steps), result["converged"])]))
    distance = Line("nats per token", list(zip(steps, result["kl_to_start"], strict=True)))
    return svg(
        [
            Panel("Top-3 accuracy of the adapted drafter: down at an update, then up", [Line("adapted", zigzag)]),
            Panel("Accept length on held-out prompts, after each update's training", curves),
            Panel("KL of the policy to the first one", [distance]),
        ],
        "policy updates",
    )

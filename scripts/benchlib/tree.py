"""`bench.py tree`: options and checks; the measurement itself is in `tree_run`, which alone loads torch."""

from __future__ import annotations

import argparse
import os
from typing import Any

from scripts.benchlib import workloads
from scripts.benchlib.report import UsageError, at_least, counts, finite
from scripts.benchlib.workloads import Workload

__all__ = ["MODES", "add_arguments", "run"]

MODES = ("dense", "dense_ckpt", "leaf", "sparse", "classic", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=("grpo", "turns", "trace"), default="turns")
    parser.add_argument("--seed", type=int, default=0, help="of random rows, weights and coefficients")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")

    grpo = parser.add_argument_group("grpo")
    grpo.add_argument("--rows", type=int, default=32)
    grpo.add_argument("--length", type=int, default=768, help="tokens of a row")
    grpo.add_argument("--shared", type=finite, default=0.8, help="part of a row that all rows share")
    grpo.add_argument("--branches", type=int, help="second level: deal the rows over this many branches below the part")

    turns = parser.add_argument_group("turns")
    turns.add_argument("--scale-turns", type=finite, default=1.0, help="factor on all lengths of the conversations")

    trace = parser.add_argument_group("trace")
    trace.add_argument("--trace", metavar="FILE", help="npz of recorded trajectories")
    trace.add_argument("--set", metavar="NAME", help="a set of the file, or the common first part of several")
    trace.add_argument("--trajectories", type=int, default=16)
    trace.add_argument("--max-len", type=int, default=32768, help="turns that end later are dropped")
    trace.add_argument("--samples-per-task", type=int, default=8, help="largest number of trajectories of one task")

    plan = parser.add_argument_group("plan (defaults are the engine's)")
    plan.add_argument("--max-block-tokens", type=int)
    plan.add_argument("--activation-budget", type=int, help="bytes, for auto")

    measure = parser.add_argument_group("measurement")
    measure.add_argument("--modes", type=_modes, default=MODES, metavar="A,B", help=f"some of {','.join(MODES)}")
    measure.add_argument("--repeats", type=int, default=3)
    measure.add_argument("--loss", choices=("all", "spans"), default="all", help="spans: last turn of each row only")
    measure.add_argument("--dense-share", type=finite, default=1.0, help="part of the rows that dense modes run on")
    measure.add_argument("--grad-check", choices=("on", "off"), default="on", help="runs the dense loop once more")
    measure.add_argument("--memory", choices=("on", "off"), default="on", help="peak, in a run of its own")
    measure.add_argument(
        "--scaling", type=counts, metavar="N,N", help="instead: auto on `turns` trees of about these many tokens"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    workload = None if args.scaling else _workload(args)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from scripts.benchlib import tree_run  # only now: torch and Megatron take seconds to load

    return tree_run.measure_scaling(args) if workload is None else tree_run.measure_modes(workload, args)


def _workload(args: argparse.Namespace) -> Workload:
    if args.workload == "grpo":
        return workloads.grpo(args.seed, args.rows, args.length, args.shared, args.branches)
    if args.workload == "turns":
        return workloads.turns(args.seed, scale=args.scale_turns)
    if not args.trace or not args.set:
        raise UsageError("--workload trace needs --trace FILE and --set NAME")
    return workloads.trace(args.trace, args.set, args.trajectories, args.max_len, args.samples_per_task)


def _check(args: argparse.Namespace) -> None:
    at_least(args, 1, "repeats", "threads", "rows", "length", "branches", "trajectories", "max_len", "samples_per_task")
    at_least(args, 1, "max_block_tokens")
    at_least(args, 0, "seed", "activation_budget")
    if not 0 < args.dense_share <= 1:
        raise UsageError(f"--dense-share {args.dense_share} must lie above 0 and at most at 1")
    if args.scale_turns <= 0:
        raise UsageError(f"--scale-turns {args.scale_turns} must be above 0")


def _modes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = sorted(set(names) - set(MODES))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown mode {unknown[0]!r}; choose from {','.join(MODES)}")
    return tuple(mode for mode in MODES if mode in names)

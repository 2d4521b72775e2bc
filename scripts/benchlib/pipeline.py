"""`bench.py pipeline`: how long pipeline stages idle on the plan of a workload, and what running ahead costs in memory.

A simulation (`areal_dta.tree.schedule`) with nominal costs of a model's blocks, no torch and no clock: stages in
program order, with forwards counted ahead (as 1F1B counts micro-batches), and as the engine runs them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal_dta.tree.plan import OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import Task, TaskKind, most_in_flight, program_tasks, simulate, stage_tasks
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.stage_memory import stage_peak
from areal_dta.tree.timing import TimeModel, block_features
from areal_dta.tree.trie import Trie, build_trie
from scripts.benchlib import workloads
from scripts.benchlib.report import UsageError, at_least, commit, counts, finite
from scripts.benchlib.workloads import Workload

__all__ = ["add_arguments", "run"]

_QWEN3_8B = ModelSizes(
    hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=12288, vocab_size=151_936
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=("grpo", "turns", "trace"), default="turns")
    parser.add_argument("--seed", type=int, default=0, help="of random rows")
    parser.add_argument("--scale-turns", type=finite, default=8.0, help="turns: factor on all lengths")
    parser.add_argument("--trace", metavar="FILE", help="trace: npz of recorded trajectories")
    parser.add_argument("--set", metavar="NAME", help="trace: a set of the file, or the common first part of several")
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=32768, help="trace: turns that end later are dropped")
    parser.add_argument("--stages", type=counts, default=(2, 4), metavar="N,N")
    parser.add_argument("--plan", choices=("auto", "classic"), default="auto")
    parser.add_argument("--max-block-tokens", type=int, default=PlanSettings().max_block_tokens)


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "trajectories", "max_len", "max_block_tokens")
    at_least(args, 0, "seed")
    if args.scale_turns <= 0:
        raise UsageError(f"--scale-turns {args.scale_turns} must be above 0")
    workload = _workload(args)
    trie = build_trie(workload.ids_T, workload.offsets_S1)
    memory = _QWEN3_8B.memory("bfloat16")
    plan = plan_walk(trie, PlanSettings(args.plan, args.max_block_tokens), memory, _needed(workload, trie))
    return {
        "commit": commit(),
        "workload": workload.name,
        "notes": workload.notes,
        "row_tokens": workload.num_tokens,
        "tree_tokens": trie.num_tokens,
        "plan": args.plan,
        "max_block_tokens": args.max_block_tokens,
        "num_blocks": len(plan.blocks),
        "recomputed_tokens": plan.recomputed_tokens,
        "model": "Qwen3-8B, nominal costs",
        "stages": {str(count): _stages(plan, count) for count in args.stages},
    }


def _workload(args: argparse.Namespace) -> Workload:
    if args.workload == "grpo":
        return workloads.grpo(args.seed, length=16384, num_rows=args.trajectories)
    if args.workload == "turns":
        return workloads.turns(args.seed, scale=args.scale_turns)
    if not args.trace or not args.set:
        raise UsageError("--workload trace needs --trace FILE and --set NAME")
    return workloads.trace(args.trace, args.set, args.trajectories, args.max_len)


def _needed(workload: Workload, trie: Trie) -> np.ndarray:
    needed_U = np.zeros(trie.num_tokens, bool)
    needed_U[trie.token_index_T[workload.loss_T]] = True
    return needed_U


def _stages(plan: WalkPlan, num_stages: int) -> dict[str, Any]:
    layers = _QWEN3_8B.num_layers // num_stages
    if layers * num_stages != _QWEN3_8B.num_layers:
        raise UsageError(f"--stages {num_stages} does not divide {_QWEN3_8B.num_layers} layers")
    model = TimeModel.of_shape(_QWEN3_8B)
    passes_B = np.asarray([block_features(b) @ np.asarray(model.forward_F) for b in plan.blocks]) / num_stages
    again = {op.block for op in plan.ops if op.kind is OpKind.PUSH and not plan.keep_B[op.block]}

    def cost(_stage: int, task: Task) -> float:
        times = 1 if task.kind is TaskKind.FORWARD else 2 + (task.block in again)
        return float(passes_B[task.block]) * times

    orders: dict[str, list[Sequence[Task]]] = {
        "program_order": [program_tasks(plan.ops)] * num_stages,
        "forwards_ahead": [_forwards_ahead(plan, num_stages - 1 - stage) for stage in range(num_stages)],
        "engine": [stage_tasks(plan.ops, stage, num_stages) for stage in range(num_stages)],
    }
    return {name: _measured(plan, lists, cost) for name, lists in orders.items()}


def _measured(
    plan: WalkPlan, lists: Sequence[Sequence[Task]], cost: Callable[[int, Task], float]
) -> dict[str, float | int]:
    first = stage_peak(_QWEN3_8B.memory("bfloat16"), plan, lists[0]) / len(lists)
    return {
        "idle_share": round(simulate(lists, cost, max_open_sends=len(plan.ops) + 1).idle_share, 4),
        "first_stage_peak_gib": round(first / 2**30, 2),
        "first_stage_blocks_in_flight": most_in_flight(lists[0]),
    }


def _forwards_ahead(plan: WalkPlan, ahead: int) -> list[Task]:
    """Before each backward the forwards that the program puts before it and ``ahead`` more, of whatever kind."""
    program = program_tasks(plan.ops)
    forwards = [task for task in program if task.kind is TaskKind.FORWARD]
    tasks: list[Task] = []
    num_due = num_run = 0
    for task in program:
        if task.kind is TaskKind.FORWARD:
            num_due += 1
            continue
        reach = max(num_run, min(num_due + ahead, len(forwards)))
        tasks += [*forwards[num_run:reach], task]
        num_run = reach
    return [*tasks, *forwards[num_run:]]

"""Times the gradient step of every mode on one workload, checks its gradient and meters its memory.

A step is ``engine.backward`` on fresh rows (planning included) with given random coefficients. All modes run on one
policy, interleaved, so that a slow phase of the machine hits all alike. ``dense`` is the better of a per-row loop and
packed blocks.

Legend: S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch

from areal_dta.engine import DenseEngine, Engine, MegatronPolicy, PlanSettings, Rows, TreeEngine
from areal_dta.engine.memory_meter import MemoryMeter
from areal_dta.tree.plan import PlanKind
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.trie import build_trie
from scripts.benchlib import workloads
from scripts.benchlib.report import UsageError, progress
from scripts.benchlib.tree_model import bench_policy
from scripts.benchlib.tree_result import MEMORY_ROWS, Batch, StepTime, Variant, origin, result, tree_tokens
from scripts.benchlib.workloads import Workload, spread_over_lengths

__all__ = ["measure_modes", "measure_scaling"]


def measure_modes(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON object of a comparison of modes."""
    torch.set_num_threads(args.threads)
    whole = Batch(workload, _coefficients(workload, args))
    share = whole
    if args.dense_share < 1:
        share = whole.subset(spread_over_lengths(workload.lens_S, args.dense_share))
    with bench_policy(workload.vocab_size, int(workload.lens_S.max()), args.seed) as policy:
        if "auto" in args.modes:
            _check_budget(policy, [whole], args)
        variants, skipped = _variants(policy, workload, args)
        _check_and_warm_up(policy, variants, share, whole, check=args.grad_check == "on")
        for repeat in range(args.repeats):
            for variant in variants:
                variant.times.append(_step(policy, variant.engine, share if variant.is_dense else whole))
                progress(f"{variant.name}: repeat {repeat + 1} of {args.repeats}, {variant.times[-1]}")
        for variant in variants if args.memory == "on" else []:
            with MemoryMeter(policy.device) as meter:
                _step(policy, variant.engine, share.longest(MEMORY_ROWS) if variant.is_dense else whole)
            variant.peak_bytes, variant.predicted_peak_bytes = (
                meter.peak_bytes,
                variant.engine.stats.predicted_peak_bytes,
            )
            progress(f"{variant.name}: peak {meter.peak_bytes / 1e6:.1f} MB")
    return result({variant.name: variant for variant in variants}, skipped, whole, share, args)


def measure_scaling(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON object of ``auto`` on conversations of more and more tasks: same shape, growing number of tokens."""
    torch.set_num_threads(args.threads)
    sizes = [tree_tokens(workloads.turns(args.seed, count, scale=args.scale_turns)) for count in (10, 20)]
    per_task = (sizes[1] - sizes[0]) / 10
    counts = [max(1, 10 + round((size - sizes[0]) / per_task)) for size in args.scaling]
    batches, points = [], []
    for count in counts:
        workload = workloads.turns(args.seed, count, scale=args.scale_turns)
        batches.append(Batch(workload, _coefficients(workload, args)))
    with bench_policy(workloads.MODEL_VOCAB, max(int(b.workload.lens_S.max()) for b in batches), args.seed) as policy:
        _check_budget(policy, batches, args)
        engine = TreeEngine(policy, _settings("auto", args, activation_budget=args.activation_budget))
        _step(policy, engine, batches[0])
        for batch in batches:
            points.append(_scaling_point(policy, engine, batch, args))
    return {"workload": "turns", **origin(args), "mode": "auto", "scaling": points}


def _scaling_point(
    policy: MegatronPolicy, engine: TreeEngine, batch: Batch, args: argparse.Namespace
) -> dict[str, Any]:
    times, plans_s = [], []
    for _ in range(args.repeats):
        times.append(_step(policy, engine, batch))
        plans_s.append(engine.stats.plan_s)
        progress(f"auto, {batch.workload.num_rows} rows: {times[-1]}")
    median_s = statistics.median(spent.wall_s for spent in times)
    point: dict[str, Any] = {
        "rows": batch.workload.num_rows,
        "tokens": batch.workload.num_tokens,
        "tree_tokens": engine.stats.tree_tokens,
        "median_s": median_s,
        "median_cpu_s": statistics.median(spent.cpu_s for spent in times),
        "us_per_tree_token": 1e6 * median_s / engine.stats.tree_tokens,
        "plan_s": statistics.median(plans_s),
        "plan_share": statistics.median(plan_s / spent.wall_s for plan_s, spent in zip(plans_s, times, strict=True)),
        "recomputed_tokens": engine.stats.recomputed_tokens,
        "num_blocks": engine.stats.num_blocks,
    }
    if args.memory == "on":
        with MemoryMeter(policy.device) as meter:
            _step(policy, engine, batch)
        point["peak_mb"] = meter.peak_bytes / 1e6
    return point


# ---- what is run ----


def _variants(
    policy: MegatronPolicy, workload: Workload, args: argparse.Namespace
) -> tuple[list[Variant], dict[str, str]]:
    """The engines of the asked modes, and why a mode is left out."""
    skipped: dict[str, str] = {}
    engines: dict[str, Engine] = {}
    if "dense" in args.modes:
        engines["dense_loop"] = DenseEngine(policy)
        engines["dense_packed"] = TreeEngine(policy, _settings("dense", args, leaf_merge=False))
    if "dense_ckpt" in args.modes:
        engines["dense_ckpt"] = DenseEngine(policy, recompute=True)
    if "leaf" in args.modes:
        engines["leaf"] = TreeEngine(policy, _settings("dense", args, leaf_merge=True))
    if "sparse" in args.modes:
        needed = policy.memory_model().dense_peak(tree_tokens(workload))  # one block, whatever its shape
        available = psutil.virtual_memory().available
        if needed > 0.8 * available:
            skipped["sparse"] = f"would hold about {needed / 1e6:.0f} MB at once, {available / 1e6:.0f} are available"
            progress(f"sparse: left out, {skipped['sparse']}")
        else:
            engines["sparse"] = TreeEngine(policy, _settings("sparse", args))
    if "classic" in args.modes:
        engines["classic"] = TreeEngine(policy, _settings("classic", args))
    if "auto" in args.modes:
        engines["auto"] = TreeEngine(policy, _settings("auto", args, activation_budget=args.activation_budget))
    return [Variant(name, engine, name.startswith("dense")) for name, engine in engines.items()], skipped


def _check_budget(policy: MegatronPolicy, batches: list[Batch], args: argparse.Namespace) -> None:
    """Raises UsageError for a budget that cannot be kept to, before anything is measured."""
    settings = _settings("auto", args, activation_budget=args.activation_budget)
    for batch in batches if args.activation_budget else ():
        trie = build_trie(batch.workload.ids_T, batch.workload.offsets_S1)
        needed_U = np.zeros(trie.num_tokens, bool)
        needed_U[trie.token_index_T[batch.coefficient_T.numpy() != 0]] = True
        try:
            plan_walk(trie, settings, policy.memory_model(), needed_U)
        except ValueError as error:
            raise UsageError(f"--activation-budget {args.activation_budget}: {error}") from error


def _settings(kind: PlanKind, args: argparse.Namespace, **more: Any) -> PlanSettings:
    chosen = {"max_block_tokens": args.max_block_tokens, **more}
    return PlanSettings(kind, **{name: value for name, value in chosen.items() if value is not None})


def _coefficients(workload: Workload, args: argparse.Namespace) -> torch.Tensor:
    """Standard normal dL/dlogp at every predicting position, or only where the loss of the last turn falls."""
    values = torch.randn(workload.num_tokens, generator=torch.Generator().manual_seed(args.seed))
    active_T = workload.predicting_T if args.loss == "all" else workload.loss_T
    return values * torch.from_numpy(active_T)


def _step(policy: MegatronPolicy, engine: Engine, batch: Batch) -> StepTime:
    """One gradient step; the rows are a new object, so that no plan is remembered from the last step."""
    rows = Rows(batch.workload.ids_T, batch.workload.offsets_S1)
    policy.zero_grad()
    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    engine.backward(rows, batch.coefficient_T, sync="full")
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
    return StepTime(time.perf_counter() - began, time.process_time() - began_cpu)


def _check_and_warm_up(
    policy: MegatronPolicy, variants: list[Variant], share: Batch, whole: Batch, check: bool
) -> None:
    """One untimed run of each; gradients are compared with the dense loop's on the rows that the loop is timed on."""
    want: dict[str, torch.Tensor] = {}
    if check:
        spent = _step(policy, DenseEngine(policy), share)
        want = {name: grad.clone() for name, grad in policy.gradients().items()}
        progress(f"dense loop for reference: {spent}")
    for variant in variants:
        if variant.name == "dense_loop" and check:
            variant.grad_rel_err = 0.0  # it ran just now
            continue
        spent = _step(policy, variant.engine, share)
        if check:
            variant.grad_rel_err = _worst_error(policy.gradients(), want)
        if whole is not share and not variant.is_dense:
            spent = _step(policy, variant.engine, whole)
        variant.recomputed_tokens = variant.engine.stats.recomputed_tokens
        progress(f"{variant.name}: warm-up, {spent}, gradient error {variant.grad_rel_err}")


def _worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest ``|got - want| / |want|`` (Euclidean norms) of any parameter; ``|got|`` where the reference is 0."""
    worst = 0.0
    for name, reference in want.items():
        scale = float(reference.double().norm()) or 1.0
        worst = max(worst, float((got[name].double() - reference.double()).norm()) / scale)
    return worst

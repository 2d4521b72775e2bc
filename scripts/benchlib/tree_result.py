"""What `bench.py tree` measured, as records and as its JSON object.

Legend: S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from areal_dta.engine import Engine, PlanSettings
from areal_dta.tree.trie import sort_rows
from scripts.benchlib.report import commit
from scripts.benchlib.tree_model import SHAPE, dense_flops, tree_flops
from scripts.benchlib.workloads import Workload

__all__ = ["MEMORY_ROWS", "Batch", "Variant", "origin", "result", "tree_tokens"]

MEMORY_ROWS = 32
_PEAK_METHOD = (
    "peak_mb: 1e6 bytes of live tensors above what was alive before the step (model, gradient buffers, coefficients), "
    "temporaries of kernels included, from the allocator's events of one extra run; numpy arrays are not tensors. "
    f"dense and dense_ckpt: over the {MEMORY_ROWS} longest measured rows, since rows follow one another."
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a workload with the coefficient of each position."""

    workload: Workload
    coefficient_T: torch.Tensor

    def subset(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(self.workload.token_index(rows))
        return Batch(self.workload.subset(rows), self.coefficient_T[index])

    def longest(self, count: int) -> Batch:
        if self.workload.num_rows <= count:
            return self
        return self.subset(np.sort(np.argsort(self.workload.lens_S, kind="stable")[-count:]))


@dataclass(frozen=True)
class StepTime:
    """Wall seconds and processor seconds of all threads; the latter are what a busy machine leaves comparable."""

    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.3f} s ({self.cpu_s:.3f} s of processor)"


@dataclass
class Variant:
    """One engine and what was measured of it; ``is_dense`` ones run on a share of the rows if told so."""

    name: str
    engine: Engine
    is_dense: bool
    times: list[StepTime] = field(default_factory=list)
    grad_rel_err: float | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int = 0
    recomputed_tokens: int = 0

    @property
    def median(self) -> StepTime:
        wall_s = statistics.median(spent.wall_s for spent in self.times)
        return StepTime(wall_s, statistics.median(spent.cpu_s for spent in self.times))


def tree_tokens(workload: Workload) -> int:
    """Distinct tokens of a workload."""
    return sort_rows(workload.ids_T, workload.offsets_S1).tree_tokens


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured and how."""
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "model": SHAPE,
        "seed": args.seed,
        "threads": args.threads,
        "repeats": args.repeats,
        "loss": args.loss,
        "max_block_tokens": args.max_block_tokens or PlanSettings().max_block_tokens,
        "activation_budget": args.activation_budget or 0,
        "peak_method": _PEAK_METHOD,
    }


def result(
    variants: dict[str, Variant], skipped: dict[str, str], whole: Batch, share: Batch, args: argparse.Namespace
) -> dict[str, Any]:
    """The JSON object; times of variants that ran on ``share`` are scaled to all rows by FLOP."""
    workload, coefficient_T = whole.workload, whole.coefficient_T.numpy()
    flops = dense_flops(workload, coefficient_T, args.loss)
    flop_limit = flops / tree_flops(workload, coefficient_T, args.loss)
    scale = flops / dense_flops(share.workload, share.coefficient_T.numpy(), args.loss)
    times = {name: _scaled(variant.median, scale if variant.is_dense else 1.0) for name, variant in variants.items()}
    dense = [name for name in ("dense_loop", "dense_packed") if name in variants]
    better = min(dense, key=lambda name: times[name].wall_s, default=None)
    named = {"dense": better, **{name: name for name in variants if name not in dense}}
    return {
        "workload": workload.name,
        "tokens": workload.num_tokens,
        "tree_tokens": tree_tokens(workload),
        "ratio": workload.num_tokens / tree_tokens(workload),
        "flop_limit": flop_limit,
        "rows": workload.num_rows,
        "loss_tokens": int(np.count_nonzero(coefficient_T)),
        "vocab_size": workload.vocab_size,
        **workload.notes,
        **origin(args),
        "dense_share": args.dense_share,
        "dense_share_rows": share.workload.num_rows,
        "dense_loop_s": times["dense_loop"].wall_s if dense else None,
        "dense_packed_s": times["dense_packed"].wall_s if dense else None,
        "dense_loop_cpu_s": times["dense_loop"].cpu_s if dense else None,
        "dense_packed_cpu_s": times["dense_packed"].cpu_s if dense else None,
        "dense_is": better,
        "dense_loop_peak_mb": _peak_mb(variants["dense_loop"]) if dense else None,
        "dense_packed_peak_mb": _peak_mb(variants["dense_packed"]) if dense else None,
        "skipped": skipped,
        "modes": {
            mode: _mode(variants[name], times[name], times[better] if better else None, flop_limit, workload.num_tokens)
            for mode, name in named.items()
            if name is not None
        },
    }


def _scaled(spent: StepTime, factor: float) -> StepTime:
    return StepTime(spent.wall_s * factor, spent.cpu_s * factor)


def _peak_mb(variant: Variant) -> float | None:
    return None if variant.peak_bytes is None else variant.peak_bytes / 1e6


def _mode(
    variant: Variant, spent: StepTime, dense: StepTime | None, flop_limit: float, row_tokens: int
) -> dict[str, Any]:
    speedup = None if dense is None else dense.wall_s / spent.wall_s
    return {
        "median_s": spent.wall_s,
        "tokens_per_s": row_tokens / spent.wall_s,
        "speedup": speedup,
        "efficiency": None if speedup is None else speedup / flop_limit,
        "peak_mb": _peak_mb(variant),
        "recomputed_tokens": variant.recomputed_tokens,
        "grad_rel_err": variant.grad_rel_err,
        "measured_s": [one.wall_s for one in variant.times],
        "median_cpu_s": spent.cpu_s,
        "speedup_cpu": None if dense is None else dense.cpu_s / spent.cpu_s,
        "predicted_peak_mb": variant.predicted_peak_bytes / 1e6 or None,
    }

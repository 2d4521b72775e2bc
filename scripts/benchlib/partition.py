"""``bench.py partition``: how evenly, how fast and with how many duplicates each method cuts a batch over ranks.

The batch is synthetic (``--sequences``) or recorded (``--trace``), there with a row per trajectory or per turn. The
yardstick is the lower bound of `areal_dta.tree.cost.lower_bound`, which counts only the prefix common to all rows as
unavoidably duplicated.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_dta.tree.cost import TREE_TOKENS, CostModel, lower_bound
from areal_dta.tree.lcp import leaf_positions
from areal_dta.tree.partition import METHODS, bin_costs, duplicated_tokens, partition
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.trie import SortedRows, sort_rows
from scripts.benchlib.report import UsageError, at_least, counts, finite, trace_arrays
from scripts.benchlib.workloads import by_task

__all__ = ["Batch", "add_arguments", "measure", "recorded", "run", "synthetic"]

# The shape of a decoder of 1.7 billion parameters. Only the ratio of pairs to tokens matters for a cut.
_SHAPE = ModelSizes(
    hidden_size=2048, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=6144, vocab_size=151_936
)
_COMMON_SHARE = 0.25  # of the shared tokens: the prefix of all rows, the rest is shared within a group
_GROUP = 16
_PER_TASK = 8
_MIB_PER_KIB = 1 / 1024


@dataclass(frozen=True)
class Batch:
    """Ragged rows: ``ids_T`` end to end, ``offsets_S1`` their bounds."""

    ids_T: np.ndarray
    offsets_S1: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("synthetic batch")
    source.add_argument("--sequences", type=int, default=100_000, help="rows")
    source.add_argument("--length", type=int, default=2_000, help="tokens of a row")
    source.add_argument("--shared", type=finite, default=0.8, help="share of a row that other rows have, too")
    source.add_argument("--seed", type=int, default=0)
    trace = parser.add_argument_group("recorded batch")
    trace.add_argument("--trace", type=Path, help="npz file with ids, offsets and turns; replaces the synthetic batch")
    trace.add_argument("--set", help="only trajectories of this set, or of all sets NAME/...")
    trace.add_argument(
        "--trajectories", type=int, default=128, help="so many, from the tasks that have most of them, 8 per task"
    )
    trace.add_argument("--max-len", type=int, default=32_768, help="leave longer trajectories out")
    rows = trace.add_mutually_exclusive_group()
    rows.add_argument("--per-turn", action="store_true", help="a row per assistant turn (default)")
    rows.add_argument("--whole", action="store_true", help="a row per trajectory")
    parser.add_argument("--ranks", type=counts, default=(8,), metavar="K,...", help="data-parallel ranks")
    parser.add_argument("--cost", choices=("flops", "tokens"), default="flops", help="what a rank's load is")
    parser.add_argument(
        "--model", type=Path, help="folder with the config.json whose FLOP count (default: a 1.7B shape)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "sequences", "length", "trajectories", "max_len")
    at_least(args, 0, "seed")
    if args.trace is None:
        batch = synthetic(args.sequences, args.length, args.shared, args.seed)
    else:
        batch = recorded(args.trace, args.set, args.trajectories, args.max_len, per_turn=not args.whole)
    try:
        sizes = _SHAPE if args.model is None else ModelSizes.from_folder(args.model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    return measure(batch, args.ranks, TREE_TOKENS if args.cost == "tokens" else sizes.flops())


def measure(batch: Batch, ranks: tuple[int, ...], model: CostModel) -> dict[str, Any]:
    """Sort the batch and cut it over each number of ranks by each method; one run of each is timed."""
    started = time.perf_counter()
    rows = sort_rows(batch.ids_T, batch.offsets_S1)
    num_leaves = len(leaf_positions(rows))
    sort_s = time.perf_counter() - started
    return {
        "rows": rows.num_rows,
        "row_tokens": rows.row_tokens,
        "tree_tokens": rows.tree_tokens,
        "leaves": num_leaves,
        "sort_s": sort_s,
        "ranks": {str(num_bins): _cuts(rows, num_bins, model) for num_bins in ranks},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MIB_PER_KIB,
    }


def _cuts(rows: SortedRows, num_bins: int, model: CostModel) -> dict[str, Any]:
    bound, set_by_row = lower_bound(rows, num_bins, model)
    report: dict[str, Any] = {}
    for method in METHODS:
        started = time.perf_counter()
        bins = partition(method, rows, num_bins, model)
        seconds = time.perf_counter() - started
        report[method] = {
            "max_over_bound": float(bin_costs(rows, bins, model).max()) / bound,
            "bound_is_largest_row": set_by_row,
            "duplicated_tokens": duplicated_tokens(rows, bins),
            "seconds": seconds,
        }
    return report


def synthetic(num_rows: int, length: int, shared: float, seed: int, vocab_size: int = 151_936) -> Batch:
    """Rows of equal length in random order: groups of 16 share a prefix, a quarter of it with all other groups."""
    if num_rows < 1 or length < 1 or not 0 <= shared < 1:
        raise UsageError(
            f"{num_rows} rows of {length} tokens, {shared:.0%} shared, make no batch; at least one row of one token, "
            "and less than 100% shared"
        )
    rng = np.random.default_rng(seed)
    shared_tokens = int(length * shared)
    common_tokens = int(shared_tokens * _COMMON_SHARE)
    num_groups = -(-num_rows // _GROUP)
    ids_ST = np.empty((num_rows, length), np.int32)
    ids_ST[:, :common_tokens] = rng.integers(0, vocab_size, common_tokens, dtype=np.int32)
    group_S = rng.permutation(num_rows) % num_groups
    group_ids = rng.integers(0, vocab_size, (num_groups, shared_tokens - common_tokens), dtype=np.int32)
    for row, group in enumerate(group_S.tolist()):
        ids_ST[row, common_tokens:shared_tokens] = group_ids[group]
        ids_ST[row, shared_tokens:] = rng.integers(0, vocab_size, length - shared_tokens, dtype=np.int32)
    return Batch(ids_ST.reshape(-1), np.arange(num_rows + 1, dtype=np.int64) * length)


def recorded(path: Path, subset: str | None, num_trajectories: int, max_len: int, *, per_turn: bool) -> Batch:
    """Trajectories of a trace that are not longer than `max_len`: whole, or a row per turn with all before it.

    `subset` names one set or all sets below it (``airline`` covers ``airline/...``). Tasks with the most trajectories
    come first, each with 8 of them, as a batch of groups would have them.
    """
    trace = trace_arrays(path, ("ids", "offsets", "task_id", "turn_traj", "turn_end"))
    ids, offsets, task_id = trace["ids"], trace["offsets"], trace["task_id"]
    turn_traj, turn_end = trace["turn_traj"], trace["turn_end"]
    names = trace.get("set", np.full(np.shape(task_id)[:1], ""))
    if not len(task_id) == len(names) == len(offsets) - 1 or len(turn_traj) != len(turn_end):
        raise UsageError(f"--trace {path}: task_id, set and offsets, or the turns, differ in length; write it anew")
    keep = np.diff(offsets) <= max_len
    if subset is not None:
        keep &= (names == subset) | np.char.startswith(names, f"{subset}/")
    chosen = np.asarray(by_task(np.flatnonzero(keep), task_id, _PER_TASK), np.int64)
    if len(chosen) < num_trajectories:
        raise UsageError(
            f"set {subset!r} has {len(chosen)} trajectories of at most {max_len} tokens at {_PER_TASK} per task, "
            f"{num_trajectories} were asked for; the sets are {', '.join(np.unique(names).tolist())}"
        )
    chosen = np.sort(chosen[:num_trajectories])
    if per_turn:
        turns = np.flatnonzero(np.isin(turn_traj, chosen) & (turn_end > 0))
        start, lens = offsets[turn_traj[turns]], turn_end[turns].astype(np.int64)
    else:
        start, lens = offsets[chosen], np.diff(offsets)[chosen]
    if not len(lens):
        raise UsageError(f"--trace {path}: the chosen trajectories have no turns; use --whole")
    offsets_S1 = np.concatenate([[0], np.cumsum(lens)])
    return Batch(np.concatenate([ids[a : a + n] for a, n in zip(start, lens)]), offsets_S1)

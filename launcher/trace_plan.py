"""What training on a trace will cost, from its tree alone: per rank tokens, blocks, seconds and bytes. No model runs.

Legend: R rows of a rank, U trie tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_dta.tree.calibration import Calibration, CalibrationError
from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.partition import partition
from areal_dta.tree.plan import OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.stage_memory import stage_peak, tasks_within_budget
from areal_dta.tree.stage_time import pipeline_seconds
from areal_dta.tree.tiles import block_tiles
from areal_dta.tree.timing import TimeModel
from areal_dta.tree.trie import SortedRows, Trie, build_trie, unshared_trie
from launcher.rundir import RunError
from launcher.trace_rows import TraceRows

__all__ = [
    "Models",
    "RankPlan",
    "TreeFigures",
    "models_of",
    "plan_ranks",
    "read_calibration",
    "tree_figures",
]


@dataclass(frozen=True)
class Models:
    """How work becomes FLOP, seconds and bytes; None where nothing is known about the model. Seconds and bytes are
    those of one of ``num_stages`` pipeline stages.
    """

    flops: CostModel | None
    time: TimeModel | None
    memory: MemoryModel | None
    num_stages: int = 1

    @property
    def balance(self) -> CostModel:
        """What a partition balances: FLOP as in a run, measured seconds without a model's sizes, else tokens."""
        measured = None if self.time is None else self.time.cost_model()
        return self.flops or (measured if measured and measured.per_token > 0 else TREE_TOKENS)


def read_calibration(path: Path) -> Calibration:
    """What ``--calibration`` names. Raises RunError."""
    try:
        return Calibration.read(path)
    except FileNotFoundError as error:
        raise RunError(
            f"--calibration {path} does not exist; a run with dta.calibrate=true writes RUN/calibration.json"
        ) from error
    except CalibrationError as error:
        raise RunError(f"--calibration {error}") from error


def models_of(
    sizes: ModelSizes | None, calibration: Calibration | None, dtype: str | None, tp: int, pp: int = 1
) -> Models:
    """Measured models from the calibration, analytic ones from the sizes where there is none. Raises RunError for
    parallel sizes that do not divide the model.
    """
    flops = None if sizes is None else sizes.flops()
    if calibration is not None:
        return Models(flops, calibration.time, calibration.memory, calibration.num_stages)
    if sizes is None:
        return Models(None, None, None)
    for option, count, size, what in (
        ("--tp", tp, sizes.num_kv_heads, "key/value heads"),
        ("--tp", tp, sizes.ffn_size, "feed-forward units"),
        ("--pp", pp, sizes.num_layers, "layers"),
    ):
        if size % count:
            raise RunError(f"{option} {count} does not divide the model's {size} {what}; give a divisor of {size}")
    stage = dataclasses.replace(sizes, num_layers=sizes.num_layers // pp)
    return Models(flops, TimeModel.of_shape(stage, tp), stage.memory(dtype or sizes.dtype, tp), pp)


@dataclass(frozen=True)
class TreeFigures:
    """The whole batch as one tree. ``flop_limit``: how many times fewer FLOP its tree costs than its rows one by one
    (None without a model's sizes); no walk can gain more.
    """

    episodes: int
    rows: int
    row_tokens: int
    loss_tokens: int
    tree_tokens: int
    token_ratio: float
    flop_limit: float | None
    longest_row: int
    mean_row: float
    segments: int
    leaves: int


def tree_figures(rows: TraceRows, order: SortedRows, flops: CostModel | None) -> TreeFigures:
    """Figures of the tree over all rows, before any partition."""
    lens_R = order.lens_R
    limit = None if flops is None else float(flops.span(0, lens_R).sum()) / flops.tree(order)
    trie = build_trie(rows.ids_T, rows.offsets_S1)
    return TreeFigures(
        episodes=rows.num_episodes,
        rows=rows.num_rows,
        row_tokens=order.row_tokens,
        loss_tokens=order.row_tokens if rows.loss_T is None else int(rows.loss_T.sum()),
        tree_tokens=order.tree_tokens,
        token_ratio=order.row_tokens / order.tree_tokens,
        flop_limit=limit,
        longest_row=int(lens_R.max()),
        mean_row=float(lens_R.mean()),
        segments=trie.num_segments,
        leaves=len(trie.leaf_rows),
    )


@dataclass(frozen=True)
class RankPlan:
    """One rank's share and its program. Counts are those of the backward walk; ``seconds`` is its predicted time,
    ``peak_bytes`` its predicted peak (walk only: no weights, gradients or optimizer state) on the hungriest of its
    pipeline stages (``stage_peak_bytes``), ``largest_block`` tokens of one, ``plan_s`` what planning took here.
    """

    rows: int
    row_tokens: int
    tree_tokens: int
    cost: float
    blocks: int
    largest_block: int
    tiles: int
    computed_tokens: int
    kept_tokens: int
    recomputed_tokens: int
    stack_rows: int
    seconds: float | None
    peak_bytes: float | None
    stage_peak_bytes: list[float] | None
    plan_s: float


def plan_ranks(
    rows: TraceRows, order: SortedRows, num_ranks: int, method: str, settings: PlanSettings, models: Models
) -> list[RankPlan]:
    """Cut the rows over ranks and plan each. Raises ValueError for an unknown method and for an activation budget that
    is too small.
    """
    return [
        _rank(rows, order, members, settings, models) for members in partition(method, order, num_ranks, models.balance)
    ]


def _rank(rows: TraceRows, order: SortedRows, members: np.ndarray, settings: PlanSettings, models: Models) -> RankPlan:
    mine = rows.take(order.order_R[members])
    began = time.perf_counter()
    if settings.kind == "dense":
        trie = unshared_trie(mine.ids_T, mine.offsets_S1, settings.leaf_merge)
    else:
        trie = build_trie(mine.ids_T, mine.offsets_S1)
    need_U = needed_tokens(mine, trie)
    plan = plan_walk(trie, settings, models.memory, need_U)
    plan_s = time.perf_counter() - began
    subset = order.subset(members)
    seconds, peaks = _costs(plan, settings, models, need_U)
    return RankPlan(
        rows=mine.num_rows,
        row_tokens=subset.row_tokens,
        tree_tokens=subset.tree_tokens,
        cost=models.balance.tree(subset),
        blocks=len(plan.blocks),
        largest_block=max((block.num_tokens for block in plan.blocks), default=0),
        tiles=sum(len(block_tiles(block)) for block in plan.blocks),
        computed_tokens=plan.num_tokens,
        kept_tokens=_kept_tokens(plan),
        recomputed_tokens=plan.recomputed_tokens,
        stack_rows=plan.stack_rows,
        seconds=seconds,
        peak_bytes=None if peaks is None else max(peaks),
        stage_peak_bytes=peaks,
        plan_s=plan_s,
    )


def _costs(
    plan: WalkPlan, settings: PlanSettings, models: Models, need_U: np.ndarray | None
) -> tuple[float | None, list[float] | None]:
    """Seconds until the last stage is done, and each stage's peak, with the lists that the engine would run."""
    if models.time is None or models.memory is None:
        return None, None
    if models.num_stages == 1:
        return models.time.seconds(plan, need_U), [models.memory.peak(plan)]
    stages = tasks_within_budget(plan, models.num_stages, models.memory, settings)
    peaks = [stage_peak(models.memory, plan, tasks) for tasks in stages]
    return pipeline_seconds(models.time, plan, stages, need_U), peaks


def needed_tokens(rows: TraceRows, trie: Trie) -> np.ndarray | None:
    """Trie tokens that predict a token with loss [U]; None: the trace does not tell."""
    if rows.loss_T is None:
        return None
    predicts_T = np.append(rows.loss_T[1:], False)
    predicts_T[rows.offsets_S1[1:] - 1] = False
    need_U = np.zeros(trie.num_tokens, bool)
    need_U[trie.token_index_T[predicts_T]] = True
    return need_U


def _kept_tokens(plan: WalkPlan) -> int:
    pushed: Sequence[int] = [op.block for op in plan.ops if op.kind is OpKind.PUSH]
    return sum(plan.blocks[b].num_tokens for b in pushed if plan.keep_B[b])

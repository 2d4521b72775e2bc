"""Seconds of a backward walk on a pipeline, idle time included; pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_dta.tree.plan import OpKind, WalkPlan
from areal_dta.tree.schedule import Task, TaskKind, simulate
from areal_dta.tree.timing import TimeModel, block_features

__all__ = ["pipeline_seconds"]


def pipeline_seconds(
    model: TimeModel, plan: WalkPlan, stages: Sequence[Sequence[Task]], need_U: np.ndarray | None = None
) -> float:
    """Until the last stage is done. ``model`` is that of the layers of one stage, ``stages`` are the lists of all;
    ``need_U`` as in `TimeModel.seconds`, which this equals for a single stage. Transfers are free.
    """
    if not plan.blocks:
        return 0.0
    features_BF = np.asarray([block_features(block) for block in plan.blocks])
    forward_B, backward_B = features_BF @ np.asarray(model.forward_F), features_BF @ np.asarray(model.backward_F)
    heads = [b.num_tokens if need_U is None else int(need_U[b.tokens_S].sum()) for b in plan.blocks]
    last = len(stages) - 1

    def cost(stage: int, task: Task) -> float:
        b, on_last = task.block, stage == last
        share = model.keys_share if on_last and heads[b] == 0 else 1.0
        without_graph = task.op.kind is not OpKind.VISIT and not plan.keep_B[b]
        if task.kind is TaskKind.FORWARD:
            return float(forward_B[b]) * (model.keys_share if on_last and without_graph else share)
        projected = np.dot(model.head_backward_H, (heads[b] > 0, heads[b])) if on_last else 0.0
        return float((backward_B[b] + without_graph * forward_B[b]) * share + projected)

    return simulate(stages, cost).total

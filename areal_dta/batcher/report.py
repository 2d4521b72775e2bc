"""The batcher's metrics: ``batch/*`` per step, and its levels."""

from __future__ import annotations

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.dispatch import Batch
from areal_dta.metrics import Publisher

__all__ = ["report_batch", "report_levels"]


def report_batch(publisher: Publisher, batch: Batch) -> None:
    s = batch.stats
    values = {
        "batch/reward_mean": s.reward_mean,
        "batch/episodes": s.episodes,
        "batch/rows": s.rows,
        "batch/tokens": s.tokens,
        "batch/tree_tokens": s.tree_tokens,
        "batch/tree_ratio": s.tree_ratio,
        "batch/staleness_max": s.staleness_max,
        "batch/staleness_mean": s.staleness_mean,
        "batch/mixed_version_share": s.mixed_version_share,
    }
    for name, value in values.items():
        publisher.emit(name, value, step=s.step)
    for rank, cost in enumerate(s.rank_costs):
        publisher.emit("batch/rank_cost", cost, step=s.step, rank=rank)


def report_levels(publisher: Publisher, core: BatcherCore, spool_bytes: int, step: int | None) -> None:
    accounts, emit = core.ledger.accounts, publisher.emit
    emit("batch/acknowledged", accounts.acknowledged, step=step)
    emit("batch/in_flight", core.desk.in_flight(), step=step)
    emit("batch/ready", core.ledger.counts.ready, step=step)
    emit("batch/spool_bytes", spool_bytes, step=step)
    emit("batch/reissued", accounts.reissued, step=step)
    for cause, count in accounts.rejected.items():
        emit("batch/rejected", count, step=step, cause=cause)
    for cause, count in accounts.dropped.items():
        emit("batch/dropped", count, step=step, cause=cause)
    for name, lengths in (("lost_lengths", accounts.lengths), ("refused_lengths", core.refused_lengths)):
        for cause, by_length in lengths.items():
            for bound, count in by_length.items():
                emit(f"batch/{name}", count, step=step, cause=cause, up_to_tokens=bound)

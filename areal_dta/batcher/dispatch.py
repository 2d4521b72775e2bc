"""From the groups of a batch to one shard per data-parallel rank. Pure and deterministic: the same batch gives the same
shards.

Legend: S training rows of the batch, T tokens of all rows, R rows by sorted position, K ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_dta.batcher.leases import Episode, Place, launch_of
from areal_dta.batcher.rewards import episode_moments, shape, standardise
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.batcher.staleness import fresh_mask
from areal_dta.records import Shard, Trajectory
from areal_dta.tree.cost import CostModel
from areal_dta.tree.minibatch import cut_minibatches, deal_groups
from areal_dta.tree.trie import sort_rows

__all__ = ["Assembly", "Batch", "BatchStats", "assemble"]


@dataclass(frozen=True)
class BatchStats:
    """What one batch was: the numbers behind the ``batch/*`` metrics. Staleness counts tokens that are trained."""

    step: int
    episodes: int
    rows: int
    tokens: int
    tree_tokens: int
    reward_mean: float
    staleness_max: int
    staleness_mean: float
    mixed_version_share: float
    rank_costs: tuple[float, ...]

    @property
    def tree_ratio(self) -> float:
        return self.tokens / max(1, self.tree_tokens)


@dataclass(frozen=True)
class Batch:
    shards: tuple[Shard, ...]
    stats: BatchStats
    keys: tuple[tuple[int, int], ...]  # (group, sample) of its episodes


@dataclass(frozen=True)
class _Rows:
    """All training rows of a batch, end to end, before the cut."""

    input_ids_T: np.ndarray
    offsets_S1: np.ndarray
    loss_mask_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    rewards_S: np.ndarray
    raw_rewards_S: np.ndarray
    group_ids_S: np.ndarray
    samples_S: np.ndarray
    launches_S: np.ndarray
    minibatch_S: np.ndarray


@dataclass(frozen=True)
class Assembly:
    """All that is needed to put a batch together, frozen, so that it can be done elsewhere while intake goes on."""

    step: int
    epoch: int
    groups: tuple[tuple[Episode, ...], ...]
    settings: BatcherSettings

    @property
    def num_tokens(self) -> int:
        return sum(e.num_tokens for group in self.groups for e in group)

    def trajectories(self, read: Callable[[Place], Trajectory]) -> list[list[Trajectory]]:
        """Those of each group; `read` gets the arrays that are not in memory."""
        return [[e.arrays(read) for e in group] for group in self.groups]

    def with_cost(self, cost: CostModel) -> Assembly:
        """Balanced by another cost."""
        return replace(self, settings=replace(self.settings, cost=cost))

    def run(self, trajectories: Sequence[Sequence[Trajectory]] | None = None) -> Batch:
        return assemble(self.groups, self.step, self.epoch, self.settings, trajectories)


def assemble(
    groups: Sequence[Sequence[Episode]],
    step: int,
    epoch: int,
    settings: BatcherSettings,
    trajectories: Sequence[Sequence[Trajectory]] | None = None,
) -> Batch:
    """Build the shards of one step from its groups' episodes; `trajectories` are theirs if the arrays lie elsewhere.

    ``Shard.rewards_S`` is final: shifted, scaled and clipped, then normalised as ``actor.reward_norm`` says, over
    episodes; the trainer must switch these off in AReaL's PPOActor (bias 0, scaling 1, clip inf, no reward_norm). A row
    whose own reward differs from its episode's (turn-level discounts) gets its own shaped reward minus the episode
    population's mean, over its deviation.
    """
    rows = _rows([[e.arrays() for e in g] for g in groups] if trajectories is None else trajectories, step, settings)
    order = sort_rows(rows.input_ids_T, rows.offsets_S1)
    minibatch_R = rows.minibatch_S[order.order_R]
    cuts = cut_minibatches(
        order, minibatch_R, settings.num_minibatches, settings.num_ranks, settings.partition, settings.cost
    )
    costs, tree_tokens = cuts.costs_MK.sum(axis=0).tolist(), cuts.tree_tokens_MK.sum(axis=0).tolist()
    totals = (len(rows.rewards_S), int(rows.loss_mask_T.sum()))
    shards = tuple(
        _shard(
            rows,
            order.order_R[cuts.of_rank(k)],
            step=step,
            rank=k,
            world_size=settings.num_ranks,
            epoch=epoch,
            num_rows_total=totals[0],
            num_loss_tokens_total=totals[1],
            cost=costs[k],
            tree_tokens=tree_tokens[k],
        )
        for k in range(settings.num_ranks)
    )
    flat = [e for group in groups for e in group]
    trained_T = rows.loss_mask_T.astype(bool)
    staleness_T = np.abs(step - rows.versions_T[trained_T])
    stats = BatchStats(
        step=step,
        episodes=len(flat),
        rows=totals[0],
        tokens=len(rows.input_ids_T),
        tree_tokens=order.tree_tokens,
        reward_mean=float(np.mean([e.reward for e in flat])),
        staleness_max=int(staleness_T.max(initial=0)),
        staleness_mean=float(staleness_T.mean()) if len(staleness_T) else 0.0,
        mixed_version_share=float(np.mean([e.mixed for e in flat])),
        rank_costs=tuple(costs),
    )
    return Batch(shards, stats, tuple(e.key for e in flat))


def _rows(groups: Sequence[Sequence[Trajectory]], step: int, settings: BatcherSettings) -> _Rows:
    shaped = [[shape(t.rewards_S, settings.rewards) for t in group] for group in groups]
    moments = [np.asarray([episode_moments(r) for r in group]) for group in shaped]
    means, divisors = standardise([m[:, 0] for m in moments], settings.rewards, within=[m[:, 1] for m in moments])
    deal = deal_groups(len(groups), settings.num_minibatches, settings.seed, step)
    trajectories, rewards, counts, minibatches = [], [], [], []
    for g, group in enumerate(groups):
        for i, traj in enumerate(group):
            trajectories.append(traj)
            rewards.append((shaped[g][i] - means[g][i]) / divisors[g][i])
            counts.append(traj.num_sequences)
            minibatches.append(deal[g])
    lens_S = np.concatenate([np.diff(t.offsets_S1) for t in trajectories])
    versions_T = np.concatenate([t.versions_T for t in trajectories])
    loss_mask_T = np.concatenate([t.loss_mask_T for t in trajectories]).astype(np.uint8)
    if settings.staleness_policy == "mask":
        loss_mask_T = loss_mask_T * fresh_mask(versions_T, step, settings.eta).astype(np.uint8)
    return _Rows(
        input_ids_T=np.concatenate([t.input_ids_T for t in trajectories]),
        offsets_S1=np.concatenate([[0], np.cumsum(lens_S)]),
        loss_mask_T=loss_mask_T,
        logprobs_T=np.concatenate([t.logprobs_T for t in trajectories]),
        versions_T=versions_T,
        rewards_S=np.concatenate(rewards).astype(np.float32),
        raw_rewards_S=np.concatenate([t.rewards_S for t in trajectories]),
        group_ids_S=np.repeat([t.group_id for t in trajectories], counts),
        samples_S=np.repeat([t.sample for t in trajectories], counts),
        launches_S=np.repeat([launch_of(t.lease_id) for t in trajectories], counts),
        minibatch_S=np.repeat(minibatches, counts),
    )


def _shard(rows: _Rows, members: np.ndarray, **fields: Any) -> Shard:
    """The shard of one rank; `members` are its rows in lexicographic order, `fields` the record's scalar fields."""
    starts, ends = rows.offsets_S1[members], rows.offsets_S1[members + 1]
    lens = ends - starts
    offsets_S1 = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    take = np.repeat(starts - offsets_S1[:-1], lens) + np.arange(int(offsets_S1[-1]))
    return Shard(
        input_ids_T=rows.input_ids_T[take],
        offsets_S1=offsets_S1,
        loss_mask_T=rows.loss_mask_T[take],
        logprobs_T=rows.logprobs_T[take],
        versions_T=rows.versions_T[take],
        rewards_S=rows.rewards_S[members],
        raw_rewards_S=rows.raw_rewards_S[members],
        group_ids_S=rows.group_ids_S[members],
        samples_S=rows.samples_S[members],
        launches_S=rows.launches_S[members],
        minibatch_S=rows.minibatch_S[members],
        **fields,
    )

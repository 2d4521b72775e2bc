"""What a trainer rank measures beyond AReaL's statistics: the log-prob mismatch with the servers.

Legend of shape suffixes: S rows, T tokens of all rows laid end to end, E episodes' rows gathered from all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from areal_dta.records import Shard

__all__ = ["Mismatch", "current_rows", "gather_rows", "measure_mismatch", "training_metrics", "version_span"]

# published name -> name in AReaL's statistics: means over loss tokens, reduced over data-parallel ranks
AREAL_NAMES = {
    "train/loss": "ppo_actor/update/batch_loss",
    "train/grad_norm": "ppo_actor/update/grad_norm",
    "train/lr": "ppo_actor/update/lr",
    "train/update_successful": "ppo_actor/update/update_successful",
    "train/entropy": "ppo_actor/update/entropy/avg",
    "train/clip_ratio": "ppo_actor/update/clip_ratio/avg",
    "train/approx_kl": "ppo_actor/update/approx_kl/avg",
}


@dataclass(frozen=True)
class Mismatch:
    """|log-prob of the server - log-prob of the trainer| over comparable tokens of all data-parallel ranks."""

    max: float
    mean: float
    num_tokens: int


def training_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """The published part of what AReaL's stats tracker exported; names without a value in this step are left out."""
    return {name: float(stats[source]) for name, source in AREAL_NAMES.items() if stats.get(source) is not None}


def version_span(shard: Shard) -> np.ndarray:
    """``[S, 4]`` int64: group, sample, oldest and newest version in the row; a row without versions: (max, -1)."""
    span_S4 = np.zeros((shard.num_rows, 4), np.int64)
    bounds = np.asarray(shard.offsets_S1).tolist()
    for row, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        versions = np.asarray(shard.versions_T[lo:hi])
        known = versions[versions >= 0]
        oldest, newest = (int(known.min()), int(known.max())) if len(known) else (np.iinfo(np.int64).max, -1)
        span_S4[row] = (shard.group_ids_S[row], shard.samples_S[row], oldest, newest)
    return span_S4


def gather_rows(rows_SN: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Rows of every rank of a (CPU) group, stacked; all ranks must call it."""
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows_SN)]), group=group)
    longest = max(int(c) for c in counts)
    padded = torch.zeros((longest, rows_SN.shape[1]), dtype=torch.int64)
    padded[: len(rows_SN)] = torch.from_numpy(rows_SN)
    parts = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return np.concatenate([p[: int(c)].numpy() for p, c in zip(parts, counts, strict=True)])


def current_rows(shard: Shard, all_spans_E4: np.ndarray, version: int) -> np.ndarray:
    """``[S]`` bool: every generated token of the row's *episode*, in whichever row and rank, is of `version`.

    A later turn's context holds the earlier turns' tokens, whose keys and values an older version may have computed;
    only rows of a one-version episode can be compared exactly. Episodes of an earlier launch are left out: a resume
    gives the numbers behind its checkpoint to other weights.
    """
    mixed = (all_spans_E4[:, 2] < version) | (all_spans_E4[:, 3] > version)
    bad = {(int(group), int(sample)) for group, sample in all_spans_E4[mixed & (all_spans_E4[:, 3] >= 0), :2]}
    keys = zip(shard.group_ids_S.tolist(), shard.samples_S.tolist(), strict=True)
    of_this_launch_S = np.asarray(shard.launches_S) == shard.epoch
    return np.array([key not in bad for key in keys], bool) & of_this_launch_S


def measure_mismatch(
    shard: Shard,
    trainer_logp_T: np.ndarray,
    version: int,
    world: dist.ProcessGroup | None,
    dp: dist.ProcessGroup,
    device: torch.device,
) -> Mismatch:
    """Compare server and trainer log-probs of loss tokens; all ranks must call it.

    ``trainer_logp_T`` is in AReaL's rolled layout (position t holds token t+1's), the shard's aligns with the token.
    `world` is a CPU group in which row data are gathered, `dp` the data-parallel group over which the result is
    reduced.
    """
    spans_E4 = gather_rows(version_span(shard), world)
    usable_S = current_rows(shard, spans_E4, version)
    lengths_S = np.diff(np.asarray(shard.offsets_S1))
    token_T = np.flatnonzero(np.repeat(usable_S, lengths_S) & np.asarray(shard.loss_mask_T).astype(bool))
    error_T = (
        np.abs(np.asarray(shard.logprobs_T)[token_T] - trainer_logp_T[token_T - 1]) if len(token_T) else np.zeros(1)
    )
    total = torch.tensor([float(error_T.sum()), float(len(token_T))], dtype=torch.float64, device=device)
    peak = torch.tensor(float(error_T.max()), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=dp)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=dp)
    count = int(total[1])
    return Mismatch(max=float(peak), mean=float(total[0]) / max(1, count), num_tokens=count)

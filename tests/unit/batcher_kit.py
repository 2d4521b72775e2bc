"""What the batcher's tests share: small settings, a hand-driven clock, made-up trajectories, a simulated run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.costs import CALIBRATION_FILE
from areal_dta.batcher.ledger import Event
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.records import Lease, Trajectory
from areal_dta.tree.calibration import Calibration
from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.timing import TimeModel


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def settings(**changes) -> BatcherSettings:
    values = {
        "num_items": 6,
        "batch_groups": 2,
        "group_size": 2,
        "eta": 1,
        "num_ranks": 2,
        "seed": 3,
        "num_eval_items": 2,
    }
    return BatcherSettings(**{**values, **changes})


def items(n: int) -> list[dict]:
    return [{"task_id": f"t{i}"} for i in range(n)]


def make_core(clock: Clock | None = None, epoch: int = 0, resume_step: int | None = None, log=(), **changes):
    """A started core; `log` is replayed first."""
    s = settings(**changes)
    core = BatcherCore(s, items(s.num_items), items(s.num_eval_items), clock or Clock())
    for event in log:
        core.replay(Event(event.kind, event.body, event.arrays))
    core.begin(epoch, resume_step)
    return core


def trajectory(
    lease: Lease, *, reward: float = 1.0, version: int | list[int] | None = None, turns: int = 2
) -> Trajectory:
    """`turns` sequences, each extending the one before by 3 prompt and 2 generated tokens, all fixed by (group,
    sample).
    """
    rng = np.random.default_rng([lease.group_id, lease.sample])
    chain = np.concatenate([[lease.group_id + 1, 7], rng.integers(0, 50, 5 * turns)]).astype(np.int32)
    versions = np.full(turns, lease.version) if version is None else np.resize(version, turns)
    ids, masks, token_versions, lens = [], [], [], []
    for turn in range(turns):
        n = 2 + 5 * (turn + 1)
        mask = np.zeros(n, np.uint8)
        mask[-2:] = 1
        ids.append(chain[:n])
        masks.append(mask)
        token_versions.append(np.where(mask, versions[turn], -1))
        lens.append(n)
    mask_T = np.concatenate(masks)
    return Trajectory(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        sample=lease.sample,
        task_id=str(lease.item["task_id"]),
        reward=reward,
        input_ids_T=np.concatenate(ids),
        offsets_S1=np.concatenate([[0], np.cumsum(lens)]),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -0.5, 0.0),
        versions_T=np.concatenate(token_versions),
        rewards_S=np.full(turns, reward),
        worker="w",
        eval_tag=lease.eval_tag,
    )


def finish_all(core: BatcherCore, reward=lambda lease: float(lease.sample), capacity: int = 1000) -> int:
    """Run every episode that may start now; returns how many."""
    leases = core.desk.lease("w", capacity)
    for lease in leases:
        assert core.trajectory(trajectory(lease, reward=reward(lease))).status in ("accepted", "duplicate")
    return len(leases)


def train(core: BatcherCore, step: int):
    """All shards of a step, then the next policy version."""
    shards = [core.shard(r, core.settings.num_ranks, step) for r in range(core.settings.num_ranks)]
    core.published(step + 1, core.ledger.epoch)
    return shards


def write_calibration(folder: Path, token_s: float = 1e-3, pair_s: float = 1e-6, block_s: float = 0.0) -> None:
    """As a trainer stores it: seconds per token (layers: forward and backward, head: backward), per pair, per block."""
    forward = (block_s, token_s, pair_s, pair_s, pair_s, 0.0)
    memory = MemoryModel.of_shape(
        hidden=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, ffn=16, vocab=32, element_bytes=4, tp=1
    )
    time = TimeModel(forward, forward, (0.0, 0.0), (0.0, token_s), measured=True)
    Calibration({"device": "a test"}, time, memory, {}).write(folder / CALIBRATION_FILE)

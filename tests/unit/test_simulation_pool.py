"""The simulator's pool decides as the real batcher does. Not covered: the batcher's own rules (`test_batcher_core`)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.leases import GroupState
from areal_dta.batcher.settings import BatcherSettings
from areal_dta.records import Lease, Shard, Trajectory
from areal_dta.simulation.pool import Finished, Grant, Pool
from areal_dta.simulation.settings import SimulationSettings


class Desk:
    """The real batcher core, fed with trajectories of two tokens."""

    def __init__(self, given_settings: SimulationSettings) -> None:
        s = given_settings
        self.core = BatcherCore(
            BatcherSettings(
                num_items=50, batch_groups=s.batch_groups, group_size=s.group_size, eta=s.eta,
                total_steps=s.total_steps, max_concurrent=s.concurrent,
                staleness_policy=s.policy, max_attempts=s.max_attempts,
            ),
            [{"task_id": str(i)} for i in range(50)], [], lambda: 0.0,
        )  # fmt: skip
        self.core.begin(0, None)
        self.leases: dict[tuple[int, int], Lease] = {}

    def grant(self, capacity: int) -> list[tuple[int, int, int]]:
        leases = self.core.desk.lease("worker.0", capacity)
        self.leases |= {(lease.group_id, lease.sample): lease for lease in leases}
        return [(lease.group_id, lease.sample, lease.attempt) for lease in leases]

    def finish(self, key: tuple[int, int], versions: dict[int, int]) -> None:
        lease = self.leases.pop(key)
        versions_T = np.repeat(list(versions), list(versions.values())).astype(np.int32)
        n = len(versions_T)
        traj = Trajectory(
            lease_id=lease.lease_id, group_id=key[0], sample=key[1], task_id="t", reward=1.0,
            input_ids_T=np.arange(n, dtype=np.int32) + 10 * key[1], offsets_S1=np.asarray([0, n]),
            loss_mask_T=np.ones(n, np.uint8), logprobs_T=np.zeros(n, np.float32), versions_T=versions_T,
            rewards_S=np.ones(1, np.float32),
        )  # fmt: skip
        assert self.core.trajectory(traj).status == "accepted"

    def batch(self, step: int) -> list[int] | None:
        shard = self.core.shard(0, 1, step)
        return sorted(set(shard.group_ids_S.tolist())) if isinstance(shard, Shard) else None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from(("wait", "drop", "mask", "keep")))
def test_the_pool_decides_as_the_batcher_does(seed: int, eta: int, policy: Any) -> None:
    """Grants, batches and drops of a random schedule, against the real core."""
    rng = random.Random(seed)
    given_settings = SimulationSettings(
        servers=1, batch_groups=2, group_size=rng.choice((1, 3)), eta=eta, policy=policy, steps=20, total_steps=20,
        max_concurrent=rng.choice((4, 30)), max_attempts=2,
    )  # fmt: skip
    desk, pool = Desk(given_settings), Pool(given_settings)
    running: dict[tuple[int, int], Grant] = {}
    trained_version = 0
    for _ in range(120):
        action = rng.random()
        if action < 0.3:
            capacity = rng.randint(1, 8)
            grants = pool.grant(capacity)
            assert [(g.group_id, g.sample, g.attempt) for g in grants] == desk.grant(capacity)
            running |= {(g.group_id, g.sample): g for g in grants}
        elif action < 0.7 and running:
            key = rng.choice(sorted(running))
            versions = {rng.randint(max(0, pool.version - 2), pool.version): 2}
            pool.finish(Finished(running.pop(key), versions))
            desk.finish(key, versions)
        elif action < 0.75 and running:
            key = rng.choice(sorted(running))
            pool.fail(running.pop(key))
            desk.core.desk.reject(desk.leases.pop(key).lease_id, "raised")
        elif pool.next_step < 20:
            if trained_version < pool.next_step:
                trained_version += 1
                pool.published(trained_version)
                desk.core.published(trained_version, 0)
            batch = pool.batch()
            found = desk.batch(desk.core.ledger.next_step)
            assert (None if batch is None else sorted(b[0].grant.group_id for b in batch)) == found
        states = {g.group_id for g in desk.core.ledger.groups.values() if g.state is not GroupState.BATCHED}
        assert set(pool.groups) == states

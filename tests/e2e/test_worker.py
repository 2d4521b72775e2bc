"""The rollout worker against a scripted batcher and a scripted SGLang server, over their real channels.

Not covered here: the real batcher and server (see the loop tests), tau2 episodes.
"""

from __future__ import annotations

from tests.e2e.worker_fakes import (
    SETTINGS,
    WAIT_S,
    FakeBatcher,
    FakeServer,
    OneTurn,
    answer,
    engine_for,
    generated,
    lease,
    running_worker,
)

# isort: split
import asyncio
import gc
import math
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from areal_dta.channel import AsyncRpcClient, RpcTimeout
from areal_dta.metrics import NullPublisher
from areal_dta.rollout.worker_engine import AFFINITY_HEADER
from areal_dta.rollout.worker_loop import Worker, WorkerError


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer().start()
    yield fake
    fake.stop()


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(3 * WAIT_S):
            return await coroutine

    return asyncio.run(bounded())


async def arrived(server: FakeServer, count: int = 1) -> None:
    """Wait until ``count`` further generation requests have reached the server."""
    for _ in range(count):
        assert await asyncio.to_thread(server.arrived.acquire, timeout=WAIT_S)


def test_leases_become_acknowledged_trajectories_and_the_worker_drains(server: FakeServer) -> None:
    async def scenario() -> None:
        batcher = FakeBatcher([lease(i) for i in range(9)], version=3)
        server.default = lambda body: answer([7, 8, 9], spans=[("0:3", 0, 1), ("0:4", 1, 3)])
        async with running_worker(batcher, server, OneTurn()) as (_, task, publisher):
            await task
        assert set(batcher.accepted) == {f"lease_{i}" for i in range(9)}
        assert not batcher.rejected
        assert batcher.max_leased <= SETTINGS.capacity
        first = batcher.accepted["lease_0"]
        assert first.input_ids_T.tolist() == [2, 3, 4, 7, 8, 9]
        assert first.versions_T.tolist() == [-1, -1, -1, 3, 4, 4]
        assert first.logprobs_T == pytest.approx([0, 0, 0, -0.07, -0.08, -0.09])
        assert (first.reward, first.rewards_S.tolist(), first.task_id, first.worker) == (
            1.0,
            [1.0],
            "task_0",
            "worker.0",
        )
        assert len(publisher.values("rollout/reward")) == 9
        assert publisher.values("rollout/turns") == [1.0] * 9

    run(scenario())


def test_requests_carry_seed_affinity_and_a_fresh_id(server: FakeServer) -> None:
    async def scenario() -> None:
        leases = [lease(0), lease(1), replace(lease(2), eval_tag="before")]
        async with running_worker(FakeBatcher(leases), server, OneTurn()) as (_, task, _p):
            await task

    run(scenario())
    by_prompt = {r["input_ids"][-1]: r for r in server.requests}
    assert [by_prompt[last]["rid"].split("/")[0] for last in (4, 5, 6)] == ["group-0", "group-0", "group-1"]
    assert sorted(h[AFFINITY_HEADER] for h in server.headers) == ["group-0", "group-0", "group-1"]
    assert len({r["rid"] for r in server.requests}) == 3
    seeds = [r["sampling_params"]["sampling_seed"] for r in server.requests]
    assert len(set(seeds)) == 3
    assert all(0 <= s < 2**31 for s in seeds)
    assert by_prompt[6]["sampling_params"]["temperature"] == 0.0, "evaluation is greedy whatever the workflow asks for"
    assert by_prompt[4]["sampling_params"]["temperature"] == 1.0


def test_a_completion_interrupted_by_a_weight_update_keeps_the_version_of_every_token(server: FakeServer) -> None:
    async def scenario() -> FakeBatcher:
        server.script.extend(
            [
                lambda body: answer([11, 12], spans=[("0:0", 0, 2)], version="0:0", reason="abort"),
                lambda body: answer([], version="0:1", reason="abort"),
                lambda body: answer([13], spans=[("0:1", 0, 1)], version="0:1", reason="abort"),
                lambda body: answer([14, 15], spans=[("0:1", 0, 1), ("0:2", 1, 2)], version="0:2"),
            ]
        )
        batcher = FakeBatcher([lease(0)])
        async with running_worker(batcher, server, OneTurn()) as (_, task, _p):
            await task
        return batcher

    trajectory = run(scenario()).accepted["lease_0"]
    assert generated(trajectory.input_ids_T, trajectory) == [11, 12, 13, 14, 15]
    assert generated(trajectory.versions_T, trajectory) == [0, 0, 1, 1, 2]
    assert [r["input_ids"] for r in server.requests][-1] == [2, 3, 4, 11, 12, 13]
    assert [r["sampling_params"]["max_new_tokens"] for r in server.requests] == [8, 6, 6, 5]
    assert len({r["sampling_params"]["sampling_seed"] for r in server.requests}) == 1
    assert len({r["rid"] for r in server.requests}) == 4


class Misbehaving(OneTurn):
    """Does what the task id says."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        what = data["task_id"]
        if what == "raises":
            raise KeyError("missing tool")
        if what == "hangs":
            await asyncio.Event().wait()
        if what == "none":
            return None
        result = await super().arun_episode(engine, data)
        if what == "no_reward":
            del result["rewards"]
        if what == "no_token":
            result["loss_mask"][:] = 0
        return result

    async def reward(self, data: dict[str, Any]) -> float:
        return math.nan if data["task_id"] == "nan" else 0.5


def test_every_failure_is_rejected_with_its_cause_and_none_becomes_reward_zero(server: FakeServer) -> None:
    expected = {
        "raises": ("raised", "KeyError: 'missing tool'"),
        "none": ("raised", "returned None"),
        "hangs": ("timeout", "0.3 s"),
        "nan": ("bad_reward", "nan"),
        "no_reward": ("bad_reward", "no 'rewards'"),
        "no_token": ("empty", "no generated token"),
        "long": ("too_long", "exceeds dta.max_len=64"),
        "refused": ("raised", "400"),
    }

    async def scenario() -> tuple[FakeBatcher, Any]:
        leases = [
            replace(lease(i), lease_id=what, item={"task_id": what, "ids": [2, 3]}) for i, what in enumerate(expected)
        ]
        leases[6] = replace(leases[6], item={"task_id": "long", "ids": list(range(62))})
        leases[7] = replace(leases[7], item={"task_id": "refused", "ids": [99]})
        server.default = lambda body: 400 if body["input_ids"] == [99] else answer([7, 8, 9])
        batcher = FakeBatcher([*leases, lease(90)])
        async with running_worker(batcher, server, Misbehaving(), episode_timeout_s=0.3) as (_, task, publisher):
            await task
        return batcher, publisher

    batcher, publisher = run(scenario())
    assert set(batcher.accepted) == {"lease_90"}
    assert {what: cause for what, (cause, _) in batcher.rejected.items()} == {w: c for w, (c, _) in expected.items()}
    for what, (_, text) in expected.items():
        assert text in batcher.rejected[what][1]
    assert len(publisher.values("rollout/failed")) == len(expected)
    assert batcher.lengths == dict.fromkeys(("raises", "none", "hangs", "refused"), 0) | {"long": 65} | dict.fromkeys(
        ("nan", "no_reward", "no_token"), 5
    )


def test_busy_is_retried_and_a_duplicate_is_dropped(server: FakeServer) -> None:
    async def scenario() -> FakeBatcher:
        batcher = FakeBatcher([lease(0), lease(1)])
        batcher.statuses.extend(["busy", "busy", "duplicate"])
        async with running_worker(batcher, server, OneTurn(), capacity=1) as (_, task, _p):
            await task
        return batcher

    batcher = run(scenario())
    assert batcher.answered == [
        (f"lease_{i}", s) for i, s in ((0, "busy"), (0, "busy"), (0, "duplicate"), (1, "accepted"))
    ]
    assert not batcher.rejected


def test_a_short_episode_is_not_held_up_by_a_long_one_before_it(server: FakeServer) -> None:
    class Gated(OneTurn):
        async def reward(self, data: dict[str, Any]) -> float:
            if data["task_id"] == "task_0":
                await asyncio.to_thread(gate.wait, WAIT_S)
            return 1.0

    gate = threading.Event()

    async def scenario() -> None:
        batcher = FakeBatcher([lease(i) for i in range(6)])
        async with running_worker(batcher, server, Gated(), capacity=2) as (_, task, _p):
            await batcher.until(lambda: len(batcher.accepted) == 5)
            assert "lease_0" not in batcher.accepted
            gate.set()
            await task
        assert len(batcher.accepted) == 6

    run(scenario())


def test_a_batcher_restart_during_an_episode_costs_nothing(server: FakeServer) -> None:
    async def scenario() -> None:
        batcher = FakeBatcher([lease(0), lease(1)])
        server.hold(True)
        async with running_worker(batcher, server, OneTurn()) as (_, task, _p):
            await arrived(server, 2)
            await batcher.restart()
            beats = len(batcher.beats)
            server.hold(False)
            await task
        assert set(batcher.accepted) == {"lease_0", "lease_1"}
        assert len(server.requests) == 2, "no episode was run again"
        assert len(batcher.beats) >= beats

    run(scenario())


def test_an_episode_whose_lease_was_given_away_is_cancelled(server: FakeServer) -> None:
    async def scenario() -> None:
        batcher = FakeBatcher([lease(0)], drain=False)
        server.hold(True)
        async with running_worker(batcher, server, OneTurn()) as (worker, task, _p):
            await arrived(server)
            batcher.unknown.add("lease_0")
            await batcher.until(lambda: "lease_0" in batcher.rejected)
            assert batcher.rejected["lease_0"][0] == "aborted"
            server.hold(False)
            batcher.lease_more([lease(1)])
            await batcher.until(lambda: "lease_1" in batcher.accepted)
            worker.stop()
            await task

    run(scenario())


def test_stop_hands_running_leases_back_at_once(server: FakeServer) -> None:
    async def scenario() -> None:
        batcher = FakeBatcher([lease(i) for i in range(3)])
        server.hold(True)
        async with running_worker(batcher, server, OneTurn()) as (worker, task, _p):
            await arrived(server, 3)
            worker.stop()
            async with asyncio.timeout(3.0):
                await task
        assert {cause for cause, _ in batcher.rejected.values()} == {"aborted"}
        assert len(batcher.rejected) == 3

    run(scenario())


def test_an_unreachable_batcher_ends_the_worker_with_the_cause(server: FakeServer) -> None:
    async def scenario() -> None:
        rpc = AsyncRpcClient("tcp://127.0.0.1:9", "worker.0")
        with engine_for(server) as engine:
            worker = Worker(replace(SETTINGS, batcher_timeout_s=0.3), rpc, engine, OneTurn(), NullPublisher())
            with pytest.raises(RpcTimeout, match=r"no answer to 'hello' from tcp://127.0.0.1:9 within 0.3 s"):
                await worker.run()
        await rpc.close()

    run(scenario())


def test_a_workflow_that_blocks_the_event_loop_ends_the_worker_but_not_its_heartbeats(server: FakeServer) -> None:
    class Blocking(OneTurn):
        async def reward(self, data: dict[str, Any]) -> float:
            assert gate.wait(WAIT_S)
            return 1.0

    gate = threading.Event()

    async def scenario() -> None:
        batcher = FakeBatcher([lease(0)])
        context = running_worker(batcher, server, Blocking(), episode_timeout_s=0.1, stuck_grace_s=0.1)
        async with context as (_, task, _p):
            await arrived(server)
            beats = len(batcher.beats)
            await batcher.until(lambda: len(batcher.beats) > beats + 3)
            await asyncio.wait([task], timeout=WAIT_S)
            gate.set()
            assert isinstance(task.exception(), WorkerError)
            assert "blocks the event loop" in str(task.exception())
        assert batcher.rejected["lease_0"][0] == "aborted"

    run(scenario())


def test_a_thousand_episodes_leave_no_task_thread_or_record_behind(server: FakeServer) -> None:
    class Instant(OneTurn):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if data["task_id"].endswith("7"):
                raise ValueError("unlucky")
            return None

    async def scenario() -> None:
        batcher = FakeBatcher([lease(i) for i in range(1000)])
        before = threading.active_count()
        async with running_worker(batcher, server, Instant(), capacity=64) as (worker, task, _p):
            await batcher.until(lambda: batcher.settled >= 500)
            threads = threading.active_count()
            await batcher.until(lambda: batcher.settled == 1000)
            assert threading.active_count() <= threads
            await task
            dispatcher = worker._engine.workflow_executor.dispatcher
            await asyncio.to_thread(worker._drainer.join, WAIT_S)
            assert not worker._running
            assert not worker._deliveries
            assert len(dispatcher._active_task_ids) + len(dispatcher._pending_results) <= 64
            assert worker._engine.workflow_executor.staleness_manager.get_stats().running == 0
        gc.collect()
        assert len(asyncio.all_tasks()) <= 3
        assert threading.active_count() <= before + 1

    run(scenario())

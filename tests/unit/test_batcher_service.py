"""The batcher's handlers over a real socket, in this process. Kills are in tests/e2e/test_batcher_faults.py."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import defaultdict

import pytest

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.service import BatcherService, ServiceSettings
from areal_dta.channel import AsyncRpcClient, RpcError
from areal_dta.metrics import NullPublisher
from areal_dta.records import Lease, pack, unpack
from tests.unit.batcher_kit import Clock, items, settings, trajectory


class Recorder(NullPublisher):
    def __init__(self):
        super().__init__("batcher")
        self.records = defaultdict(list)

    def _send(self, record):
        self.records[record.name].append(record)


class Harness:
    """A service and a client of it."""

    def __init__(self, directory, **changes):
        self.settings = settings(**changes)
        self.metrics = Recorder()
        self.directory = directory

    async def __aenter__(self):
        core = BatcherCore(self.settings, items(6), items(2), Clock())
        shell = ServiceSettings(
            address="tcp://127.0.0.1:0",
            spool_dir=self.directory / "spool",
            epoch=0,
            trace_dir=self.directory,
            segment_bytes=2000,
            report_interval_s=0.0,
            tick_s=0.02,
        )
        self.service = BatcherService(core, shell, self.metrics)
        await self.service.start()
        self.running = asyncio.create_task(self.service.run())
        self.client = AsyncRpcClient(self.service.server.address, "w")
        return self

    async def __aexit__(self, *exc):
        await self.client.close()
        self.service.stop()
        await asyncio.wait_for(self.running, 20)

    async def call(self, kind, body=None, arrays=None, timeout_s=30):
        return await self.client.call(kind, body, arrays, timeout_s=timeout_s)

    async def lease(self, capacity=100, wait_s=0.0, worker="w"):
        reply = await self.call("lease", {"worker": worker, "capacity": capacity, "wait_s": wait_s})
        return [unpack(Lease, plain) for plain in reply.body["leases"]]

    async def deliver(self, lease, **changes):
        body, arrays = pack(trajectory(lease, **changes))
        return (await self.call("trajectory", body, arrays)).body

    async def step(self, step):
        for lease in await self.lease():
            assert (await self.deliver(lease))["status"] == "accepted"
        replies = [await self.call("shard", {"rank": r, "world_size": 2, "step": step, "wait_s": 20}) for r in range(2)]
        assert {r.body["status"] for r in replies} == {"ready"}
        await self.call("published", {"number": step + 1, "epoch": 0})


def test_waiting_requests_wake_when_what_they_wait_for_happens(tmp_path):
    async def main():
        async with Harness(tmp_path, eta=0) as h:
            first = await h.lease()
            asking = asyncio.create_task(h.call("shard", {"rank": 1, "world_size": 2, "step": 0, "wait_s": 60}))
            more = asyncio.create_task(h.lease(wait_s=60))
            await asyncio.gather(*[h.deliver(lease) for lease in first])
            assert (await asyncio.wait_for(asking, 20)).body["status"] == "ready"
            assert not more.done()
            await h.call("published", {"number": 1, "epoch": 0})
            assert {x.version for x in await asyncio.wait_for(more, 20)} == {1}
            wait = (await h.call("shard", {"rank": 0, "world_size": 2, "step": 1, "wait_s": 0})).body
            assert (wait["status"], wait["have"], wait["need"]) == ("wait", 0, 2)
            idle = asyncio.create_task(h.call("lease", {"worker": "w", "capacity": 1, "wait_s": 60}))
            await h.call("finish")
            assert (await asyncio.wait_for(idle, 20)).body == {"leases": [], "draining": True}

    asyncio.run(main())


def test_a_poll_of_a_worker_that_was_replaced_is_granted_nothing(tmp_path):
    async def main():
        async with Harness(tmp_path, eta=0) as h:
            await h.call("hello", {"name": "v", "role": "worker", "pid": 1})
            await h.lease()
            old = asyncio.create_task(h.lease(wait_s=60, worker="v"))
            await h.call("status")
            await h.call("hello", {"name": "v", "role": "worker", "pid": 2})
            assert await asyncio.wait_for(old, 20) == []

    asyncio.run(main())


def test_an_evaluation_is_awaited_and_reported(tmp_path):
    async def main():
        async with Harness(tmp_path) as h:
            assert (await h.call("eval_start", {"tag": "t", "number": 0})).body == {"total": 2}
            result = asyncio.create_task(h.call("eval_result", {"tag": "t", "wait_s": 60}))
            for lease in await h.lease(2):
                assert (await h.deliver(lease, reward=0.5))["status"] == "accepted"
            body = (await asyncio.wait_for(result, 20)).body
            assert (body["finished"], body["mean_reward"], body["rewards"]) == (True, 0.5, {"t0": [0.5], "t1": [0.5]})

    asyncio.run(main())


def test_metrics_traces_and_stripping_follow_the_batches_and_a_restart_goes_on(tmp_path):
    async def main():
        async with Harness(tmp_path) as h:
            for step in range(3):
                await h.step(step)
            spool = tmp_path / "spool"
            before = sum(p.stat().st_size for p in spool.glob("*.log"))
            await h.call("commit", {"step": 1, "checkpoint": "step_1"})
            status = (await h.call("status")).body
        assert sum(p.stat().st_size for p in spool.glob("*.log")) < before
        assert [r.step for r in h.metrics.records["batch/tree_ratio"]] == [0, 1, 2]
        assert {r.labels["rank"] for r in h.metrics.records["batch/rank_cost"]} == {0, 1}
        assert len(h.metrics.records["time/assemble"]) == 3
        for name in ("reward_mean", "episodes", "rows", "tokens", "tree_tokens", "staleness_max", "staleness_mean"):
            assert len(h.metrics.records[f"batch/{name}"]) == 3
        assert h.metrics.records["batch/acknowledged"] and h.metrics.records["batch/in_flight"]
        assert len(list(tmp_path.glob("batch_*.npz"))) == 3
        (tmp_path / "batch_000002.npz").unlink()
        async with Harness(tmp_path) as h:
            again = (await h.call("status")).body
            await h.step(3)
        assert {k: again[k] for k in ("acknowledged", "trained", "lost", "step", "position")} == {
            k: status[k] for k in ("acknowledged", "trained", "lost", "step", "position")
        }
        assert len(list(tmp_path.glob("batch_*.npz"))) == 4

    asyncio.run(main())


def test_malformed_requests_are_refused_by_field_and_bad_trajectories_by_cause(tmp_path):
    async def main():
        async with Harness(tmp_path) as h:
            for kind, body, text in [
                ("lease", {"worker": "w"}, "'lease' needs 'capacity' as int, got None"),
                ("commit", {"step": "1", "checkpoint": ""}, "needs 'step' as int"),
                ("shard", {"rank": 0, "world_size": 2, "step": 5}, "next step is 0"),
                ("eval_result", {"tag": "x"}, "no evaluation 'x'"),
            ]:
                with pytest.raises(RpcError, match=text):
                    await h.call(kind, body)
            lease = (await h.lease(1))[0]
            body, arrays = pack(trajectory(lease))
            reply = (await h.call("trajectory", {**body, "reward": None}, arrays)).body
            assert reply == {"status": "rejected", "cause": "bad_reward"}
            assert (await h.call("trajectory", {"lease_id": 7}, arrays)).body["cause"] == "malformed"
            assert (await h.call("status")).body["rejected"] == {"bad_reward": 1}

    asyncio.run(main())


def test_a_full_disk_ends_the_process_and_nothing_is_acknowledged(tmp_path, monkeypatch):
    async def main():
        async with Harness(tmp_path) as h:
            lease = (await h.lease(1))[0]

            def full(fd, data):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(os, "write", full)
            delivery = asyncio.create_task(h.deliver(lease))
            with pytest.raises(OSError, match="No space left"):
                await asyncio.wait_for(asyncio.shield(h.running), 20)
            monkeypatch.undo()
            delivery.cancel()  # whether the refusal still got out before the end is a matter of luck
            (outcome,) = await asyncio.gather(delivery, return_exceptions=True)
            assert isinstance(outcome, RpcError | asyncio.CancelledError)

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(main())

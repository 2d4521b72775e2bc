"""A batcher service in this process and a client of it, for tests."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.service import BatcherService, ServiceSettings
from areal_dta.channel import AsyncRpcClient
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

    def __init__(self, directory, *, trace=True, clock=None, **changes):
        shell = {
            name: changes.pop(name)
            for name in ("spool_bytes", "segment_bytes", "small_tokens", "measured_cost")
            if name in changes
        }
        self.shell = {"segment_bytes": 2000, "trace_dir": directory if trace else None, **shell}
        self.clock = clock or Clock()
        self.settings = settings(**changes)
        self.metrics = Recorder()
        self.directory = directory

    async def __aenter__(self):
        core = BatcherCore(self.settings, items(self.settings.num_items), items(2), self.clock)
        shell = ServiceSettings(
            address="tcp://127.0.0.1:0",
            spool_dir=self.directory / "spool",
            epoch=0,
            report_interval_s=0.0,
            tick_s=0.02,
            **self.shell,
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

    async def deliver_until_taken(self, lease):
        while (answer := await self.deliver(lease))["status"] == "busy":
            await asyncio.sleep(0.01)
        return answer["status"]

    async def step(self, step):
        for lease in await self.lease():
            assert (await self.deliver(lease))["status"] == "accepted"
        await self.shards(step)

    async def shards(self, step):
        replies = [await self.call("shard", {"rank": r, "world_size": 2, "step": step, "wait_s": 20}) for r in range(2)]
        assert {r.body["status"] for r in replies} == {"ready"}
        await self.call("published", {"number": step + 1, "epoch": 0})

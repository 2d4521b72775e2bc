"""One made-up rollout worker for ``bench.py batcher``: leases, delivers trajectories as fast as they are acknowledged,
writes what it measured as JSON.

    python -m scripts.benchlib.batcher_load ADDRESS NAME LENGTH CONCURRENCY REPORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from areal_dta.channel import AsyncRpcClient
from areal_dta.records import Lease, Trajectory, pack, unpack

__all__ = ["Load"]

CALL_TIMEOUT_S = 120.0
_BACKOFF_S = 0.05


class Load:
    """Delivers until the batcher drains; keeps `concurrency` deliveries in flight."""

    def __init__(self, link: AsyncRpcClient, name: str, length: int, concurrency: int) -> None:
        self._link, self._name, self._concurrency = link, name, concurrency
        self._ids_T = np.random.default_rng(0).integers(0, 150_000, 2 * length, dtype=np.int32)
        self._mask_T = np.zeros(length, np.uint8)
        self._mask_T[length // 4 :] = 1
        self._logprobs_T = np.where(self._mask_T, np.float32(-0.5), np.float32(0))
        self._requests = 0
        self.acks: list[tuple[float, float]] = []  # (when, seconds until the acknowledgement)

    async def run(self) -> None:
        slots = asyncio.Semaphore(self._concurrency)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            self._requests += 1
            body = {
                "worker": self._name,
                "capacity": 8 * self._concurrency,
                "wait_s": 5.0,
                "request": str(self._requests),
            }
            reply = await self._link.call("lease", body, timeout_s=CALL_TIMEOUT_S)
            for plain in reply.body["leases"]:
                await slots.acquire()
                task = asyncio.create_task(self._deliver(unpack(Lease, plain), slots))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if reply.body["draining"]:
                break
        await asyncio.gather(*tasks)

    async def _deliver(self, lease: Lease, slots: asyncio.Semaphore) -> None:
        body, arrays = pack(self._trajectory(lease))
        began_s = time.monotonic()
        try:
            while True:
                reply = await self._link.call("trajectory", body, arrays, timeout_s=CALL_TIMEOUT_S)
                if reply.body["status"] != "busy":
                    break
                await asyncio.sleep(_BACKOFF_S)
        finally:
            slots.release()
        if reply.body["status"] != "accepted":
            raise RuntimeError(f"lease {lease.lease_id}: {reply.body}")
        now_s = time.monotonic()
        self.acks.append((now_s, now_s - began_s))

    def _trajectory(self, lease: Lease) -> Trajectory:
        """Half of it is the group's, the rest its own; one row."""
        length = len(self._mask_T)
        ids_T = np.empty(length, np.int32)
        start = lease.group_id * 7 % length
        ids_T[: length // 2] = self._ids_T[start : start + length // 2]
        start = (lease.group_id * 31 + lease.sample * 17) % length
        ids_T[length // 2 :] = self._ids_T[start : start + length - length // 2]
        return Trajectory(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            sample=lease.sample,
            task_id=str(lease.item["task_id"]),
            reward=float(lease.sample % 2),
            input_ids_T=ids_T,
            offsets_S1=np.asarray([0, length]),
            loss_mask_T=self._mask_T,
            logprobs_T=self._logprobs_T,
            versions_T=np.where(self._mask_T, np.int32(lease.version), np.int32(-1)),
            rewards_S=np.asarray([lease.sample % 2], np.float32),
            worker=self._name,
        )


async def _main(address: str, name: str, length: int, concurrency: int) -> dict[str, Any]:
    link = AsyncRpcClient(address, name)
    await link.call("hello", {"name": name, "role": "worker", "pid": os.getpid()}, timeout_s=CALL_TIMEOUT_S)
    load = Load(link, name, length, concurrency)
    await load.run()
    await link.close()
    return {"acks": load.acks, "cpu_s": sum(os.times()[:2])}


if __name__ == "__main__":
    _address, _name, _length, _concurrency, _report = sys.argv[1:]
    Path(_report).write_text(json.dumps(uvloop.run(_main(_address, _name, int(_length), int(_concurrency)))))

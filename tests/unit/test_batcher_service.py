"""The batcher's handlers over a real socket, in this process. Kills are in tests/e2e/test_batcher_faults.py."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from areal_dta.channel import RpcError
from areal_dta.records import Lease, pack, unpack
from areal_dta.wire import encode
from tests.unit.batcher_kit import trajectory
from tests.unit.batcher_service_kit import Harness


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def test_acknowledgements_go_on_while_a_large_batch_is_assembled(tmp_path):
    """A batch whose sort and copies take about a second of processor time, in the process of its own."""

    async def main():
        changes = {"batch_groups": 32, "num_items": 200, "eta": 1, "small_tokens": 0, "segment_bytes": 1 << 24}
        async with Harness(tmp_path, trace=False, **changes) as h:
            leases = await h.lease(1000)
            for lease in leases[:64]:
                await h.deliver(lease, turns=60)
            asking = asyncio.create_task(h.call("shard", {"rank": 0, "world_size": 2, "step": 0, "wait_s": 60}))
            latencies = []
            for lease in leases[64:]:
                began_s = time.monotonic()
                assert (await h.deliver(lease))["status"] == "accepted"
                latencies.append(time.monotonic() - began_s)
                if asking.done():
                    break
            assert latencies
            assert float(np.median(latencies)) < 0.3
            assert (await asyncio.wait_for(asking, 60)).body["status"] == "ready"

    asyncio.run(main())


def test_an_assembling_process_that_dies_is_replaced_once_and_then_told(tmp_path, monkeypatch):
    async def main():
        async with Harness(tmp_path, trace=False, small_tokens=0) as h:
            for lease in await h.lease():
                await h.deliver(lease)
            monkeypatch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(RpcError, match="puts step 0 together .* died twice, exit code 1"):
                await h.call("shard", {"rank": 0, "world_size": 2, "step": 0, "wait_s": 60})
            monkeypatch.undo()
            reply = await h.call("shard", {"rank": 0, "world_size": 2, "step": 0, "wait_s": 60})
            assert reply.body["status"] == "ready"

    asyncio.run(main())


def test_a_rank_that_stops_reading_blocks_nobody_and_costs_no_copies(tmp_path):
    async def main():
        async with Harness(tmp_path, eta=0, trace=False) as h:
            for lease in await h.lease():
                await h.deliver(lease, turns=300)
            ask = {"rank": 0, "world_size": 2, "step": 0, "wait_s": 20}
            size = sum(a.nbytes for a in (await h.call("shard", ask)).arrays.values())
            deaf = zmq.Context.instance().socket(zmq.DEALER)
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.setsockopt(zmq.LINGER, 0)
            deaf.connect(h.service.server.address)
            before = rss_bytes()
            for n in range(400):
                deaf.send_multipart(encode(f"deaf/x/{n}", "shard", ask, {}))
            for _ in range(50):
                assert (await h.call("shard", {**ask, "rank": 1})).body["status"] == "ready"
            assert rss_bytes() - before < max(64 << 20, 50 * size)
            assert 400 * size > 2 * max(64 << 20, 50 * size)  # else this shows nothing
            deaf.close(0)

    asyncio.run(main())


def test_a_wall_clock_that_jumps_expires_nothing(tmp_path, monkeypatch):
    async def main():
        async with Harness(tmp_path, clock=time.monotonic, lease_timeout_s=30) as h:
            lease = (await h.lease(1))[0]
            for jump_s in (1e7, -1e7):
                monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.8e9 + jump_s)
                await asyncio.sleep(0.1)  # several ticks
                assert (await h.call("heartbeat", {"worker": "w", "lease_ids": [lease.lease_id]})).body["unknown"] == []
            assert (await h.call("status")).body["rejected"] == {}

    asyncio.run(main())


def test_a_lease_request_that_is_repeated_gets_the_same_leases_also_from_a_restarted_batcher(tmp_path):
    async def main():
        ask = {"worker": "w", "capacity": 2, "wait_s": 0.0, "request": "r1"}
        async with Harness(tmp_path) as h:
            await h.call("hello", {"name": "w", "role": "worker", "pid": 1})
            first = (await h.call("lease", ask)).body["leases"]
            assert len(first) == 2
            assert (await h.call("lease", ask)).body["leases"] == first
        async with Harness(tmp_path) as h:
            await h.call("hello", {"name": "w", "role": "worker", "pid": 1})
            assert (await h.call("lease", ask)).body["leases"] == first
            await h.deliver(unpack(Lease, first[0]))
            assert (await h.call("lease", ask)).body["leases"] == first[1:]
            other = (await h.call("lease", {**ask, "request": "r2"})).body["leases"]
            assert not {x["lease_id"] for x in other} & {x["lease_id"] for x in first}
            assert (await h.call("status")).body["in_flight"] == 3

    asyncio.run(main())

"""Full, broken and small disks under the batcher's service. Kills are in tests/e2e/test_batcher_kills.py."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess

import pytest

from areal_dta.channel import RpcError
from tests.unit.batcher_service_kit import Harness


def test_a_full_disk_keeps_workers_waiting_says_so_and_recovers(tmp_path, monkeypatch):
    real = os.writev

    def full(fd, buffers):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main():
        async with Harness(tmp_path) as h:
            first, *others = await h.lease()
            monkeypatch.setattr(os, "writev", full)
            held = asyncio.create_task(h.deliver(first))  # not acknowledged: it is not on disk
            async with asyncio.timeout(20):
                while (await h.call("status")).body["no_room"] != "disk_full":
                    await asyncio.sleep(0.01)
            assert not held.done()
            told = await h.deliver(others[0])
            assert (told["status"], told["cause"]) == ("busy", "disk_full") and "free space there" in told["why"]
            assert (await h.call("heartbeat", {"worker": "w", "lease_ids": [first.lease_id]})).body["unknown"] != []
            monkeypatch.setattr(os, "writev", real)
            assert (await asyncio.wait_for(held, 20))["status"] == "accepted"
            async with asyncio.timeout(20):
                while (answer := await h.deliver(others[0]))["status"] == "busy":
                    await asyncio.sleep(0.01)
            assert answer["status"] == "accepted"
            assert (await h.call("status")).body["acknowledged"] == 2

    asyncio.run(main())


def test_a_disk_that_is_really_full_is_told_and_recovered_from(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")

    async def main():
        async with Harness(disk, trace=False, segment_bytes=1 << 20, batch_groups=32, num_items=64) as h:
            leases = await h.lease()
            (disk / "ballast").write_bytes(bytes(40 << 10))
            deliveries = asyncio.gather(*[h.deliver_until_taken(lease) for lease in leases])
            async with asyncio.timeout(20):
                while (await h.call("status")).body["no_room"] != "disk_full":
                    await asyncio.sleep(0.01)
            reply = (await h.call("shard", {"rank": 0, "world_size": 2, "step": 0, "wait_s": 0})).body
            assert "the disk of" in reply["why"] and "free space" in reply["why"]
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
            assert set(await asyncio.wait_for(deliveries, 30)) == {"accepted"}
            assert (await h.call("status")).body["acknowledged"] == len(leases)

    try:
        asyncio.run(main())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_broken_disk_ends_the_process_and_nothing_is_acknowledged(tmp_path, monkeypatch):
    async def main():
        async with Harness(tmp_path) as h:
            lease = (await h.lease(1))[0]

            def broken(fd, data):
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(os, "writev", broken)
            delivery = asyncio.create_task(h.deliver(lease))
            with pytest.raises(OSError, match="Input/output error"):
                await asyncio.wait_for(asyncio.shield(h.running), 20)
            monkeypatch.undo()
            delivery.cancel()  # whether the refusal still got out before the end is a matter of luck
            (outcome,) = await asyncio.gather(delivery, return_exceptions=True)
            assert isinstance(outcome, RpcError | asyncio.CancelledError)

    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(main())


def test_a_log_larger_than_its_bound_makes_workers_wait_until_a_checkpoint_lets_go(tmp_path):
    async def main():
        async with Harness(tmp_path, eta=1, spool_bytes=20_000) as h:
            for step in range(100):
                leases = await h.lease()
                answers = [await h.deliver(lease) for lease in leases]
                if "spool_full" in {answer.get("cause") for answer in answers}:
                    break
                await h.shards(step)
            why = (await h.call("shard", {"rank": 0, "world_size": 2, "step": step, "wait_s": 0})).body["why"]
            assert "batcher.spool_bytes=20000: raise it, or save checkpoints more often" in why
            await h.call("commit", {"step": step - 1, "checkpoint": "c"})
            async with asyncio.timeout(20):
                assert {await h.deliver_until_taken(lease) for lease in leases} <= {"accepted", "duplicate"}
            assert (await h.call("status")).body["spool_bytes"] < 20_000

    asyncio.run(main())


def test_only_the_current_pool_stays_in_the_log_however_long_the_run(tmp_path):
    async def main():
        sizes = []
        async with Harness(tmp_path, eta=0, trace=False) as h:
            for step in range(12):
                await h.step(step)
                await h.call("commit", {"step": step, "checkpoint": "c"})
                while h.service.busy:
                    await asyncio.sleep(0)
                sizes.append((await h.call("status")).body["spool_bytes"])
            held = [e for e in h.service.core.ledger.held().values() if e.trajectory is not None]
            assert not held  # arrays lie in the log only
        assert max(sizes[6:]) <= max(sizes[:6]) + 500
        async with Harness(tmp_path, eta=0, trace=False) as h:
            await h.step(12)
            status = (await h.call("status")).body
            assert (status["trained"], status["lost"], status["duplicated"]) == (52, 0, 0)

    asyncio.run(main())

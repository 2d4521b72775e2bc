"""Workers that must wait: what they and the ranks are told, that it ends, and that nothing runs out of time by it."""

from __future__ import annotations

import asyncio
import time

import pytest

from areal_dta.batcher import service as services
from areal_dta.channel import RpcError, RpcTimeout
from areal_dta.rollout.worker_link import BatcherLink
from tests.unit.batcher_kit import trajectory
from tests.unit.batcher_service_kit import Harness

SMALL = {"eta": 1, "spool_bytes": 20_000, "trace": False}


async def fill(h: Harness):
    """Steps without a checkpoint until the log is full: (the step that waits, a lease of it, all its leases)."""
    for step in range(100):
        leases = await h.lease()
        for lease in leases:
            if (await h.deliver(lease)).get("cause") == "spool_full":
                await asyncio.sleep(0.1)  # some ticks: it may be shortened
                if (await h.deliver(lease))["status"] == "accepted":
                    continue
                while (body := (await ask(h, step)).body)["status"] == "ready" or "assembled" in body["why"]:
                    step += body["status"] == "ready"  # what is complete can still be trained
                    await asyncio.sleep(0.01)
                return step, lease, leases
        await h.shards(step)
    raise AssertionError("the log was never full")


async def until_refused(h: Harness, step: int):
    async with asyncio.timeout(20):
        while True:
            await ask(h, step, 0.1)


def ask(h: Harness, step: int, wait_s: float = 0.0):
    return h.call("shard", {"rank": 0, "world_size": 2, "step": step, "wait_s": wait_s})


def test_a_full_log_without_a_checkpoint_ends_rank_and_worker_with_the_cause_and_the_remedy(tmp_path):
    async def main():
        async with Harness(tmp_path, lease_timeout_s=1.0, **SMALL) as h:
            step, lease, _ = await fill(h)
            first = (await ask(h, step)).body
            assert first["status"] == "wait" and "save checkpoints more often" in first["why"]
            with pytest.raises(
                RpcError, match=r"batcher.spool_bytes=20000: raise it.*no batch can be completed like this"
            ):
                await until_refused(h, step)
            link = BatcherLink(h.client, "w", 0.5)
            with pytest.raises(
                RpcTimeout, match=r"busy \(spool_full\) to lease .* for 0.5 s: .*batcher.spool_bytes=20000"
            ):
                await link.deliver(lease, trajectory(lease))

    asyncio.run(main())


def test_a_worker_that_waits_for_room_delivers_once_a_checkpoint_lets_go(tmp_path):
    async def main():
        async with Harness(tmp_path, **SMALL) as h:
            step, lease, leases = await fill(h)
            link = BatcherLink(h.client, "w", 30)
            blocked = [asyncio.create_task(link.deliver(x, trajectory(x))) for x in leases]
            await asyncio.sleep(0.2)
            assert not all(task.done() for task in blocked)
            size = (await h.call("status")).body["spool_bytes"]
            await h.call("commit", {"step": step - 1, "checkpoint": "c"})
            assert set(await asyncio.wait_for(asyncio.gather(*blocked), 20)) <= {"accepted", "duplicate"}
            assert (await h.call("status")).body["spool_bytes"] < size
            status = (await h.call("status")).body
            assert (status["lost"], status["duplicated"], status["no_room"]) == (0, 0, "")

    asyncio.run(main())


def test_a_rank_that_asks_while_the_log_is_being_shortened_is_not_refused(tmp_path, monkeypatch):
    real, go_on = services.compact, asyncio.Event()

    async def slow(*args):
        await go_on.wait()
        await real(*args)

    monkeypatch.setattr(services, "compact", slow)

    async def main():
        async with Harness(tmp_path, lease_timeout_s=0.2, **SMALL) as h:
            step, lease, _ = await fill(h)
            await h.call("commit", {"step": step - 1, "checkpoint": "c"})
            for _ in range(4):
                assert (await ask(h, step, 0.1)).body["status"] == "wait"
            go_on.set()
            assert await asyncio.wait_for(h.deliver_until_taken(lease), 20) in ("accepted", "rejected")

    asyncio.run(main())


def test_groups_do_not_run_out_of_time_while_their_episodes_may_not_be_delivered(tmp_path):
    """Finished episodes wait at a full log (then: at a full pool) for longer than a group may take."""

    async def main():
        timing = {"clock": time.monotonic, "group_timeout_s": 0.5}
        async with Harness(tmp_path / "log", **timing, **SMALL) as h:
            step, _, leases = await fill(h)
            await asyncio.sleep(1.0)
            await h.call("commit", {"step": step - 1, "checkpoint": "c"})
            assert {await h.deliver_until_taken(lease) for lease in leases} <= {"accepted", "duplicate"}
            assert (await h.call("status")).body["rejected"] == {}
        async with Harness(tmp_path / "pool", trace=False, intake_limit=4, eta=3, **timing) as h:
            leases = await h.lease()
            answers = [await h.deliver(lease) for lease in leases]
            assert [a["status"] for a in answers[:5]] == ["accepted"] * 4 + ["busy"]
            assert answers[4]["cause"] == "intake_full"
            await asyncio.sleep(1.0)
            await h.shards(0)
            assert await h.deliver_until_taken(leases[4]) == "accepted"
            assert (await h.call("status")).body["rejected"] == {}
            async with asyncio.timeout(20):  # with room again, the rest is late after all
                while not (await h.call("status")).body["rejected"]:
                    await asyncio.sleep(0.05)

    for name in ("log", "pool"):
        (tmp_path / name).mkdir()
    asyncio.run(main())


def test_a_process_that_was_stopped_for_a_while_expires_nobody_it_could_not_hear(tmp_path):
    async def main():
        async with Harness(tmp_path, clock=time.monotonic, lease_timeout_s=1.2, trace=False) as h:
            lease, silent = await h.lease(2)
            time.sleep(1.5)  # the whole event loop, as SIGSTOP or a frozen machine would
            beat = {"worker": "w", "lease_ids": [lease.lease_id], "num_tokens": [7]}
            await asyncio.sleep(0.1)  # ticks come before the heartbeat
            assert (await h.call("heartbeat", beat)).body["unknown"] == []
            async with asyncio.timeout(20):  # who stays silent still expires
                while not (await h.call("status")).body["rejected"]:
                    await h.call("heartbeat", beat)
                    await asyncio.sleep(0.05)
            assert (await h.call("status")).body["rejected"] == {"expired": 1}
            assert (await h.call("heartbeat", beat)).body["unknown"] == []

    asyncio.run(main())


def test_a_log_full_of_what_was_dropped_is_shortened_without_a_checkpoint(tmp_path):
    async def main():
        async with Harness(tmp_path, **{**SMALL, "eta": 0}, filter_equal_rewards=True) as h:
            for _ in range(30):  # all rewards are equal: every group is dropped, and nothing is ever trained
                for lease in await h.lease():
                    assert await asyncio.wait_for(h.deliver_until_taken(lease), 20) == "accepted"
            status = (await h.call("status")).body
            assert status["dropped"]["equal_rewards"] >= 100 and status["lost"] == 0
            assert status["spool_bytes"] < 20_000

    asyncio.run(main())

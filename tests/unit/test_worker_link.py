"""What a worker tells the batcher of an episode it gives up, and what it says when the batcher takes none."""

from __future__ import annotations

import asyncio

import pytest

from areal_dta.channel import Reply, RpcError, RpcTimeout
from areal_dta.records import Lease
from areal_dta.rollout.worker_link import BatcherLink
from tests.unit.batcher_kit import trajectory

LEASE = Lease("e0.g0.s0.a0", 0, 0, 0, {"task_id": "t"}, 0, 0, 1)


class ScriptedRpc:
    """Answers deliveries with ``reply`` (raised if it is an error); records everything."""

    def __init__(self, reply):
        self.reply, self.calls = reply, []

    async def call(self, kind, body=None, arrays=None, *, timeout_s):
        self.calls.append((kind, dict(body or {})))
        if kind == "trajectory":
            if isinstance(self.reply, Exception):
                raise self.reply
            return Reply(self.reply)
        return Reply()


def test_every_rejection_says_how_long_the_episode_was():
    rpc = ScriptedRpc(RpcError("bad_request", "no such field"))
    link = BatcherLink(rpc, "w", 1.0)
    told = trajectory(LEASE)

    async def main():
        await link.reject(LEASE, "timeout", "too slow", 700)
        assert await link.deliver(LEASE, told) == "rejected"
        await link.hand_back({"a": 3, "b": 0}, 1.0)

    asyncio.run(main())
    rejected = [(b["lease_id"], b["cause"], b["num_tokens"]) for kind, b in rpc.calls if kind == "reject"]
    assert rejected == [
        (LEASE.lease_id, "timeout", 700),
        (LEASE.lease_id, "raised", told.num_tokens),
        ("a", "aborted", 3),
        ("b", "aborted", 0),
    ]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"cause": "disk_full", "why": "free space there"}, r"busy \(disk_full\) .* for 0.1 s: free space there"),
        ({"cause": "intake_full"}, r"busy \(intake_full\) .* the trainer takes no batches.*runtime.step_timeout_s"),
    ],
)
def test_a_batcher_that_stays_busy_is_an_error_with_its_cause_and_remedy(reply, text):
    link = BatcherLink(ScriptedRpc({"status": "busy", **reply}), "w", 0.1)
    with pytest.raises(RpcTimeout, match=text):
        asyncio.run(link.deliver(LEASE, trajectory(LEASE)))

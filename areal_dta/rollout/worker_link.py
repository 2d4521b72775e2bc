"""What a worker says to the batcher: retried calls, deliveries that wait out backpressure, rejections with a cause."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from areal_dta.channel import Reply, RpcError, RpcTimeout
from areal_dta.records import Lease, Trajectory, pack

__all__ = ["BatcherLink", "Rpc"]

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0
_PASSING = frozenset({"internal", "overloaded"})
_WHY = "the trainer takes no batches; see its log, or raise runtime.step_timeout_s"


class Rpc(Protocol):
    """What is used of `channel.AsyncRpcClient`."""

    async def call(
        self,
        kind: str,
        body: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
    ) -> Reply: ...


class BatcherLink:
    """The batcher as worker ``name`` sees it; ``timeout_s`` bounds how long a batcher that is down is waited for."""

    def __init__(self, rpc: Rpc, name: str, timeout_s: float) -> None:
        self.name = name
        self._rpc, self._timeout_s = rpc, timeout_s

    async def call(self, kind: str, body: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> Reply:
        """Call the batcher, again if it fails inside; RpcTimeout when it stays silent, RpcError when it refuses."""
        give_up, delay_s = time.monotonic() + self._timeout_s, _BACKOFF_FIRST_S
        while True:
            try:
                return await self._rpc.call(
                    kind, body, arrays, timeout_s=max(0.1, round(give_up - time.monotonic(), 3))
                )
            except RpcError as error:
                if error.kind not in _PASSING or time.monotonic() + delay_s > give_up:
                    raise
                log.warning("batcher failed at %r, trying again: %s", kind, error)
            await asyncio.sleep(delay_s)
            delay_s = min(_BACKOFF_MAX_S, delay_s * 2)

    async def deliver(self, lease: Lease, trajectory: Trajectory) -> str:
        """Hand over a trajectory, again while the batcher is busy; returns accepted, duplicate or rejected.

        Raises RpcTimeout when it is busy for longer than the link's time-out.
        """
        body, arrays = pack(trajectory)
        delay_s, give_up, told = _BACKOFF_FIRST_S, time.monotonic() + self._timeout_s, ""
        while True:
            try:
                reply = await self.call("trajectory", body, arrays)
            except RpcError as error:
                await self.reject(lease, "raised", f"refused by the batcher: {error}", trajectory.num_tokens)
                return "rejected"
            status = str(reply.body["status"])
            if status != "busy":
                if status != "accepted":
                    log.warning("trajectory of lease %s: %s (%s)", lease.lease_id, status, reply.body.get("cause"))
                return status
            cause = reply.body.get("cause") or "intake_full"
            if cause != told:
                told = cause
                log.warning("the batcher takes no trajectory now (%s): %s", cause, reply.body.get("why") or _WHY)
            if time.monotonic() > give_up:
                raise RpcTimeout(
                    f"the batcher answered busy ({cause}) to lease {lease.lease_id} for {self._timeout_s:g} s: "
                    f"{reply.body.get('why') or _WHY}"
                )
            await asyncio.sleep(delay_s)
            delay_s = min(_BACKOFF_MAX_S, delay_s * 2)

    async def reject(self, lease: Lease, cause: str, detail: str, num_tokens: int) -> None:
        """Report an episode without a trajectory; the batcher decides whether the sample is tried again. `num_tokens`
        is how long it was.
        """
        log.warning("episode %s of task %s: %s: %s", lease.lease_id, lease.item.get("task_id"), cause, detail)
        told = {"worker": self.name, "cause": cause, "detail": detail, "num_tokens": num_tokens}
        try:
            await self.call("reject", {"lease_id": lease.lease_id, **told})
        except RpcError as error:  # it no longer knows the lease: nothing is lost
            log.warning("batcher did not take the rejection of %s: %s", lease.lease_id, error)

    async def hand_back(self, lengths: Mapping[str, int], timeout_s: float) -> None:
        """Return leases (by id, with the tokens their episodes have so far) as ``aborted`` without insisting: the
        batcher's own lease time-out covers what is lost.
        """
        told = {"worker": self.name, "cause": "aborted", "detail": "the worker stops"}
        bodies = [{**told, "lease_id": lease_id, "num_tokens": n} for lease_id, n in lengths.items()]
        calls = [self._rpc.call("reject", body, timeout_s=timeout_s) for body in bodies]
        failed = [r for r in await asyncio.gather(*calls, return_exceptions=True) if isinstance(r, BaseException)]
        if failed:
            log.warning("%d of %d leases could not be handed back, first: %s", len(failed), len(bodies), failed[0])

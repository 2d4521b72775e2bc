"""A trainer rank's side of the batcher's protocol: typed calls, every wait bounded and named; no torch, no AReaL."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from areal_dta.channel import RpcClient
from areal_dta.records import Shard, unpack

__all__ = ["BatcherLink", "EvalProgress", "WaitTimeout"]

POLL_S = 5.0  # how long the batcher may hold a request that it cannot answer yet


class WaitTimeout(TimeoutError):
    """What was awaited did not come; the message names it, how long, and what the other side said last."""


@dataclass(frozen=True)
class EvalProgress:
    """State of an evaluation: ``rewards`` by task once episodes are done."""

    done: int
    total: int
    finished: bool
    mean_reward: float | None
    rewards: dict[str, list[float]]


class BatcherLink:
    """Calls are repeated by the channel while the batcher is away (restarting), at most ``timeout_s`` seconds."""

    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        self._client = RpcClient(address, name)
        self._name = name
        self._timeout_s = timeout_s

    def hello(self) -> tuple[int, int]:
        """Introduce this process; returns the batcher's (epoch, policy version)."""
        body = self._call("hello", {"name": self._name, "role": "trainer", "pid": os.getpid()})
        return int(body["epoch"]), int(body["version"])

    def next_shard(self, step: int, rank: int, world_size: int) -> Shard:
        """This data-parallel rank's rows of `step`; waits for the batch to fill. Raises WaitTimeout or RpcTimeout."""
        deadline = time.monotonic() + self._timeout_s
        said = "nothing"
        while (left_s := deadline - time.monotonic()) > 0:
            request = {"rank": rank, "world_size": world_size, "step": step, "wait_s": min(POLL_S, left_s)}
            reply = self._client.call("shard", request, timeout_s=left_s + POLL_S)
            body = dict(reply.body)
            status = body.pop("status", None)
            have, need, why = body.pop("have", "?"), body.pop("need", "?"), body.pop("why", "")
            if status == "ready":
                return unpack(Shard, body, dict(reply.arrays))
            said = f"{have} of {need} groups ready{f' ({why})' if why else ''}"
        raise WaitTimeout(
            f"waited {self._timeout_s:g} s for the batch of step {step}: {said}; "
            "see the workers' logs, or raise runtime.step_timeout_s"
        )

    def published(self, number: int, epoch: int) -> None:
        self._call("published", {"number": number, "epoch": epoch})

    def commit(self, step: int, checkpoint: str) -> None:
        self._call("commit", {"step": step, "checkpoint": checkpoint})

    def eval_start(self, tag: str, number: int) -> int:
        """Ask for greedy episodes over the evaluation set; returns their number."""
        return int(self._call("eval_start", {"tag": tag, "number": number})["total"])

    def eval_result(self, tag: str, wait_s: float) -> EvalProgress:
        body = self._call("eval_result", {"tag": tag, "wait_s": wait_s})
        mean = body.get("mean_reward")
        return EvalProgress(
            done=int(body["done"]),
            total=int(body["total"]),
            finished=bool(body["finished"]),
            mean_reward=None if mean is None else float(mean),
            rewards=dict(body.get("rewards") or {}),
        )

    def finish(self) -> None:
        self._call("finish", {})

    def close(self) -> None:
        self._client.close()

    def _call(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.call(kind, body, timeout_s=self._timeout_s).body

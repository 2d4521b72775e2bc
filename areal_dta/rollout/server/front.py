"""Between the handlers and the engine, on the event loop: admission, time-outs, and callers that go away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, Progress
from areal_dta.rollout.server.ticket import EngineDead, MemoryReleased, Ticket

__all__ = ["Front"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Sink = tuple[list[list[Progress]], asyncio.Event]


class Front:
    """``max_waiting`` requests may queue; an answer takes ``request_timeout_s`` at most."""

    def __init__(self, engine: Engine, request_timeout_s: float, max_waiting: int) -> None:
        self.engine = engine
        self.num_requests = 0
        self.num_refused = 0
        self._request_timeout_s = request_timeout_s
        self._max_waiting = max_waiting

    async def on_model_thread(self, future: Future[T], what: str) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._request_timeout_s)
        except TimeoutError as error:
            raise ApiError(f"{what} did not happen within {self._request_timeout_s} s", 504, "timeout") from error

    async def run_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate for all requests; if the caller goes away or time runs out, what still runs is aborted."""
        self._admit(len(requests))
        tickets: list[Ticket] = []
        cause = "client_gone"
        try:
            self._submit(requests, tickets, None)
            async with asyncio.timeout(self._request_timeout_s):
                done = await asyncio.gather(*(t.future for t in tickets))
        except TimeoutError as error:
            cause = "timeout"
            raise self._too_late() from error
        finally:
            self._abandon(tickets, cause)
        for completion in done:
            self._check(completion)
        return done

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Progress]]:
        """(index of the request, what it got since its last one) until all are done.

        A slow reader gets fewer, larger pieces. Closing the generator aborts what still runs.
        """
        self._admit(len(requests))
        tickets: list[Ticket] = []
        arrived = asyncio.Event()
        pieces: list[list[Progress]] = [[] for _ in requests]
        cause = "client_gone"
        deadline = time.monotonic() + self._request_timeout_s
        try:
            self._submit(requests, tickets, (pieces, arrived))
            num_open = len(requests)
            while num_open:
                # Not asyncio.timeout: that would also interrupt the reader between two pieces.
                await asyncio.wait_for(arrived.wait(), max(0.0, deadline - time.monotonic()))
                arrived.clear()
                for index, parts in enumerate(pieces):
                    if not parts:
                        continue
                    pieces[index] = []
                    new = tuple(t for p in parts for t in p.new)
                    merged = Progress(new, parts[-1].cached_tokens, parts[-1].done)
                    if merged.done is not None:
                        num_open -= 1
                        self._check(merged.done)
                    yield index, merged
        except TimeoutError as error:
            cause = "timeout"
            raise self._too_late() from error
        finally:
            self._abandon(tickets, cause)

    def _admit(self, count: int) -> None:
        waiting = self.engine.load()["num_waiting"]
        if waiting + count > self._max_waiting:
            self.num_refused += count
            raise ApiError(
                f"{waiting} requests are waiting already, at most {self._max_waiting}; retry later", 503, "busy"
            )
        self.num_requests += count

    def _submit(self, requests: Sequence[GenerationRequest], tickets: list[Ticket], sink: Sink | None) -> None:
        """Hand in one by one, so that ``tickets`` holds what is in when a later one is refused."""
        try:
            for index, request in enumerate(requests):
                if sink is None:
                    tickets.append(self.engine.submit(request))
                    continue

                def put(progress: Progress, index: int = index, sink: Sink = sink) -> None:
                    sink[0][index].append(progress)
                    sink[1].set()

                tickets.append(self.engine.submit(request, put))
        except EngineDead as error:
            raise ApiError(str(error), 503, "unavailable") from error
        except MemoryReleased as error:
            self.num_refused += len(requests)
            raise ApiError(str(error), 503, "memory_released") from error

    def _abandon(self, tickets: Sequence[Ticket], cause: str) -> None:
        """Abort what still runs: nobody waits for it any more."""
        left = [t for t in tickets if not t.future.done() or t.future.cancelled()]
        try:
            if left:
                self.engine.abandon(left, cause)
        except EngineDead:
            log.info("the engine stopped before %d abandoned requests could be aborted", len(left))

    def _too_late(self) -> ApiError:
        paused = " (generation is paused)" if self.engine.paused else ""
        released = " (the KV memory is released)" if self.engine.released else ""
        return ApiError(
            f"no answer within request_timeout_s={self._request_timeout_s}{paused}{released}", 504, "timeout"
        )

    def _check(self, completion: Completion) -> None:
        if completion.finish.kind == "error":
            status = 503 if self.engine.error is None else 500
            raise ApiError(completion.finish.message or "the server failed", status, "unavailable")

"""What a caller of the engine holds, and the two reasons why it may get nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from areal_dta.rollout.server.sequence import Completion, Progress, Sequence

__all__ = ["EngineDead", "MemoryReleased", "Stream", "Ticket"]


class EngineDead(RuntimeError):
    """The model thread has stopped (shutdown, or an error named in the message)."""


class MemoryReleased(RuntimeError):
    """The KV memory has been given back, and requests are refused meanwhile."""


@dataclass(frozen=True)
class Ticket:
    """A request handed in: its answer, and what to abort it by."""

    future: asyncio.Future[Completion]
    seq: Sequence


@dataclass(eq=False)
class Stream:
    """Where the progress of a request goes."""

    loop: asyncio.AbstractEventLoop
    put: Callable[[Progress], None]
    num_sent: int = 0

    def progress(self, seq: Sequence, done: Completion | None = None) -> Progress:
        new = tuple(seq.output[self.num_sent :])
        self.num_sent += len(new)
        return Progress(new, seq.cached_tokens, done)

"""Room on the disk: whether there is any for another trajectory, and making some."""

from __future__ import annotations

import asyncio
import logging
import time

from areal_dta.batcher import snapshot
from areal_dta.batcher.ledger import Event, Ledger
from areal_dta.batcher.spool import SNAPSHOT, Spool
from areal_dta.batcher.spool_commit import GroupCommit

__all__ = ["Room", "compact"]

log = logging.getLogger(__name__)


class Room:
    """`spool_bytes` bounds the log, `buffer_bytes` what is on its way there; a log that stays full for `patience_s`
    while a batch is waited for will not get smaller.
    """

    def __init__(
        self, spool: Spool, commit: GroupCommit, spool_bytes: int, buffer_bytes: int, patience_s: float
    ) -> None:
        self.spool_bytes = spool_bytes
        self._spool, self._commit, self._buffer_bytes, self._patience_s = spool, commit, buffer_bytes, patience_s
        self._full_since_s: float | None = None

    def missing(self) -> str:
        """Why no trajectory can be taken now, for the sender to try again; empty if one can."""
        if self._commit.full is not None:
            return "disk_full"
        if self._spool.buffered_bytes > self._buffer_bytes:
            return "disk_slow"
        if self._spool.size_bytes <= self.spool_bytes:
            self._full_since_s = None
            return ""
        if self._full_since_s is None:
            self._full_since_s = time.monotonic()
            log.error("%s", self._spool_full())
        return "spool_full"

    def hopeless(self) -> bool:
        """Whether the log has been full for so long that no checkpoint is going to let anything go."""
        since_s = self._full_since_s
        return self.missing() == "spool_full" and since_s is not None and time.monotonic() - since_s > self._patience_s

    def explain(self, why: str) -> str:
        """With what keeps trajectories out, if something does."""
        match self.missing():
            case "disk_full":
                return f"{why}; the disk of {self._spool.directory} is full: free space there"
            case "spool_full":
                return f"{why}; {self._spool_full()}"
        return why

    def _spool_full(self) -> str:
        return (
            f"{self._spool.directory} holds {self._spool.size_bytes} bytes, more than batcher.spool_bytes="
            f"{self.spool_bytes}: raise it, or save checkpoints more often"
        )


async def compact(ledger: Ledger, spool: Spool, commit: GroupCommit, spool_bytes: int) -> None:
    """Once most of the log is old: write the state and the arrays still needed anew, and delete the rest. All events
    must have been appended; nobody may read places of the log meanwhile.
    """
    held = ledger.held()
    live_bytes = sum(e.place.num_bytes for e in held.values() if e.place is not None)
    size_bytes = spool.size_bytes
    if size_bytes - live_bytes < max(live_bytes, spool.segment_bytes) and size_bytes <= spool_bytes:
        return
    state = Event(SNAPSHOT, snapshot.dump(ledger))
    commit.roll()  # with no pause since the dump, so that the state is what the log holds up to here
    await commit.durable()
    keep = {k: e.place for k, e in ledger.held().items() if k in held and e.place is not None}
    try:
        moved = await asyncio.to_thread(spool.compact, state, keep)
    except OSError as error:
        log.error("could not shorten the log: %s", error)
        return
    for key, place in moved.items():
        ledger.stored(key, place)
    log.info("shortened the log from %d to %d bytes", size_bytes, spool.size_bytes)

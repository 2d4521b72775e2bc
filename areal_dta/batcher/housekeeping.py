"""Room on the disk: whether there is any for another trajectory, and making some."""

from __future__ import annotations

import asyncio
import logging
import time

from areal_dta.batcher import snapshot
from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.ledger import Event, Ledger
from areal_dta.batcher.spool import SNAPSHOT, Spool
from areal_dta.batcher.spool_commit import GroupCommit

__all__ = ["Room", "compact", "tick"]

log = logging.getLogger(__name__)

_WORTH_PART = 4  # of the log must be old for it to be shortened between checkpoints
_OVERSLEPT_S = 1.0  # a process at work comes by more often


class Room:
    """`spool_bytes` bounds the log, `buffer_bytes` what is on its way there; a log that stays full for `patience_s`
    while a batch is waited for will not get smaller. `shortening` counts the jobs that are about to make it so.
    """

    def __init__(
        self, spool: Spool, commit: GroupCommit, spool_bytes: int, buffer_bytes: int, patience_s: float
    ) -> None:
        self.spool_bytes = spool_bytes
        self._spool, self._commit, self._buffer_bytes, self._patience_s = spool, commit, buffer_bytes, patience_s
        self._told_full = self._worth_shortening = False
        self._stuck: tuple[int, float] | None = None  # the step that waits, since when
        self.shortening = 0

    def missing(self) -> str:
        """Why no trajectory can be taken now, for the sender to try again; empty if one can."""
        if self._commit.full is not None:
            return "disk_full"
        if self._spool.buffered_bytes > self._buffer_bytes:
            return "disk_slow"
        if self._spool.size_bytes <= self.spool_bytes:
            self._told_full = False
            return ""
        if not self._told_full:
            self._told_full = self._worth_shortening = True
            log.error("%s", self._spool_full())
        return "spool_full"

    def worth_shortening(self, ledger: Ledger) -> bool:
        """Asked once whenever the log has become too large: what was dropped meanwhile needs no checkpoint to be let
        go, if it is enough to be worth the copy of the rest.
        """
        wish, self._worth_shortening = self.missing() == "spool_full" and self._worth_shortening, False
        least_bytes = max(self._spool.segment_bytes, self._spool.size_bytes // _WORTH_PART)
        return wish and self._spool.size_bytes - _live_bytes(ledger) >= least_bytes

    def hopeless(self, step: int) -> bool:
        """Whether the log has been full for so long, with the batch of `step` being asked for, that no checkpoint is
        going to let anything go. A rank may ask before another one has announced the checkpoint.
        """
        if self.missing() != "spool_full" or self.shortening:
            self._stuck = None
            return False
        if self._stuck is None or self._stuck[0] != step:
            self._stuck = (step, time.monotonic())
        return time.monotonic() - self._stuck[1] > self._patience_s

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


def tick(core: BatcherCore, room: Room, gap_s: float) -> None:
    """Expire what is over its time; `gap_s`: seconds since the last call. Time stands still for groups while nobody can
    deliver, and for leases too while the disk is full or while this process was stopped: who could not be heard or
    answered loses nothing by it.
    """
    cause = room.missing()
    deaf = cause == "disk_full" or gap_s > max(_OVERSLEPT_S, core.settings.lease_timeout_s / 4)
    if deaf or cause or core.crowded:
        core.desk.delay(gap_s, leases=deaf)
    core.desk.tick()


def _live_bytes(ledger: Ledger) -> int:
    """Of arrays that a resume from the last checkpoint could still train."""
    return sum(e.place.num_bytes for e in ledger.held().values() if e.place is not None)


async def compact(ledger: Ledger, spool: Spool, commit: GroupCommit, spool_bytes: int) -> None:
    """Once most of the log is old: write the state and the arrays still needed anew, and delete the rest. All events
    must have been appended; nobody may read places of the log meanwhile.
    """
    held = ledger.held()
    live_bytes, size_bytes = _live_bytes(ledger), spool.size_bytes
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

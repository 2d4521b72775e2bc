"""Writes the spool from an event loop: one fsync for all that gathered, in a worker thread."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from areal_dta.batcher.leases import Place
from areal_dta.batcher.ledger import Event, Key
from areal_dta.batcher.spool import Spool

__all__ = ["GroupCommit"]

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class GroupCommit:
    """`durable` returns when everything appended before is on disk; `on_stored` hears where tagged events lie.

    A full disk is waited out: nothing is lost, the same bytes are tried again every `retry_s` and `full` holds the
    error until they are written; who waits in `durable` waits on. Any other error of the disk is final (`failure`).
    """

    def __init__(
        self,
        spool: Spool,
        on_stored: Callable[[Key, Place], None] | None = None,
        window_s: float = 0.002,
        retry_s: float = 0.5,
    ) -> None:
        self._spool, self._on_stored, self._window_s, self._retry_s = spool, on_stored, window_s, retry_s
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self.full: OSError | None = None
        self.failure: OSError | None = None
        self._task = asyncio.create_task(self._run(), name="spool-writer")

    def append(self, event: Event, tag: Key | None = None) -> None:
        self._spool.append(event, tag)

    def roll(self) -> None:
        """As `Spool.roll`."""
        self._spool.roll()

    async def durable(self) -> None:
        """Return when everything appended so far is on disk; raises the OSError of a disk that failed for good."""
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._wake.set()
        await future

    async def _run(self) -> None:
        while not self._closing.is_set() or self._waiting:
            await self._wake.wait()
            if not self._closing.is_set():
                await asyncio.sleep(self._window_s)
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                await self._write()
            except OSError as error:
                log.critical("cannot write the spool in %s: %s", self._spool.directory, error)
                self.failure = error
                waiting, self._waiting = waiting + self._waiting, []
            for future in waiting:
                if future.done():  # its caller was cancelled
                    continue
                if self.failure:
                    future.set_exception(self.failure)
                else:
                    future.set_result(None)
            if self.failure:
                return

    async def _write(self) -> None:
        entries = self._spool.take()
        while entries:
            try:
                places, entries = await asyncio.to_thread(self._spool.write, entries)
            except OSError as error:
                if error.errno not in _FULL or self._closing.is_set():
                    raise
                await self._wait_for_space(error)
                continue
            if self.full is not None:
                self.full = None
                log.warning("the disk of %s has space again; trajectories are accepted", self._spool.directory)
            if self._on_stored is not None:
                for tag, place in places:
                    self._on_stored(tag, place)

    async def _wait_for_space(self, error: OSError) -> None:
        if self.full is None:
            log.error(
                "the disk of %s is full (%s): workers are told to wait and nothing is lost; free space there",
                self._spool.directory,
                error.strerror,
            )
        self.full = error
        try:
            await asyncio.wait_for(self._closing.wait(), self._retry_s)
        except TimeoutError:
            return

    async def close(self) -> None:
        """Write what is left and stop."""
        if self.failure is None:
            self._closing.set()
            self._wake.set()
            await self._task
        if self.failure is None:
            self._spool.close()

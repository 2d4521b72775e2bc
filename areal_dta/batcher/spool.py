"""The batcher's log on disk: append-only segments of length- and CRC-framed records, made durable in groups.

A segment is ``magic`` followed by records ``[u32 length][u32 crc32][payload]``; the payload is a msgpack list of the
frames that `areal_dta.wire` makes of (kind, body, arrays). Appends are buffered; `GroupCommit` writes and fsyncs
everything buffered every few milliseconds and wakes those who wait for it, so an answer given after `durable()` is on
disk.

After a crash the last segment may end in a torn record: replay truncates it and says so. Damage anywhere else is an
error. Records are never removed; once a checkpoint covers them, `strip` rewrites closed segments with the trajectories'
arrays left out (the accounting stays).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack

from areal_dta.batcher.ledger import Event
from areal_dta.wire import ChannelError, decode, encode

__all__ = ["GroupCommit", "Spool", "SpoolError"]

log = logging.getLogger(__name__)

MAGIC = b"DTASPL01"
_FRAME = struct.Struct("<II")


class SpoolError(OSError):
    """A log that cannot be used: damaged, locked by another process, or of another format."""


class Spool:
    """The segments of one directory, for one process at a time. Call `replay` to its end before the first `append`."""

    def __init__(self, directory: Path, segment_bytes: int = 64 << 20) -> None:
        self.directory, self._segment_bytes = directory, segment_bytes
        self.truncated_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._strip_lock = threading.Lock()
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise SpoolError(f"{directory} is in use by another batcher; stop it first") from error
        for leftover in directory.glob("*.tmp"):
            leftover.unlink()
        self._buffer: list[bytes] = []
        self._file: int | None = None
        self._current: Path | None = None
        self._bare: set[Path] = set()  # segments without any array left: nothing more to strip

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("*.log"))

    def replay(self) -> Iterator[Event]:
        """All events in order; truncates a torn tail. Raises SpoolError for damage before the tail."""
        paths = self.segments()
        for path in paths:
            yield from self._read(path, last=path == paths[-1])

    def _read(self, path: Path, last: bool) -> Iterator[Event]:
        data = path.read_bytes()
        at = len(MAGIC)
        if data[:at] != MAGIC:
            if not (last and (MAGIC.startswith(data) or not any(data))):
                raise SpoolError(f"{path} does not start with {MAGIC!r}; it is no spool segment of this version")
            self._truncate(path, 0, len(data))
            return
        while at < len(data):
            payload = _payload_at(data, at)
            if payload is None:
                if not last:
                    raise SpoolError(
                        f"{path} is damaged at byte {at}; restore the file from a copy, or start a new run"
                    )
                self._truncate(path, at, len(data) - at)
                return
            at += _FRAME.size + len(payload)
            yield _event(path, payload)

    def _truncate(self, path: Path, size: int, torn: int) -> None:
        log.warning("%s: dropped a torn tail of %d bytes at byte %d (it was never acknowledged)", path, torn, size)
        self.truncated_bytes += torn
        if size == 0:
            path.unlink()
        else:
            os.truncate(path, size)
        _sync_directory(self.directory)

    def append(self, event: Event) -> None:
        """Buffer an event; it is on disk after the next `flush`."""
        self._buffer.append(_record(event))

    def take(self) -> bytes:
        """What is buffered, for `write`; the buffer is empty afterwards."""
        data, self._buffer = b"".join(self._buffer), []
        return data

    def write(self, data: bytes) -> None:
        """Write and fsync; raises OSError (a full disk), after which the process must end and replay."""
        file = self._file if self._file is not None else self._open()
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
        if os.fstat(file).st_size >= self._segment_bytes:
            os.close(file)
            self._file = self._current = None

    def flush(self) -> None:
        """`write` all that is buffered."""
        if data := self.take():
            self.write(data)

    def _open(self) -> int:
        paths = self.segments()
        path = paths[-1] if paths else None
        fresh = path is None or path.stat().st_size >= self._segment_bytes
        if fresh or path is None:
            path = self.directory / f"{int(path.stem) + 1 if path else 1:08d}.log"
        self._file, self._current = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), path
        if fresh:
            os.write(self._file, MAGIC)
            os.fsync(self._file)
            _sync_directory(self.directory)
        return self._file

    def strip(self, reduce: Callable[[Event], Event | None]) -> int:
        """Rewrite closed segments with every event that `reduce` changes (None: keep it); returns the bytes saved.

        One at a time: a second caller waits, or two would write the same temporary file.
        """
        with self._strip_lock:
            return self._strip(reduce)

    def _strip(self, reduce: Callable[[Event], Event | None]) -> int:
        saved = 0
        for path in self.segments()[:-1]:
            if path == self._current or path in self._bare:
                continue
            events = list(self._read(path, last=False))
            reduced = [reduce(e) for e in events]
            if not any((r or e).arrays for e, r in zip(events, reduced, strict=True)):
                self._bare.add(path)
            if all(r is None for r in reduced):
                continue
            tmp = path.with_suffix(".tmp")
            with tmp.open("wb") as file:
                file.write(MAGIC)
                for event, smaller in zip(events, reduced, strict=True):
                    file.write(_record(smaller or event))
                file.flush()
                os.fsync(file.fileno())
            saved += path.stat().st_size - tmp.stat().st_size
            tmp.replace(path)
            _sync_directory(self.directory)
        return saved

    def close(self) -> None:
        """Flush and let the directory go."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.close()


class GroupCommit:
    """Writes a spool from an event loop: one fsync for all that gathered within `window_s`, in a worker thread."""

    def __init__(self, spool: Spool, window_s: float = 0.003) -> None:
        self._spool, self._window_s = spool, window_s
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self.failure: OSError | None = None
        self._task = asyncio.create_task(self._run(), name="spool-writer")

    def append(self, event: Event) -> None:
        self._spool.append(event)

    async def durable(self) -> None:
        """Return when everything appended so far is on disk; raises the OSError of a failed write."""
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._wake.set()
        await future

    async def _run(self) -> None:
        while not self._closing or self._waiting:
            await self._wake.wait()
            if not self._closing:
                await asyncio.sleep(self._window_s)
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            data = self._spool.take()
            try:
                if data:
                    await asyncio.to_thread(self._spool.write, data)
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

    async def close(self) -> None:
        """Write what is left and stop."""
        if self.failure is None:
            self._closing = True
            self._wake.set()
            await self._task
            self._spool.close()


def _record(event: Event) -> bytes:
    payload = msgpack.packb([bytes(f) for f in encode("", event.kind, event.body, event.arrays)])
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _payload_at(data: bytes, at: int) -> bytes | None:
    """The payload of the record at this offset, or None if it is torn or damaged."""
    if at + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, at)
    payload = data[at + _FRAME.size : at + _FRAME.size + length]
    if length == 0 or len(payload) != length or zlib.crc32(payload) != crc:
        return None
    return payload


def _event(path: Path, payload: bytes) -> Event:
    try:
        _, kind, body, arrays = decode(msgpack.unpackb(payload))
    except (ValueError, ChannelError) as error:
        raise SpoolError(f"{path} holds a record that cannot be read: {error}") from error
    return Event(kind, body, arrays)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

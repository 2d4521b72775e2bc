"""The batcher's log on disk: append-only segments, replayed after a restart, rewritten when most of it is old.

Appends are buffered; `write` puts them on disk with one fsync per chunk and says where each went, so that the arrays of
an episode can stay there until they are needed (`areal_dta.batcher.spool_format.read_at`).

After a crash the last segment may end in a torn record: replay truncates it and says so. Damage anywhere else is an
error. `compact` replaces all closed segments by one that begins with a snapshot of the state and holds the arrays
that may still be needed; it becomes valid with one rename, and what came before it is then deleted (again at the next
replay, if a kill came in between).
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from areal_dta.batcher.leases import Place
from areal_dta.batcher.ledger import Event, Key
from areal_dta.batcher.spool_format import (
    HEAD,
    MAGIC,
    Buffer,
    Framed,
    SpoolError,
    frame,
    framed,
    parse,
    payload_at,
    payload_of,
    read_at,
)

__all__ = ["Entry", "Spool", "SpoolError", "Stored"]

log = logging.getLogger(__name__)

SNAPSHOT = "snapshot"  # kind of the event that stands for everything before it
HELD = "held"  # kind of the events that follow a snapshot: arrays of an episode it names
_IOV_MAX = 512
_PEEK_BYTES = 64 << 10


@dataclass(frozen=True)
class Entry:
    """A buffered append; ``tag`` comes back with its place. Without payload: close the segment here."""

    payload: tuple[Buffer, ...]
    num_bytes: int
    tag: Key | None = None


@dataclass(frozen=True)
class Stored:
    """An event of the log and where it lies."""

    event: Event
    place: Place


Placed = tuple[Key, Place]


class Spool:
    """The segments of one directory, for one process at a time. Call `replay` to its end before the first `write`."""

    def __init__(self, directory: Path, segment_bytes: int = 64 << 20) -> None:
        self.directory, self.segment_bytes = directory, segment_bytes
        self.truncated_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise SpoolError(f"{directory} is in use by another batcher; stop it first") from error
        for leftover in directory.glob("*.tmp"):
            leftover.unlink()
        self._buffer: list[Entry] = []
        self._appended_bytes = self._written_bytes = 0  # the first is the caller's, the second the writing thread's
        self._file: int | None = None
        self._path: Path | None = None
        self._end = 0  # of the open segment
        self._closed_bytes = sum(p.stat().st_size for p in self.segments())
        self.barrier = 0  # number of the last segment that ended at a `roll`

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("*.log"))

    @property
    def size_bytes(self) -> int:
        """Bytes on disk and about to be there."""
        return self._closed_bytes + self._end + self.buffered_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait to be written, in memory."""
        return self._appended_bytes - self._written_bytes

    # -- reading

    def replay(self) -> Iterator[Stored]:
        """All events in order, from the last snapshot on; truncates a torn tail. Raises SpoolError for damage before
        the tail.
        """
        paths = self.segments()
        begin = max((i for i, path in enumerate(paths) if _starts_with_snapshot(path)), default=0)
        for path in paths[:begin]:
            self._closed_bytes -= path.stat().st_size
            path.unlink()
        for path in paths[begin:]:
            yield from self._read(path, last=path == paths[-1])

    def _read(self, path: Path, last: bool) -> Iterator[Stored]:
        data = path.read_bytes()
        at = len(MAGIC)
        if data[:at] != MAGIC:
            if not (last and (MAGIC.startswith(data) or not any(data))):
                raise SpoolError(f"{path} does not start with {MAGIC!r}; it is no spool segment of this version")
            self._truncate(path, 0, len(data))
            return
        while at < len(data):
            payload = payload_at(data, at)
            if payload is None:
                if not last:
                    raise SpoolError(
                        f"{path} is damaged at byte {at}; restore the file from a copy, or start a new run"
                    )
                self._truncate(path, at, len(data) - at)
                return
            num_bytes = HEAD.size + len(payload)
            yield Stored(parse(path, payload), Place(path.name, at, num_bytes))
            at += num_bytes

    def _truncate(self, path: Path, size: int, torn: int) -> None:
        log.warning("%s: dropped a torn tail of %d bytes at byte %d (it was never acknowledged)", path, torn, size)
        self.truncated_bytes += torn
        self._closed_bytes -= torn
        if size == 0:
            path.unlink()
        else:
            os.truncate(path, size)
        _sync_directory(self.directory)

    # -- writing

    def append(self, event: Event, tag: Key | None = None) -> None:
        """Buffer an event; it is on disk after the next `flush`, and `write` then gives `tag` with its place."""
        payload = tuple(payload_of(event))
        self._add(Entry(payload, sum(map(len, payload)) + HEAD.size, tag))

    def roll(self) -> None:
        """End the segment behind everything appended so far; `barrier` is its number once that is on disk."""
        self._add(Entry((), 0))

    def _add(self, entry: Entry) -> None:
        self._buffer.append(entry)
        self._appended_bytes += entry.num_bytes

    def take(self) -> list[Entry]:
        """What is buffered, for `write`; the buffer is empty afterwards."""
        entries, self._buffer = self._buffer, []
        return entries

    def write(self, entries: Sequence[Entry]) -> tuple[list[Placed], list[Entry]]:
        """Write and fsync up to the next end of a segment: (places of the tagged entries, entries still to write).

        Raises OSError (a full disk) with nothing of these entries on disk: the same call may be made again.
        """
        cut = next((i for i, entry in enumerate(entries) if not entry.payload), len(entries))
        chunk = entries[:cut]
        places = self._write_chunk(chunk) if chunk else []
        self._written_bytes += sum(entry.num_bytes for entry in chunk)
        if cut < len(entries):
            self._close_segment()
            self.barrier = int(self.segments()[-1].stem) if self.segments() else 0
        elif self._end >= self.segment_bytes:
            self._close_segment()
        return places, list(entries[cut + 1 :])

    def _write_chunk(self, chunk: Sequence[Entry]) -> list[Placed]:
        file, name = self._open()
        base = at = self._end
        places: list[Placed] = []
        buffers: list[Buffer] = []
        try:
            for entry in chunk:
                record = frame(entry.payload)
                if entry.tag is not None:
                    places.append((entry.tag, Place(name, at, record.num_bytes)))
                at += record.num_bytes
                buffers += record.buffers
            _write_all(file, buffers)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, base)  # a torn record in the middle of a segment could not be told from damage
            os.lseek(file, base, os.SEEK_SET)
            raise
        self._end = at
        return places

    def flush(self) -> list[Placed]:
        """`write` all that is buffered."""
        places: list[Placed] = []
        entries = self.take()
        while entries:
            placed, entries = self.write(entries)
            places += placed
        return places

    def _open(self) -> tuple[int, str]:
        if self._file is None or self._path is None:
            paths = self.segments()
            path = paths[-1] if paths else None
            size = path.stat().st_size if path else 0
            if path is None or size >= self.segment_bytes or int(path.stem) <= self.barrier:
                path, size = self.directory / f"{int(path.stem) + 1 if path else 1:08d}.log", 0
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                if size < len(MAGIC):
                    os.ftruncate(file, 0)
                    os.write(file, MAGIC)
                    os.fsync(file)
                    _sync_directory(self.directory)
                    self._closed_bytes -= size
                    size = len(MAGIC)
                else:
                    self._closed_bytes -= size
            except OSError:
                os.close(file)
                raise
            os.lseek(file, size, os.SEEK_SET)
            self._file, self._path, self._end = file, path, size
        return self._file, self._path.name

    def _close_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._closed_bytes += self._end
            self._file, self._path, self._end = None, None, 0

    # -- compaction

    def compact(self, snapshot: Event, keep: Mapping[Key, Place]) -> dict[Key, Place]:
        """Replace the segments up to `barrier` by one with this snapshot and the arrays at these places; returns where
        they lie now. Nobody may read the old places meanwhile or afterwards. Places behind the barrier stay.
        """
        old = [path for path in self.segments() if int(path.stem) <= self.barrier]
        if not old:
            return {}
        target, names = old[-1], {path.name for path in old}
        tmp = target.with_suffix(".tmp")
        moved: dict[Key, Place] = {}
        try:
            with tmp.open("wb") as file:
                file.write(MAGIC)
                at = len(MAGIC) + _write_record(file, framed(snapshot))
                for tag, place in keep.items():
                    if place.segment in names:
                        event = read_at(self.directory, place)
                        num_bytes = _write_record(file, framed(Event(HELD, event.body, event.arrays)))
                        moved[tag] = Place(target.name, at, num_bytes)
                        at += num_bytes
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            tmp.unlink(missing_ok=True)
            raise
        before = sum(path.stat().st_size for path in old)
        tmp.replace(target)
        _sync_directory(self.directory)
        for path in old[:-1]:
            path.unlink()
        self._closed_bytes += at - before
        return moved

    def close(self) -> None:
        """Flush and let the directory go."""
        self.flush()
        self._close_segment()
        self._lock.close()


def _starts_with_snapshot(path: Path) -> bool:
    """Whether the first record is a whole snapshot (a torn one would have no name yet)."""
    with path.open("rb") as file:
        start = file.read(_PEEK_BYTES)
        if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + HEAD.size:
            return False
        if SNAPSHOT.encode() not in start:
            return False
        length, _ = HEAD.unpack_from(start, len(MAGIC))
        file.seek(len(MAGIC))
        payload = payload_at(file.read(HEAD.size + length), 0)
    return payload is not None and parse(path, payload).kind == SNAPSHOT


def _write_record(file: BinaryIO, record: Framed) -> int:
    for piece in record.buffers:
        file.write(piece)
    return record.num_bytes


def _write_all(file: int, buffers: Sequence[Buffer]) -> None:
    for first in range(0, len(buffers), _IOV_MAX):
        part = list(buffers[first : first + _IOV_MAX])
        while part:
            written = os.writev(file, part)
            while part and written >= len(part[0]):
                written -= len(part.pop(0))
            if part and written:
                part[0] = memoryview(part[0])[written:]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

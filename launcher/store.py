"""The run store: one ZeroMQ PULL socket that every process pushes its records to; it appends them to `metrics.jsonl`.

Runs on a thread of the launcher. Records that do not parse are counted, not stored.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import zmq

from areal_dta.metrics import MetricError, MetricRecord
from launcher.rundir import RunError

__all__ = ["MetricsStore"]

POLL_MS = 100  # how long `close` may go unnoticed
BACKLOG_RECORDS = 20_000  # kept for `drain`; the file keeps all
Key = tuple[str, str]


class MetricsStore:
    """Owns the metrics file of a running launch. ``bad_records`` counts messages that were no records; ``failure`` says
    why nothing can be stored any more.

    Raises RunError when the address cannot be bound.
    """

    def __init__(self, address: str, path: Path) -> None:
        self.bad_records = 0
        self.failure: str | None = None
        self._last: dict[Key, MetricRecord] = {}
        self._fresh: deque[MetricRecord] = deque(maxlen=BACKLOG_RECORDS)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RunError(f"metrics address {address} cannot be bound: {error}; start the run again") from error
        self._file = path.open("a", encoding="utf-8")
        if _ends_torn(path):  # the launcher was killed inside a line
            self._file.write("\n")
        self._thread = threading.Thread(target=self._serve, name="metrics-store", daemon=True)
        self._thread.start()

    def append(self, record: MetricRecord) -> None:
        """Store a record of the launcher's own."""
        with self._lock:
            self._write([record])

    def drain(self) -> list[MetricRecord]:
        """Records that arrived since the last call."""
        with self._lock:
            fresh = list(self._fresh)
            self._fresh.clear()
        return fresh

    def last(self, proc: str, name: str) -> MetricRecord | None:
        """The latest record of a process under a name."""
        with self._lock:
            return self._last.get((proc, name))

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what has arrived, then close file and socket."""
        self._closing.set()
        self._thread.join(timeout_s)
        with self._lock:
            if not self._file.closed:
                self._file.close()
        if not self._thread.is_alive():
            self._socket.close()
            self._context.term()

    def _serve(self) -> None:
        while True:
            ready = self._socket.poll(POLL_MS)
            if not ready:
                if self._closing.is_set():
                    return
                continue
            records = self._receive_all()
            with self._lock:
                if self._file.closed:
                    return
                try:
                    self._write(records)
                except OSError as error:
                    self.failure = (
                        f"{self._file.name} cannot be written: {error.strerror}; free space and resume the run"
                    )
                    return

    def _receive_all(self, limit: int = 1000) -> list[MetricRecord]:
        records: list[MetricRecord] = []
        for _ in range(limit):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                records.append(MetricRecord.from_wire(_decode(frame)))
            except (MetricError, ValueError, msgpack.exceptions.UnpackException):
                self.bad_records += 1
        return records

    def _write(self, records: list[MetricRecord]) -> None:
        self._file.write("".join(json.dumps(r.to_wire()) + "\n" for r in records))
        self._file.flush()
        for record in records:
            self._last[(record.proc, record.name)] = record
        self._fresh.extend(records)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _decode(frame: bytes) -> Any:
    return msgpack.unpackb(frame, raw=False)

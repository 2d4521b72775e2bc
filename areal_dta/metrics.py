"""What every process says about itself: values, spans and events, pushed to the run store and read back from its file.

A record travels as one msgpack map per ZeroMQ message (PUSH to the run store's PULL) and rests as one JSON line of
``metrics.jsonl``. Telling must never hold up the work told about: a publisher does not block, drops records when its
queue is full, and reports how many it dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import msgpack
import zmq

__all__ = [
    "KINDS",
    "MetricError",
    "MetricRecord",
    "MetricsTail",
    "NullPublisher",
    "Publisher",
    "init",
    "last_by_label",
    "last_value",
    "read_metrics",
    "series",
]

KINDS = ("value", "span", "event")
DROPPED = "metrics/dropped"
QUEUE_RECORDS = 10_000  # about 2 MB: minutes of metrics while the run store is away
EXIT_LINGER_S = 1.0  # bound on what an unclosed publisher may delay the exit of its process

Label = str | int | float | bool | None


class MetricError(ValueError):
    """A record that is not of the metric format."""


@dataclass(frozen=True)
class MetricRecord:
    """One observation. ``t`` is unix seconds; the value of a span is its length in seconds; an event has no value.

    A value that is not finite is stored as None with the text ("nan", "inf") in ``message``: JSON has no word for it.
    """

    t: float
    proc: str
    kind: str
    name: str
    value: float | None = None
    step: int | None = None
    labels: dict[str, Label] = field(default_factory=dict)
    message: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The map that is sent and stored; ``message`` only where there is one."""
        wire: dict[str, Any] = {
            "t": self.t,
            "proc": self.proc,
            "kind": self.kind,
            "name": self.name,
            "value": self.value,
            "step": self.step,
            "labels": self.labels,
        }
        if self.message:
            wire["message"] = self.message
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> MetricRecord:
        """Inverse of `to_wire`; raises MetricError naming the field that is wrong."""
        if not isinstance(wire, Mapping):
            raise MetricError(f"a metric record is a map, got {type(wire).__name__}")
        t, value, step, labels = wire.get("t"), wire.get("value"), wire.get("step"), wire.get("labels") or {}
        if t is None or not _is_number(t):
            raise MetricError(f"metric field 't' is {t!r}, expected unix seconds")
        for key in ("proc", "name"):
            if not isinstance(wire.get(key), str) or not wire[key]:
                raise MetricError(f"metric field {key!r} is {wire.get(key)!r}, expected text")
        if wire.get("kind") not in KINDS:
            raise MetricError(f"metric field 'kind' is {wire.get('kind')!r}, expected one of {', '.join(KINDS)}")
        if value is not None and not _is_number(value):
            raise MetricError(f"metric field 'value' of {wire['name']} is {value!r}, expected a number or null")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
            raise MetricError(f"metric field 'step' of {wire['name']} is {step!r}, expected an integer or null")
        if not isinstance(labels, Mapping):
            raise MetricError(f"metric field 'labels' of {wire['name']} is {labels!r}, expected a map")
        message = wire.get("message")
        return cls(
            t=float(t),
            proc=wire["proc"],
            kind=wire["kind"],
            name=wire["name"],
            value=None if value is None or not math.isfinite(value) else float(value),
            step=step,
            labels=dict(labels),
            message=None if message is None else str(message),
        )


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


class Publisher:
    """Sends the records of one process; safe from any thread; never blocks, never raises for a full queue."""

    def __init__(self, process_name: str, address: str, clock: Callable[[], float] = time.time) -> None:
        self.process_name = process_name
        self._clock = clock
        self._lock = threading.Lock()
        self._dropped = 0
        self._reported = 0
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        self._socket: zmq.Socket[bytes] | None = socket
        # Also when the owner forgets `close`, and in this order: a context collected before its socket waits for ever.
        self._shut = weakref.finalize(self, _shut, socket, context)
        socket.setsockopt(zmq.LINGER, int(EXIT_LINGER_S * 1000))
        socket.setsockopt(zmq.SNDHWM, QUEUE_RECORDS)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._shut()
            raise MetricError(f"cannot publish metrics to {address!r}: {error}; expected tcp://HOST:PORT") from error

    @property
    def dropped(self) -> int:
        """Records given up so far, because the queue was full or the publisher already closed."""
        return self._dropped

    def emit(self, name: str, /, value: SupportsFloat, step: int | None = None, **labels: Any) -> None:
        """Publish a value (anything that `float` takes: a number, a numpy scalar, a one-element tensor)."""
        self._publish("value", name, value, step, labels)

    def event(self, name: str, /, message: str = "", step: int | None = None, **fields: Any) -> None:
        """Publish that something happened; ``fields`` become the record's labels."""
        self._publish("event", name, None, step, fields, message)

    @contextlib.contextmanager
    def span(self, name: str, /, step: int | None = None, **labels: Any) -> Iterator[None]:
        """Time the body and publish its seconds, with label ``failed`` when it raised."""
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._publish("span", name, time.perf_counter() - start, step, {**labels, "failed": True})
            raise
        self._publish("span", name, time.perf_counter() - start, step, labels)

    def close(self, timeout_s: float = 2.0) -> None:
        """Hand over what is queued within ``timeout_s`` seconds; what is emitted afterwards counts as dropped."""
        with self._lock:
            socket, self._socket = self._socket, None
            if socket is None:
                return
            self._report_drops(socket)
            socket.setsockopt(zmq.LINGER, max(0, int(timeout_s * 1000)))
        self._shut()

    def _publish(
        self,
        kind: str,
        name: str,
        value: SupportsFloat | None,
        step: int | None,
        labels: Mapping[str, Any],
        message: str = "",
    ) -> None:
        number = None if value is None else float(value)
        if number is not None and not math.isfinite(number):
            number, message = None, message or str(number)
        plain = {key: _plain_label(label) for key, label in labels.items()}
        step = None if step is None else int(step)
        self._send(MetricRecord(self._clock(), self.process_name, kind, name, number, step, plain, message or None))

    def _send(self, record: MetricRecord) -> None:
        with self._lock:
            if self._socket is None:
                self._dropped += 1
                return
            self._report_drops(self._socket)
            if not _try_send(self._socket, record):
                self._dropped += 1

    def _report_drops(self, socket: zmq.Socket[bytes]) -> None:
        """Publish the drop count (cumulative) once the queue has room again."""
        count = self._dropped
        if count == self._reported:
            return
        if _try_send(socket, MetricRecord(self._clock(), self.process_name, "value", DROPPED, float(count))):
            self._reported = count


class NullPublisher(Publisher):
    """A publisher that tells nobody: for processes and tests that run without a run store."""

    def __init__(self, process_name: str = "", clock: Callable[[], float] = time.time) -> None:
        self.process_name = process_name
        self._clock = clock
        self._dropped = 0

    def close(self, timeout_s: float = 2.0) -> None:
        """Nothing is queued, so there is nothing to wait for."""

    def _send(self, record: MetricRecord) -> None:
        return


def init(process_name: str, address: str | None) -> Publisher:
    """The publisher of process ``process_name`` ("trainer.0"); without an address (run store) a `NullPublisher`."""
    return NullPublisher(process_name) if address is None else Publisher(process_name, address)


def _shut(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Flush and release; bounded by the socket's linger."""
    socket.close()
    context.term()


def _try_send(socket: zmq.Socket[bytes], record: MetricRecord) -> bool:
    try:
        socket.send(msgpack.packb(record.to_wire()), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _plain_label(value: Any) -> Label:
    """Labels are plain scalars on the wire; numpy scalars are unwrapped, everything else becomes its text."""
    if value is None or isinstance(value, str | int | float | bool):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    item = getattr(value, "item", None)
    return _plain_label(item()) if callable(item) and getattr(value, "size", 0) == 1 else str(value)


class MetricsTail:
    """Reads a growing ``metrics.jsonl`` piece by piece.

    A line counts once its newline is there, so a half-written last line is read on a later call. A complete line
    that is no record (a writer was killed inside it) is skipped and counted in ``bad_lines``. A file that shrank is
    read anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self._offset = 0

    def read_new(self) -> list[MetricRecord]:
        """Records completed since the last call, in file order; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return list(self._parse(data[:end]))

    def _parse(self, data: bytes) -> Iterator[MetricRecord]:
        for line in data.splitlines():
            if not line.strip():
                continue
            try:
                yield MetricRecord.from_wire(json.loads(line))
            except ValueError:  # not JSON, not UTF-8, or MetricError
                self.bad_lines += 1


def read_metrics(path: Path) -> list[MetricRecord]:
    """Every record of a metrics file in file order; an absent file has none, torn lines are skipped."""
    return MetricsTail(path).read_new()


def series(records: Iterable[MetricRecord], name: str, proc: str | None = None, **labels: Label) -> dict[int, float]:
    """Value by step of ``name``, ascending; the last record of a step wins (a resumed run trains steps again)."""
    chosen = _select(records, name, proc, labels)
    found = {r.step: r.value for r in chosen if r.step is not None and r.value is not None}
    return dict(sorted(found.items()))


def last_value(records: Iterable[MetricRecord], name: str, proc: str | None = None, **labels: Label) -> float | None:
    """The latest value of ``name`` in file order, or None if it was never published."""
    value = None
    for record in _select(records, name, proc, labels):
        value = value if record.value is None else record.value
    return value


def last_by_label(records: Iterable[MetricRecord], name: str, label: str) -> dict[str, float]:
    """The latest value of ``name`` for each value of ``label``; records without the label are left out."""
    found: dict[str, float] = {}
    for record in _select(records, name, None, {}):
        if label in record.labels and record.value is not None:
            found[str(record.labels[label])] = record.value
    return found


def _select(
    records: Iterable[MetricRecord], name: str, proc: str | None, labels: Mapping[str, Label]
) -> Iterator[MetricRecord]:
    for record in records:
        if record.name != name or (proc is not None and record.proc != proc):
            continue
        if all(record.labels.get(key) == value for key, value in labels.items()):
            yield record

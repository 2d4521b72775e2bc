"""Who is idle, who trains, who leads: the coordinator's decisions as a pure state machine over reports and a clock.

A server is BUSY or IDLE by its own word; it counts as TRAINING while its worker is in the round. What nobody has said
recently is not believed: a silent server counts as busy, a silent worker as gone. Every decision follows from the
latest reports alone, so a coordinator that is started again finds its way back from the next ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

__all__ = [
    "Assignment",
    "Fleet",
    "Plan",
    "ReportError",
    "Rules",
    "ServerReport",
    "ServerState",
    "WorkerReport",
    "WorkerState",
    "pack",
    "read_server",
    "read_worker",
    "unpack",
]

MAX_MESSAGE_BYTES = 1 << 16
LEADER_WAIT_S = 0.5


class ReportError(ValueError):
    """A message between coordinator, servers and workers that cannot be understood."""


class ServerState(StrEnum):
    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"  # idle, and its worker is in the round


class WorkerState(StrEnum):
    READY = "ready"
    TRAINING = "training"


@dataclass(frozen=True)
class ServerReport:
    """``sent_s``: monotonic clock of the sender when its state last changed; processes of one machine share it."""

    name: str
    busy: bool
    num_running: int
    num_waiting: int
    sent_s: float


@dataclass(frozen=True)
class WorkerReport:
    """``server``: whose idle time the worker uses; ``address``: where it can be reached as a leader."""

    name: str
    server: str
    state: str
    step: int
    num_samples: int
    address: str
    round_id: str = ""
    leader: str = ""


@dataclass(frozen=True)
class Assignment:
    """What a worker should do: train in ``round_id`` under ``leader``, or rest (empty round) for ``reason``.

    ``busy_s`` is the clock at which the server said it had work, from which preemption is timed; 0 otherwise.
    """

    round_id: str = ""
    leader: str = ""
    leader_address: str = ""
    members: tuple[str, ...] = ()
    reason: str = ""
    busy_s: float = 0.0

    @property
    def train(self) -> bool:
        return bool(self.round_id)

    def to_wire(self) -> dict[str, Any]:
        return {
            "round_id": self.round_id,
            "leader": self.leader,
            "leader_address": self.leader_address,
            "members": list(self.members),
            "reason": self.reason,
            "busy_s": self.busy_s,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Assignment:
        try:
            return cls(
                str(wire["round_id"]),
                str(wire["leader"]),
                str(wire["leader_address"]),
                tuple(str(m) for m in wire["members"]),
                str(wire["reason"]),
                float(wire["busy_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"assignment {wire!r:.200} is malformed: {error!r}") from error


@dataclass(frozen=True)
class Rules:
    """A round starts when ``min_idle`` servers have been idle for ``idle_s``; reports older than the time-outs are not
    believed."""

    min_idle: int = 1
    idle_s: float = 2.0
    server_timeout_s: float = 2.0
    worker_timeout_s: float = 1.5
    max_members: int = 64
    release_retry_s: float = 2.0


@dataclass(frozen=True)
class Plan:
    """Servers whose KV memory should be released now, and who trains under whom."""

    release: tuple[str, ...]
    round_id: str
    leader: str
    members: tuple[str, ...]


@dataclass
class _Server:
    report: ServerReport
    heard_s: float
    idle_since_s: float | None
    released: bool = False
    releasing: bool = False
    retry_s: float = 0.0


@dataclass
class _Worker:
    report: WorkerReport
    heard_s: float


class Fleet:
    """Reports in, `plan` out. Times are passed in, nothing is awaited, nothing is sent."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._servers: dict[str, _Server] = {}
        self._workers: dict[str, _Worker] = {}
        self._members: tuple[str, ...] = ()
        self._leader = ""
        self._round_id = ""
        self._started_s: float | None = None

    def hear_server(self, report: ServerReport, now_s: float) -> None:
        known = self._servers.get(report.name)
        if known is None:
            self._servers[report.name] = _Server(report, now_s, None if report.busy else now_s)
            return
        if now_s - known.heard_s > self.rules.server_timeout_s:
            known.idle_since_s, known.released = None, False  # it may have been another process since
        known.report, known.heard_s = report, now_s
        if report.busy:
            known.idle_since_s, known.released = None, False  # work makes it take its memory again
        elif known.idle_since_s is None:
            known.idle_since_s = now_s

    def hear_worker(self, report: WorkerReport, now_s: float) -> None:
        self._workers[report.name] = _Worker(report, now_s)
        self._started_s = now_s if self._started_s is None else self._started_s
        if report.state == WorkerState.TRAINING and report.round_id and report.name not in self._members:
            self._adopt(report, now_s)

    def _adopt(self, report: WorkerReport, now_s: float) -> None:
        """A worker found training belongs to the round of before this coordinator's start; its server is idle still."""
        assert self._started_s is not None
        other_round = bool(self._members) and report.round_id != self._round_id
        if other_round or now_s - self._started_s > self.rules.server_timeout_s:
            return
        server = self._servers.get(report.server)
        if server is None or not self._idle(server, now_s):
            return
        server.released = True
        if not self._members:
            self._round_id, self._leader = report.round_id, report.leader
        self._members = tuple(sorted({*self._members, report.name}))

    def release_started(self, name: str) -> None:
        self._servers[name].releasing = True

    def release_ended(self, name: str, ok: bool, now_s: float) -> None:
        """The server gave its memory back, or refused; then it is asked again after a while."""
        server = self._servers.get(name)
        if server is None:
            return
        server.releasing = False
        server.released = ok and server.idle_since_s is not None
        if not ok:
            server.retry_s = now_s + self.rules.release_retry_s

    def _idle(self, server: _Server, now_s: float) -> bool:
        return server.idle_since_s is not None and now_s - server.heard_s <= self.rules.server_timeout_s

    def _alive(self, worker: _Worker, now_s: float) -> bool:
        return now_s - worker.heard_s <= self.rules.worker_timeout_s

    def server_states(self, now_s: float) -> dict[str, ServerState]:
        """Every known server's state; for what cannot be known, BUSY."""
        training = {self._workers[m].report.server for m in self._members}
        return {
            name: ServerState.BUSY
            if not self._idle(server, now_s)
            else (ServerState.TRAINING if name in training else ServerState.IDLE)
            for name, server in self._servers.items()
        }

    def plan(self, now_s: float) -> Plan:
        """Who trains from now on; also forgets those who left."""
        rules = self.rules
        able = {
            name: self._servers[worker.report.server]
            for name, worker in self._workers.items()
            if self._alive(worker, now_s)
            and worker.report.num_samples > 0
            and worker.report.server in self._servers
            and self._idle(self._servers[worker.report.server], now_s)
        }
        members = [m for m in self._members if m in able]
        rested = [s for s in self._servers.values() if self._idle(s, now_s) and _idle_s(s, now_s) >= rules.idle_s]
        release: list[str] = []
        if members or len(rested) >= rules.min_idle:
            for name, server in sorted(able.items()):
                if name in members or _idle_s(server, now_s) < rules.idle_s or len(members) >= rules.max_members:
                    continue
                if server.released:
                    members.append(name)
                elif not server.releasing and now_s >= server.retry_s:
                    release.append(server.report.name)
        self._change(tuple(sorted(members)), now_s)
        return Plan(tuple(release), self._round_id, self._leader, self._members)

    def _change(self, members: tuple[str, ...], now_s: float) -> None:
        if members and not self._members:
            self._round_id, self._leader = uuid.uuid4().hex[:12], ""
        if not members:
            self._round_id = self._leader = ""
        elif self._leader not in members and not self._expected(self._leader, now_s):
            # The furthest state wins; the name breaks ties, so that two coordinators would choose alike.
            self._leader = min(members, key=lambda m: (-self._workers[m].report.step, m))
        self._members = members

    def _expected(self, leader: str, now_s: float) -> bool:
        """Just started, a coordinator gives the leader it was told of the time to report, too."""
        start_s = self._started_s or 0.0
        return bool(leader) and leader not in self._workers and now_s - start_s < LEADER_WAIT_S

    def assignment(self, name: str, now_s: float) -> Assignment | None:
        """What worker ``name`` should do, None while its server has not been heard of (then nothing is said)."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        server = self._servers.get(worker.report.server)
        if server is None:
            return None
        if name in self._members and self._leader not in self._workers:
            return None
        if name in self._members:
            address = self._workers[self._leader].report.address
            return Assignment(self._round_id, self._leader, address, self._members)
        if self._idle(server, now_s):
            return Assignment(reason="waiting for enough idle servers")
        busy_s = server.report.sent_s if server.report.busy else 0.0
        return Assignment(reason="work arrived" if busy_s else "the server is silent", busy_s=busy_s)


def _idle_s(server: _Server, now_s: float) -> float:
    return -1.0 if server.idle_since_s is None else now_s - server.idle_since_s


def pack(kind: str, body: Mapping[str, Any]) -> bytes:
    """One message; the body holds plain values."""
    return bytes(msgpack.packb({"kind": kind, **body}))


def unpack(frame: bytes) -> tuple[str, dict[str, Any]]:
    """Inverse of `pack`; raises ReportError for anything else."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ReportError(f"a message of {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        body = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ReportError(f"not msgpack: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise ReportError(f"message {body!r:.120} is no map with a kind")
    return body.pop("kind"), body


def read_server(body: Mapping[str, Any]) -> ServerReport:
    """The report in a message; raises ReportError."""
    try:
        return ServerReport(
            _name(body["name"]),
            bool(body["busy"]),
            int(body["num_running"]),
            int(body["num_waiting"]),
            float(body["sent_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"server report {body!r:.200} is malformed: {error!r}") from error


def read_worker(body: Mapping[str, Any]) -> WorkerReport:
    """The report in a message; raises ReportError."""
    try:
        return WorkerReport(
            _name(body["name"]),
            _name(body["server"]),
            str(WorkerState(body["state"])),
            int(body["step"]),
            int(body["num_samples"]),
            str(body["address"]),
            str(body.get("round_id", "")),
            str(body.get("leader", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"worker report {body!r:.200} is malformed: {error!r}") from error


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 100:
        raise ValueError(f"name {value!r:.120} must be a text of 1 to 100 characters")
    return value

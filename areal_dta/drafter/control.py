"""The worker's line to the coordinator: a thread that says what the worker does and holds what it should do.

An assignment is a lease: every report is answered, and without an answer for ``lease_s`` the worker rests. So it never
competes with a server for longer than that, even when the coordinator is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

import zmq

from areal_dta.drafter.reporter import HEARTBEAT_S, connect_dealer
from areal_dta.drafter.states import Assignment, ReportError, WorkerState, pack, unpack

__all__ = ["ControlLink"]

log = logging.getLogger(__name__)
POLL_S = 0.02
HALTED = Assignment(reason="the process ends")
SILENT = Assignment(reason="the coordinator is silent")


@dataclass(frozen=True)
class _Status:
    state: str = WorkerState.READY
    step: int = 0
    num_samples: int = 0
    round_id: str = ""
    leader: str = ""


class ControlLink:
    """Connects to the coordinator at ``address`` for worker ``name``, which uses the idle time of ``server``."""

    def __init__(self, address: str, name: str, server: str, hub_address: str, lease_s: float = 1.0) -> None:
        self.name = name
        self._identity = {"name": name, "server": server, "address": hub_address}
        self._lease_s = lease_s
        self._status = _Status()
        self._dirty = True
        self._assignment, self._heard_s = SILENT, -1e9
        self._changed = threading.Event()
        self._stopping = False
        self.halted = False
        self._socket = connect_dealer(address)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def current(self) -> Assignment:
        """What to do now; cheap, for calling between micro-steps."""
        if self.halted:
            return HALTED
        if time.monotonic() - self._heard_s > self._lease_s:
            return SILENT
        return self._assignment

    def left(self, assignment: Assignment) -> bool:
        """Whether ``assignment`` is over: another round, another leader, or rest."""
        current = self.current()
        return (current.round_id, current.leader) != (assignment.round_id, assignment.leader)

    def wait(self, timeout_s: float) -> Assignment:
        """`current` after a change of assignment, or after ``timeout_s``."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        return self.current()

    def halt(self) -> None:
        """From now on there is nothing to do but to end; safe in signal handlers."""
        self.halted = True

    def report(
        self,
        state: WorkerState | None = None,
        step: int | None = None,
        num_samples: int | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        """What the worker does; a change is sent within `POLL_S`. ``assignment``: whose round it takes part in."""
        status = self._status
        if state is not None:
            status = replace(status, state=state)
        if step is not None:
            status = replace(status, step=step)
        if num_samples is not None:
            status = replace(status, num_samples=num_samples)
        if assignment is not None:
            status = replace(status, round_id=assignment.round_id, leader=assignment.leader)
        before, self._status = self._status, status
        if status.state != before.state or bool(status.num_samples) != bool(before.num_samples):
            self._dirty = True  # after the status: the thread may send at once

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread; raises TimeoutError when it does not end in time."""
        self._stopping = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the control thread of {self.name} did not end within {timeout_s:g} s")

    def _run(self) -> None:
        next_s = 0.0
        while not self._stopping:
            now_s = time.monotonic()
            if self._dirty or now_s >= next_s:
                self._dirty, next_s = False, now_s + HEARTBEAT_S
                self._send()
            if self._socket.poll(int(POLL_S * 1000), zmq.POLLIN):
                self._receive()
        self._socket.close(0)

    def _send(self) -> None:
        status = self._status
        body = {
            **self._identity,
            "state": str(status.state),
            "step": status.step,
            "num_samples": status.num_samples,
            "round_id": status.round_id,
            "leader": status.leader,
        }
        try:
            self._socket.send(pack("worker", body), zmq.NOBLOCK)
        except zmq.Again:
            self._dirty = True  # nobody is there; again at the next poll

    def _receive(self) -> None:
        try:
            kind, body = unpack(self._socket.recv(zmq.NOBLOCK))
            if kind != "assignment":
                raise ReportError(f"the coordinator sent a {kind!r:.40}")
            assignment = Assignment.from_wire(body)
        except ReportError as error:
            log.warning("%s", error)
            return
        self._heard_s = time.monotonic()
        if assignment != self._assignment:
            self._assignment = assignment
            self._changed.set()

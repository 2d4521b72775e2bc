"""How a rollout server says whether it has work: a thread of its own, so that telling costs the model thread nothing.

The model thread writes three attributes and, when busy turns to idle or back, sets an event; the thread does the rest.
Whether anybody listens is never noticed by the server.
"""

from __future__ import annotations

import threading
import time

import zmq

from areal_dta.drafter.states import pack

__all__ = ["ServerReporter", "connect_dealer"]

HEARTBEAT_S = 0.2
STALE_MESSAGES = 4  # more are not kept for a coordinator that does not read: old states help nobody


class ServerReporter:
    """Reports to the coordinator at ``address`` every 0.2 s, and at once when `update` changes busy to idle or back."""

    def __init__(self, address: str, name: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._name, self._heartbeat_s = name, heartbeat_s
        self._load = (0, 0)
        self._busy = False
        self._changed_s = time.monotonic()
        self._wake = threading.Event()
        self._stopping = False
        self.num_unsent = 0  # heartbeats that found no coordinator
        self._socket = connect_dealer(address)
        self._thread = threading.Thread(target=self._run, name="server-reporter", daemon=True)
        self._thread.start()

    def update(self, num_running: int, num_waiting: int) -> None:
        """What the server does now; called between steps, costs about a microsecond, never blocks."""
        self._load = (num_running, num_waiting)
        busy = bool(num_running or num_waiting)
        if busy != self._busy:
            self._busy, self._changed_s = busy, time.monotonic()
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread; raises TimeoutError when it does not end in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the reporter thread of {self._name} did not end within {timeout_s:g} s")

    def _run(self) -> None:
        while not self._stopping:
            self._send()
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()
        self._socket.close(0)

    def _send(self) -> None:
        running, waiting = self._load
        body = {
            "name": self._name,
            "busy": self._busy,
            "num_running": running,
            "num_waiting": waiting,
            "sent_s": self._changed_s,
        }
        try:
            self._socket.send(pack("server", body), zmq.NOBLOCK)
        except zmq.Again:
            self.num_unsent += 1


def connect_dealer(address: str) -> zmq.Socket[bytes]:
    """A DEALER that reconnects quickly, keeps little for a peer that is away, and never delays an exit."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, STALE_MESSAGES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 400)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ValueError(f"cannot connect to {address!r}: {error}; expected tcp://HOST:PORT") from error
    return socket

"""Request and reply between processes over ZeroMQ: a ROUTER server, DEALER clients, msgpack headers and raw array
frames.

The format of a message is in `areal_dta.wire`; a malformed one is counted and answered with an error, never fatal.

Delivery is at-least-once on the wire and at-most-once concurrently in the handler: a client re-sends a request with
*the same id* until it is answered, so a lost connection or a server killed with ``kill -9`` costs one re-send. The
server runs an id that is already in flight only once and keeps a small cache of replies for ids that come again. After
a server restart both are gone, so handlers must be idempotent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.asyncio import Socket as AsyncSocket

from areal_dta.channel_server import PING, RpcFailure, RpcServer
from areal_dta.wire import MAX_FRAME_BYTES, ChannelError, Reply, Request, decode, encode

__all__ = [
    "AsyncRpcClient",
    "ChannelError",
    "Reply",
    "Request",
    "RpcClient",
    "RpcError",
    "RpcFailure",
    "RpcServer",
    "RpcTimeout",
]

log = logging.getLogger(__name__)

_RESEND_FIRST_S = 1.0
_RESEND_MAX_S = 4.0
_NO_PEER_RETRY_S = 0.05


class RpcError(RuntimeError):
    """The server answered with an error; ``kind`` is its code (e.g. ``unknown_kind``, ``internal``), ``message`` its
    text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class RpcTimeout(TimeoutError):
    """No answer in time; the text names what was awaited, from where, for how long, and whether anyone was
    listening.
    """


class _Pending:
    """Bookkeeping of one call: when to send (again), how to describe a time-out. No I/O."""

    def __init__(self, where: str, kind: str, timeout_s: float) -> None:
        self.where, self.kind, self.timeout_s = where, kind, timeout_s
        now = time.monotonic()
        self.deadline, self.next_send, self.interval_s = now + timeout_s, now, _RESEND_FIRST_S
        self.sends = 0

    def sent(self, delivered: bool) -> None:
        now = time.monotonic()
        if not delivered:
            self.next_send = now + _NO_PEER_RETRY_S
            return
        self.sends += 1
        self.next_send = now + self.interval_s
        self.interval_s = min(_RESEND_MAX_S, self.interval_s * 2)

    def wait_s(self) -> float:
        """Seconds to the next send; raises RpcTimeout when the call's time is over."""
        now = time.monotonic()
        if now >= self.deadline:
            heard = f"sent {self.sends} times" if self.sends else "nobody accepted a connection there"
            raise RpcTimeout(f"no answer to {self.kind!r} from {self.where} within {self.timeout_s:g} s ({heard})")
        return max(0.0, min(self.next_send, self.deadline) - now)


class _Ids:
    def __init__(self, name: str) -> None:
        if not name or "/" in name:
            raise ValueError(f"client name {name!r} must be non-empty and without '/'")
        self._prefix, self._count = f"{name}/{uuid.uuid4().hex[:12]}/", itertools.count()

    def next(self) -> str:
        return f"{self._prefix}{next(self._count)}"


def _connect(socket: zmq.Socket[bytes] | AsyncSocket, address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue only to a live connection, so a dead server is noticed, not written to
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ChannelError(f"cannot connect to {address!r}: {error}; expected tcp://HOST:PORT") from error


def _reply(kind: str, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> Reply:
    if kind == "ok":
        return Reply(body, arrays)
    raise RpcError(str(body.get("code", "malformed")), str(body.get("message", f"reply of kind {kind!r}")))


class RpcClient:
    """Blocking client, for use from one thread at a time.

    `address` is ``tcp://HOST:PORT``; `name` is what the server's handlers see as ``client``. With `connect_timeout_s`
    the constructor waits for the server to answer and raises RpcTimeout if it does not; without it nothing is awaited
    here.
    """

    def __init__(self, address: str, name: str, connect_timeout_s: float | None = None) -> None:
        self.address, self._ids = address, _Ids(name)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _connect(self._socket, address)
        if connect_timeout_s is not None:
            self.call(PING, timeout_s=connect_timeout_s)

    def call(
        self,
        kind: str,
        body: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        timeout_s: float,
    ) -> Reply:
        """Send one request and wait for its reply; raises RpcTimeout, RpcError (the server refused) or ChannelError."""
        message_id = self._ids.next()
        frames = encode(message_id, kind, body or {}, arrays or {})
        pending = _Pending(self.address, kind, timeout_s)
        while True:
            wait_s = pending.wait_s()
            if wait_s <= 0:
                pending.sent(self._send(frames))
                continue
            if self._socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN):
                got_id, got_kind, got_body, got_arrays = decode(self._socket.recv_multipart())
                if got_id == message_id:  # anything else answers an earlier call that was given up
                    return _reply(got_kind, got_body, got_arrays)

    def _send(self, frames: list[bytes | memoryview]) -> bool:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(0)

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncRpcClient:
    """`RpcClient` for asyncio: many calls may be in flight at once, on one event loop. Created inside a running
    loop.
    """

    def __init__(self, address: str, name: str) -> None:
        self.address, self._ids = address, _Ids(name)
        self._socket = AsyncContext.instance().socket(zmq.DEALER)
        _connect(self._socket, address)
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(
        self,
        kind: str,
        body: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        timeout_s: float,
    ) -> Reply:
        """As `RpcClient.call`."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"rpc-reader {self.address}")
        message_id = self._ids.next()
        frames = encode(message_id, kind, body or {}, arrays or {})
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = future
        pending = _Pending(self.address, kind, timeout_s)
        try:
            while not future.done():
                wait_s = pending.wait_s()
                if wait_s <= 0:
                    pending.sent(await self._send(frames))
                else:
                    await asyncio.wait([future], timeout=wait_s)
            return future.result()
        finally:
            del self._waiting[message_id]
            if future.done() and not future.cancelled():
                future.exception()  # retrieved, even when the caller was cancelled in between

    async def _send(self, frames: list[bytes | memoryview]) -> bool:
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def _read(self) -> None:
        while True:
            try:
                message_id, kind, body, arrays = decode(await self._socket.recv_multipart())
            except ChannelError as error:
                log.warning("dropped a malformed reply from %s: %s", self.address, error)
                continue
            future = self._waiting.get(message_id)
            if future is None or future.done():
                continue
            try:
                future.set_result(_reply(kind, body, arrays))
            except RpcError as error:
                future.set_exception(error)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(0)

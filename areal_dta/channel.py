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
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.asyncio import Socket as AsyncSocket

from areal_dta.wire import MAX_FRAME_BYTES, ChannelError, decode, decode_header, encode

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

_PING = "_ping"
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


class RpcFailure(Exception):
    """Raised by a handler to answer with an error of its own choice; the client sees RpcError(code, message)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Request:
    """What a handler gets. Arrays are read-only views of the received frames; ``client`` is the caller's name."""

    kind: str
    body: dict[str, Any]
    arrays: dict[str, np.ndarray]
    client: str


@dataclass(frozen=True)
class Reply:
    """What a handler returns and a client receives. Received arrays are read-only."""

    body: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Reply]]


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
            self.call(_PING, timeout_s=connect_timeout_s)

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


class RpcServer:
    """ROUTER side: one task per request, `handlers` by kind.

    `address` may end in ``:0`` for a free port; after `start` the attribute holds the bound address. `counters` counts
    ``malformed``, ``resent``, ``replayed`` (answered from the cache), ``failed`` and ``overloaded`` messages.
    """

    def __init__(
        self,
        address: str,
        handlers: Mapping[str, Handler],
        *,
        max_in_flight: int = 4096,
        cache_bytes: int = 32 << 20,
        cache_entries: int = 1024,
    ) -> None:
        self.address = address
        self.counters: Counter[str] = Counter()
        self._handlers = {**handlers, _PING: _answer_ping}
        self._max_in_flight = max_in_flight
        self._cache = _ReplyCache(cache_bytes, cache_entries)
        self._in_flight: dict[str, bytes] = {}  # request id -> routing id that last asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: AsyncSocket | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and serve; raises OSError when the address is taken or is no address."""
        socket = AsyncContext.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(
                error.errno, f"cannot listen on {self.address}: {error.strerror}; choose another port"
            ) from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = socket
        self._loop_task = asyncio.create_task(self._serve(socket), name=f"rpc-server {self.address}")

    async def stop(self) -> None:
        """Stop serving; requests in flight are cancelled (their clients re-send to whoever binds next)."""
        tasks = [*self._tasks, *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _serve(self, socket: AsyncSocket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            try:
                message_id, kind, body, arrays = decode(frames)
            except ChannelError as error:
                self.counters["malformed"] += 1
                log.warning("malformed message: %s", error)
                await self._send(peer, _error_frames(_id_of(frames), "malformed", str(error)))
                continue
            cached = self._cache.get(message_id)
            if cached is not None:
                self.counters["replayed"] += 1
                await self._send(peer, cached)
            elif message_id in self._in_flight:
                self.counters["resent"] += 1
                self._in_flight[message_id] = peer
            elif len(self._in_flight) >= self._max_in_flight:
                self.counters["overloaded"] += 1
                text = f"{len(self._in_flight)} requests are in flight, the limit is {self._max_in_flight}; retry later"
                await self._send(peer, _error_frames(message_id, "overloaded", text))
            else:
                self._in_flight[message_id] = peer
                request = Request(kind, body, arrays, message_id.partition("/")[0])
                task = asyncio.create_task(self._run(message_id, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, message_id: str, request: Request) -> None:
        try:
            frames = await self._answer(message_id, request)
        finally:
            peer = self._in_flight.pop(message_id)
        self._cache.put(message_id, frames)
        await self._send(peer, frames)

    async def _answer(self, message_id: str, request: Request) -> list[bytes | memoryview]:
        handler = self._handlers.get(request.kind)
        if handler is None:
            known = ", ".join(sorted(k for k in self._handlers if k != _PING))
            return _error_frames(message_id, "unknown_kind", f"no request {request.kind!r:.80} here; known: {known}")
        try:
            reply = await handler(request)
            return encode(message_id, "ok", reply.body, reply.arrays)
        except RpcFailure as failure:
            self.counters["failed"] += 1
            return _error_frames(message_id, failure.code, failure.message)
        except Exception as error:  # the boundary of foreign code: reported to log and caller, the server lives on
            self.counters["failed"] += 1
            log.exception("handler of %r failed for %s", request.kind, request.client)
            return _error_frames(message_id, "internal", f"{type(error).__name__}: {error}")

    async def _send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> None:
        if self._socket is None:
            return
        try:
            await self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK)
        except zmq.Again:  # the peer's queue is full: it will re-send and hit the cache
            self.counters["unsent"] += 1


class _ReplyCache:
    """The latest replies by request id, bounded in count and bytes; replies above an eighth of the budget are not
    kept.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[str, tuple[int, list[bytes | memoryview]]] = OrderedDict()
        self._bytes = 0

    def get(self, message_id: str) -> list[bytes | memoryview] | None:
        entry = self._entries.get(message_id)
        return entry[1] if entry else None

    def put(self, message_id: str, frames: list[bytes | memoryview]) -> None:
        size = sum(len(f) for f in frames)
        if size > self._max_bytes // 8:
            return
        self._entries[message_id] = (size, frames)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._entries) > self._max_entries:
            self._bytes -= self._entries.popitem(last=False)[1][0]


async def _answer_ping(request: Request) -> Reply:
    return Reply()


def _error_frames(message_id: str, code: str, message: str) -> list[bytes | memoryview]:
    return encode(message_id, "error", {"code": code, "message": message}, {})


def _id_of(frames: Sequence[bytes]) -> str:
    """The request id of a message that failed to decode, if at least its header is readable; else empty."""
    try:
        return str(decode_header(frames)["id"])
    except ChannelError:
        return ""

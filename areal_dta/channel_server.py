"""The ROUTER side of `areal_dta.channel`: one task per request, replies cached for ids that come again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.asyncio import Socket as AsyncSocket

from areal_dta.wire import MAX_FRAME_BYTES, ChannelError, Reply, Request, decode, decode_header, encode

__all__ = ["PING", "Handler", "RpcFailure", "RpcServer"]

log = logging.getLogger(__name__)

PING = "_ping"  # answered by every server
Handler = Callable[[Request], Awaitable[Reply]]


class RpcFailure(Exception):
    """Raised by a handler to answer with an error of its own choice; the client sees RpcError(code, message)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


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
        self._handlers = {**handlers, PING: _answer_ping}
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
            known = ", ".join(sorted(k for k in self._handlers if k != PING))
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
            # Not copied: what waits for a peer that does not read refers to the arrays, however often it asked.
            await self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=False)
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

"""One attempt at one server: the whole answer, or its events passed on as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time

import aiohttp
from aiohttp import web

from areal_dta.rollout.router_pool import INSTANCE_HEADER, Server, ServerFailed
from areal_dta.rollout.server.errors import ApiError

__all__ = ["Relay"]

log = logging.getLogger(__name__)


class Relay:
    """``stream`` is the answer under way once its first event has come: from then on no other server can take over."""

    def __init__(self, session: aiohttp.ClientSession, server: Server, request: web.Request, raw: bytes) -> None:
        self._session = session
        self._server = server
        self._request = request
        self._raw = raw
        self.stream: web.StreamResponse | None = None

    async def run(self, deadline: float) -> web.StreamResponse:
        """The answer; raises ServerFailed once the pool declares the server lost, TimeoutError at ``deadline``."""
        attempt = asyncio.ensure_future(self._send())
        lost = asyncio.ensure_future(self._server.lost.wait())
        try:
            done, _ = await asyncio.wait(
                {attempt, lost}, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
            if attempt in done:
                return attempt.result()
            if lost in done:
                raise ServerFailed(f"went out: {self._server.reason}")
            raise TimeoutError
        finally:
            attempt.cancel()
            lost.cancel()

    async def _send(self) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"} if self._raw else {}
        instance = self._server.instance
        async with self._session.request(
            self._request.method, self._server.url + self._request.path, data=self._raw or None, headers=headers
        ) as r:
            streamed = r.status == 200 and r.content_type == "text/event-stream"
            body = await (r.content.readany() if streamed else r.read())
            if r.headers.get(INSTANCE_HEADER) != instance:
                raise ServerFailed("answered after a restart, with weights the router has not set")
            if not streamed:
                kind = r.headers.get("Content-Type", "application/json")
                return web.Response(body=body, status=r.status, headers={"Content-Type": kind})
            self.stream = web.StreamResponse(headers={"Cache-Control": "no-cache"})
            self.stream.content_type = "text/event-stream"
            await self.stream.prepare(self._request)
            try:
                await self._pass_on(self.stream, r.content, body)
            except ConnectionResetError:
                log.info("%s: the caller of a stream hung up", self._request.path)
        return self.stream

    async def _pass_on(self, stream: web.StreamResponse, content: aiohttp.StreamReader, first: bytes) -> None:
        """Whole events only, so that an error event can follow at any time. Raises ConnectionResetError when the caller
        is gone, ServerFailed when the server is."""
        pending, body = b"", first
        while body:
            pending += body
            end = pending.rfind(b"\n\n") + 2
            if end > 1:
                await stream.write(pending[:end])
                pending = pending[end:]
            try:
                body = await content.readany()
            except aiohttp.ClientError as error:
                raise ServerFailed(f"the connection broke: {error!r}") from error
        await stream.write_eof()

    async def break_off(self, error: ApiError) -> web.StreamResponse:
        """End the stream with ``error`` as its last event."""
        assert self.stream is not None
        with contextlib.suppress(ConnectionResetError):  # the caller has gone too
            await self.stream.write(b"data: " + json.dumps(error.to_json()).encode() + b"\n\ndata: [DONE]\n\n")
            await self.stream.write_eof()
        return self.stream

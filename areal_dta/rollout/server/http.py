"""What every HTTP process here shares: the API key, JSON errors, reading a body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_dta.rollout.server.errors import ApiError

__all__ = ["OPEN_PATHS", "event_stream", "guard", "json_response", "read_json"]

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HEADERS = "response_headers"  # of the request: what a streamed answer must carry, which begins before the handler ends
OPEN_PATHS = frozenset({"/health"})


def json_response(body: Any, status: int = 200) -> web.Response:
    """NaN and infinities are not JSON: a body that holds one raises ValueError (and so becomes a 500)."""
    return web.Response(text=json.dumps(body, allow_nan=False), status=status, content_type="application/json")


def guard(api_key: str | None, headers: dict[str, str] | None = None) -> Any:
    """Middleware: checks the key, turns every error into JSON, adds ``headers`` to each answer."""
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    def refuse(error: ApiError) -> web.Response:
        return json_response(error.to_json(), error.status)

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                return refuse(ApiError("missing or wrong API key; send Authorization: Bearer KEY", 401, "unauthorized"))
        try:
            return await handler(request)
        except ApiError as error:
            return refuse(error)
        except web.HTTPRequestEntityTooLarge as error:
            return refuse(ApiError(f"{error.text}; split the request or raise max_body_bytes", 413, "too_large"))
        except web.HTTPException as error:
            return refuse(ApiError(f"{request.method} {request.path}: {error.reason}", error.status, "http"))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug: the caller must get an answer, the log the trace
            log.exception("%s %s failed", request.method, request.path)
            return refuse(ApiError(f"internal error: {error!r}", 500, "internal"))

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_HEADERS] = headers or {}
        response = await answer(request, handler)
        if headers and not response.prepared:
            response.headers.update(headers)
        return response

    return middleware


async def event_stream(request: web.Request, events: AsyncGenerator[Any]) -> web.StreamResponse:
    """Answer with server-sent events, ``data: JSON`` each, closed by ``data: [DONE]``.

    What fails before the first event is an ordinary refusal; later failures are an event with ``error``. A caller that
    hangs up closes ``events`` at once.
    """
    response = web.StreamResponse(headers={**request[_HEADERS], "Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    async with contextlib.aclosing(events):
        first = await anext(events)
        await response.prepare(request)
        try:
            await response.write(_event(first))
            async for event in events:
                await response.write(_event(event))
        except ApiError as error:
            await response.write(_event(error.to_json()))
        except ConnectionResetError:
            log.info("%s %s: the caller hung up", request.method, request.path)
            return response
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, allow_nan=False).encode() + b"\n\n"


async def read_json(request: web.Request, allow_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object; ApiError 400 for anything else."""
    raw = await request.read()
    if not raw and allow_empty:
        return {}
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")

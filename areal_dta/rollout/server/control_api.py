"""Endpoints that steer the server: pause, abort, flush, and giving memory back."""

from __future__ import annotations

from aiohttp import web

from areal_dta.rollout.server.engine import PAUSE_MODES
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.http import json_response, read_json

__all__ = ["WHILE_RELEASED", "ControlApi"]

WHILE_RELEASED = ("wait", "refuse", "resume")


class ControlApi:
    """``while_released``: what requests do while the KV memory is given back, where the caller does not say."""

    def __init__(self, front: Front, while_released: str) -> None:
        self._front = front
        self._engine = front.engine
        self._while_released = while_released

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/pause_generation", self.pause)
        router.add_post("/continue_generation", self.resume)
        router.add_post("/abort_request", self.abort)
        router.add_post("/flush_cache", self.flush)
        router.add_get("/flush_cache", self.flush)
        router.add_post("/release_memory_occupation", self.release_memory)
        router.add_post("/resume_memory_occupation", self.resume_memory)

    async def pause(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("mode",), {}, "body")
        mode = body.get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise ApiError(f"mode {mode!r:.60} is none of {', '.join(PAUSE_MODES)}")
        count = await self._front.on_model_thread(self._engine.pause(mode), "the pause")
        return json_response({"status": "ok", "message": f"Generation paused ({mode}).", "num_paused_requests": count})

    async def resume(self, request: web.Request) -> web.Response:
        await self._front.on_model_thread(self._engine.resume(), "the continuation")
        return json_response({"status": "ok", "message": "Generation continued."})

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("rid", "abort_all"), {"abort_message": (None, "")}, "body")
        rid, abort_all = body.get("rid") or None, bool(body.get("abort_all"))
        if not abort_all and not isinstance(rid, str):
            raise ApiError("send rid (a string) or abort_all=true")
        count = await self._front.on_model_thread(self._engine.abort(None if abort_all else rid), "the abort")
        return json_response({"success": True, "num_aborted": count})

    async def flush(self, request: web.Request) -> web.Response:
        if not await self._front.on_model_thread(self._engine.flush(), "the flush"):
            raise ApiError("requests are running or waiting; abort them or flush later", 400, "busy")
        return json_response({"success": True, "message": "Cache flushed."})

    async def release_memory(self, request: web.Request) -> web.Response:
        """The KV cache only: without weights the server could not say what it serves."""
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("tags", "requests"), {}, "body")
        self._check_tags(body.get("tags"))
        meanwhile = body.get("requests") or self._while_released
        if meanwhile not in WHILE_RELEASED:
            raise ApiError(f"requests={meanwhile!r:.60} is none of {', '.join(WHILE_RELEASED)}")
        freed = await self._front.on_model_thread(self._engine.release_memory(meanwhile), "the release")
        if freed is None:
            raise ApiError("requests are running; abort them, or pause with mode=retract first", 400, "busy")
        return json_response({"success": True, "bytes_released": freed, "requests": meanwhile})

    async def resume_memory(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("tags",), {}, "body")
        self._check_tags(body.get("tags"))
        taken = await self._front.on_model_thread(self._engine.resume_memory(), "taking the memory again")
        return json_response({"success": True, "bytes_taken": taken})

    def _check_tags(self, tags: object) -> None:
        if tags is not None and tags != ["kv_cache"]:
            raise ApiError(f"tags={tags!r:.60}: this server releases the KV cache only; send tags=['kv_cache'] or none")

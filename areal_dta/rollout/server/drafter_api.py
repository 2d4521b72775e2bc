"""Endpoint that changes the drafter. Target updates never touch it, and nothing here touches the target."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.http import json_response, read_json
from areal_dta.rollout.server.spec_control import SpecControl

__all__ = ["DrafterApi"]

log = logging.getLogger(__name__)
DRAFTER_REFUSALS = (OSError, ValueError)  # DrafterMismatch is a ValueError


class DrafterApi:
    """A drafter that is torn, of another model or of another version than announced is refused; the old one stays."""

    def __init__(self, front: Front, control: SpecControl | None) -> None:
        self._front = front
        self._control = control
        self._lock = asyncio.Lock()
        self.num_failed = 0  # updates that were not taken

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/update_drafter_from_disk", self.from_disk)

    async def from_disk(self, request: web.Request) -> web.Response:
        """``{model_path, drafter_version?, digest?}``: read and check on a helper thread, swap between two steps."""
        body = await read_json(request)
        check_fields(body, ("model_path", "drafter_version", "digest"), {}, "body")
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise ApiError(f"model_path must be a folder, got {path!r:.80}")
        expected = {key: body.get(key) for key in ("drafter_version", "digest")}
        for key, value in expected.items():
            if value is not None and not isinstance(value, str):
                raise ApiError(f"{key} must be a string, got {value!r:.60}")
        control = self._control
        if control is None:
            raise ApiError("speculation is off on this server; start it with --speculation auto", 400, "off")
        async with self._lock:
            try:
                update = await asyncio.to_thread(
                    control.read, Path(path), expected["drafter_version"], expected["digest"]
                )
                installed = self._front.engine.call(lambda: control.install(update))
                await self._front.on_model_thread(installed, "the drafter swap")
            except MemoryError as error:
                self.num_failed += 1
                log.warning("decoding goes on without drafter %s: %s", path, error)
                return json_response({"success": False, "message": str(error)}, 400)
            except DRAFTER_REFUSALS as error:
                self.num_failed += 1
                log.warning("drafter %s refused: %s", path, error)
                message = f"refused, drafter {control.drafter_version or 'none'} stays: {error}"
                return json_response({"success": False, "message": message}, 400)
        return json_response({"success": True, "message": "Drafter updated.", "drafter_version": update.version})

"""The HTTP face of the engine: SGLang's endpoints. Runs on the event loop; the model runs on its own thread."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from areal_dta.metrics import Publisher
from areal_dta.nn import WeightsMismatch
from areal_dta.rollout.server.chat_api import ChatApi
from areal_dta.rollout.server.engine import PAUSE_MODES, Engine, EngineDead
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.http import guard, json_response, read_json
from areal_dta.rollout.server.protocol import Limits, check_fields, completion_json, parse_generate
from areal_dta.rollout.server.sequence import Completion, GenerationRequest
from areal_dta.rollout.server.tokenizer import TextCodec
from areal_dta.weights import TornWeights

__all__ = ["ServerApi"]

log = logging.getLogger(__name__)
T = TypeVar("T")
HEALTH_TIMEOUT_S = 20.0
_SERIAL_FIELDS = ("model_path", "weight_version", "abort_all_requests", "flush_cache")
_UPDATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "load_format": (None, "auto", "safetensors"),
    "is_async": (None, False),
    "keep_pause": (None, True, False),
    "recapture_cuda_graph": (None, False),
    "token_step": (None, 0),
}


class ServerApi:
    """Handlers and the application. ``model_name`` is what ``/v1/models`` and chat answers call the model."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec | None,
        limits: Limits,
        model_path: Path,
        publisher: Publisher,
        api_key: str | None = None,
        request_timeout_s: float = 3600.0,
        max_body_bytes: int = 64 << 20,
        max_waiting: int = 8192,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._limits = limits
        self._model_path = model_path
        self._publisher = publisher
        self._request_timeout_s = request_timeout_s
        self._max_waiting = max_waiting
        self._update_lock = asyncio.Lock()
        self.instance = uuid.uuid4().hex  # a restarted server is another instance, which the router must notice
        chat = ChatApi(codec, limits, model_path.name, self.run_all)
        self.app = web.Application(
            client_max_size=max_body_bytes, middlewares=[guard(api_key, {"X-Server-Instance": self.instance})]
        )
        post, get = self.app.router.add_post, self.app.router.add_get
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        for path in ("/get_server_info", "/server_info"):
            get(path, self.server_info)
        for path in ("/get_model_info", "/model_info"):
            get(path, self.model_info)
        get("/v1/models", chat.models)
        post("/v1/chat/completions", chat.complete)
        post("/generate", self.generate)
        post("/pause_generation", self.pause)
        post("/continue_generation", self.resume)
        post("/abort_request", self.abort)
        post("/flush_cache", self.flush)
        get("/flush_cache", self.flush)
        post("/update_weights_from_disk", self.update_from_disk)

    async def _on_model_thread(self, future: Future[T], what: str) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._request_timeout_s)
        except TimeoutError as error:
            raise ApiError(f"{what} did not happen within {self._request_timeout_s} s", 504, "timeout") from error

    async def run_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate for all requests; if the caller goes away or time runs out, what still runs is aborted."""
        load = self._engine.load()
        if load["num_waiting"] + len(requests) > self._max_waiting:
            raise ApiError(
                f"{load['num_waiting']} requests are waiting already, at most {self._max_waiting}; retry later",
                503,
                "busy",
            )
        try:
            futures = [self._engine.submit(r) for r in requests]
        except EngineDead as error:
            raise ApiError(str(error), 503, "unavailable") from error
        try:
            done = await asyncio.wait_for(asyncio.gather(*futures), self._request_timeout_s)
        except TimeoutError as error:
            self._abandon(requests)
            raise ApiError(
                f"no answer within request_timeout_s={self._request_timeout_s}"
                + (" (generation is paused)" if self._engine.paused else ""),
                504,
                "timeout",
            ) from error
        except asyncio.CancelledError:
            self._abandon(requests)
            raise
        failed = next((c for c in done if c.finish.kind == "error"), None)
        if failed is not None:
            status = 503 if self._engine.error is None else 500
            raise ApiError(failed.finish.message or "the server failed", status, "unavailable")
        return done

    def _abandon(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            for rid in {r.rid for r in requests}:
                self._engine.abort(rid)
        except EngineDead:
            log.info("the engine stopped before %d abandoned requests could be aborted", len(requests))

    async def generate(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        tokenize = self._codec.encode if self._codec else None
        requests, as_list, return_logprob = parse_generate(body, self._limits, tokenize)
        done = await self.run_all(requests)
        answers = [completion_json(c, self._text(c), return_logprob) for c in done]
        return json_response(answers if as_list else answers[0])

    def _text(self, completion: Completion) -> str:
        if self._codec is None:
            return ""
        text = self._codec.decode(completion.output_ids, completion.request.sampling.skip_special_tokens)
        matched = completion.finish.matched
        if isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return text

    async def health(self, request: web.Request) -> web.Response:
        if not self._engine.alive:
            raise ApiError(f"the model thread has stopped: {self._engine.error!r}", 503, "unhealthy")
        return json_response({"status": "ok", "weight_version": self._engine.version})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Healthy only if a token can be generated now; while paused, that the model thread answers."""
        try:
            if self._engine.paused:
                await asyncio.wait_for(asyncio.wrap_future(self._engine.call(lambda: None)), HEALTH_TIMEOUT_S)
            else:
                probe, _, _ = parse_generate(
                    {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, self._limits, None
                )
                await asyncio.wait_for(self.run_all(probe), HEALTH_TIMEOUT_S)
        except (TimeoutError, EngineDead) as error:
            raise ApiError(f"no token within {HEALTH_TIMEOUT_S} s ({error})", 503, "unhealthy") from error
        return json_response({"status": "ok", "weight_version": self._engine.version})

    async def server_info(self, request: web.Request) -> web.Response:
        config = self._engine.config
        return json_response(
            {
                "model_path": str(self._model_path),
                "weight_version": self._engine.version,
                "paused": self._engine.paused,
                "instance": self.instance,
                "dtype": str(self._engine.dtype).removeprefix("torch."),
                "context_length": self._engine.max_sequence_tokens,
                "family": config.family,
                "internal_states": [self._engine.load()],
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "model_path": str(self._model_path),
                "tokenizer_path": str(self._model_path),
                "is_generation": True,
                "weight_version": self._engine.version,
                "model_type": self._engine.config.family,
            }
        )

    async def pause(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("mode",), {}, "body")
        mode = body.get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise ApiError(f"mode {mode!r:.60} is none of {', '.join(PAUSE_MODES)}")
        count = await self._on_model_thread(self._engine.pause(mode), "the pause")
        return json_response({"status": "ok", "message": f"Generation paused ({mode}).", "num_paused_requests": count})

    async def resume(self, request: web.Request) -> web.Response:
        await self._on_model_thread(self._engine.resume(), "the continuation")
        return json_response({"status": "ok", "message": "Generation continued."})

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("rid", "abort_all"), {"abort_message": (None, "")}, "body")
        rid, abort_all = body.get("rid") or None, bool(body.get("abort_all"))
        if not abort_all and not isinstance(rid, str):
            raise ApiError("send rid (a string) or abort_all=true")
        count = await self._on_model_thread(self._engine.abort(None if abort_all else rid), "the abort")
        return json_response({"success": True, "num_aborted": count})

    async def flush(self, request: web.Request) -> web.Response:
        if not await self._on_model_thread(self._engine.flush(), "the flush"):
            raise ApiError("requests are running or waiting; abort them or flush later", 400, "busy")
        return json_response({"success": True, "message": "Cache flushed."})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Read and verify on a helper thread while generation goes on, then swap between two steps."""
        body = await read_json(request)
        check_fields(body, _SERIAL_FIELDS, _UPDATE_NEUTRAL, "body")
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise ApiError(f"model_path must be a folder, got {path!r:.80}")
        if version is not None and (not isinstance(version, str) or not version):
            raise ApiError(f"weight_version must be a non-empty string, got {version!r:.60}")
        folder = Path(path)
        async with self._update_lock:
            try:
                with self._publisher.span("time/server_update"):
                    update = await asyncio.to_thread(self._engine.read_update, folder, version)
                    count = await self._on_model_thread(
                        self._engine.apply_update(update, bool(body.get("abort_all_requests"))), "the weight swap"
                    )
            except (TornWeights, WeightsMismatch, ValueError, OSError) as error:
                log.warning("weights %s refused: %s", path, error)
                message = f"refused, version {self._engine.version} keeps serving: {error}"
                return json_response({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self._model_path = folder
        answer = {"success": True, "message": "Weights updated.", "num_paused_requests": count}
        return json_response({**answer, "weight_version": update.version})

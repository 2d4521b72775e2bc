"""The HTTP face of the engine: SGLang's endpoints. Runs on the event loop; the model runs on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_dta.metrics import Publisher
from areal_dta.rollout.server.chat_api import ChatApi
from areal_dta.rollout.server.control_api import ControlApi
from areal_dta.rollout.server.drafter_api import DrafterApi
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.exposition import CONTENT_TYPE
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.http import event_stream, guard, json_response, read_json
from areal_dta.rollout.server.prometheus import render_metrics
from areal_dta.rollout.server.protocol import GenerateBody, parse_generate
from areal_dta.rollout.server.sampling_fields import Limits
from areal_dta.rollout.server.sequence import Completion, TokenLogprobs
from areal_dta.rollout.server.text_stream import TextStream
from areal_dta.rollout.server.ticket import EngineDead
from areal_dta.rollout.server.tokenizer import TextCodec
from areal_dta.rollout.server.weights_api import WeightsApi

__all__ = ["ApiSettings", "ServerApi"]

HEALTH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ApiSettings:
    """``while_released``: what requests do while the KV memory is given back; ``reasoning``: chat replies are split at
    ``</think>`` unless a request says otherwise."""

    api_key: str | None = None
    request_timeout_s: float = 3600.0
    max_body_bytes: int = 64 << 20
    max_waiting: int = 8192
    while_released: str = "wait"
    reasoning: bool = False


class ServerApi:
    """Handlers and the application. ``model_name`` is what ``/v1/models`` and chat answers call the model."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec | None,
        limits: Limits,
        model_path: Path,
        publisher: Publisher,
        settings: ApiSettings = ApiSettings(),
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._limits = limits
        self._front = Front(engine, settings.request_timeout_s, settings.max_waiting)
        self._settings = settings
        self.instance = uuid.uuid4().hex  # a restarted server is another instance, which the router must notice
        self._chat = ChatApi(codec, limits, model_path.name, self._front, settings.reasoning, engine.config)
        control = ControlApi(self._front, settings.while_released)
        self._weights = WeightsApi(self._front, model_path, publisher)
        self.app = web.Application(
            client_max_size=settings.max_body_bytes,
            middlewares=[guard(settings.api_key, {"X-Server-Instance": self.instance})],
        )
        post, get = self.app.router.add_post, self.app.router.add_get
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        get("/metrics", self.metrics)
        for path in ("/get_server_info", "/server_info"):
            get(path, self.server_info)
        for path in ("/get_model_info", "/model_info"):
            get(path, self.model_info)
        get("/v1/models", self._chat.models)
        post("/v1/chat/completions", self._chat.complete)
        post("/generate", self.generate)
        control.add_routes(self.app.router)
        self._weights.add_routes(self.app.router)
        self._drafters = DrafterApi(self._front, engine.speculation)
        self._drafters.add_routes(self.app.router)

    async def close(self) -> None:
        await self._weights.close()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        parsed = parse_generate(body, self._limits, self._codec.encode if self._codec else None)
        if parsed.stream:
            return await event_stream(request, self._events(parsed))
        done = await self._front.run_all(parsed.requests)
        answers = [self._answer(parsed, c) for c in done]
        return json_response(answers if parsed.as_list else answers[0])

    def _answer(self, parsed: GenerateBody, completion: Completion) -> dict[str, Any]:
        return parsed.answer(completion, self._text(completion), self._spell(), completion.output)

    def _spell(self) -> Any:
        return None if self._codec is None else self._codec.token_text

    def _text(self, completion: Completion) -> str:
        if self._codec is None:
            return ""
        sampling = completion.request.sampling
        text = self._codec.decode(completion.output_ids, sampling.skip_special_tokens)
        matched = completion.finish.matched
        if isinstance(matched, str) and matched in text and not sampling.no_stop_trim:
            text = text[: text.index(matched)]
        return text

    async def _events(self, parsed: GenerateBody) -> AsyncGenerator[dict[str, Any]]:
        """SGLang's stream: every event has all text and tokens so far, or with ``incremental`` the new ones only."""
        states = [_GenerateStream(self._codec, parsed, i) for i in range(len(parsed.requests))]
        async with contextlib.aclosing(self._front.stream(parsed.requests)) as stream:
            async for index, progress in stream:
                state = states[index]
                text, output = state.take(progress.new, progress.done)
                if progress.done is None:
                    event = parsed.piece(
                        parsed.requests[index], text, self._spell(), output, state.num_output, progress.cached_tokens
                    )
                else:
                    event = parsed.answer(progress.done, text, self._spell(), output)
                yield {**event, "index": index} if parsed.as_list else event

    async def health(self, request: web.Request) -> web.Response:
        if not self._engine.alive:
            raise ApiError(f"the model thread has stopped: {self._engine.error!r}", 503, "unhealthy")
        return json_response({"status": "ok", "weight_version": self._engine.version})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Healthy only if a token can be generated now; while paused or released, that the model thread answers."""
        try:
            if self._engine.paused or self._engine.released:
                await asyncio.wait_for(asyncio.wrap_future(self._engine.call(lambda: None)), HEALTH_TIMEOUT_S)
            else:
                probe = parse_generate(
                    {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, self._limits, None
                )
                await asyncio.wait_for(self._front.run_all(probe.requests), HEALTH_TIMEOUT_S)
        except (TimeoutError, EngineDead) as error:
            raise ApiError(f"no token within {HEALTH_TIMEOUT_S} s ({error})", 503, "unhealthy") from error
        return json_response({"status": "ok", "weight_version": self._engine.version})

    async def metrics(self, request: web.Request) -> web.Response:
        text = render_metrics(self._engine, self._front, self._chat, self._drafters.num_failed)
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    async def server_info(self, request: web.Request) -> web.Response:
        config = self._engine.config
        return json_response(
            {
                "model_path": str(self._weights.model_path),
                "weight_version": self._engine.version,
                "paused": self._engine.paused,
                "memory_released": self._engine.released is not None,
                "instance": self.instance,
                "dtype": str(self._engine.dtype).removeprefix("torch."),
                "context_length": self._engine.max_sequence_tokens,
                "max_waiting": self._settings.max_waiting,
                "max_body_bytes": self._settings.max_body_bytes,
                "family": config.family,
                "internal_states": [self._engine.load()],
                "speculation": None if self._engine.speculation is None else self._engine.speculation.snapshot(),
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        path = str(self._weights.model_path)
        return json_response(
            {
                "model_path": path,
                "tokenizer_path": path,
                "is_generation": True,
                "weight_version": self._engine.version,
                "weights_digest": self._weights.digest,
                "model_type": self._engine.config.family,
            }
        )


class _GenerateStream:
    """Text and tokens of one streamed request."""

    def __init__(self, codec: TextCodec | None, parsed: GenerateBody, index: int) -> None:
        sampling = parsed.requests[index].sampling
        self._trim = not sampling.no_stop_trim
        self._incremental = parsed.incremental
        self._text = ""
        self._output: list[TokenLogprobs] = []
        self.num_output = 0
        self._stream: TextStream | None = None
        if codec is not None:
            skip = sampling.skip_special_tokens
            self._stream = TextStream(lambda ids: codec.decode(ids, skip), sampling.stop if self._trim else ())

    def take(self, new: tuple[TokenLogprobs, ...], done: Completion | None) -> tuple[str, list[TokenLogprobs]]:
        """(text, tokens) to be sent."""
        text = "" if self._stream is None else self._stream.push(t.token for t in new)
        if done is not None and self._stream is not None:
            matched = done.finish.matched
            text += self._stream.finish(matched if isinstance(matched, str) and self._trim else None)
        self.num_output += len(new)
        if self._incremental:
            return text, list(new)
        self._text += text
        self._output.extend(new)
        return self._text, self._output

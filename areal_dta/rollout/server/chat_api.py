"""OpenAI's chat completions on top of the engine: template, tool calls, log-probs, token ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from jinja2 import Template

from areal_dta.rollout.server.chat import ChatError, ParsedReply, compile_template, parse_reply, render_chat
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.http import json_response, read_json
from areal_dta.rollout.server.protocol import Limits, check_fields, make_requests, parse_sampling
from areal_dta.rollout.server.sequence import Completion, GenerationRequest
from areal_dta.rollout.server.tokenizer import TextCodec

__all__ = ["ChatApi"]

_FIELDS = (
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens",
    "seed", "stop", "stop_token_ids", "n", "logprobs", "return_token_ids", "frequency_penalty", "ignore_eos", "rid",
    "chat_template_kwargs", "skip_special_tokens", "min_tokens",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "stream_options": (None,),
    "logit_bias": (None, {}),
}
# Chat name -> sampling name, where a value is passed on as it is.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "n": "n",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
Run = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]


class ChatApi:
    """``run`` generates for prepared requests."""

    def __init__(self, codec: TextCodec | None, limits: Limits, model_name: str, run: Run) -> None:
        self._codec = codec
        self._limits = limits
        self._model_name = model_name
        self._run = run
        self._template: Template | None = None

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "areal-dta",
            "max_model_len": self._limits.max_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        if body.get("stream"):
            raise ApiError("stream=true is not supported by this server; send stream=false")
        check_fields(body, _FIELDS, _NEUTRAL, "body")
        codec = self._codec
        if codec is None:
            raise ApiError("the model folder has no tokenizer.json; use /generate with input_ids")
        prompt = codec.encode(self._render(codec, body), add_special_tokens=False)
        sampling = {ours: body[theirs] for theirs, ours in _SAMPLING.items() if body.get(theirs) is not None}
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        sampling["max_new_tokens"] = self._limits.max_tokens if limit is None else limit
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str):
            raise ApiError(f"rid must be a string, got {rid!r:.60}")
        parsed = parse_sampling(sampling, self._limits, True)
        requests = make_requests([tuple(prompt)], [parsed], [rid], self._limits, [None])
        completions = await self._run(requests)
        return json_response(self._answer(codec, body, rid, prompt, completions))

    def _render(self, codec: TextCodec, body: Mapping[str, Any]) -> str:
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a non-empty list")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise ApiError(f"messages[{i}] must be an object with a role of {', '.join(_ROLES)}")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
            raise ApiError("tools must be a list of objects")
        choice = body.get("tool_choice") or "auto"
        if choice not in ("auto", "none"):
            raise ApiError(f"tool_choice {choice!r:.60} is not supported; use 'auto' or 'none'")
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise ApiError(f"chat_template_kwargs must be an object, got {options!r:.60}")
        try:
            if self._template is None:
                self._template = compile_template(codec)
            return render_chat(self._template, codec, messages, None if choice == "none" else tools, options)
        except ChatError as error:
            raise ApiError(str(error)) from error

    def _answer(
        self,
        codec: TextCodec,
        body: Mapping[str, Any],
        rid: str,
        prompt: list[int],
        completions: Sequence[Completion],
    ) -> dict[str, Any]:
        with_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        num_output = sum(len(c.output_ids) for c in completions)
        answer: dict[str, Any] = {
            "id": rid,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or self._model_name,
            "choices": [self._choice(codec, body, i, c, with_tools) for i, c in enumerate(completions)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": num_output,
                "total_tokens": len(prompt) + num_output,
                "prompt_tokens_details": {"cached_tokens": completions[0].cached_tokens},
            },
            "metadata": {"weight_version": completions[0].weight_version},
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = prompt
        return answer

    def _choice(
        self, codec: TextCodec, body: Mapping[str, Any], index: int, c: Completion, with_tools: bool
    ) -> dict[str, Any]:
        ids = c.output_ids
        ended = c.finish.kind == "stop" and isinstance(c.finish.matched, int)
        text = codec.decode_raw(list(ids[:-1] if ended else ids))
        if c.request.sampling.skip_special_tokens and "<tool_call>" not in text:
            text = codec.decode(ids)
        if isinstance(c.finish.matched, str) and c.finish.matched in text:
            text = text[: text.index(c.finish.matched)]
        reply = parse_reply(text) if with_tools else ParsedReply(text, ())
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "index": i,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(reply.tool_calls)
            ]
        elif not reply.text:
            message["content"] = ""
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if reply.tool_calls and c.finish.kind == "stop" else c.finish.kind,
            "matched_stop": c.finish.matched,
            "logprobs": self._logprobs(codec, c) if body.get("logprobs") else None,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = list(ids)
            choice["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in c.spans]
        return choice

    def _logprobs(self, codec: TextCodec, completion: Completion) -> dict[str, Any]:
        content = []
        for token, logprob in zip(completion.output_ids, completion.output_logprobs, strict=True):
            text = codec.token_text(token)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content}

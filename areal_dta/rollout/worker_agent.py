"""OpenAI-style agents as AReaL workflows without AReaL's proxy processes; tool calls that are never dropped silently.

`AgentWorkflow` gives an agent (``async run(data, base_url=..., api_key=..., http_client=...)``) an OpenAI endpoint on
loopback. Each episode has its own API key; a completion sent with it is made by that episode's `ArealOpenAI` client,
which remembers tokens, log-probs and versions.

AReaL parses tool calls with sglang's or vllm's parsers. With neither installed it logs a warning and drops the calls,
so an agent with tools would silently never call one. `install_tool_call_parser` replaces that step by parsers of our
own, or an error.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import importlib.util
import json
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

import areal.experimental.openai.client as areal_client
from aiohttp import web
from areal.api import RolloutWorkflow
from areal.experimental.openai import ArealOpenAI
from areal.infra import workflow_context
from areal.infra.utils.concurrent import register_loop_cleanup
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall, Function
from openai.types.responses.response_function_tool_call import ResponseFunctionToolCall

from areal_dta.rollout.worker_convert import Rejected

__all__ = ["AgentWorkflow", "ToolCallParserMissing", "install_tool_call_parser", "register_tool_call_parser"]

log = logging.getLogger(__name__)

ToolCallParser = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""Text -> (text outside of calls, [(function name, JSON arguments)])."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THINK_END = "</think>"
_IGNORED_FIELDS = frozenset({"model", "user", "seed", "parallel_tool_calls", "logprobs"})


class ToolCallParserMissing(RuntimeError):
    """Tools were offered to the model but nothing here can read its tool calls."""


def parse_hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).

    A thought (up to ``</think>``) is not searched. One malformed call makes the whole text content: that is the
    policy's error to learn from.
    """
    thought, sep, answer = text.rpartition(_THINK_END)
    calls = []
    for body in _CALL.findall(answer):
        try:
            call = json.loads(body)
            arguments = call.get("arguments") or {}
            calls.append((str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments)))
        except (ValueError, KeyError, AttributeError):
            return text, []
    return (thought + sep + _CALL.sub("", answer).strip() if calls else text), calls


_parsers: dict[str, ToolCallParser] = dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), parse_hermes)


def register_tool_call_parser(name: str, parser: ToolCallParser) -> None:
    """Make ``parser`` available as rollout.agent.tool_call_parser=``name``."""
    _parsers[name] = parser


def install_tool_call_parser() -> bool:
    """Let `ArealOpenAI` use this module's parsers where AReaL's own would do nothing; returns whether it was needed."""
    if any(importlib.util.find_spec(name) is not None for name in ("sglang", "vllm")):
        return False
    # AReaL has no hook for this: its client calls a function of its module's namespace.
    areal_client.process_tool_calls = _process_tool_calls
    return True


def _process_tool_calls(
    text: str,
    tools: list[Any],
    tool_call_parser: str,
    reasoning_parser: str,
    finish_reason: str,
    use_responses: bool = False,
    tokenizer: Any = None,
) -> tuple[list[Any] | None, str, str]:
    """The contract of AReaL's function of that name: (tool calls or None, remaining text, finish reason)."""
    parser = _parsers.get(tool_call_parser)
    if parser is None:
        raise ToolCallParserMissing(
            f"no parser for tool_call_parser={tool_call_parser!r}, and neither sglang nor vllm is installed; use "
            f"{', '.join(sorted(_parsers))} or register_tool_call_parser({tool_call_parser!r}, ...)"
        )
    content, calls = parser(text)
    if not calls:
        return None, text, finish_reason
    make = _response_call if use_responses else _chat_call
    reason = "tool_calls" if finish_reason == "stop" else finish_reason
    return [make(name, arguments) for name, arguments in calls], content, reason


def _chat_call(name: str, arguments: str) -> ChatCompletionMessageFunctionToolCall:
    function = Function(name=name, arguments=arguments)
    return ChatCompletionMessageFunctionToolCall(type="function", id=f"call_{secrets.token_hex(12)}", function=function)


def _response_call(name: str, arguments: str) -> ResponseFunctionToolCall:
    token = secrets.token_hex(12)
    return ResponseFunctionToolCall(
        type="function_call",
        id=f"fc-{token}",
        call_id=f"call_{token}",
        name=name,
        arguments=arguments,
        status="completed",
    )


class AgentWorkflow(RolloutWorkflow):
    """An agent object as a workflow.

    The agent returns the episode's reward, or {completion id: reward}; earlier completions get the discounted later
    ones, as in AReaL. ``max_tokens`` bounds prompt plus output of a completion. Rejected with ``bad_reward`` for any
    other return value.
    """

    def __init__(
        self,
        agent: Any,
        tokenizer: Any,
        *,
        max_tokens: int | None = None,
        turn_discount: float = 1.0,
        export_style: str = "individual",
        tool_call_parser: str = "qwen",
        reasoning_parser: str = "qwen3",
        chat_template_type: str = "hf",
    ) -> None:
        self.agent, self.tokenizer = agent, tokenizer
        self._turn_discount, self._export_style = turn_discount, export_style
        self._client_options = {
            "engine_max_tokens": max_tokens,
            "tool_call_parser": tool_call_parser,
            "reasoning_parser": reasoning_parser,
            "chat_template_type": chat_template_type,
        }
        self._gateway = _Gateway()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        """Run the agent once; returns its completions with rewards."""
        http_client = await workflow_context.get_httpx_client()
        # Every option of the base client is set, so that it builds no connection pool of its own per episode.
        client = ArealOpenAI(
            engine,
            self.tokenizer,
            api_key="none",
            base_url="http://localhost",
            http_client=http_client,
            **self._client_options,
        )
        api_key, base_url = await self._gateway.open(client)
        try:
            rewards = await self.agent.run(data, base_url=base_url, api_key=api_key, http_client=http_client)
        finally:
            self._gateway.close(api_key)
        _set_rewards(client, rewards)
        client.apply_reward_discount(self._turn_discount)
        return client.export_interactions(self._export_style)


def _set_rewards(client: ArealOpenAI, rewards: Any) -> None:
    if isinstance(rewards, bool) or not isinstance(rewards, (int, float, dict)):
        raise Rejected("bad_reward", f"the agent returned {rewards!r}; expected a number or {{completion id: number}}")
    if not client._cache:
        raise Rejected("empty", "the agent made no completion through base_url")
    if not isinstance(rewards, dict):
        client.set_last_reward(float(rewards))
        return
    if client._cache.last_interaction_id not in rewards:
        raise Rejected("bad_reward", "the agent's rewards leave out its last completion")
    for completion_id, reward in rewards.items():
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise Rejected("bad_reward", f"reward of {completion_id} is {reward!r}")
        client.set_reward(completion_id, float(reward))


class _Gateway:
    """The OpenAI endpoint of one worker: loopback only, one API key per episode. Lives on the executor's event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, ArealOpenAI] = {}
        self._base_url: str | None = None
        self._starting: asyncio.Lock | None = None

    async def open(self, client: ArealOpenAI) -> tuple[str, str]:
        """Admit a client; returns (API key, base URL)."""
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._base_url is None:
                self._base_url = await self._start()
        api_key = secrets.token_urlsafe(24)
        self._sessions[api_key] = client
        return api_key, self._base_url

    def close(self, api_key: str) -> None:
        self._sessions.pop(api_key, None)

    async def _start(self) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        register_loop_cleanup(runner.cleanup)
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        scheme, _, api_key = request.headers.get("Authorization", "").partition(" ")
        client = self._sessions.get(api_key) if scheme == "Bearer" else None
        if client is None:
            return _error(401, "unknown API key: the episode is over or the key was not passed on")
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return _error(400, f"request body is not JSON: {error}")
        stream, options = body.pop("stream", False), body.pop("stream_options", None) or {}
        fields = {key: value for key, value in body.items() if key not in _IGNORED_FIELDS}
        template = fields.pop("chat_template_kwargs", None)
        if template:
            fields["extra_body"] = {"chat_template_kwargs": template}
        try:
            completion = await client.chat.completions.create(**fields)
        except (ValueError, TypeError, NotImplementedError) as error:
            return _error(400, f"{type(error).__name__}: {error}")
        except RuntimeError as error:
            log.warning("completion failed: %s", error)
            return _error(500, f"{type(error).__name__}: {error}")
        if stream:
            return await _as_stream(request, completion.model_dump(mode="json"), bool(options.get("include_usage")))
        return web.json_response(text=completion.model_dump_json())


async def _as_stream(request: web.Request, completion: dict[str, Any], usage: bool) -> web.StreamResponse:
    """The finished completion as OpenAI's chunks: the role, the whole message, the end, and usage if asked for."""
    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    common = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    try:
        for deltas in zip(*map(_deltas, completion["choices"]), strict=True):
            await response.write(_event({**common, "choices": list(deltas)}))
        if usage:
            await response.write(_event({**common, "choices": [], "usage": completion.get("usage")}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionResetError:
        log.info("the agent hung up before its completion was sent; it is kept all the same")
    return response


def _deltas(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """One choice's part of each chunk."""
    message = {key: value for key, value in choice["message"].items() if value is not None}
    role = {"role": message.pop("role", "assistant")}
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    parts: list[tuple[dict[str, Any], str | None]] = [(role, None), (message, None), ({}, choice["finish_reason"])]
    return [{"index": choice["index"], "delta": delta, "finish_reason": reason} for delta, reason in parts]


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "areal_dta", "code": status}}, status=status)

"""A chat body, read and checked: what is sampled, how the reply is read, which tools may or must be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields, integer, typed
from areal_dta.rollout.server.sampling_fields import Limits, parse_sampling
from areal_dta.rollout.server.sequence import LogprobWants, SamplingParams

__all__ = ["ChatBody", "parse_chat"]

MAX_TOP_LOGPROBS = 20
_FIELDS = (
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p",
    "max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids", "n", "logprobs", "top_logprobs",
    "return_raw_logprob", "return_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "rid", "chat_template_kwargs", "skip_special_tokens", "min_tokens", "no_stop_trim",
    "stream", "stream_options", "separate_reasoning", "reuse_token_ids",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"response_format": (None, {"type": "text"}), "user": (None,)}
# Chat name -> sampling name, where a value is passed on as it is.
_SAMPLING = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "frequency_penalty",
            "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens",
            "no_stop_trim", "n",
        )
    },
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatBody:
    """``forced``: names of which exactly one must be called (None: free). ``tools`` None: none are offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    forced: tuple[str, ...] | None
    template_options: dict[str, Any]
    sampling: SamplingParams
    n: int
    wants: LogprobWants
    logprobs: bool
    return_token_ids: bool
    separate_reasoning: bool
    reuse_token_ids: bool
    stream: bool
    stream_usage: bool
    rid: str | None
    model: str | None


def parse_chat(body: Mapping[str, Any], limits: Limits, reasoning: bool) -> ChatBody:
    """``reasoning``: whether thoughts are split off where the body does not say."""
    check_fields(body, _FIELDS, _NEUTRAL, "body")
    sampling = {ours: body[theirs] for theirs, ours in _SAMPLING.items() if body.get(theirs) is not None}
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    sampling["max_new_tokens"] = limits.max_tokens if limit is None else limit
    params, n = parse_sampling(sampling, limits, True)

    def switch(name: str, default: bool = False) -> bool:
        value = body.get(name)
        return default if value is None else bool(typed(value, bool, name))

    tools, forced = _tools(body)
    if not switch("parallel_tool_calls", True) and tools and forced is None:
        params = replace(params, stop_after=("</tool_call>",))
    logprobs = switch("logprobs")
    top = integer(body.get("top_logprobs") or 0, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    raw = switch("return_raw_logprob")
    if (top or raw) and not logprobs:
        raise ApiError(f"{'top_logprobs' if top else 'return_raw_logprob'} needs logprobs=true")
    options = typed(body.get("chat_template_kwargs") or {}, dict, "chat_template_kwargs")
    stream_options = typed(body.get("stream_options") or {}, dict, "stream_options")
    check_fields(stream_options, ("include_usage",), {}, "stream_options")
    rid, model = body.get("rid") or None, body.get("model")
    return ChatBody(
        messages=_messages(body),
        tools=tools,
        forced=forced,
        template_options=options,
        sampling=params,
        n=n,
        wants=LogprobWants(raw=raw, top=top),
        logprobs=logprobs,
        return_token_ids=switch("return_token_ids"),
        separate_reasoning=switch("separate_reasoning", reasoning),
        reuse_token_ids=switch("reuse_token_ids", True),
        stream=switch("stream"),
        stream_usage=bool(stream_options.get("include_usage")),
        rid=None if rid is None else typed(rid, str, "rid"),
        model=None if model is None else typed(model, str, "model"),
    )


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a non-empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ApiError(f"messages[{i}] must be an object with a role of {', '.join(_ROLES)}")
    return messages


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, tuple[str, ...] | None]:
    """(tools on offer, names of which one must be called)."""
    tools, choice = body.get("tools"), body.get("tool_choice") or "auto"
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise ApiError("tools must be a list of objects")
    if choice in ("auto", "none"):
        return (tools or None) if choice == "auto" else None, None
    names = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ApiError(f"tools[{i}].function.name must be a non-empty string, got {name!r:.60}")
        names.append(name)
    if not names:
        raise ApiError(f"tool_choice={choice!r:.60} needs tools")
    if choice == "required":
        return tools, tuple(names)
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            f"tool_choice={choice!r:.60} must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
    if function["name"] not in names:
        raise ApiError(f"tool_choice names {function['name']!r:.60}, tools are {', '.join(names)}")
    return tools, (function["name"],)

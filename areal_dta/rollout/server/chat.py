"""Chat to text and back: the tokenizer's chat template, and the tool calls in what the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_dta.rollout.server.tokenizer import TextCodec

__all__ = ["ChatError", "ParsedReply", "ToolCall", "compile_template", "parse_reply", "render_chat"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ChatError(ValueError):
    """The conversation cannot be rendered: no template, or the template refused it."""


@dataclass(frozen=True)
class ToolCall:
    """One call as written by the model; ``arguments`` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """``text`` is what is not a well-formed tool call, trimmed; ``malformed`` the blocks that were not."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...] = ()


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _environment() -> Environment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return env


def compile_template(codec: TextCodec) -> Template:
    """The folder's chat template under the conventions of Hugging Face; raises ChatError when there is none."""
    if codec.chat_template is None:
        raise ChatError(
            "the tokenizer has no chat template; add chat_template.jinja to the model folder or use /generate"
        )
    return _environment().from_string(codec.chat_template)


def render_chat(
    template: Template,
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> str:
    """The prompt for the next assistant message. Tool-call arguments given as JSON text are parsed for the template."""
    try:
        return template.render(
            messages=[_template_message(m) for m in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            **codec.special_tokens,
            **options,
        )
    except TemplateError as error:
        raise ChatError(f"the chat template refused the conversation: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ChatError(f"the chat template cannot render the conversation ({error!r}); check the messages") from error


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in message.items() if v is not None or k == "content"}
    content = out.get("content")
    if isinstance(content, list):  # text parts
        out["content"] = "".join(part.get("text", "") for part in content)
    elif content is None:
        out["content"] = ""
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_template_call(c) for c in calls]
    return out


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except json.JSONDecodeError as error:
            raise ChatError(f"tool call {function.get('name')!r} has arguments that are not JSON: {error}") from error
    return {**call, "function": function}


def parse_reply(text: str) -> ParsedReply:
    """Split a reply in the Hermes format (also Qwen 2.5's and 3's): ``<tool_call>{"name", "arguments"}</tool_call>``.

    A block that is not such JSON stays in the text and is listed as malformed: nothing is dropped silently.
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    rest: list[str] = []
    position = 0
    for match in _CALL.finditer(text):
        rest.append(text[position : match.start()])
        position = match.end()
        call = _parse_call(match.group(1))
        if call is None:
            malformed.append(match.group(1))
            rest.append(match.group(0))
        else:
            calls.append(call)
    rest.append(text[position:])
    return ParsedReply("".join(rest).strip(), tuple(calls), tuple(malformed))


def _parse_call(block: str) -> ToolCall | None:
    try:
        raw = json.loads(block)
    except json.JSONDecodeError:
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return None
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    return ToolCall(raw["name"], _to_json(arguments)) if isinstance(arguments, dict) else None

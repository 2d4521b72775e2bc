"""Chat to text and back: the tokenizer's chat template, and the tool calls in what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_dta.rollout.server.text_stream import held_back
from areal_dta.rollout.server.tokenizer import TextCodec

__all__ = [
    "MARKERS",
    "ChatError",
    "ParsedReply",
    "ReplyParser",
    "ToolCall",
    "compile_template",
    "ends_in_thought",
    "parse_reply",
    "render_chat",
]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"
MARKERS = (_OPEN, _CLOSE, _THINK, _THINK_END)  # kept in the text even where a tokenizer has them as special tokens


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
    reasoning: str = ""


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
    add_generation_prompt: bool = True,
) -> str:
    """The prompt for the next assistant message. Tool-call arguments given as JSON text are parsed for the template."""
    try:
        return template.render(
            messages=[_template_message(m) for m in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **codec.special_tokens,
            **options,
        )
    except TemplateError as error:
        raise ChatError(f"the chat template refused the conversation: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ChatError(f"the chat template cannot render the conversation ({error!r}); check the messages") from error


def ends_in_thought(prompt: str) -> bool:
    """Whether the template has opened a thought for the model."""
    return prompt.rstrip().endswith(_THINK)


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


class ReplyParser:
    """Splits a growing reply into thought, text and tool calls; the pieces do not depend on how it was cut.

    Formats: ``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes, Qwen 2.5 and 3) and, with ``reasoning``, a
    leading ``<think>...</think>``; ``in_thought`` when the prompt has opened it already. A thought is not searched for
    calls. A block that is not such JSON stays in the text and is listed as malformed: nothing is dropped silently. With
    neither tools nor reasoning the text passes as it is, else the white space around text and thought is trimmed.
    """

    def __init__(self, tools: bool, reasoning: bool = False, in_thought: bool = False) -> None:
        self._tools = tools
        self._trim = tools or reasoning
        self._where = "thought" if reasoning and in_thought else "start" if reasoning else "text"
        self._buffer = ""
        self._space = {"text": "", "thought": ""}  # withheld until something follows
        self._begun = {"text": False, "thought": False}
        self.malformed: list[str] = []

    def feed(self, text: str) -> list[tuple[str, str | ToolCall]]:
        """Pieces that are certain: ("thought" | "text", str) or ("call", ToolCall)."""
        self._buffer += text
        out: list[tuple[str, str | ToolCall]] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[tuple[str, str | ToolCall]]:
        """The rest: an unfinished call is text."""
        out: list[tuple[str, str | ToolCall]] = []
        rest, self._buffer = self._buffer, ""
        self._emit("thought" if self._where == "thought" else "text", rest, out)
        return out

    def _advance(self, out: list[tuple[str, str | ToolCall]]) -> bool:
        if self._where == "start":
            seen = self._buffer.lstrip()
            if seen.startswith(_THINK):
                self._buffer, self._where = seen[len(_THINK) :], "thought"
                return True
            if not _THINK.startswith(seen):
                self._where = "text"
                return True
            return False
        if self._where == "call":
            body, closed, rest = self._buffer.partition(_CLOSE)
            if not closed:
                return False
            self._buffer, self._where = rest, "text"
            block = body.removeprefix(_OPEN).strip()
            call = _parse_call(block)
            if call is None:
                self.malformed.append(block)
                self._emit("text", body + closed, out)
            else:
                out.append(("call", call))
            return True
        marker = _THINK_END if self._where == "thought" else _OPEN
        if self._where == "text" and not self._tools:
            text, found, rest = self._buffer, "", ""
        else:
            text, found, rest = self._buffer.partition(marker)
        keep = 0 if found or (self._where == "text" and not self._tools) else held_back(text, (marker,))
        self._buffer = text[len(text) - keep :] if keep else ""
        self._emit(self._where, text[: len(text) - keep], out)
        if found and self._where == "thought":
            self._buffer, self._where = rest, "text"
        elif found:
            self._buffer, self._where = _OPEN + rest, "call"
        return bool(found)

    def _emit(self, kind: str, text: str, out: list[tuple[str, str | ToolCall]]) -> None:
        if self._trim:
            text = self._space[kind] + text
            if not self._begun[kind]:
                text = text.lstrip()
            kept = text.rstrip()
            self._space[kind] = text[len(kept) :]
            text = kept
        if text:
            self._begun[kind] = True
            out.append((kind, text))


def parse_reply(text: str, tools: bool = True, reasoning: bool = False, in_thought: bool = False) -> ParsedReply:
    """A whole reply, split as `ReplyParser` does."""
    parser = ReplyParser(tools, reasoning, in_thought)
    pieces = [*parser.feed(text), *parser.finish()]
    texts = {kind: "".join(str(p) for k, p in pieces if k == kind) for kind in ("text", "thought")}
    calls = tuple(p for _, p in pieces if isinstance(p, ToolCall))
    return ParsedReply(texts["text"], calls, tuple(parser.malformed), texts["thought"])


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

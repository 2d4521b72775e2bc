"""OpenAI's chat completions on top of the engine: template, tool calls, thoughts, log-probs, token ids, streams."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from jinja2 import Template

from areal_dta.nn import DecoderConfig
from areal_dta.rollout.server.chat import ChatError, compile_template, ends_in_thought, render_chat
from areal_dta.rollout.server.chat_fields import ChatBody, parse_chat
from areal_dta.rollout.server.chat_reply import ChoiceBuilder, ReplyForm
from areal_dta.rollout.server.chat_turns import TurnMemory, conversation_keys
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.http import event_stream, json_response, read_json
from areal_dta.rollout.server.protocol import make_requests
from areal_dta.rollout.server.sampling_fields import Limits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest
from areal_dta.rollout.server.tokenizer import TextCodec
from areal_dta.rollout.server.tool_constraint import ToolCallConstraint

__all__ = ["ChatApi"]

SOURCES = ("template", "previous_turn")


@dataclass(frozen=True)
class _Chat:
    """One request under way."""

    body: ChatBody
    rid: str
    created: int
    prompt: list[int]
    source: str  # of the prompt's token ids, one of SOURCES
    form: ReplyForm
    requests: tuple[GenerationRequest, ...]


class ChatApi:
    """``reasoning``: thoughts are split off unless a body says otherwise."""

    def __init__(
        self,
        codec: TextCodec | None,
        limits: Limits,
        model_name: str,
        front: Front,
        reasoning: bool,
        config: DecoderConfig,
    ) -> None:
        self._codec = codec
        self._limits = limits
        self._model_name = model_name
        self._front = front
        self._reasoning = reasoning
        self._eos_ids = frozenset(config.eos_token_ids)
        self._template: Template | None = None
        self._turns = TurnMemory()
        self.prompt_sources = dict.fromkeys(SOURCES, 0)

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "areal-dta",
            "max_model_len": self._limits.max_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        raw = await read_json(request)
        body = parse_chat(raw, self._limits, self._reasoning)
        if self._codec is None:
            raise ApiError("the model folder has no tokenizer.json; use /generate with input_ids")
        chat = self._prepare(self._codec, body)
        if body.stream:
            return await event_stream(request, self._chunks(self._codec, chat))
        completions = await self._front.run_all(chat.requests)
        return json_response(self._answer(self._codec, chat, completions))

    def _prepare(self, codec: TextCodec, body: ChatBody) -> _Chat:
        text = self._render(codec, body, body.messages, True)
        in_thought = ends_in_thought(text)
        reused = self._extend(codec, body, text) if body.reuse_token_ids else None
        prompt = reused or codec.encode(text, add_special_tokens=False)
        source = "template" if reused is None else "previous_turn"
        self.prompt_sources[source] += 1
        rid = body.rid or uuid.uuid4().hex
        requests = make_requests([tuple(prompt)], [(body.sampling, body.n)], [rid], self._limits, [None], [body.wants])
        if body.forced is not None:
            before = "</think>" if in_thought else ""
            constraint = functools.partial(
                ToolCallConstraint, body.forced, codec.token_text, codec.special_ids | self._eos_ids, before
            )
            requests = [replace(r, constraint=constraint) for r in requests]
        tools = bool(body.tools)
        form = ReplyForm(
            tools,
            body.separate_reasoning or (body.forced is not None and in_thought),
            in_thought,
            body.logprobs,
            body.return_token_ids,
        )
        return _Chat(body, rid, int(time.time()), prompt, source, form, tuple(requests))

    def _render(
        self, codec: TextCodec, body: ChatBody, messages: Sequence[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        try:
            if self._template is None:
                self._template = compile_template(codec)
            return render_chat(
                self._template, codec, messages, body.tools, body.template_options, add_generation_prompt
            )
        except ChatError as error:
            raise ApiError(str(error)) from error

    def _keys(self, body: ChatBody, messages: Sequence[dict[str, Any]]) -> list[bytes]:
        return conversation_keys(messages, [body.tools, body.template_options])

    def _extend(self, codec: TextCodec, body: ChatBody, text: str) -> list[int] | None:
        """The previous turn's token ids plus those of what was added since; None where there is no such turn, or where
        the template rewrites history (drops earlier thoughts, say) so that nothing is merely added."""
        found = self._turns.find(self._keys(body, body.messages))
        if found is None:
            return None
        count, ids = found
        turn = self._render(codec, body, body.messages[:count], False)
        if not text.startswith(turn):
            return None
        ended = ids[-1] in self._eos_ids
        mark = codec.token_text(ids[-1]) if ended else codec.special_tokens.get("eos_token", "")
        position = turn.rfind(mark) if mark else -1
        if position < 0 or turn[position + len(mark) :].strip():
            return None  # the template does not close the reply with its stop token
        rest = text[position + len(mark) if ended else position :]
        return ids + codec.encode(rest, add_special_tokens=False)

    def _remember(self, chat: _Chat, message: dict[str, Any], done: Completion) -> None:
        """A reply whose text was cut at a stop string is not what its tokens say: not remembered."""
        matched = done.finish.matched
        cut = isinstance(matched, str) and matched not in chat.body.sampling.stop_after
        if done.output and not cut and done.finish.kind != "abort":
            key = self._keys(chat.body, [*chat.body.messages, message])[-1]
            self._turns.remember(key, [*chat.prompt, *done.output_ids])

    def _head(self, chat: _Chat, kind: str) -> dict[str, Any]:
        return {
            "id": chat.rid,
            "object": kind,
            "created": chat.created,
            "model": chat.body.model or self._model_name,
        }

    def _tail(self, chat: _Chat, completions: Sequence[Completion]) -> dict[str, Any]:
        """Usage and where things came from."""
        num_output = sum(len(c.output) for c in completions)
        tail: dict[str, Any] = {
            "usage": {
                "prompt_tokens": len(chat.prompt),
                "completion_tokens": num_output,
                "total_tokens": len(chat.prompt) + num_output,
                "prompt_tokens_details": {"cached_tokens": completions[0].cached_tokens},
            },
            "metadata": {"weight_version": completions[0].weight_version, "prompt_source": chat.source},
        }
        if chat.body.return_token_ids:
            tail["prompt_token_ids"] = chat.prompt
        return tail

    def _answer(self, codec: TextCodec, chat: _Chat, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, done in enumerate(completions):
            builder = ChoiceBuilder(codec, index, chat.form, done.request.sampling)
            builder.take(done.output, done)
            message = builder.message()
            self._remember(chat, message, done)
            logprobs = builder.logprobs(done.output)
            choices.append({"index": index, "message": message, "logprobs": logprobs, **builder.finish(done)})
        return {**self._head(chat, "chat.completion"), "choices": choices, **self._tail(chat, completions)}

    async def _chunks(self, codec: TextCodec, chat: _Chat) -> AsyncGenerator[dict[str, Any]]:
        """OpenAI's chunks. The last one carries usage, versions and token ids, with ``stream_options.include_usage`` in
        a chunk of its own without choices, as OpenAI has it."""
        head = self._head(chat, "chat.completion.chunk")
        builders = [ChoiceBuilder(codec, i, chat.form, r.sampling) for i, r in enumerate(chat.requests)]
        finished: dict[int, Completion] = {}
        started: set[int] = set()
        async with contextlib.aclosing(self._front.stream(chat.requests)) as stream:
            async for index, progress in stream:
                builder = builders[index]
                deltas = builder.take(progress.new, progress.done) or [{}]
                for number, delta in enumerate(deltas):
                    if index not in started:
                        started.add(index)
                        delta = {"role": "assistant", **delta}
                    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
                    if number == 0:
                        choice["logprobs"] = builder.logprobs(progress.new)
                    if delta or (choice["logprobs"] or {}).get("content"):
                        yield {**head, "choices": [choice]}
                if progress.done is None:
                    continue
                finished[index] = progress.done
                self._remember(chat, builder.message(), progress.done)
                chunk = {
                    **head,
                    "choices": [{"index": index, "delta": {}, "logprobs": None, **builder.finish(progress.done)}],
                }
                last = len(finished) == len(builders)
                tail = self._tail(chat, [finished[i] for i in sorted(finished)])
                yield {**chunk, **tail} if last and not chat.body.stream_usage else chunk
                if last and chat.body.stream_usage:
                    yield {**head, "choices": [], **tail}

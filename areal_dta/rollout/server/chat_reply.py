"""From completions to OpenAI's chat answers, whole or in chunks; both split a reply the same way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_dta.rollout.server.chat import MARKERS, ReplyParser, ToolCall
from areal_dta.rollout.server.protocol import spans_json
from areal_dta.rollout.server.sequence import Completion, SamplingParams, TokenLogprobs
from areal_dta.rollout.server.text_stream import TextStream
from areal_dta.rollout.server.tokenizer import TextCodec

__all__ = ["ChoiceBuilder", "ReplyForm"]


@dataclass(frozen=True)
class ReplyForm:
    """How replies are read and shown."""

    tools: bool
    reasoning: bool
    in_thought: bool
    logprobs: bool
    token_ids: bool


class ChoiceBuilder:
    """One choice: takes tokens as they come and gives deltas; `message` is all of them together."""

    def __init__(self, codec: TextCodec, index: int, form: ReplyForm, sampling: SamplingParams) -> None:
        self.index = index
        self._codec = codec
        self._form = form
        self._skip_special = sampling.skip_special_tokens
        self._keep = MARKERS if form.tools or form.reasoning else ()
        self._trim = not sampling.no_stop_trim
        self._text = TextStream(codec.decode_raw, sampling.stop if self._trim else ())
        self._parser = ReplyParser(form.tools, form.reasoning, form.in_thought)
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []

    def take(self, new: Sequence[TokenLogprobs], done: Completion | None) -> list[dict[str, Any]]:
        """Deltas of the tokens ``new``; with ``done`` the last ones."""
        ids = [t.token for t in new]
        if done is not None and done.finish.kind == "stop" and isinstance(done.finish.matched, int) and ids:
            ids = ids[:-1]  # the stop token is not part of the text
        text = self._text.push(self._codec.visible(ids, self._skip_special, self._keep))
        pieces = self._parser.feed(text)
        if done is not None:
            matched = done.finish.matched
            trimmed = matched if isinstance(matched, str) and self._trim else None
            if trimmed in done.request.sampling.stop_after:
                trimmed = None
            pieces += self._parser.feed(self._text.finish(trimmed))
            pieces += self._parser.finish()
        return [self._delta(kind, piece) for kind, piece in pieces]

    def _delta(self, kind: str, piece: str | ToolCall) -> dict[str, Any]:
        if isinstance(piece, ToolCall):
            call = {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "index": len(self._calls),
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.arguments},
            }
            self._calls.append(call)
            return {"tool_calls": [call]}
        if kind == "thought":
            self._reasoning += piece
            return {"reasoning_content": piece}
        self._content += piece
        return {"content": piece}

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content or (None if self._calls else "")}
        if self._form.reasoning:
            message["reasoning_content"] = self._reasoning or None
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish(self, done: Completion) -> dict[str, Any]:
        """Finish reason and, where asked for, token ids and versions."""
        out: dict[str, Any] = {
            "finish_reason": "tool_calls" if self._calls and done.finish.kind == "stop" else done.finish.kind,
            "matched_stop": done.finish.matched,
        }
        if self._form.token_ids:
            out["token_ids"] = list(done.output_ids)
            out["weight_versions"] = spans_json(done.spans)
        return out

    def logprobs(self, output: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """OpenAI's form; ``raw_logprob`` and ``token_id`` are additions."""
        if not self._form.logprobs:
            return None
        return {"content": [self._entry(t) for t in output]}

    def _entry(self, t: TokenLogprobs) -> dict[str, Any]:
        top = [{**self._spelled(token), "logprob": lp} for lp, token in t.top if lp != float("-inf")]
        entry = {**self._spelled(t.token), "logprob": t.logprob, "top_logprobs": top}
        return entry if t.raw is None else {**entry, "raw_logprob": t.raw}

    def _spelled(self, token: int) -> dict[str, Any]:
        text = self._codec.token_text(token)
        return {"token": text, "bytes": list(text.encode()), "token_id": token}

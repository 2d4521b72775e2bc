"""Conversations as token ids: each turn's prompt is the previous ids, what was sampled, and the new messages' ids.

Nothing that was sampled is ever decoded and encoded again, so training sees exactly the tokens the server produced.
New messages are rendered by the tokenizer's own chat template after a placeholder turn, and what follows the
placeholder is encoded: that works for templates that treat earlier turns differently (Qwen3 drops earlier reasoning),
because earlier text is not rendered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tau2.data_model.message import AssistantMessage, Message, ToolMessage
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from experiments.tau2.toolcalls import parse_agent_turn

__all__ = ["ChatError", "ChatRenderer", "load_tokenizer"]

_PLACEHOLDER = "placeholder-of-an-earlier-turn"


class ChatError(ValueError):
    """A tokenizer without a usable chat template."""


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in folder ``path`` (or in the local Hugging Face cache); never touches the network.

    Raises ChatError when it is missing or has no chat template or end-of-turn token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ChatError(
            f"no tokenizer at {path!r} ({error}); set tokenizer_path to a local Hugging Face folder"
        ) from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ChatError(f"the tokenizer at {path!r} lacks a chat template or an eos token; use that of a chat model")
    return tokenizer


class ChatRenderer:
    """Renders tau2 messages for one tokenizer; ``template_args`` go to the chat template (e.g. ``enable_thinking``)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_args: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int = int(tokenizer.eos_token_id)
        self._template_args = dict(template_args or {})
        self._eos_text: str = str(tokenizer.eos_token)

    @classmethod
    def load(cls, path: str | Path, template_args: dict[str, Any] | None = None) -> ChatRenderer:
        return cls(load_tokenizer(str(path)), template_args)

    def first_prompt(
        self, system_prompt: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Ids of the whole conversation so far, ready for the agent's turn."""
        chat = [{"role": "system", "content": system_prompt}, *(to_chat(m) for m in messages)]
        return self._encode(self._render(chat, list(tools)))

    def continuation(self, output_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids that follow the sampled turn ``output_ids``: the end of that turn unless it was sampled, then
        ``messages``.
        """
        chat = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _PLACEHOLDER},
            *(to_chat(m) for m in messages),
        ]
        _, found, tail = self._render(chat, None).rpartition(_PLACEHOLDER)
        if not found:
            raise ChatError("the chat template does not show an assistant's text; incremental rendering is impossible")
        if output_ids and output_ids[-1] == self.eos_id:
            tail = tail.removeprefix(self._eos_text)
        return self._encode(tail)

    def read_turn(self, output_ids: Sequence[int], turn: int) -> AssistantMessage:
        """The message that the sampled ids say (see `parse_agent_turn`)."""
        ids = [i for i in output_ids if i != self.eos_id]
        return parse_agent_turn(self.tokenizer.decode(ids, skip_special_tokens=False), turn)

    def write_turn(self, message: AssistantMessage) -> list[int]:
        """Ids of a given agent turn, its end included: what a policy that says ``message`` would have sampled."""
        before = self._render([{"role": "user", "content": "."}], None)
        whole = self._render([{"role": "user", "content": "."}, to_chat(message)], None, generate=False)
        if not whole.startswith(before):
            raise ChatError("the chat template changes its generation prompt once a turn is complete")
        return self._encode(whole[len(before) :].rstrip("\n"))

    def _render(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat, tools=tools, add_generation_prompt=generate, tokenize=False, **self._template_args
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def to_chat(message: Message) -> dict[str, Any]:
    """A tau2 message as the dict that chat templates read."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        chat["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    elif isinstance(message, ToolMessage):
        chat["tool_call_id"] = message.id
    return chat

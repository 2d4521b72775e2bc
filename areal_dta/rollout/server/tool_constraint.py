"""Forced tool calls: which tokens may come next so that the output is one well-formed call of an offered function.

The form is ``<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>``. OBJECT is any JSON object with at
most one space between its parts; it is not checked against the function's parameter schema. Tokens are judged by their
own text, which is right for byte-level tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = ["JsonObject", "ToolCallConstraint"]

MAX_DEPTH = 64
_CLOSE = "}\n</tool_call>"
_AFTER_NUMBER = {"int": ".eE", "zero": ".eE", "fraction": "eE", "exponent": ""}
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


@dataclass(frozen=True)
class JsonObject:
    """A JSON object read so far. ``expect``: what comes next; ``stack``: the open brackets; ``word``: the rest of true,
    false or null. Immutable, so that a token can be tried."""

    expect: str = "object"
    stack: str = ""
    word: str = ""
    in_key: bool = False
    after_space: bool = False

    @property
    def complete(self) -> bool:
        return self.expect == "end"

    def step(self, ch: str) -> JsonObject | None:
        """The state after ``ch``, None if it cannot come here."""
        if self.expect in ("string", "escape") or self.expect.startswith("hex"):
            return self._in_string(ch)
        if self.expect == "word":
            rest = self.word[1:]
            if ch != self.word[0]:
                return None
            return replace(self, word=rest) if rest else self._after_value()
        if self.expect in ("minus", "int", "zero", "point", "fraction", "e", "sign", "exponent"):
            return self._in_number(ch)
        if ch == " ":
            return None if self.after_space or self.expect in ("object", "end") else replace(self, after_space=True)
        return replace(self, after_space=False)._structure(ch)

    def _structure(self, ch: str) -> JsonObject | None:
        expect = self.expect
        if ch == "{" and expect in ("object", "value", "value or ]"):
            return replace(self, expect="key or }", stack=self.stack + "{") if len(self.stack) < MAX_DEPTH else None
        if ch == "[" and expect in ("value", "value or ]"):
            return replace(self, expect="value or ]", stack=self.stack + "[") if len(self.stack) < MAX_DEPTH else None
        if ch == "}" and self.stack.endswith("{") and expect in ("key or }", "comma"):
            return self._closed()
        if ch == "]" and self.stack.endswith("[") and expect in ("value or ]", "comma"):
            return self._closed()
        if ch == "," and expect == "comma":
            return replace(self, expect="key" if self.stack.endswith("{") else "value")
        if ch == ":" and expect == "colon":
            return replace(self, expect="value")
        if ch == '"' and expect in ("key", "key or }"):
            return replace(self, expect="string", in_key=True)
        if expect not in ("value", "value or ]"):
            return None
        if ch == '"':
            return replace(self, expect="string", in_key=False)
        if ch in _WORDS:
            return replace(self, expect="word", word=_WORDS[ch])
        if ch == "-":
            return replace(self, expect="minus")
        if ch in "0123456789":
            return replace(self, expect="zero" if ch == "0" else "int")
        return None

    def _closed(self) -> JsonObject:
        stack = self.stack[:-1]
        return replace(self, stack=stack, expect="comma" if stack else "end")

    def _after_value(self) -> JsonObject:
        return replace(self, expect="comma", word="")

    def _in_string(self, ch: str) -> JsonObject | None:
        if self.expect == "string":
            if ch == '"':
                return replace(self, expect="colon") if self.in_key else self._after_value()
            if ch == "\\":
                return replace(self, expect="escape")
            return self if ch >= " " else None
        if self.expect == "escape":
            if ch == "u":
                return replace(self, expect="hex4")
            return replace(self, expect="string") if ch in '"\\/bfnrt' else None
        if ch not in "0123456789abcdefABCDEF":
            return None
        left = int(self.expect[3:]) - 1
        return replace(self, expect=f"hex{left}" if left else "string")

    def _in_number(self, ch: str) -> JsonObject | None:
        expect = self.expect
        if ch in "0123456789":
            after = {"minus": "zero" if ch == "0" else "int", "int": "int", "zero": None, "point": "fraction"}
            after |= {"fraction": "fraction", "e": "exponent", "sign": "exponent", "exponent": "exponent"}
            found = after[expect]
            return None if found is None else replace(self, expect=found)
        if expect == "e" and ch in "+-":
            return replace(self, expect="sign")
        if expect not in _AFTER_NUMBER:
            return None
        if ch in _AFTER_NUMBER[expect]:
            return replace(self, expect="point" if ch == "." else "e")
        return self._after_value().step(ch)


@dataclass(frozen=True)
class _State:
    typed: str = ""  # of the opening, up to the arguments
    arguments: JsonObject = JsonObject()
    closed: int = 0  # characters of the closing


class ToolCallConstraint:
    """``names``: the functions to choose from; ``token_text``: a token's text; ``hidden``: special tokens, never used.

    ``before`` is written first (``</think>`` where the template has opened a thought).
    """

    def __init__(
        self, names: Sequence[str], token_text: Callable[[int], str], hidden: frozenset[int], before: str = ""
    ) -> None:
        quoted = [json.dumps(name, ensure_ascii=False) for name in names]
        self._openings = [f'{before}<tool_call>\n{{"name": {name}, "arguments": ' for name in quoted]
        self._token_text = token_text
        self._hidden = hidden
        self._state = _State()

    @property
    def complete(self) -> bool:
        return self._state.closed == len(_CLOSE)

    def allows(self, token: int) -> bool:
        return self._after(token) is not None

    def accept(self, token: int) -> None:
        state = self._after(token)
        if state is None:
            raise ValueError(f"token {token} ({self._token_text(token)!r}) does not continue the forced tool call")
        self._state = state

    def _after(self, token: int) -> _State | None:
        text = self._token_text(token)
        if token in self._hidden and text not in ("<tool_call>", "</tool_call>", "</think>"):
            return None
        state: _State | None = self._state if text else None
        for ch in text:
            if state is None:
                return None
            state = self._step(state, ch)
        return state

    def _step(self, state: _State, ch: str) -> _State | None:
        if state.typed not in self._openings:
            typed = state.typed + ch
            return replace(state, typed=typed) if any(o.startswith(typed) for o in self._openings) else None
        if not state.arguments.complete:
            arguments = state.arguments.step(ch)
            return None if arguments is None else replace(state, arguments=arguments)
        if state.closed < len(_CLOSE) and ch == _CLOSE[state.closed]:
            return replace(state, closed=state.closed + 1)
        return None

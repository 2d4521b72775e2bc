"""Text of a growing output: tokens in, text out, holding back what a later token may still change or cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["TextStream", "held_back"]

_BROKEN = "\ufffd"  # what an unfinished character decodes to


def held_back(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(text), len(marker) - 1), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


class TextStream:
    """``decode(ids)`` spells tokens out; ``stops`` are cut off the text once the output ended by them."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._known = self._read = 0  # tokens before `_known` are forgotten, those before `_read` are in the text
        self._pending = ""

    def push(self, ids: Iterable[int]) -> str:
        """Text that is certain now that ``ids`` have come."""
        self._ids.extend(ids)
        known = self._decode(self._ids[self._known : self._read])
        text = self._decode(self._ids[self._known :])
        if text.endswith(_BROKEN):
            return ""
        self._pending += text[len(known) :]
        self._known, self._read = self._read, len(self._ids)
        certain = len(self._pending) - held_back(self._pending, self._stops)
        certain = min([certain, *(self._pending.index(s) for s in self._stops if s in self._pending)])
        ready, self._pending = self._pending[:certain], self._pending[certain:]
        return ready

    def finish(self, matched: str | None = None) -> str:
        """The rest, up to the stop string that ``matched``."""
        known = self._decode(self._ids[self._known : self._read])
        rest = self._pending + self._decode(self._ids[self._known :])[len(known) :]
        self._pending = ""
        return rest[: rest.index(matched)] if matched is not None and matched in rest else rest

"""Fields of requests, checked."""

from __future__ import annotations

from typing import TypeVar

from areal_dta.batcher.core import Refusal
from areal_dta.channel import Request

__all__ = ["field", "length", "lengths"]

T = TypeVar("T")


def field(request: Request, name: str, kind: type[T]) -> T:
    """A field of the request's body; raises Refusal when it is missing or of another type."""
    value = request.body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        text = f"{request.kind!r} needs {name!r} as {kind.__name__}, got {value!r:.80}"
        raise Refusal("bad_request", text)
    return value


def length(request: Request) -> int | None:
    """Tokens of a trajectory that may be malformed."""
    ids = request.arrays.get("input_ids_T")
    return None if ids is None else int(ids.size)


def lengths(request: Request) -> list[int]:
    """Tokens of the episodes that a heartbeat is about; a worker need not tell."""
    given = request.body.get("num_tokens")
    return [n if isinstance(n, int) else 0 for n in given] if isinstance(given, list) else []

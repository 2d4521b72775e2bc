"""Checks of JSON fields: every refusal names the field, its value and what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_dta.rollout.server.errors import ApiError

__all__ = ["check_fields", "integer", "number", "token_ids", "typed"]


def check_fields(
    body: Mapping[str, Any], known: Sequence[str], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Refuse unknown names and features that are known but not offered."""
    for name, value in body.items():
        if name in neutral:
            if not any(value is v or value == v for v in neutral[name]):
                raise ApiError(f"{where}.{name}={value!r:.60} is not supported by this server; leave it out")
        elif name not in known:
            close = difflib.get_close_matches(name, [*known, *neutral], 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
            raise ApiError(f"unknown field {where}.{name}{hint}")


def typed(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise ApiError(f"{name} must be a number, got {value!r}")
    if not isinstance(value, kind):
        wanted = " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__
        raise ApiError(f"{name} must be {wanted}, got {value!r:.60} ({type(value).__name__})")
    return value


def number(value: Any, name: str, low: float, high: float) -> float:
    number = float(typed(value, (int, float), name))
    if not low <= number <= high:
        raise ApiError(f"{name}={number} is outside [{low}, {high}]")
    return number


def integer(value: Any, name: str, low: int, high: int) -> int:
    number: int = typed(value, int, name)
    if not low <= number <= high:
        raise ApiError(f"{name}={number} is outside [{low}, {high}]")
    return number


def token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    typed(value, list, name)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise ApiError(f"{name}[{i}] must be int, got {token!r:.60} ({type(token).__name__})")
        if not 0 <= token < vocab_size:
            raise ApiError(f"{name}[{i}]={token} is outside the vocabulary [0, {vocab_size})")
    return tuple(value)

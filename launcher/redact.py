"""Keys don't belong on a screen or into a CI log: what `--dry-run` prints is shown without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["HIDDEN", "redact_command", "redact_values"]

HIDDEN = "***"


def redact_values(value: Any, name: str = "") -> Any:
    """A copy of a nested mapping in which every ``*api_key`` that is set is hidden."""
    if isinstance(value, dict):
        return {key: redact_values(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [redact_values(inner) for inner in value]
    return HIDDEN if value and name.endswith("api_key") else value


def redact_command(argv: Sequence[str]) -> list[str]:
    """argv with whatever follows an ``--*api-key`` flag hidden."""
    return [HIDDEN if flag.endswith("api-key") else word for flag, word in zip(["", *argv], argv)]

"""The refusal that every HTTP process here answers with."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError"]


class ApiError(Exception):
    """A refusal with its HTTP status; the message says what was wrong and what to do."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "code": self.status}}

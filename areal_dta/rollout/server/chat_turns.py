"""Token ids of finished chat turns, so that the next turn of a conversation extends them instead of re-tokenising.

Text that is tokenised again need not give the tokens that the model wrote; a trainer would then learn from a prompt
that was never seen. Conversations are recognised by their messages, the reply exactly as this server returned it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["TurnMemory", "conversation_keys"]


def conversation_keys(messages: Sequence[Mapping[str, Any]], context: Any) -> list[bytes]:
    """Key i identifies ``messages[: i + 1]`` under ``context`` (tools and template options)."""
    value = hashlib.sha256(json.dumps(context, sort_keys=True, default=str).encode()).digest()
    keys = []
    for message in messages:
        value = hashlib.sha256(value + json.dumps(_canonical(message), sort_keys=True).encode()).digest()
        keys.append(value)
    return keys


def _canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in message.items() if v is not None and v != [] and k not in ("content", "tool_calls")}
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    out["content"] = content or ""
    if calls := message.get("tool_calls"):
        functions = [(c.get("id"), c.get("function") or {}) for c in calls if isinstance(c, dict)]
        out["calls"] = [[call_id, f.get("name"), f.get("arguments")] for call_id, f in functions]
    return out


class TurnMemory:
    """Least recently used conversations are forgotten beyond ``max_bytes``."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ids: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def remember(self, key: bytes, ids: Sequence[int]) -> None:
        """``ids``: prompt and output of the turn that ends with the message of ``key``; the latest wins."""
        old = self._ids.pop(key, None)
        self._num_bytes -= 0 if old is None else old.nbytes
        self._ids[key] = np.asarray(ids, np.int32)
        self._num_bytes += self._ids[key].nbytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._ids.popitem(last=False)[1].nbytes

    def find(self, keys: Sequence[bytes]) -> tuple[int, list[int]] | None:
        """The longest known beginning: (number of its messages, their token ids)."""
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] in self._ids:
                self._ids.move_to_end(keys[index])
                return index + 1, self._ids[keys[index]].tolist()
        return None

"""Which server a request should go to: the one that holds its prefix, unless that one is overloaded. Pure, no I/O."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Affinity", "RequestKeys", "request_keys"]

PREFIX_BLOCK = 64  # tokens; prefixes are remembered at multiples of it
MAX_BLOCKS = 512


@dataclass(frozen=True)
class RequestKeys:
    """``name``: what the client says belongs together; ``prefixes``: hashes of ever longer prompt prefixes."""

    name: str | None = None
    prefixes: tuple[int, ...] = ()


def request_keys(header: str | None, body: Mapping[str, Any] | None) -> RequestKeys:
    """Keys of a request: the ``X-Affinity`` header or the body's ``rid``, else its prompt (tokens or messages)."""
    if header:
        return RequestKeys(header)
    if body is None:
        return RequestKeys()
    rid = body.get("rid")
    name = rid if isinstance(rid, str) and rid else None
    ids = body.get("input_ids")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids = ids[0]
    if isinstance(ids, list):
        return RequestKeys(name, _prefix_hashes(ids))
    messages = body.get("messages")
    if isinstance(messages, list):  # system prompt and first user message identify a conversation and its group
        return RequestKeys(name, (hash(json.dumps(messages[:2], sort_keys=True)),))
    return RequestKeys(name)


def _prefix_hashes(ids: Sequence[int]) -> tuple[int, ...]:
    hashes: list[int] = []
    value = 0
    for lo in range(0, min(len(ids) - len(ids) % PREFIX_BLOCK, MAX_BLOCKS * PREFIX_BLOCK), PREFIX_BLOCK):
        value = hash((value, str(ids[lo : lo + PREFIX_BLOCK])))
        hashes.append(value)
    return (*hashes, hash((value, str(ids[len(hashes) * PREFIX_BLOCK :]))))


class Affinity:
    """Remembers where keys went (least recently used are forgotten) and picks a server by them and by load."""

    def __init__(self, max_entries: int = 65536, spill_above: int = 16) -> None:
        self._max_entries = max_entries
        self._spill_above = spill_above
        self._where: OrderedDict[object, str] = OrderedDict()
        self._turn = 0
        self.reasons = dict.fromkeys(("name", "prefix", "spill", "new"), 0)

    def pick(self, keys: RequestKeys, outstanding: Mapping[str, int]) -> str:
        """Choose among ``outstanding`` (server -> unanswered requests, not empty).

        The server of the name or else of the longest known prefix wins unless it has more than ``spill_above`` requests
        above the least loaded; otherwise the least loaded, in turns where several are.
        """
        least = min(outstanding.values())
        preferred, reason = self._known(keys, outstanding)
        if preferred is not None and outstanding[preferred] <= least + self._spill_above:
            chosen = preferred
        else:
            reason = "new" if preferred is None else "spill"
            idle = [url for url, count in outstanding.items() if count == least]
            self._turn += 1
            chosen = idle[self._turn % len(idle)]
        self.reasons[reason] += 1
        for key in (*(() if keys.name is None else (keys.name,)), *keys.prefixes):
            self._where[key] = chosen
            self._where.move_to_end(key)
        while len(self._where) > self._max_entries:
            self._where.popitem(last=False)
        return chosen

    def _known(self, keys: RequestKeys, outstanding: Mapping[str, int]) -> tuple[str | None, str]:
        if keys.name is not None and self._where.get(keys.name) in outstanding:
            return self._where[keys.name], "name"
        for prefix in reversed(keys.prefixes):
            if self._where.get(prefix) in outstanding:
                return self._where[prefix], "prefix"
        return None, "new"

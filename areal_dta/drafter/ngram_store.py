"""Text of sibling sequences, stored once and indexed by n-gram.

Sequences whose prompts start alike (the first ``key_tokens``) are siblings: samples of a group, turns of a
conversation, tasks under one policy prompt. A sequence stores only what no sibling has stored before it (a `Segment`,
hanging off the segment that holds the text before). Every segment indexes its own n-grams, so dropping one is dropping
its object.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["END", "WORD_BITS", "NgramLimits", "NgramStats", "Segment", "TextStore"]

CHUNK_TOKENS = 64  # stored text is found again in steps of this many tokens, then token by token
TOKEN_BITS = 21  # an n-gram key packs at most three tokens into 63 bits
TOKEN_MASK = (1 << TOKEN_BITS) - 1
WORD_BITS = 32  # a stored token
END = 1 << 31  # beyond every index


@dataclass(frozen=True)
class NgramLimits:
    """A match is ``min_n`` to ``max_n`` tokens long. Memory is about 110 bytes per stored token."""

    min_n: int = 2
    max_n: int = 8
    key_tokens: int = 256
    max_tokens: int = 400_000
    max_siblings: int = 64  # segments searched beside the own ones, the most recently opened first
    own_matches: int = 4  # occurrences looked at per own segment, the latest first
    sibling_matches: int = 2  # the same per sibling

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= 3 or not self.min_n <= self.max_n <= CHUNK_TOKENS:
            raise ValueError(f"min_n={self.min_n}, max_n={self.max_n}; needs 1 <= min_n <= 3 and max_n in min_n..64")


@dataclass(frozen=True)
class NgramStats:
    """Sizes now and counts since the start."""

    num_tokens: int  # stored
    num_segments: int
    num_groups: int
    num_dropped: int  # segments forgotten for memory
    num_full: int  # sequences not (or no longer) indexed because everything stored was in use


@dataclass(eq=False)
class Segment:
    """Text from absolute position ``start`` on. ``tokens`` begins with up to 64 tokens of the text before it."""

    group: _Group
    parent: Segment | None
    start: int
    num_lead: int
    tokens: array[int]
    last: dict[int, int] = field(default_factory=dict)  # n-gram -> its latest end (index into tokens)
    before: array[int] = field(default_factory=lambda: array("i"))  # per index: the same n-gram's end before it, or -1
    key: int = 0  # the n-gram that ends with the last token
    chunks: list[int] = field(default_factory=list)
    chunk_hash: int = 0  # of all whole chunks of the text so far
    path: tuple[tuple[Segment, int], ...] = ()  # itself and its ancestors, each up to which index the text is shared
    branches: dict[tuple[int, int], Segment] = field(default_factory=dict)  # end and next token -> first such child
    num_children: int = 0
    is_open: bool = True
    is_full: bool = False  # memory ran out: it takes no more tokens and proposes nothing

    @property
    def num_own(self) -> int:
        return len(self.tokens) - self.num_lead


@dataclass(eq=False)
class _Group:
    """Siblings."""

    key: int
    segments: dict[Segment, None] = field(default_factory=dict)  # in the order they were opened
    chunks: dict[int, tuple[Segment, int]] = field(default_factory=dict)  # hash of the text up to there -> its end


class TextStore:
    """All sequences of one server. Not thread-safe: used by the model thread only."""

    def __init__(self, limits: NgramLimits) -> None:
        self.limits = limits
        self._open: dict[str, Segment] = {}
        self._groups: dict[int, _Group] = {}
        self._unused: OrderedDict[Segment, None] = OrderedDict()  # closed and childless, least recently used first
        self._num_tokens = self._num_segments = self._num_dropped = self._num_full = 0
        self._key_mask = (1 << TOKEN_BITS * limits.min_n) - 1

    def __getitem__(self, seq_id: str) -> Segment:
        return self._open[seq_id]

    @property
    def stats(self) -> NgramStats:
        return NgramStats(self._num_tokens, self._num_segments, len(self._groups), self._num_dropped, self._num_full)

    def open(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Start a sequence with its prompt; stored siblings' text is found again, not stored again."""
        if seq_id in self._open:
            raise ValueError(f"sequence {seq_id!r} is open already; close it first")
        text = array("i", tokens)
        group_key = hash(text[: self.limits.key_tokens].tobytes())
        group = self._groups.setdefault(group_key, _Group(group_key))
        parent, end, num_shared, chunk_hash = self._find(group, text)
        if parent is None:
            segment = Segment(group, None, 0, 0, array("i"))
        else:
            lead = parent.tokens[max(end - CHUNK_TOKENS, 0) : end]
            segment = Segment(group, parent, num_shared, len(lead), lead, chunk_hash=chunk_hash)
            segment.before.extend([-1] * (len(lead) - 1))
            segment.key = self._key_of(lead)
            segment.path = ((parent, end), *parent.path[1:])
            parent.num_children += 1
            self._unused.pop(parent, None)
        segment.path = ((segment, END), *segment.path)
        group.segments[segment] = None
        self._num_segments += 1
        self._open[seq_id] = segment
        self._append(segment, text[num_shared:])

    def extend(self, seq_id: str, new_tokens: Sequence[int]) -> None:
        """Add tokens that were accepted."""
        self._append(self._open[seq_id], new_tokens)

    def close(self, seq_id: str, keep: bool = True) -> None:
        """The sequence ended; ``keep`` lets its siblings draw on it until memory is needed."""
        segment = self._open.pop(seq_id)
        segment.is_open = False
        if segment.num_children:
            return
        self._unused[segment] = None
        if not keep or not segment.num_own:
            del self._unused[segment]
            self._drop(segment)

    def text(self, seq_id: str) -> list[int]:
        """All tokens of an open sequence as the index knows them."""
        parts: list[int] = []
        for segment, end in self._open[seq_id].path:
            parts = segment.tokens[segment.num_lead : end].tolist() + parts
        return parts

    def _key_of(self, tokens: array[int]) -> int:
        key = 0
        for token in tokens[-self.limits.min_n :]:
            key = key << TOKEN_BITS | token & TOKEN_MASK
        return key

    def _find(self, group: _Group, text: array[int]) -> tuple[Segment | None, int, int, int]:
        """The segment that holds the longest stored start of ``text``, its end there, its length, its chunks' hash."""
        data = memoryview(text).cast("B")
        found: tuple[Segment, int] | None = None
        num_shared = chunk_hash = 0
        for end in range(CHUNK_TOKENS, len(text) + 1, CHUNK_TOKENS):
            digest = _chunk_hash(chunk_hash, data[4 * (end - CHUNK_TOKENS) : 4 * end].tobytes())
            place = group.chunks.get(digest)
            if place is None:
                break
            found, num_shared, chunk_hash = place, end, digest
        if found is None:
            return None, 0, 0, 0
        segment, at = found
        limit = min(num_shared + CHUNK_TOKENS - 1, len(text))  # beyond it another chunk would have been found
        while True:
            same = _common_prefix(segment.tokens[at : at + limit - num_shared], text[num_shared:limit])
            at, num_shared = at + same, num_shared + same
            child = segment.branches.get((at, text[num_shared])) if num_shared < limit else None
            if child is None:
                return segment, at, num_shared, chunk_hash
            segment, at = child, child.num_lead

    def _append(self, segment: Segment, new: Sequence[int]) -> None:
        if segment.is_full or not len(new):
            return
        if not self._make_room(len(new)):
            segment.is_full = True
            self._num_full += 1
            return
        self._num_tokens += len(new)
        size = len(segment.tokens)
        if segment.parent is not None and size == segment.num_lead:
            segment.parent.branches.setdefault((segment.path[1][1], new[0]), segment)
        if len(new) > CHUNK_TOKENS:
            self._append_many(segment, new)
        else:
            tokens, last, before, key, min_n = (
                segment.tokens,
                segment.last,
                segment.before,
                segment.key,
                self.limits.min_n,
            )
            for token in new:
                # An n-gram is indexed once something follows it.
                if size >= min_n:
                    before.append(last.get(key, -1))
                    last[key] = size - 1
                elif size:
                    before.append(-1)
                key = (key << TOKEN_BITS | token & TOKEN_MASK) & self._key_mask
                tokens.append(token)
                size += 1
            segment.key = key
        self._register_chunks(segment)

    def _append_many(self, segment: Segment, new: Sequence[int]) -> None:
        """`_append` for a prompt: keys and chains by numpy."""
        tokens, min_n = segment.tokens, self.limits.min_n
        first = len(segment.before)  # the first index not indexed yet
        tokens.extend(new)
        segment.key = self._key_of(tokens)
        window = np.array(tokens[max(first - min_n + 1, 0) : len(tokens) - 1], dtype=np.int64) & TOKEN_MASK
        num_short = max(min_n - 1 - first, 0)  # indices before the first whole n-gram
        segment.before.extend([-1] * num_short)
        first += num_short
        keys = np.zeros(len(tokens) - 1 - first, dtype=np.int64)
        for j in range(min_n):
            keys = keys << TOKEN_BITS | window[j : j + len(keys)]
        order = np.argsort(keys, kind="stable")
        repeats = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        before = np.full(len(keys), -1, dtype=np.int32)
        before[order[repeats + 1]] = order[repeats] + first
        names = keys.tolist()
        if segment.last:
            for i in np.flatnonzero(before < 0).tolist():
                before[i] = segment.last.get(names[i], -1)
        segment.before.frombytes(before.tobytes())
        segment.last.update(zip(names, range(first, first + len(names)), strict=True))

    def _register_chunks(self, segment: Segment) -> None:
        base = segment.start - segment.num_lead  # absolute position of tokens[0]
        end = (segment.start // CHUNK_TOKENS + len(segment.chunks) + 1) * CHUNK_TOKENS - base
        while end <= len(segment.tokens):
            data = segment.tokens[end - CHUNK_TOKENS : end].tobytes()
            segment.chunk_hash = _chunk_hash(segment.chunk_hash, data)
            segment.chunks.append(segment.chunk_hash)
            segment.group.chunks.setdefault(segment.chunk_hash, (segment, end))
            end += CHUNK_TOKENS

    def _make_room(self, num_new: int) -> bool:
        while self._num_tokens + num_new > self.limits.max_tokens:
            if not self._unused:
                return False
            self._drop(self._unused.popitem(last=False)[0])
            self._num_dropped += 1
        return True

    def _drop(self, segment: Segment) -> None:
        group, parent = segment.group, segment.parent
        for digest in segment.chunks:
            if group.chunks.get(digest, (None, 0))[0] is segment:
                del group.chunks[digest]
        del group.segments[segment]
        if not group.segments:
            del self._groups[group.key]
        self._num_tokens -= segment.num_own
        self._num_segments -= 1
        if parent is not None:
            parent.num_children -= 1
            branch = (segment.path[1][1], segment.tokens[segment.num_lead]) if segment.num_own else None
            if branch is not None and parent.branches.get(branch) is segment:
                del parent.branches[branch]
            if not parent.num_children and not parent.is_open:
                # It was last used through this child, so it is now the least recently used itself.
                self._unused[parent] = None
                self._unused.move_to_end(parent, last=False)


def _chunk_hash(before: int, data: bytes) -> int:
    return hash((before, data))


def _common_prefix(a: array[int], b: array[int]) -> int:
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])

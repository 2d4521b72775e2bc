"""Which keys the new tokens of a batch see, laid out as index tensors for `paged_attention`; pure planning.

A prefix that several sequences of the batch share is attended once for all of them; which pages are shared is read off
the page tables. A long run of pages that lie in order gets a pass of its own, too: it is read in place. What follows, a
sequence's tail, is copied together; tails of similar sizes are padded to one rectangle.

Legend of shape suffixes: T new tokens of the batch, B sequences of a group, Q new tokens per sequence (padded), S key
slots (padded), P pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["AttentionPlan", "SharedPart", "SharedPrefix", "Span", "TailGroup", "find_shared", "plan_attention"]

# A separate pass over a shared prefix (or over a group of equal shapes) costs about as much as attending this many keys
# for one query token, so it must save more. Anything from 500 to 6000 measured the same on one CPU core.
PASS_OVERHEAD_KEYS = 2048


@dataclass(frozen=True, eq=False)
class Span:
    """The new tokens in slots ``[start, end)`` of one sequence; ``table`` maps its pages, the new ones included.

    By default they are a chain: each sees every slot up to its own. With ``visible`` (end - start, end - context) they
    are part of a tree: all see the slots before ``context``, and of the slots from there on those that are marked
    (itself included). ``depths`` gives their positions, which are then not their slots.
    """

    table: Sequence[int]
    start: int
    end: int
    context: int | None = None  # None: start
    visible: np.ndarray | None = None
    depths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.known <= self.start < self.end:
            raise ValueError(f"a span needs context <= start < end, got {self.known}, {self.start}, {self.end}")
        shape = (self.end - self.start, self.end - self.known)
        if self.visible is not None and self.visible.shape != shape:
            raise ValueError(f"visible has shape {self.visible.shape}; new tokens by slots from context on are {shape}")
        if self.depths is not None and len(self.depths) != shape[0]:
            raise ValueError(f"{len(self.depths)} depths for {shape[0]} new tokens")

    @property
    def known(self) -> int:
        """Slots before this one are seen by all new tokens."""
        return self.start if self.context is None else self.context

    @property
    def num_new(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class SharedPrefix:
    """Pages that all spans of ``members`` have from ``first_page`` on, before their new tokens: a pass of its own."""

    members: tuple[int, ...]
    first_page: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class SharedPart:
    """A shared prefix for `PagedKV`: the rows that see it, and its pages."""

    rows_T: torch.Tensor | None  # None: every row of the batch, in order
    pages_P: torch.Tensor
    slots: slice | None  # where the keys are if the pages lie in order


@dataclass(frozen=True)
class TailGroup:
    """Sequences whose own parts have similar sizes, padded to one rectangle."""

    rows_BQ: torch.Tensor | None  # None: the rows of the batch, in order and without padding
    keep: torch.Tensor | None  # which of B * Q are no padding; None: all
    pages_BP: torch.Tensor
    hidden_BQS: torch.Tensor  # True where a key must not be seen
    _biases: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def bias(self, group_size: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of queries and their heads (B, 1, Q * group_size or 1, S): 0 or -inf."""
        key = (group_size, dtype)
        if key not in self._biases:
            B, Q, S = self.hidden_BQS.shape
            bias = torch.zeros(B, Q, S, dtype=dtype, device=self.hidden_BQS.device)
            bias.masked_fill_(self.hidden_BQS, float("-inf"))
            self._biases[key] = (bias if Q == 1 else bias.repeat_interleave(group_size, 1)).unsqueeze(1)
        return self._biases[key]


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors of one forward pass, the same for all layers."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor  # where the new keys and values go
    shared: tuple[SharedPart, ...]
    tails: tuple[TailGroup, ...]
    max_position: int


def find_shared(spans: Sequence[Span], page_size: int) -> list[SharedPrefix]:
    """Prefixes worth a pass of their own, seen by all new tokens of their members, the outer ones first."""
    usable = [list(s.table[: s.known // page_size]) for s in spans]
    found: list[SharedPrefix] = []
    todo: list[tuple[list[int], int, int]] = [(list(range(len(spans))), 0, 0)]
    while todo:
        members, unclaimed, column = todo.pop()
        groups: dict[int, list[int]] = {}
        for m in members:
            if column < len(usable[m]):
                groups.setdefault(usable[m][column], []).append(m)
        for group in groups.values():
            if len(group) < 2:
                continue
            end = _common_end([usable[m] for m in group], column)
            num_queries = sum(spans[m].num_new for m in group)
            smallest = min(spans[m].num_new for m in group)
            saved = (num_queries - smallest) * (end - unclaimed) * page_size
            start = unclaimed
            if saved > PASS_OVERHEAD_KEYS:
                found.append(SharedPrefix(tuple(group), unclaimed, tuple(usable[group[0]][unclaimed:end])))
                start = end
            todo.append((group, start, end))
    starts = _tail_starts(found, len(spans))
    for m, pages in enumerate(usable):
        start = starts[m]
        end = start + _run_length(pages[start:])
        if (end - start) * page_size > PASS_OVERHEAD_KEYS:
            found.append(SharedPrefix((m,), start, tuple(pages[start:end])))
    return found


def _run_length(pages: Sequence[int]) -> int:
    """How many of the first pages lie in order."""
    return next((i for i, page in enumerate(pages) if page != pages[0] + i), len(pages))


def _tail_starts(shared: Sequence[SharedPrefix], num_spans: int) -> list[int]:
    """The first page of every span that is in no shared prefix."""
    starts = [0] * num_spans
    for part in shared:
        for m in part.members:
            starts[m] = max(starts[m], part.first_page + len(part.pages))
    return starts


def _common_end(tables: list[list[int]], column: int) -> int:
    """First column from ``column`` on where the tables differ (pages are unique to their content and place)."""
    shortest, longest = min(tables), max(tables)  # the lexicographic extremes bound what all share
    limit = min(len(shortest), len(longest))
    end = column
    while end < limit and shortest[end] == longest[end]:
        end += 1
    return end


def plan_attention(
    spans: Sequence[Span], page_size: int, device: torch.device, shared: Sequence[SharedPrefix] | None = None
) -> AttentionPlan:
    """Lay the batch out; ``shared`` (from an earlier step with the same sequences) skips the search."""
    shared = find_shared(spans, page_size) if shared is None else shared
    first_row = np.concatenate(([0], np.cumsum([s.num_new for s in spans])))
    tail_page = _tail_starts(shared, len(spans))
    slots = list(itertools.chain.from_iterable(_slots(s, page_size) for s in spans))
    positions = list(
        itertools.chain.from_iterable(range(s.start, s.end) if s.depths is None else s.depths for s in spans)
    )

    def tensor(array: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

    parts = []
    for part in shared:
        rows = None
        if len(part.members) < len(spans):
            rows = tensor(np.concatenate([np.arange(first_row[m], first_row[m + 1]) for m in part.members]))
        first, in_order = part.pages[0], _run_length(part.pages) == len(part.pages)
        slots_of_run = slice(first * page_size, (first + len(part.pages)) * page_size) if in_order else None
        parts.append(SharedPart(rows, tensor(part.pages), slots_of_run))
    return AttentionPlan(
        positions_T=tensor(positions),
        slots_T=tensor(slots),
        shared=tuple(parts),
        tails=tuple(
            _tail_group(spans, group, tail_page, first_row, page_size, device)
            for group in _group_tails(spans, tail_page, page_size)
        ),
        max_position=max(positions) + 1,
    )


def _slots(span: Span, page_size: int) -> Sequence[int]:
    if span.num_new == 1:
        return (span.table[span.start // page_size] * page_size + span.start % page_size,)
    index = np.arange(span.start, span.end)
    first = span.start // page_size
    pages = np.asarray(span.table[first : -(-span.end // page_size)])
    slots: list[int] = (pages[index // page_size - first] * page_size + index % page_size).tolist()
    return slots


def _group_tails(spans: Sequence[Span], tail_page: Sequence[int], page_size: int) -> list[list[int]]:
    """Cut the spans into groups so that padding costs less than the passes saved; one group if all are alike."""
    queries = [s.num_new for s in spans]
    keys = [s.end - p * page_size for s, p in zip(spans, tail_page, strict=True)]
    longest = max(queries)
    if longest == min(queries) and longest * (len(spans) * max(keys) - sum(keys)) <= PASS_OVERHEAD_KEYS:
        return [list(range(len(spans)))]
    order = sorted(range(len(spans)), key=lambda i: (-queries[i], -keys[i]))
    groups: list[list[int]] = []
    max_keys = waste = 0
    for i in order:
        head = groups[-1][0] if groups else i
        grown = max(max_keys, keys[i])
        extra = queries[head] * grown - queries[i] * keys[i]
        extra += (grown - max_keys) * sum(queries[j] for j in groups[-1]) if groups else 0
        if groups and waste + extra <= PASS_OVERHEAD_KEYS:
            groups[-1].append(i)
            max_keys, waste = grown, waste + extra
        else:
            groups.append([i])
            max_keys, waste = keys[i], 0
    return groups


def _tail_group(
    spans: Sequence[Span],
    group: list[int],
    tail_page: Sequence[int],
    first_row: np.ndarray,
    page_size: int,
    device: torch.device,
) -> TailGroup:
    lens = np.array([spans[i].num_new for i in group])
    tails = [spans[i].table[tail_page[i] : -(-spans[i].end // page_size)] for i in group]
    num_pages = max(len(t) for t in tails)
    table = np.fromiter(
        itertools.chain.from_iterable((*t, *[0] * (num_pages - len(t))) for t in tails), np.int64
    ).reshape(len(group), num_pages)
    column = np.arange(lens.max())
    valid = column < lens[:, None]
    offset = np.array([spans[i].start - tail_page[i] * page_size for i in group])
    num_visible = np.where(valid, offset[:, None] + column + 1, 1)  # padding sees one key: a softmax needs one
    hidden = np.arange(num_pages * page_size) >= num_visible[:, :, None]
    for row, i in enumerate(group):
        visible = spans[i].visible
        if visible is not None:
            own = hidden[row, : len(visible)]
            first, last = (slot - tail_page[i] * page_size for slot in (spans[i].known, spans[i].end))
            own[:, :first] = False
            own[:, first:last] = ~visible
            own[:, last:] = True
    in_order = bool(valid.all()) and group == list(range(len(spans)))
    rows = np.where(valid, first_row[group][:, None] + column, 0)
    return TailGroup(
        rows_BQ=None if in_order else torch.from_numpy(rows).to(device),
        keep=None if bool(valid.all()) else torch.from_numpy(valid.ravel().nonzero()[0]).to(device),
        pages_BP=torch.from_numpy(table).to(device),
        hidden_BQS=torch.from_numpy(hidden).to(device),
    )

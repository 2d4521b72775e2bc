"""KV tensors in pages, and attention over them for a batch of sequences with any number of new tokens each.

A prefix that several sequences of the batch share is attended once for all of them (their queries stacked against one
set of keys) and merged with each sequence's own part by log-sum-exp. Which pages are shared is read off the page
tables. Exact up to rounding: softmax over a union of key sets from the softmaxes over the parts.

Legend of shape suffixes: T new tokens of the batch, N query heads, K key/value heads, G query heads per key/value head,
H head dim, B sequences of a group, Q new tokens per sequence (padded), S key slots (padded), P pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_dta.nn import DecoderConfig

__all__ = ["AttentionPlan", "PagedKV", "SharedPrefix", "Span", "find_shared", "plan_attention"]

# A separate pass over a shared prefix (or over a group of equal shapes) costs about as much as attending this many keys
# for one query token, so it must save more. Anything from 500 to 6000 measured the same on one CPU core.
PASS_OVERHEAD_KEYS = 2048


@dataclass(frozen=True)
class Span:
    """The new tokens ``[start, end)`` of one sequence in this step; ``table`` maps its pages, the new ones included."""

    table: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True)
class SharedPrefix:
    """The pages that all spans of ``members`` have from ``first_page`` on, before their new tokens."""

    members: tuple[int, ...]
    first_page: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class _SharedPart:
    rows_T: torch.Tensor | None  # None: every row of the batch, in order
    pages_P: torch.Tensor


@dataclass(frozen=True)
class _TailGroup:
    """Sequences whose own parts have similar sizes, padded to one rectangle."""

    rows_BQ: torch.Tensor | None  # None: one row per sequence, the whole batch in order
    valid_BQ: torch.Tensor | None  # None: no padding among the queries
    pages_BP: torch.Tensor
    num_visible_BQ: torch.Tensor  # keys of the tail that a query sees


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors of one forward pass, the same for all layers."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor  # where the new keys and values go
    shared: tuple[_SharedPart, ...]
    tails: tuple[_TailGroup, ...]
    max_position: int


def find_shared(spans: Sequence[Span], page_size: int) -> list[SharedPrefix]:
    """Prefixes worth a pass of their own; each is shared by at least two spans and lies before all their new tokens."""
    usable = [list(s.table[: s.start // page_size]) for s in spans]
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
            num_queries = sum(spans[m].end - spans[m].start for m in group)
            smallest = min(spans[m].end - spans[m].start for m in group)
            saved = (num_queries - smallest) * (end - unclaimed) * page_size
            start = unclaimed
            if saved > PASS_OVERHEAD_KEYS:
                found.append(SharedPrefix(tuple(group), unclaimed, tuple(usable[group[0]][unclaimed:end])))
                start = end
            todo.append((group, start, end))
    return found


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
    lens = np.array([s.end - s.start for s in spans])
    first_row = np.concatenate(([0], np.cumsum(lens)))
    tail_page = [0] * len(spans)
    for part in shared:
        for m in part.members:
            tail_page[m] = max(tail_page[m], part.first_page + len(part.pages))
    positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
    pages = np.concatenate([np.asarray(s.table)[np.arange(s.start, s.end) // page_size] for s in spans])

    def tensor(array: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

    parts = []
    for part in shared:
        rows = None
        if len(part.members) < len(spans):
            rows = tensor(np.concatenate([np.arange(first_row[m], first_row[m + 1]) for m in part.members]))
        parts.append(_SharedPart(rows, tensor(part.pages)))
    return AttentionPlan(
        positions_T=tensor(positions),
        slots_T=tensor(pages * page_size + positions % page_size),
        shared=tuple(parts),
        tails=tuple(
            _tail_group(spans, group, tail_page, first_row, page_size, device)
            for group in _group_tails(spans, tail_page, page_size)
        ),
        max_position=int(positions.max()) + 1,
    )


def _group_tails(spans: Sequence[Span], tail_page: Sequence[int], page_size: int) -> list[list[int]]:
    """Cut the spans into groups so that padding costs less than the passes saved; one group if all are alike."""
    queries = [s.end - s.start for s in spans]
    keys = [s.end - p * page_size for s, p in zip(spans, tail_page, strict=True)]
    if max(queries) == 1 and len(spans) * max(keys) - sum(keys) <= PASS_OVERHEAD_KEYS:
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
) -> _TailGroup:
    lens = np.array([spans[i].end - spans[i].start for i in group])
    tails = [spans[i].table[tail_page[i] : -(-spans[i].end // page_size)] for i in group]
    num_pages = max(len(t) for t in tails)
    table = np.fromiter(
        itertools.chain.from_iterable((*t, *[0] * (num_pages - len(t))) for t in tails), np.int64
    ).reshape(len(group), num_pages)
    column = np.arange(lens.max())
    valid = column < lens[:, None]
    offset = np.array([spans[i].start - tail_page[i] * page_size for i in group])
    visible = np.where(valid, offset[:, None] + column + 1, 1)
    in_order = lens.max() == 1 and len(group) == len(spans) and group == list(range(len(spans)))
    rows = np.where(valid, first_row[group][:, None] + column, 0)
    return _TailGroup(
        rows_BQ=None if in_order else torch.from_numpy(rows).to(device),
        valid_BQ=None if bool(valid.all()) else torch.from_numpy(valid).to(device),
        pages_BP=torch.from_numpy(table).to(device),
        num_visible_BQ=torch.from_numpy(visible).to(device),
    )


class PagedKV:
    """The tensors: per layer keys and values of shape (K, pages, page, H); page 0 stays zero."""

    def __init__(
        self, config: DecoderConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (config.num_kv_heads, num_pages * page_size, config.head_dim)
        self.page_size = page_size
        self._config = config
        self._dtype, self._device = dtype, device
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        self.restore()
        self._scale = config.head_dim**-0.5

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._k, *self._v))

    def release(self) -> int:
        """Drop the tensors; returns their bytes. `attend` needs `restore` first."""
        freed = self.num_bytes
        self._k, self._v = [], []
        return freed

    def restore(self) -> int:
        """Allocate the tensors if they are not there; returns their bytes."""
        if not self._k:
            # Zeros, not garbage: padded keys get weight 0, and 0 x NaN would still be NaN.
            layers = range(self._config.num_layers)
            self._k = [torch.zeros(self._shape, dtype=self._dtype, device=self._device) for _ in layers]
            self._v = [torch.zeros(self._shape, dtype=self._dtype, device=self._device) for _ in layers]
        return self.num_bytes

    def attend(
        self, plan: AttentionPlan, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values, return the attention output (T, N, H)."""
        k_KSH, v_KSH = self._k[layer], self._v[layer]
        k_KSH.index_copy_(1, plan.slots_T, k_TKH.transpose(0, 1))
        v_KSH.index_copy_(1, plan.slots_T, v_TKH.transpose(0, 1))
        T, N, H = q_TNH.shape
        K = self._config.num_kv_heads
        q_KTGH = (q_TNH * self._scale).view(T, K, N // K, H).transpose(0, 1).contiguous()
        out_KTGH, lse_KTG = self._tails(plan, k_KSH, v_KSH, q_KTGH)
        for part in plan.shared:
            k, v = (self._pages(t, part.pages_P) for t in (k_KSH, v_KSH))
            if part.rows_T is None:
                o, lse = _attend(q_KTGH.flatten(1, 2), k, v, None)
                out_KTGH, lse_KTG = _merge(out_KTGH, lse_KTG, o.view_as(out_KTGH), lse.view_as(lse_KTG))
                continue
            rows = part.rows_T
            q = q_KTGH.index_select(1, rows)
            o, lse = _attend(q.flatten(1, 2), k, v, None)
            merged, total = _merge(
                out_KTGH.index_select(1, rows), lse_KTG.index_select(1, rows), o.view_as(q), lse.view(q.shape[:-1])
            )
            out_KTGH.index_copy_(1, rows, merged)
            lse_KTG.index_copy_(1, rows, total)
        return out_KTGH.transpose(0, 1).reshape(T, N, H)

    def _pages(self, store_KSH: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        K, _, H = store_KSH.shape
        rows = store_KSH.view(K, -1, self.page_size * H).index_select(1, pages.flatten())
        return rows.view(K, -1, H)

    def _tails(
        self, plan: AttentionPlan, k_KSH: torch.Tensor, v_KSH: torch.Tensor, q_KTGH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(plan.tails) == 1 and plan.tails[0].rows_BQ is None:
            out, lse = self._tail(plan.tails[0], k_KSH, v_KSH, q_KTGH.unsqueeze(2))
            return out.squeeze(2), lse.squeeze(2)
        out_KTGH = torch.empty_like(q_KTGH)
        lse_KTG = q_KTGH.new_empty(q_KTGH.shape[:-1])
        for group in plan.tails:
            rows_BQ = group.rows_BQ
            assert rows_BQ is not None
            q = q_KTGH.index_select(1, rows_BQ.flatten()).unflatten(1, rows_BQ.shape)
            out, lse = self._tail(group, k_KSH, v_KSH, q)
            rows, out, lse = rows_BQ.flatten(), out.flatten(1, 2), lse.flatten(1, 2)
            if group.valid_BQ is not None:
                keep = group.valid_BQ.flatten().nonzero().squeeze(1)
                rows, out, lse = rows[keep], out[:, keep], lse[:, keep]
            out_KTGH.index_copy_(1, rows, out)
            lse_KTG.index_copy_(1, rows, lse)
        return out_KTGH, lse_KTG

    def _tail(
        self, group: _TailGroup, k_KSH: torch.Tensor, v_KSH: torch.Tensor, q_KBQGH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        K, B, Q, G, H = q_KBQGH.shape
        S = group.pages_BP.shape[1] * self.page_size
        k, v = (self._pages(t, group.pages_BP).view(K * B, S, H) for t in (k_KSH, v_KSH))
        hidden_BQS = torch.arange(S, device=q_KBQGH.device) >= group.num_visible_BQ.unsqueeze(-1)
        mask = hidden_BQS.unsqueeze(2).expand(B, Q, G, S).reshape(1, B, Q * G, S)
        out, lse = _attend(q_KBQGH.reshape(K * B, Q * G, H), k, v, mask)
        return out.view(K, B, Q, G, H), lse.view(K, B, Q, G)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batched attention with its log-sum-exp; ``hidden`` (1, B, Q, S) is True where a key must not be seen."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    if hidden is not None:
        K = len(scores) // hidden.shape[1]
        scores.view(K, *hidden.shape[1:]).masked_fill_(hidden, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.to(v.dtype), v)
    return out.div_(total.to(v.dtype)), (peak + total.log()).squeeze(-1)


def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    share_b = torch.sigmoid(lse_b - lse_a).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_a, out_b, share_b), torch.logaddexp(lse_a, lse_b)

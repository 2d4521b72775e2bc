"""N-gram drafts: what mostly followed the last tokens, in this sequence, its siblings or anything else served lately.

A table maps the last 4, 2 or 1 tokens (their hash) to the tokens that came next and how often. A draft is the likeliest
continuation, token after token, by the longest of these contexts that is known. How likely it is, the index knows from
its own record: whenever tokens arrive, it notes whether it would have named them, by length of the context, how often
that was seen and how unanimous it was. So a draft ends where its chance to be accepted falls below what a row costs.

Drafts are verified by the target, so a stale or wrong entry (or two contexts with one hash) costs time, never
correctness, and weight updates change nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_dta.drafter.draft_tree import EMPTY, DraftTree

__all__ = ["NgramIndex", "NgramLimits", "NgramStats"]

ORDERS = (4, 2, 1)  # tokens of a context, the longest first
LONGEST = ORDERS[0]
CHUNK_TOKENS = 64  # prompts are recognised in steps of this many tokens
COUNT_BITS = 16
COUNT_MASK = (1 << COUNT_BITS) - 1
TOTALS, SHARES = 5, 5  # classes of how often a context was seen (1, 2-3, 4-7, 8-15, more) and how unanimous it was
MAX_TRIES = 1000.0  # older observations fade beyond this many of a class
PRIOR_HITS, PRIOR_TRIES = 1.0, 2.0

# What followed a context: while it was always the same, ``token << COUNT_BITS | count``; after that a list of the most
# frequent token, its count, the count of all, and a dict of the counts.
Followers = int | list[Any]


@dataclass(frozen=True)
class NgramLimits:
    """At most ``max_tokens`` contexts are kept, about 160 bytes each. A token of text that repeats nothing brings two
    or three; of tau2 trajectories, most of which is prompts said before, seven tokens bring one."""

    max_tokens: int = 400_000

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens}; needs room for at least two")


@dataclass(frozen=True)
class NgramStats:
    """Contexts stored, sequences open, and how often the older half of the contexts was forgotten."""

    num_contexts: int
    num_open: int
    num_forgotten: int


@dataclass
class _Half:
    """What was learnt since a moment."""

    table: dict[int, Followers] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)  # hashes of prompts' starts, in whole chunks


class NgramIndex:
    """All sequences of one server. Not thread-safe: used by the model thread only.

    Memory is bounded by forgetting: the table has a younger and an older half. What is said again moves to the younger;
    when that is full, the older is dropped and the younger takes its place.

    Measured on one CPU core (`tests/unit/test_ngram.py::test_costs`, Python 3.11): extend 2 us per token, first open of
    a 5,000-token prompt 1.4 us per token, opening it again 0.01 us per token; a draft 0.7 us per token.
    """

    def __init__(self, limits: NgramLimits | None = None) -> None:
        self.limits = limits or NgramLimits()
        self._young, self._old = _Half(), _Half()
        self._recent: dict[str, list[int]] = {}  # the last LONGEST tokens of every open sequence
        self._hits = [PRIOR_HITS] * (len(ORDERS) * TOTALS * SHARES)  # by class
        self._tries = [PRIOR_TRIES] * (len(ORDERS) * TOTALS * SHARES)
        self._num_forgotten = 0

    @property
    def stats(self) -> NgramStats:
        num_contexts = len(self._young.table) + len(self._old.table)
        return NgramStats(num_contexts, len(self._recent), self._num_forgotten)

    def open(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Start a sequence with its prompt, of which only what is new is learnt."""
        if seq_id in self._recent:
            raise ValueError(f"sequence {seq_id!r} is open already; close it first")
        text = list(tokens)
        known = start = 0
        for end in range(CHUNK_TOKENS, len(text) + 1, CHUNK_TOKENS):
            known = hash((known, *text[end - CHUNK_TOKENS : end]))
            if start == end - CHUNK_TOKENS and known in self._young.prompts:
                start = end
            else:
                self._young.prompts.add(known)
        lead = max(start - LONGEST, 0)
        self._learn(text[lead:], start - lead, judged=False)
        self._recent[seq_id] = text[-LONGEST:]

    def extend(self, seq_id: str, new_tokens: Sequence[int]) -> None:
        """Add tokens that the target has drawn."""
        recent = self._recent[seq_id]
        text = [*recent, *new_tokens]
        self._learn(text, len(recent), judged=True)
        self._recent[seq_id] = text[-LONGEST:]

    def close(self, seq_id: str) -> None:
        """The sequence ended; what it said helps the others."""
        del self._recent[seq_id]

    def propose(self, seq_id: str, max_tokens: int, least_chance: float = 0.0) -> DraftTree:
        """The likeliest continuation, of up to ``max_tokens`` tokens and as long as all of it is accepted with a chance
        of at least ``least_chance``. Empty when no context is known."""
        text = self._recent[seq_id].copy()
        num_known = len(text)
        chance = 1.0
        while len(text) < num_known + max_tokens:
            place, found = self._look_up(text)
            if found is None:
                break
            chance *= self._hits[place] / self._tries[place]
            if chance < least_chance:
                break
            text.append(_best(found))
        return DraftTree.chain(text[num_known:]) if len(text) > num_known else EMPTY

    def _look_up(self, text: list[int]) -> tuple[int, Followers | None]:
        """What followed the longest known context at the end of ``text``, and its class."""
        young, old = self._young.table, self._old.table
        for index, order in enumerate(ORDERS):
            if order <= len(text):
                key = hash(tuple(text[-order:]))
                found = young.get(key) or old.get(key)
                if found is not None:
                    return _class_of(index, found), found
        return 0, None

    def _learn(self, text: Sequence[int], first: int, judged: bool) -> None:
        """Take in the tokens from index ``first`` on; ``judged``: note whether they would have been drafted."""
        young, old = self._young.table, self._old.table
        for i in range(max(first, 1), len(text)):
            token, judge = text[i], judged
            for index, order in enumerate(ORDERS):
                if order > i:
                    continue
                key = hash(tuple(text[i - order : i]))
                found = young.get(key)
                if found is None:
                    found = old.pop(key, None)
                    if found is None:
                        young[key] = token << COUNT_BITS | 1
                        continue
                    young[key] = found
                if judge:
                    self._judge(_class_of(index, found), token, found)
                    judge = False
                if isinstance(found, int):
                    if found >> COUNT_BITS != token:
                        young[key] = _split(found, token)
                    elif found & COUNT_MASK < COUNT_MASK:
                        young[key] = found + 1
                else:
                    _count(found, token)
        if len(young) > self.limits.max_tokens // 2:
            self._old, self._young = self._young, _Half()
            self._num_forgotten += 1

    def _judge(self, place: int, token: int, found: Followers) -> None:
        if self._tries[place] >= MAX_TRIES:
            self._tries[place] *= 0.5
            self._hits[place] *= 0.5
        self._tries[place] += 1.0
        self._hits[place] += token == _best(found)


def _best(found: Followers) -> int:
    token: int = found >> COUNT_BITS if isinstance(found, int) else found[0]
    return token


def _class_of(index: int, found: Followers) -> int:
    """Contexts of a class are believed alike."""
    if isinstance(found, int):
        total, share = found & COUNT_MASK, SHARES - 1
    else:
        total, share = found[2], (SHARES * found[1] - 1) // found[2]
    return (index * TOTALS + min(total.bit_length(), TOTALS) - 1) * SHARES + share


def _split(found: int, token: int) -> Followers:
    """A second token follows."""
    usual, count = found >> COUNT_BITS, found & COUNT_MASK
    best = usual if count > 1 else token  # of equals the latest
    return [best, count, count + 1, {usual: count, token: 1}]


def _count(found: list[Any], token: int) -> None:
    counts = found[3]
    count = counts[token] = counts.get(token, 0) + 1
    found[2] += 1
    if count >= found[1]:
        found[0], found[1] = token, count

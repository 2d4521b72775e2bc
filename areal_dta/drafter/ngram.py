"""N-gram drafts: what followed the last tokens the last time, in this sequence or in its siblings.

Drafts are verified by the target, so a stale or wrong entry costs time, never correctness, and weight updates change
nothing here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areal_dta.drafter.draft_tree import EMPTY, DraftTree
from areal_dta.drafter.ngram_store import END, WORD_BITS, NgramLimits, NgramStats, Segment, TextStore

__all__ = ["NgramIndex", "NgramLimits", "NgramStats"]


@dataclass(frozen=True)
class _Match:
    length: int
    is_own: bool
    following: array[int]


class NgramIndex:
    """All sequences of one server. Not thread-safe: used by the model thread only.

    Measured on one CPU core (`tests/unit/test_ngram.py::test_costs`, Python 3.11): extend 0.8 us per token, first open
    of a 5,000-token prompt 0.2 us per token, opening it again 0.02 us per token; a proposal 1.3 us without siblings,
    15 us (chain of 7) and 20 us (tree of 15) with 64 siblings that all match. 110 bytes per stored token.
    """

    def __init__(self, limits: NgramLimits | None = None) -> None:
        self.limits = limits or NgramLimits()
        self._store = TextStore(self.limits)

    @property
    def stats(self) -> NgramStats:
        return self._store.stats

    def open(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Start a sequence with its prompt; stored siblings' text is found again, not stored again."""
        self._store.open(seq_id, tokens)

    def extend(self, seq_id: str, new_tokens: Sequence[int]) -> None:
        """Add tokens that were accepted."""
        self._store.extend(seq_id, new_tokens)

    def close(self, seq_id: str, keep: bool = True) -> None:
        """The sequence ended; ``keep`` lets its siblings draw on it until memory is needed."""
        self._store.close(seq_id, keep)

    def text(self, seq_id: str) -> list[int]:
        """All tokens of an open sequence as the index knows them."""
        return self._store.text(seq_id)

    def propose(self, seq_id: str, max_depth: int, num_nodes: int) -> DraftTree:
        """What may follow: a chain of up to ``max_depth`` tokens and, where nodes are left, alternatives to it.

        The longest match decides, then the own text before the siblings', then the most frequent continuation among
        equals, then the latest. Empty when nothing of at least ``min_n`` tokens matches.
        """
        matches = self._matches(self._store[seq_id], max_depth) if min(max_depth, num_nodes) > 0 else []
        if not matches:
            return EMPTY
        best = max((m.length, m.is_own) for m in matches)
        chain = _likeliest_chain([m.following for m in matches if (m.length, m.is_own) == best])[:num_nodes]
        if num_nodes <= max_depth or len(matches) == 1:
            return DraftTree.chain(chain)
        return _with_alternatives(chain, matches, num_nodes)

    def _matches(self, segment: Segment, max_depth: int) -> list[_Match]:
        """Occurrences of the sequence's end: own ones first, then by segment, the latest opened first."""
        limits, key = self.limits, segment.key
        max_n = limits.max_n
        ending = segment.tokens[-max_n:]
        if segment.is_full or len(ending) < limits.min_n:
            return []
        wanted = int.from_bytes(ending.tobytes(), "little") << WORD_BITS * (max_n - len(ending))
        found: list[_Match] = []

        def look(other: Segment, low: int, high: int, num_wanted: int, is_own: bool) -> None:
            """Occurrences in ``other`` whose next token is at ``low`` or later and before ``high``."""
            tokens, before = other.tokens, other.before
            at = other.last.get(key, -1)
            while at + 1 >= high:
                at = before[at]
            while at >= 0 and at + 1 >= low and num_wanted:
                # Little-endian words: the highest bit that differs belongs to the last token that differs.
                seen = tokens[max(at + 1 - max_n, 0) : at + 1]
                differ = wanted ^ int.from_bytes(seen.tobytes(), "little") << WORD_BITS * (max_n - len(seen))
                length = max_n - (differ.bit_length() + WORD_BITS - 1) // WORD_BITS
                following = tokens[at + 1 : at + 1 + max_depth]
                if other is segment and len(following) < max_depth:
                    following = (following * max_depth)[:max_depth]  # the text repeats itself with this period
                found.append(_Match(min(length, len(seen), len(ending)), is_own, following))
                at = before[at]
                num_wanted -= 1

        for other, limit in segment.path:
            look(other, 0, limit, limits.own_matches, True)
        # What hangs below the same text: first the siblings that brought it, then the others.
        for other, limit in segment.path[1:]:
            look(other, limit, END, limits.sibling_matches, False)
        shared = {other for other, _ in segment.path}
        left = limits.max_siblings
        for other in reversed(segment.group.segments):
            if other in shared:
                continue
            if key in other.last:
                look(other, 0, END, limits.sibling_matches, False)
            left -= 1
            if not left:
                break
        return found


def _likeliest_chain(followings: list[array[int]]) -> list[int]:
    """Token after token the most frequent among the continuations that agree so far, the first of equals."""
    chain: list[int] = []
    while followings:
        if len(followings) == 1:
            return chain + followings[0][len(chain) :].tolist()
        depth = len(chain)
        counts: dict[int, int] = {}
        for following in followings:
            if depth < len(following):
                counts[following[depth]] = counts.get(following[depth], 0) + 1
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        chain.append(token)
        followings = [f for f in followings if depth < len(f) and f[depth] == token]
    return chain


def _with_alternatives(chain: Iterable[int], matches: list[_Match], num_nodes: int) -> DraftTree:
    """The chain, then the other continuations' nodes by match length, ownership and frequency."""
    tokens: list[int] = []
    parents: list[int] = []
    index: dict[tuple[int, int], int] = {}
    ranks: list[tuple[int, bool, int]] = []  # of a node: match that brought it, and how many matches of that rank did
    node = -1
    for token in chain:
        index[node, token] = node = len(tokens)
        tokens.append(token)
        parents.append(node - 1)
        ranks.append((END, True, 0))
    num_chain = len(tokens)
    for match in sorted(matches, key=lambda m: (m.length, m.is_own), reverse=True):
        node = -1
        for token in match.following:
            known = index.get((node, token))
            if known is None:
                index[node, token] = known = len(tokens)
                tokens.append(token)
                parents.append(node)
                ranks.append((match.length, match.is_own, 1))
            elif known >= num_chain:
                length, is_own, count = ranks[known]
                if (length, is_own) == (match.length, match.is_own):
                    ranks[known] = (length, is_own, count + 1)
            node = known
    # A node never outranks its parent, and comes after it: the best ones are closed under parents.
    chosen = sorted(sorted(range(len(tokens)), key=lambda i: ranks[i], reverse=True)[:num_nodes])
    new = {old: i for i, old in enumerate(chosen)} | {-1: -1}
    return DraftTree(tuple(tokens[i] for i in chosen), tuple(new[parents[i]] for i in chosen))

"""N-gram drafts against a twin that keeps whole texts and scans them; memory stays bounded; costs are measured."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.drafter.draft_tree import EMPTY, ROOT, DraftTree
from areal_dta.drafter.ngram import NgramIndex, NgramLimits
from areal_dta.drafter.ngram_store import CHUNK_TOKENS


@dataclass
class Text:
    """A sequence of the twin: whole text, of which [0, start) was stored before by ``parent``."""

    tokens: list[int]
    start: int = 0
    parent: Text | None = None
    family: list[Text] = field(default_factory=list)  # in the order of opening


class Twin:
    """The same rules with lists and scans."""

    def __init__(self, limits: NgramLimits) -> None:
        self.limits = limits
        self.families: dict[tuple[int, ...], list[Text]] = {}
        self.starts: dict[tuple[int, ...], Text] = {}  # family and text of whole chunks -> who stored it first
        self.branches: dict[tuple[int, int, int], Text] = {}  # parent, position and next token -> first such text

    def open(self, tokens: list[int]) -> Text:
        family = self.families.setdefault(tuple(tokens[: self.limits.key_tokens]), [])
        text = Text(tokens, family=family)
        for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
            holder = self.starts.get((id(family), *tokens[:end]))
            if holder is None:
                break
            text.parent, text.start = holder, end
        if text.parent is not None:
            limit = min(text.start + CHUNK_TOKENS - 1, len(tokens))
            while text.start < limit:
                held, token = text.parent, tokens[text.start]
                if len(held.tokens) > text.start and held.tokens[text.start] == token:
                    text.start += 1
                    continue
                child = self.branches.get((id(held), text.start, token))
                if child is None:
                    break
                text.parent = child
        family.append(text)
        self.extend(text, [])
        return text

    def extend(self, text: Text, new: list[int]) -> None:
        text.tokens = text.tokens + new
        if text.parent is not None and len(text.tokens) > text.start:
            self.branches.setdefault((id(text.parent), text.start, text.tokens[text.start]), text)
        for end in range(CHUNK_TOKENS, len(text.tokens) + 1, CHUNK_TOKENS):
            self.starts.setdefault((id(text.family), *text.tokens[:end]), text)

    def matches(self, text: Text, depth: int) -> list[tuple[int, bool, list[int]]]:
        limits, found = self.limits, []

        def scan(other: Text, low: int, high: int, num: int, own: bool) -> None:
            places = []
            for at in range(min(high, len(other.tokens)) - 1, low - 1, -1):  # at: where the continuation starts
                length = 0
                while length < min(limits.max_n, at, len(text.tokens)):
                    if other.tokens[at - 1 - length] != text.tokens[-1 - length]:
                        break
                    length += 1
                if length >= limits.min_n:
                    places.append((length, at))
            for length, at in places[:num]:
                following = other.tokens[at : at + depth]
                while other is text and len(following) < depth:
                    following = following + following[: depth - len(following)]
                found.append((length, own, following))

        path = [(text, 1 << 40)]
        while (last := path[-1][0]).parent is not None:
            path.append((last.parent, last.start))
        for other, limit in path:
            scan(other, other.start, limit, limits.own_matches, True)
        for other, limit in path[1:]:
            scan(other, limit, 1 << 40, limits.sibling_matches, False)
        rest = [o for o in reversed(text.family) if all(o is not p for p, _ in path)]
        for other in rest[: limits.max_siblings]:
            scan(other, other.start, 1 << 40, limits.sibling_matches, False)
        return found

    def propose(self, text: Text, depth: int, num_nodes: int) -> set[tuple[int, ...]]:
        """All paths of the drafted tree, spelled out."""
        matches = self.matches(text, depth)
        if not matches or not depth or not num_nodes:
            return set()
        best = max((m[:2] for m in matches), key=lambda m: m)
        chain: list[int] = []
        while agreeing := [f for *rank, f in matches if tuple(rank) == best and f[: len(chain)] == chain]:
            nexts = [f[len(chain)] for f in agreeing if len(f) > len(chain)]
            if not nexts:
                break
            chain.append(max(nexts, key=lambda t: (nexts.count(t), -nexts.index(t))))
        nodes = [tuple(chain[: i + 1]) for i in range(min(len(chain), num_nodes))]
        if num_nodes > depth:
            ranked = sorted(matches, key=lambda m: (-m[0], -m[1]))
            others: list[tuple[int, ...]] = []
            for *_, f in ranked:
                others += [p for i in range(len(f)) if (p := tuple(f[: i + 1])) not in nodes and p not in others]

            def value(path: tuple[int, ...]) -> tuple[int, bool, int]:
                having = [m[:2] for m in ranked if tuple(m[2][: len(path)]) == path]
                return (*having[0], having.count(having[0]))

            others.sort(key=value, reverse=True)
            nodes += others[: num_nodes - len(nodes)]
        return set(nodes)


def spelled(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(0, 5), st.sampled_from([2, 3, 30]))
def test_proposals_equal_a_scan_of_all_texts(seed: int, min_n: int, more_n: int, vocabulary: int) -> None:
    rng = random.Random(seed)
    limits = NgramLimits(
        min_n, min_n + more_n, rng.choice([8, 64]), 10**6, rng.choice([1, 2, 64]), rng.randint(1, 3), rng.randint(1, 3)
    )
    index, twin = NgramIndex(limits), Twin(limits)
    trunk = [rng.randrange(vocabulary) for _ in range(200)]
    live: dict[str, Text] = {}
    closed: list[Text] = []
    for step in range(rng.randint(5, 60)):
        if not live or rng.random() < 0.25:
            # A sample of the group, a later turn of a conversation, or anything.
            base = rng.choice([trunk, trunk, *[c.tokens for c in closed[-2:]], []])
            prompt = base[: rng.choice([len(base), 70, 130, 10])] + [
                rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 5, 80]))
            ]
            live[str(step)] = twin.open(prompt)
            index.open(str(step), prompt)
        name = rng.choice(list(live))
        new = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 1, 2, 5, 70]))]
        index.extend(name, new)
        twin.extend(live[name], new)
        for name, text in live.items():
            assert index.text(name) == text.tokens
            depth, num_nodes = rng.randint(0, 6), rng.randint(0, 12)
            tree = index.propose(name, depth, num_nodes)
            assert spelled(tree) == twin.propose(text, depth, num_nodes)
            assert len(tree) <= num_nodes and all(d <= depth for d in tree.depths)
        if rng.random() < 0.2:
            name = rng.choice(list(live))
            # The twin never forgets, so only what has text of its own may stay behind.
            if len(live[name].tokens) > live[name].start:
                closed.append(live.pop(name))
                index.close(name)


def test_the_longest_match_wins_over_the_latest() -> None:
    index = NgramIndex()
    index.open("a", [9, 1, 2, 3, 50, 8, 2, 3, 60, 9, 1, 2, 3])
    assert index.propose("a", 1, 1) == DraftTree.chain([50])


def test_own_text_wins_over_siblings_and_siblings_vote() -> None:
    index = NgramIndex(NgramLimits(key_tokens=2))
    for name, token in (("s1", 70), ("s2", 71), ("s3", 70)):
        index.open(name, [1, 2, 5, 6, token, 80])
        index.close(name)
    index.open("a", [1, 2, 5, 6])
    assert index.propose("a", 2, 2) == DraftTree.chain([70, 80])
    assert spelled(index.propose("a", 2, 3)) == {(70,), (70, 80), (71,)}
    index.extend("a", [33, 5, 6])
    assert index.propose("a", 1, 1) == DraftTree.chain([33])
    index.open("stranger", [3, 2, 5, 6])
    assert index.propose("stranger", 2, 2) == EMPTY


def test_a_repeating_text_is_continued_by_its_period() -> None:
    index = NgramIndex()
    index.open("a", [4, 5, 4, 5, 4, 5])
    assert index.propose("a", 5, 5) == DraftTree.chain([4, 5, 4, 5, 4])


def test_what_a_sibling_generated_from_the_same_prompt_is_proposed_from_the_first_token_on() -> None:
    prompt = list(range(1000, 1300))
    index = NgramIndex()
    index.open("first", prompt)
    index.extend("first", [7, 8, 9])
    index.open("second", prompt)
    assert index.propose("second", 3, 3) == DraftTree.chain([7, 8, 9])
    index.extend("second", [7])
    index.open("third", prompt)
    assert index.propose("third", 2, 2) == DraftTree.chain([7, 8])


def test_a_shared_prompt_is_stored_once_and_turns_store_only_what_is_new() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(5000) for _ in range(5000)]
    index = NgramIndex()
    for sample in range(16):
        text = list(prompt)
        for turn in range(5):
            name = f"{sample}.{turn}"
            index.open(name, text)
            new = [rng.randrange(5000) for _ in range(40)]
            index.extend(name, new)
            assert index.text(name) == text + new
            index.close(name)
            text += new
    distinct = 5000 + 16 * 5 * 40
    assert index.stats.num_tokens == distinct


def test_memory_is_bounded_by_dropping_what_was_not_used_for_longest() -> None:
    rng = random.Random(1)
    limits = NgramLimits(max_tokens=3000)
    index = NgramIndex(limits)
    trunk = [rng.randrange(100) for _ in range(500)]
    index.open("resident", trunk)
    index.extend("resident", [201, 202, 203])
    for i in range(200):
        prompt = trunk if i % 2 else [300 + i] * 300
        index.open(f"{i}", prompt)
        index.extend(f"{i}", [rng.randrange(100) for _ in range(rng.randrange(200))])
        assert index.stats.num_tokens <= limits.max_tokens
        index.close(f"{i}", keep=i % 5 != 0)
    assert index.stats.num_dropped > 100 and index.stats.num_full == 0
    assert index.text("resident") == [*trunk, 201, 202, 203]
    index.open("late", trunk)  # the open sequence's text is still there to be found
    assert 201 in {path[0] for path in spelled(index.propose("late", 1, 64))}
    for name in ("late", "resident"):
        index.close(name, keep=False)
    index.open("flood", [rng.randrange(100) for _ in range(2990)])
    index.close("flood", keep=False)
    stats = index.stats
    assert (stats.num_tokens, stats.num_segments, stats.num_groups) == (0, 0, 0)


def test_a_sequence_that_finds_no_room_is_served_without_drafts() -> None:
    index = NgramIndex(NgramLimits(max_tokens=100))
    index.open("a", [1, 2] * 45)
    index.open("b", [3, 4] * 45)
    assert index.propose("a", 2, 2) == DraftTree.chain([1, 2])
    assert index.propose("b", 2, 2) == EMPTY
    index.extend("b", [3])
    index.extend("a", [1] * 20)
    assert index.propose("a", 2, 2) == EMPTY
    assert index.stats.num_full == 2
    for name in ("a", "b"):
        index.close(name)
    index.open("c", [3, 4] * 45)
    assert index.propose("c", 2, 2) == DraftTree.chain([3, 4])


def test_misuse_is_named() -> None:
    index = NgramIndex()
    index.open("a", [1])
    with pytest.raises(ValueError, match="open already"):
        index.open("a", [1])
    with pytest.raises(ValueError, match="min_n=4"):
        NgramLimits(min_n=4)
    assert index.propose("a", 3, 3) == EMPTY
    assert ROOT not in index.propose("a", 3, 3).tokens


def test_costs() -> None:
    """Bounds are ten times what one quiet core needs (see `NgramIndex`): this catches a slip in complexity."""
    rng = random.Random(0)
    prompt = [rng.randrange(20_000) for _ in range(5000)]
    answer = [rng.randrange(20_000) for _ in range(300)]
    index = NgramIndex()

    def seconds(action, num_times: int) -> float:
        start = time.perf_counter()
        for i in range(num_times):
            action(i)
        return (time.perf_counter() - start) / num_times

    costs = {"first": seconds(lambda i: index.open(f"{i}", prompt), 1) / 5000}
    index.extend("0", answer)
    costs["again"] = seconds(lambda i: index.open(f"{i + 1}", prompt), 64) / 5000
    costs["extend"] = seconds(lambda i: [index.extend(f"{s + 1}", [answer[i]]) for s in range(64)], 200) / 64
    costs["extend 4"] = (
        seconds(lambda i: index.extend("65", answer[4 * i : 4 * i + 4]) if i else index.open("65", prompt), 60) / 4
    )
    costs["chain"] = seconds(lambda i: index.propose(f"{i % 64 + 1}", 7, 7), 400)
    costs["tree"] = seconds(lambda i: index.propose(f"{i % 64 + 1}", 7, 15), 400)
    index.open("alone", answer[::-1])
    costs["alone"] = seconds(lambda i: index.propose("alone", 7, 7), 400)
    print({name: f"{cost * 1e6:.2f} us" for name, cost in costs.items()})
    limits_us = {"first": 6, "again": 1, "extend": 15, "extend 4": 10, "chain": 600, "tree": 1000, "alone": 60}
    assert not {name: cost for name, cost in costs.items() if cost * 1e6 > limits_us[name]}

"""N-gram drafts against a twin that keeps what followed every context as plain lists; memory stays bounded; costs are
measured."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.drafter.draft_tree import EMPTY, DraftTree
from areal_dta.drafter.ngram import CHUNK_TOKENS, MAX_TRIES, ORDERS, PRIOR_HITS, PRIOR_TRIES, NgramIndex, NgramLimits

Context = tuple[int, ...]


class Twin:
    """The same rules with whole texts, contexts spelled out, and counting by scanning."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.young: dict[Context, list[int]] = {}
        self.old: dict[Context, list[int]] = {}
        self.starts: set[Context] = set()
        self.texts: dict[str, list[int]] = {}
        self.rates: dict[Context, list[float]] = defaultdict(lambda: [PRIOR_HITS, PRIOR_TRIES])

    def open(self, name: str, prompt: list[int]) -> None:
        whole = [tuple(prompt[:end]) for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS)]
        num_known = next((i for i, start in enumerate(whole) if start not in self.starts), len(whole))
        self.starts |= set(whole)
        self.texts[name] = list(prompt)
        self.learn(prompt, num_known * CHUNK_TOKENS, False)

    def extend(self, name: str, new: list[int]) -> None:
        text = self.texts[name]
        first = len(text)
        text += new
        self.learn(text, first, True)

    def learn(self, text: list[int], first: int, judged: bool) -> None:
        for i in range(max(first, 1), len(text)):
            judge = judged
            for order in ORDERS:
                if order > i:
                    continue
                context = tuple(text[i - order : i])
                known = self.young.get(context) or self.old.pop(context, [])
                if known and judge:
                    rate = self.rates[self.class_of(order, known)]
                    if rate[1] >= MAX_TRIES:
                        rate[0], rate[1] = rate[0] / 2, rate[1] / 2
                    rate[0] += self.best(known) == text[i]
                    rate[1] += 1
                    judge = False
                self.young[context] = [*known, text[i]]
        if len(self.young) > self.max_tokens // 2:
            self.young, self.old, self.starts = {}, self.young, set()

    @staticmethod
    def best(known: list[int]) -> int:
        """The most frequent; of equals the one that got there last."""
        most = max(known.count(token) for token in known)
        reached = {t: [i for i, k in enumerate(known) if k == t][most - 1] for t in known if known.count(t) == most}
        return max(reached, key=lambda token: reached[token])

    def class_of(self, order: int, known: list[int]) -> Context:
        most = known.count(self.best(known))
        seen = next(i for i, edge in enumerate((1, 3, 7, 15, 1 << 60)) if len(known) <= edge)
        unanimous = next(i for i in range(5) if 5 * most <= (i + 1) * len(known))
        return (order, seen, unanimous)

    def propose(self, name: str, max_tokens: int, least_chance: float) -> list[int]:
        text = list(self.texts[name])
        chance, first = 1.0, len(text)
        while len(text) < first + max_tokens:
            for order in ORDERS:
                context = tuple(text[len(text) - order :]) if order <= len(text) else ()
                known = self.young.get(context) or self.old.get(context)
                if known:
                    break
            else:
                break
            hits, tries = self.rates[self.class_of(order, known)]
            chance *= hits / tries
            if chance < least_chance:
                break
            text.append(self.best(known))
        return text[first:]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([2, 3, 30]), st.sampled_from([40, 300, 10**6]))
def test_proposals_equal_a_scan_of_everything_said(seed: int, vocabulary: int, max_tokens: int) -> None:
    rng = random.Random(seed)
    index, twin = NgramIndex(NgramLimits(max_tokens)), Twin(max_tokens)
    trunk = [rng.randrange(vocabulary) for _ in range(200)]
    live: list[str] = []
    for step in range(rng.randint(5, 60)):
        if not live or rng.random() < 0.25:
            # A sample of the group, a later turn of a conversation, or anything.
            base = rng.choice([trunk, trunk, *list(twin.texts.values())[-2:], []])
            prompt = base[: rng.choice([len(base), 70, 130, 10])] + [
                rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 5, 80]))
            ]
            live.append(str(step))
            twin.open(live[-1], prompt)
            index.open(live[-1], prompt)
        name = rng.choice(live)
        new = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 1, 2, 5, 70]))]
        index.extend(name, new)
        twin.extend(name, new)
        for name in live:
            num_tokens, least = rng.randint(0, 12), rng.choice([0.0, 0.2, 0.6])
            tree = index.propose(name, num_tokens, least)
            assert list(tree.tokens) == twin.propose(name, num_tokens, least)
            assert tree.is_chain
        assert index.stats.num_contexts == len(twin.young) + len(twin.old)
        if rng.random() < 0.2:
            index.close(live.pop(rng.randrange(len(live))))


def test_the_longest_context_wins_over_the_latest_and_the_most_frequent() -> None:
    index = NgramIndex()
    index.open("a", [9, 1, 2, 3, 50, 8, 2, 3, 60, 7, 2, 3, 60, 9, 1, 2, 3])
    assert index.propose("a", 1) == DraftTree.chain([50])


def test_siblings_vote_and_the_latest_of_equals_wins() -> None:
    index = NgramIndex()
    for name, token in (("s1", 70), ("s2", 71), ("s3", 70), ("s4", 72)):
        index.open(name, [1, 2, 5, 6, token, 80])
        index.close(name)
    index.open("a", [1, 2, 5, 6])
    assert index.propose("a", 2) == DraftTree.chain([70, 80])
    index.open("s5", [1, 2, 5, 6])
    index.extend("s5", [72])
    assert index.propose("a", 1) == DraftTree.chain([72])


def test_a_repeating_text_is_continued_by_its_period() -> None:
    index = NgramIndex()
    index.open("a", [4, 5, 4, 5, 4, 5])
    assert index.propose("a", 5) == DraftTree.chain([4, 5, 4, 5, 4])


def test_what_a_sibling_generated_from_the_same_prompt_is_proposed_from_the_first_token_on() -> None:
    prompt = list(range(1000, 1300))
    index = NgramIndex()
    index.open("first", prompt)
    index.extend("first", [7, 8, 9])
    index.open("second", prompt)
    assert index.propose("second", 3) == DraftTree.chain([7, 8, 9])


def test_a_draft_ends_where_its_chance_is_too_small() -> None:
    rng = random.Random(0)
    index = NgramIndex()
    index.open("a", [1])
    for _ in range(400):  # 2 3 4 always follow one another, after 4 comes anything
        index.extend("a", [2, 3, 4, rng.randrange(10, 20)])
    index.extend("a", [2])
    assert index.propose("a", 9, 0.5) == DraftTree.chain([3, 4])
    assert len(index.propose("a", 9)) == 9
    index.open("b", [2])
    assert index.propose("b", 9, 1.0) == EMPTY  # nothing is certain


def test_prompts_teach_nothing_about_what_the_policy_says() -> None:
    rng = random.Random(2)
    index = NgramIndex()
    for i in range(20):
        index.open(str(i), [rng.randrange(3) for _ in range(300)])
    index.extend("0", [200, 201, 202])
    index.open("b", [200])
    assert index.propose("b", 2, 0.25) == DraftTree.chain([201, 202])  # as likely as what nothing is known of


def test_a_shared_prompt_is_learnt_once() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(5000) for _ in range(5000)]
    index = NgramIndex()
    index.open("0", prompt)
    num_contexts = index.stats.num_contexts
    for i in range(1, 16):
        index.open(f"{i}", prompt)
    assert index.stats.num_contexts == num_contexts <= 3 * 5000
    index.open("turn", [*prompt, *range(9000, 9064)])
    assert index.stats.num_contexts == num_contexts + 2 * 64 + 63  # the last token is no context yet


def test_memory_is_bounded_by_forgetting_what_was_not_said_for_longest() -> None:
    rng = random.Random(1)
    limits = NgramLimits(max_tokens=6000)
    index = NgramIndex(limits)
    trunk = [rng.randrange(100) for _ in range(500)]
    for i in range(200):
        prompt = trunk if i % 2 else [1000 + i] * 300
        index.open(f"{i}", prompt)
        index.extend(f"{i}", [201, 202, 203])
        index.extend(f"{i}", [rng.randrange(100) for _ in range(rng.randrange(200))])
        assert index.stats.num_contexts <= limits.max_tokens + 3 * 700  # a prompt is taken in as a whole
        index.close(f"{i}")
    stats = index.stats
    assert stats.num_forgotten > 10 and stats.num_open == 0
    index.open("late", trunk)  # said again and again
    assert index.propose("late", 3) == DraftTree.chain([201, 202, 203])


def test_misuse_is_named() -> None:
    index = NgramIndex()
    index.open("a", [1])
    with pytest.raises(ValueError, match="open already"):
        index.open("a", [1])
    with pytest.raises(ValueError, match="max_tokens=1"):
        NgramLimits(max_tokens=1)
    index.open("empty", [])
    assert index.propose("a", 3) == index.propose("empty", 3) == EMPTY


def test_costs() -> None:
    """Bounds are ten times what one quiet core needs (see `NgramIndex`): this catches a slip in complexity."""
    rng = random.Random(0)
    prompt = [rng.randrange(20_000) for _ in range(5000)]
    answer = [rng.randrange(20_000) for _ in range(300)]
    index = NgramIndex()

    def seconds(action: Callable[[int], object], num_times: int) -> float:
        start = time.thread_time()
        for i in range(num_times):
            action(i)
        return (time.thread_time() - start) / num_times

    costs = {"first": seconds(lambda i: index.open(f"{i}", prompt), 1) / 5000}
    index.extend("0", answer)
    costs["again"] = seconds(lambda i: index.open(f"{i + 1}", prompt), 64) / 5000
    costs["extend"] = seconds(lambda i: [index.extend(f"{s + 1}", [answer[i]]) for s in range(64)], 200) / 64
    costs["extend 4"] = (
        seconds(lambda i: index.extend("65", answer[4 * i : 4 * i + 4]) if i else index.open("65", prompt), 60) / 4
    )
    costs["draft of 7"] = seconds(lambda i: index.propose(f"{i % 64 + 1}", 7), 400)
    costs["draft of 15"] = seconds(lambda i: index.propose(f"{i % 64 + 1}", 15), 400)
    print({name: f"{cost * 1e6:.2f} us" for name, cost in costs.items()})
    limits_us = {"first": 20, "again": 1, "extend": 30, "extend 4": 20, "draft of 7": 100, "draft of 15": 200}
    assert not {name: cost for name, cost in costs.items() if cost * 1e6 > limits_us[name]}

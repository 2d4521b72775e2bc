"""The load of `bench.py tail` and what is read off its clocks: lengths, requests, idle time and who used it. Pure, but
for `play` and `talk`, which send the requests."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import torch

from areal_dta.metrics import MetricRecord
from areal_dta.nn import DecoderWeights
from areal_dta.nn.decoder import sequence_logits
from areal_dta.rollout.server.sampler import MIN_TEMPERATURE, gumbel_noise
from scripts.benchlib.serving import ServerError, post

__all__ = [
    "Answer",
    "Ask",
    "Conversation",
    "Span",
    "idle_spans",
    "make_step",
    "overlap_s",
    "play",
    "score_gap",
    "talk",
    "tail_lengths",
    "training_spans",
]

Span = tuple[float, float]
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Ask:
    """One request, its place and what it may say at most (and says: stop tokens are ignored)."""

    prompt: tuple[int, ...]
    length: int
    seed: int
    server: int


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    end_s: float  # unix time


@dataclass(frozen=True)
class Conversation:
    """Turns of ``lengths`` tokens, each but the last followed by an observation."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]
    seed: int
    server: int


def tail_lengths(count: int, median: float, longest: float, rng: np.random.Generator) -> list[int]:
    """``count`` log-normal quantiles in random order; the largest is ``longest`` medians, whatever the seed."""
    ranks = [statistics.NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    spread = math.log(longest) / ranks[-1] if count > 1 else 0.0
    lengths = [max(1, round(median * math.exp(spread * z))) for z in ranks]
    return [int(n) for n in rng.permutation(lengths)]


def make_step(
    prompts: Sequence[tuple[int, ...]], samples: int, lengths: Sequence[int], num_servers: int, first_seed: int
) -> list[Ask]:
    """``samples`` requests per prompt; a group stays on one server, where its prompt is computed once."""
    return [
        Ask(prompts[i // samples], length, first_seed + i, i // samples % num_servers)
        for i, length in enumerate(lengths)
    ]


def idle_spans(start_s: float, asks: Sequence[Ask], answers: Sequence[Answer], num_servers: int) -> list[list[Span]]:
    """Per server: from its last answer (or the start) to the last of all."""
    ends = [start_s] * num_servers
    for ask, answer in zip(asks, answers, strict=True):
        ends[ask.server] = max(ends[ask.server], answer.end_s)
    return [[(end, max(ends))] if end < max(ends) else [] for end in ends]


def training_spans(records: Iterable[MetricRecord], worker: str, now_s: float) -> list[Span]:
    """When ``worker`` trained, by its own word; a span that is not over ends now."""
    spans: list[Span] = []
    since: float | None = None
    for record in records:
        if record.proc != worker or record.kind != "event":
            continue
        if record.name == "drafter/training" and since is None:
            since = record.t
        elif record.name == "drafter/resting" and since is not None:
            spans.append((since, record.t))
            since = None
    return spans if since is None else [*spans, (since, now_s)]


def overlap_s(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds in both; the spans of each do not overlap among themselves."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


@torch.inference_mode()
def score_gap(
    target: DecoderWeights, ask: Ask, temperature: float, expected: Sequence[int], found: Sequence[int]
) -> float:
    """How far apart the two tokens score where two answers part: rounding decides between near ones."""
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        return math.inf  # one ended where the other went on
    tokens = [*ask.prompt, *expected[:at]]
    score_V = sequence_logits(target, tokens)[-1]
    if temperature >= MIN_TEMPERATURE:
        score_V = score_V / temperature + gumbel_noise([(ask.seed, len(tokens))], len(score_V))[0]
    return abs(float(score_V[expected[at]] - score_V[found[at]]))


async def _generate(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], length: int, seed: int, temperature: float
) -> Answer:
    sampling = {"max_new_tokens": length, "min_new_tokens": length, "temperature": temperature, "sampling_seed": seed}
    status, answer = await post(session, f"{url}/generate", {"input_ids": list(prompt), "sampling_params": sampling})
    if status != 200:
        raise ServerError(f"{url} answered {status}: {answer!r:.500}")
    ids = tuple(answer["output_ids"])
    if len(ids) != length:
        raise ServerError(f"{url} answered {len(ids)} tokens, {length} were asked for")
    return Answer(ids, time.time())


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
    )


async def play(urls: Sequence[str], asks: Sequence[Ask], temperature: float) -> list[Answer]:
    """Send all at once; returns when the last is answered."""
    async with _session() as session:
        jobs = (_generate(session, urls[a.server], a.prompt, a.length, a.seed, temperature) for a in asks)
        return list(await asyncio.gather(*jobs))


async def talk(
    urls: Sequence[str], conversations: Sequence[Conversation], in_flight: int, temperature: float
) -> tuple[list[list[Answer]], float]:
    """Keep ``in_flight`` conversations going; their answers, and the unix time at which the last one began."""
    slots = asyncio.Semaphore(in_flight)
    begins: list[float] = []

    async def hold(conversation: Conversation) -> list[Answer]:
        async with slots:
            begins.append(time.time())
            tokens, answers = list(conversation.prompt), []
            for turn, length in enumerate(conversation.lengths):
                seed = conversation.seed + turn
                answer = await _generate(session, urls[conversation.server], tokens, length, seed, temperature)
                answers.append(answer)
                tokens += answer.ids
                if turn < len(conversation.observations):
                    tokens += conversation.observations[turn]
            return answers

    async with _session() as session:
        answers = list(await asyncio.gather(*(hold(c) for c in conversations)))
    return answers, max(begins)

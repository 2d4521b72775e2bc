"""The serving engine's tokens against transformers' ``generate``, whatever happens around and to a request.

In fp64 all tokens are the same. In fp32 they may differ where the two best logits are within 1e-4; how often that
happened is printed at the end. SmolLM2 takes part when ``AREAL_DTA_SMOLLM2`` names its folder (written by
``experiments.models.smollm2``). Not covered: a GPU, bf16, weight updates (see the tests of log-probs).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_dta.nn import DecoderConfig, DecoderWeights, load_decoder
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.sampler import gumbel_noise
from areal_dta.rollout.server.sequence import GenerationRequest, SamplingParams
from tests.contract.engine_drive import (
    Answer,
    Pauses,
    answer_all,
    count_near_ties,
    greedy_by_transformers,
    plain,
    running_engine,
)
from tests.unit.tiny_models import FAMILIES, save_tiny_model

SIZES = (1, 3, 32)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
SMOLLM2 = "AREAL_DTA_SMOLLM2"
SENTENCES = (
    "The customer wants to change the date of a flight.", "A reservation has three passengers and two bags.",
    "Please look up the order before you answer.", "Refunds take five to seven days.",
    "The agent may not promise a compensation.", "Write a short story about a lighthouse.",
    "List the planets of the solar system in order.", "def fibonacci(n):",
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """A model in both implementations, two sets of prompts, and what transformers says to them."""

    model: Any
    weights: DecoderWeights
    num_new_tokens: int
    prompts: dict[str, list[list[int]]]  # "apart": no two start alike; "related": shared prefixes of many lengths
    expected: dict[str, list[list[int]]]

    def request(self, index: int, prompt: list[int], seed: int = 0, **sampling: Any) -> GenerationRequest:
        params = SamplingParams(max_new_tokens=self.num_new_tokens, **{"temperature": 0.0, **sampling})
        return GenerationRequest(str(index), tuple(prompt), params, seed)

    def greedy_after(self, prompt: list[int], ids: list[int]) -> list[int]:
        left = self.num_new_tokens - (len(ids) - len(prompt))
        if left == 0 or ids[-1] in self.weights.config.eos_token_ids:
            return []
        return greedy_by_transformers(self.model, [ids], left, self.weights.config.eos_token_ids)[0]


def toy_prompts() -> dict[str, list[list[int]]]:
    rng = random.Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, 300) for _ in range(count)]

    trunk = ids(60)
    related = [trunk[: rng.randrange(17, 60)] + ids(rng.randrange(1, 30)) for _ in range(max(SIZES))]
    return {"apart": [[2 + i, *ids(rng.randrange(20, 70))] for i in range(max(SIZES))], "related": related}


def text_prompts(folder: Path) -> dict[str, list[list[int]]]:
    rng = random.Random(5)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def speak(count: int) -> str:
        return " ".join(rng.choice(SENTENCES) for _ in range(count))

    apart = [ids(f"{i}. {speak(rng.randrange(1, 4))}") for i in range(max(SIZES))]
    trunk = ids(speak(5))
    return {"apart": apart, "related": [trunk[: 17 + i % 30] + ids(speak(1)) for i in range(max(SIZES))]}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``references(family, dtype)``, each made once."""

    @cache
    def folder_of(family: str) -> Path:
        if family != "smollm2":
            save_tiny_model(folder := tmp_path_factory.mktemp(family), family)
            return folder
        if SMOLLM2 not in os.environ:
            pytest.skip(f"{SMOLLM2} does not name a folder written by experiments.models.smollm2")
        return Path(os.environ[SMOLLM2])

    @cache
    def make(family: str, dtype: str) -> Reference:
        folder = folder_of(family)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        weights = load_decoder(folder, DecoderConfig.from_folder(folder), DTYPES[dtype])
        num_new_tokens = 12 if family == "smollm2" else 24
        prompts = text_prompts(folder) if family == "smollm2" else toy_prompts()
        eos_ids = weights.config.eos_token_ids
        expected = {k: greedy_by_transformers(model, p, num_new_tokens, eos_ids) for k, p in prompts.items()}
        return Reference(model, weights, num_new_tokens, prompts, expected)

    return make


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Tokens compared and near ties met, told at the end."""
    counts: Counter[str] = Counter()
    yield counts
    plugins = request.config.pluginmanager
    terminal, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    assert terminal is not None
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        terminal.write_line("")
        for key in sorted(k for k in counts if k.endswith("tokens")):
            terminal.write_line(f"{key}: {counts[key]}, near ties: {counts[key.replace('tokens', 'ties')]}")


@dataclass(frozen=True)
class Scenario:
    """What happens around the requests; they are sent twice, with ``fillers`` others in between."""

    kind: str = "related"
    limits: dict[str, int] = field(default_factory=dict)
    pause: str | None = None
    num_fillers: int = 0


SCENARIOS = {
    "no-hits": Scenario("apart"),
    "prefix-hits": Scenario(),
    "chunked-prefill": Scenario(limits={"max_prefill_tokens": 16}),
    "eviction": Scenario(limits={"max_total_tokens": 256}, num_fillers=12),
    "abort-and-resubmit": Scenario(pause="abort"),
    "retract": Scenario(pause="retract"),
    "in-place": Scenario(pause="in_place"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_greedy_output_is_transformers_output(
    family: str, dtype: str, name: str, size: int, references: Any, tally: Counter[str]
) -> None:
    ref, scenario = references(family, dtype), SCENARIOS[name]
    prompts, fillers = ref.prompts[scenario.kind][:size], ref.prompts["apart"][: scenario.num_fillers]
    expected = ref.expected[scenario.kind][:size]
    with running_engine(ref.weights, **{"max_total_tokens": 8192, **scenario.limits}) as engine:
        pauses = Pauses(engine, scenario.pause) if scenario.pause else None
        first = answer_all(engine, [ref.request(i, p) for i, p in enumerate(prompts)])
        if fillers:
            answer_all(engine, [ref.request(i, p) for i, p in enumerate(fillers)])
        second = [] if name == "no-hits" else answer_all(engine, [ref.request(i, p) for i, p in enumerate(prompts)])
        check_that_it_happened(name, size, engine, first, second, pauses)
    for answers in (first, second):
        for prompt, answer, want in zip(prompts, answers, expected, strict=False):
            tally[f"{family} {dtype} greedy tokens"] += len(want)
            if dtype == "fp64":
                assert list(answer.output_ids) == want
            else:
                go_on = partial(ref.greedy_after, prompt)
                tally[f"{family} {dtype} greedy ties"] += count_near_ties(
                    ref.model, prompt, answer.output_ids, want, plain, go_on
                )


def check_that_it_happened(
    name: str, size: int, engine: Engine, first: list[Answer], second: list[Answer], pauses: Pauses | None
) -> None:
    """The scenario did what it is named after."""
    hits = [a.cached_tokens for a in first], [a.cached_tokens for a in second]
    if name == "no-hits":
        assert sum(hits[0]) == 0
    elif name == "eviction":
        assert hits[1][0] == 0, "the pool is small enough that the others took its pages"
    elif name != "abort-and-resubmit":
        assert min(hits[1]) > 0
    if size > 1 and name in ("prefix-hits", "chunked-prefill"):
        assert sum(hits[0]) > 0
    if name == "chunked-prefill":
        assert engine.stats.steps >= (engine.stats.prompt_tokens - engine.stats.cached_tokens) / 16
    if pauses is not None:
        assert len(pauses.affected) >= 4
        assert max(pauses.affected) >= size / 2
    if name == "abort-and-resubmit":
        assert all(a.num_submissions > 1 for a in first if len(a.output_ids) > 5)
    if name == "retract":
        assert engine.stats.retractions >= size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, "smollm2"])
def test_sampled_output_with_a_seed_does_not_depend_on_the_batch_around_it(
    family: str, dtype: str, references: Any, tally: Counter[str]
) -> None:
    ref = references(family, dtype)
    cut = {"top_p": 0.9, "top_k": 40} if dtype == "fp64" else {}  # whose borders are near ties of another kind
    prompts = ref.prompts["related"]
    requests = [ref.request(i, p, seed=100 + i, temperature=0.9, **cut) for i, p in enumerate(prompts)]
    watched = [0, 5, 11]
    alone: dict[int, tuple[int, ...]] = {}
    for i in watched:
        with running_engine(ref.weights, max_total_tokens=8192) as engine:
            alone[i] = answer_all(engine, [requests[i]])[0].output_ids
    assert len(set(alone.values())) == len(watched)
    everybody = list(range(len(prompts)))
    for batch, limits, pause in (
        (watched, {}, None),
        (everybody, {}, None),
        (everybody, {"max_prefill_tokens": 16, "max_batch": 7}, "retract"),
        (everybody[::-1], {}, "abort"),
    ):
        with running_engine(ref.weights, **{"max_total_tokens": 8192, **limits}) as engine:
            if pause:
                Pauses(engine, pause)
            answers = dict(zip(batch, answer_all(engine, [requests[i] for i in batch]), strict=True))
        for i in watched:
            tally[f"{family} {dtype} sampled tokens"] += len(alone[i])
            if dtype == "fp64":
                assert answers[i].output_ids == alone[i]
            else:
                tally[f"{family} {dtype} sampled ties"] += count_sampled_ties(
                    ref, requests[i], answers[i].output_ids, alone[i]
                )


def count_sampled_ties(
    ref: Reference, request: GenerationRequest, got: tuple[int, ...], expected: tuple[int, ...]
) -> int:
    """1 if the two part at a near tie of logits with noise; what follows there is another text."""
    at = next((t for t, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))

    def noisy(logits_V: torch.Tensor, position: int) -> torch.Tensor:
        return logits_V / request.sampling.temperature + gumbel_noise([(request.seed, position)], len(logits_V))[0]

    if at == len(expected):
        assert got == expected
        return 0
    return count_near_ties(ref.model, request.input_ids, got[: at + 1], expected[: at + 1], noisy, lambda ids: [])


def test_a_difference_is_a_near_tie_only_when_the_logits_say_so(references: Any) -> None:
    ref = references("llama", "fp64")
    prompt, expected = ref.prompts["apart"][0], ref.expected["apart"][0]
    wrong = [*expected[:3], (expected[3] + 1) % 320, *expected[4:]]
    with pytest.raises(AssertionError, match=r"token 3: \d+ instead of \d+, .* below the best"):
        count_near_ties(ref.model, prompt, wrong, expected, plain, lambda ids: wrong[4:])

    def flat(logits_V: torch.Tensor, position: int) -> torch.Tensor:
        return logits_V * 1e-6

    assert count_near_ties(ref.model, prompt, wrong, expected, flat, lambda ids: wrong[4:]) == 1
    with pytest.raises(AssertionError, match="the shorter is the start of the longer"):
        count_near_ties(ref.model, prompt, expected[:-1], expected, plain, lambda ids: [])

"""Scheduler, KV cache and sampler without HTTP, against transformers. Not covered: a GPU, fp16."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from pathlib import Path

import pytest
import torch

from areal_dta import metrics
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import DecoderWeights, sequence_logits
from areal_dta.rollout.server import attention_plan
from areal_dta.rollout.server.attention_plan import Span, find_shared
from areal_dta.rollout.server.engine import Engine, EngineDead
from areal_dta.rollout.server.kv_cache import CacheFull, KVCache
from areal_dta.rollout.server.sampler import SampleRow, gumbel_noise, sample
from areal_dta.rollout.server.scheduler import SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from tests.unit.server_kit import make_scheduler, run_requests
from tests.unit.tiny_models import FAMILIES, save_tiny_model

GREEDY = SamplingParams(max_new_tokens=30, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=25, temperature=0.9)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share prefixes of many lengths."""
    rng = random.Random(seed)
    trunk = [rng.randrange(2, 300) for _ in range(90)]
    return [
        trunk[: rng.randrange(1, 90)] + [rng.randrange(2, 300) for _ in range(rng.randrange(0, 40))]
        for _ in range(count)
    ]


def full_logprobs(weights: DecoderWeights, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the output from one dense forward over the whole sequence."""
    prompt, output = list(completion.request.input_ids), list(completion.output_ids)
    logits = sequence_logits(weights, prompt + output)[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_transformers_output(family: str, tmp_path: Path):
    model = save_tiny_model(tmp_path, family).double()
    prompts = make_prompts(12)
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([p]), max_new_tokens=30, do_sample=False)[0, len(p) :].tolist() for p in prompts
        ]
    for limits in ({}, {"max_prefill_tokens": 37, "max_batch": 5}, {"max_total_tokens": 400, "max_batch": 9}):
        scheduler = make_scheduler(tmp_path, torch.float64, **limits)
        for _ in range(2):  # the second time with prefix hits
            assert [list(c.output_ids) for c in run_requests(scheduler, prompts, GREEDY)] == expected
        assert scheduler.stats.cached_tokens > 0
        assert scheduler.cache.num_available == scheduler.cache.num_pages


@pytest.mark.parametrize("pass_overhead_keys", [0, 2048, 10**9], ids=["every-level-shared", "default", "never-shared"])
def test_sampled_logprobs_equal_a_full_forward(pass_overhead_keys: int, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_plan, "PASS_OVERHEAD_KEYS", pass_overhead_keys)
    scheduler = make_scheduler(folder)
    rng = random.Random(4)
    trunk, branch = ([rng.randrange(2, 300) for _ in range(200)] for _ in range(2))
    forks = [trunk + branch[: 40 * (i % 5)] + [rng.randrange(2, 300) for _ in range(9)] for i in range(15)]
    for completion in run_requests(scheduler, [*make_prompts(20), *forks], SAMPLED):
        expected = full_logprobs(scheduler.runner.weights, completion, SAMPLED.temperature)
        assert (torch.tensor(completion.output_logprobs) - expected).abs().max() < 1e-5


def test_a_seed_fixes_the_tokens_whatever_the_batch(folder: Path):
    prompts, seeds = make_prompts(16), list(range(100, 116))
    together = run_requests(make_scheduler(folder, torch.float64), prompts, SAMPLED, seeds)
    chunked = run_requests(
        make_scheduler(folder, torch.float64, max_batch=3, max_prefill_tokens=16), prompts, SAMPLED, seeds
    )
    for i, prompt in enumerate(prompts):
        alone = run_requests(make_scheduler(folder, torch.float64), [prompt], SAMPLED, [seeds[i]])[0]
        assert alone.output_ids == together[i].output_ids == chunked[i].output_ids
    assert len({c.output_ids for c in run_requests(make_scheduler(folder), [prompts[0]] * 8, SAMPLED)}) > 1


def test_resubmitting_a_partial_output_continues_the_same_draw(folder: Path):
    prompt = make_prompts(1)[0]
    whole = run_requests(make_scheduler(folder, torch.float64), [prompt], SAMPLED, [7])[0].output_ids
    rest = SamplingParams(max_new_tokens=SAMPLED.max_new_tokens - 5, temperature=SAMPLED.temperature)
    again = run_requests(make_scheduler(folder, torch.float64), [prompt + list(whole[:5])], rest, [7])[0].output_ids
    assert whole[:5] + again == whole


def test_prefix_hits_change_nothing_and_cover_the_previous_turn(folder: Path):
    scheduler = make_scheduler(folder, torch.float64)
    prompt = make_prompts(1)[0] * 3
    first = run_requests(scheduler, [prompt], GREEDY)[0]
    follow_up = prompt + list(first.output_ids) + [5, 6, 7]
    second = run_requests(scheduler, [follow_up], GREEDY)[0]
    assert second.cached_tokens == (len(prompt) + len(first.output_ids) - 1) // 16 * 16
    assert second.output_ids == run_requests(make_scheduler(folder, torch.float64), [follow_up], GREEDY)[0].output_ids


def test_samples_of_a_group_compute_their_prompt_once(folder: Path):
    scheduler = make_scheduler(folder)
    prompt = make_prompts(1)[0] * 5
    completions = run_requests(scheduler, [prompt] * 8, SAMPLED)
    assert sum(c.cached_tokens for c in completions) == 7 * ((len(prompt) - 1) // 16 * 16)


def test_a_long_prompt_under_way_is_waited_for_rather_than_repeated(folder: Path):
    scheduler = make_scheduler(folder, max_prefill_tokens=32)
    prompt = make_prompts(1)[0] * 5
    completions = run_requests(scheduler, [prompt] * 4, SAMPLED)
    assert sum(c.cached_tokens for c in completions) == 3 * ((len(prompt) - 1) // 16 * 16)


def test_requests_wait_when_the_pool_is_full_and_all_finish(folder: Path):
    scheduler = make_scheduler(folder, torch.float64, max_total_tokens=256)
    prompts = make_prompts(20, seed=3)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    tight = run_requests(scheduler, prompts, sampling)
    roomy = run_requests(make_scheduler(folder, torch.float64), prompts, sampling)
    assert [c.output_ids for c in tight] == [c.output_ids for c in roomy]
    assert scheduler.stats.retractions > 0
    assert scheduler.cache.num_available == scheduler.cache.num_pages


def test_new_weights_in_flight_are_used_with_recomputed_context(folder: Path, tmp_path: Path):
    save_tiny_model(tmp_path, seed=1)
    scheduler = make_scheduler(folder)
    old = scheduler.runner.weights
    new = load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32)

    def swap(step: int) -> None:
        if step == 6:
            scheduler.swap_weights(new, "v1")

    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for completion in run_requests(scheduler, make_prompts(6), sampling, between_steps=swap):
        first, second = completion.spans
        assert (first.version, second.version, first.start, second.end) == ("v0", "v1", 0, 20)
        assert first.end == second.start == 7
        got = torch.tensor(completion.output_logprobs)
        expected = torch.cat([full_logprobs(old, completion)[:7], full_logprobs(new, completion)[7:]])
        assert (got - expected).abs().max() < 1e-5
    assert scheduler.version == "v1"
    # Nothing computed by v0 is found any more: what is cached equals what v1 computes.
    prompt = make_prompts(6)[0] * 2
    fresh = run_requests(scheduler, [prompt], SAMPLED)[0]
    assert (torch.tensor(fresh.output_logprobs) - full_logprobs(new, fresh, 0.9)).abs().max() < 1e-5


@pytest.mark.parametrize("start", [0, 1, 33, 70])
def test_scoring_gives_the_prompts_logprobs_with_and_without_hits(start: int, folder: Path):
    scheduler = make_scheduler(folder, max_prefill_tokens=24)
    prompt = make_prompts(1, seed=5)[0] * 2
    expected = sequence_logits(scheduler.runner.weights, prompt).log_softmax(-1)[:-1]
    expected = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    for _ in range(2):
        scored = run_requests(scheduler, [prompt], GREEDY, logprob_start=start)[0].input_logprobs
        assert [token for _, token in scored] == prompt[start:]
        values = [value for value, _ in scored]
        if start == 0:
            assert values.pop(0) is None
        got = torch.tensor(values)
        assert (got - expected[max(start, 1) - 1 :]).abs().max() < 1e-5


def test_frequency_penalty_counts_output_tokens(folder: Path):
    prompt = make_prompts(1)[0]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, frequency_penalty=2.0, ignore_eos=True)
    scheduler = make_scheduler(folder, torch.float64)
    ids = list(prompt)
    for token in run_requests(scheduler, [prompt], sampling)[0].output_ids:
        logits = sequence_logits(scheduler.runner.weights, ids)[-1]
        for seen in ids[len(prompt) :]:
            logits[seen] -= 2.0
        assert int(logits.argmax()) == token
        ids.append(token)


def test_min_new_tokens_keeps_the_stop_token_away(folder: Path):
    sampling = SamplingParams(max_new_tokens=40, min_new_tokens=40, temperature=1.5)
    for completion in run_requests(make_scheduler(folder), make_prompts(8), sampling):
        assert len(completion.output_ids) == 40
        assert 1 not in completion.output_ids


def test_noise_is_gumbel_and_independent_between_seeds_and_positions():
    noise = gumbel_noise([(s, p) for s in range(30) for p in range(30)], 512)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    centred = noise - noise.mean(1, keepdim=True)
    correlation = torch.corrcoef(centred).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 0.3
    assert abs(float(correlation.mean())) < 1e-3
    assert torch.equal(noise[5], gumbel_noise([(0, 5)], 512)[0])


def test_tokens_follow_the_softmax_of_what_top_k_and_top_p_leave():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    cases = [(1.0, -1, 5), (1.0, 3, 3), (0.7, -1, 2), (0.8, 2, 2), (1e-6, -1, 1)]
    for top_p, top_k, kept in cases:
        rows = [SampleRow(11, i, 0.8, top_p, top_k) for i in range(20_000)]
        tokens, logprobs = sample(logits.repeat(len(rows), 1), rows)
        share = torch.bincount(tokens, minlength=5) / len(rows)
        expected = torch.zeros(5)
        expected[:kept] = (logits[:kept] / 0.8).softmax(0)
        assert (share - expected).abs().max() < 0.015, (top_p, top_k)
        assert torch.allclose(logprobs, (logits / 0.8).log_softmax(0)[tokens], atol=1e-6)


def test_nucleus_of_a_flat_distribution_over_a_large_vocabulary():
    rows = [SampleRow(1, i, 1.0, 0.5) for i in range(300)]
    logits = torch.linspace(0, 0.001, 2000).repeat(300, 1)
    tokens, _ = sample(logits, rows)
    assert int(tokens.min()) >= 998
    assert int(tokens.min()) < 1100


def test_mixed_rows_are_drawn_as_if_alone():
    logits = torch.randn(6, 400)
    rows = [
        SampleRow(1, 5, 0.0), SampleRow(2, 5, 1.3), SampleRow(3, 9, 0.7, 0.9), SampleRow(4, 2, 1.0, 1.0, 20),
        SampleRow(5, 2, 1.0, 0.5, 300), SampleRow(6, 1),
    ]  # fmt: skip
    tokens, logprobs = sample(logits, rows)
    for i, row in enumerate(rows):
        token, logprob = sample(logits[i : i + 1], [row])
        assert int(token) == int(tokens[i])
        assert float(logprob) == pytest.approx(float(logprobs[i]), abs=1e-6)


def test_shared_prefixes_are_found_level_by_level_when_worth_a_pass():
    trunk, left, right = list(range(1, 41)), list(range(50, 90)), list(range(100, 140))
    tables = [trunk + left + [200 + i] for i in range(4)] + [trunk + right + [300 + i] for i in range(4)] + [[999]]
    spans = [Span(t, len(t) * 16 - 1, len(t) * 16) for t in tables]
    found = {s.members: (s.first_page, list(s.pages)) for s in find_shared(spans, 16)}
    # 7 x 40 pages saved by the trunk, 3 x 40 by no branch alone: 1920 keys are less than a pass costs.
    assert found == {(0, 1, 2, 3, 4, 5, 6, 7): (0, trunk)}
    spans += [Span(trunk + left + [400], 81 * 16 - 1, 81 * 16)] * 2
    found = {s.members: (s.first_page, list(s.pages)) for s in find_shared(spans, 16)}
    assert found[(0, 1, 2, 3, 9, 10)] == (40, left)


def test_pages_under_a_sequences_new_tokens_are_not_shared():
    table = list(range(1, 300))
    assert find_shared([Span(table, 0, 160), Span(table, 0, 160)], 16) == []


def test_least_recently_used_leaves_go_first_and_locked_ones_stay():
    cache = KVCache(7, 4)
    tokens = {name: [base + i for i in range(8)] for name, base in (("a", 0), ("b", 100), ("c", 200))}
    for name in ("a", "b", "c"):
        cache.store(tokens[name], [], cache.allocate(2), 8)
    hit = cache.match(tokens["a"], 8)
    cache.lock(hit)
    assert len(hit) == 2
    cache.unlock(cache.match(tokens["b"], 0))
    cache.allocate(1)
    assert [len(cache.match(tokens[n], 8)) for n in "abc"] == [2, 1, 2]
    cache.allocate(3)
    assert [len(cache.match(tokens[n], 8)) for n in "abc"] == [2, 0, 0]
    with pytest.raises(CacheFull):
        cache.allocate(1)
    cache.unlock(hit)
    cache.allocate(2)
    assert cache.num_available == 0
    assert cache.num_cached == 0


def test_the_tree_cannot_be_reset_under_a_sequence():
    cache = KVCache(5, 4)
    cache.store([1, 2, 3, 4], [], cache.allocate(1), 4)
    path = cache.match([1, 2, 3, 4], 4)
    cache.lock(path)
    with pytest.raises(RuntimeError, match="in use"):
        cache.reset_tree()
    cache.unlock(path)
    cache.reset_tree()
    assert cache.num_available == 4


def test_a_model_thread_that_fails_answers_everybody_and_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch):
    weights = load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)
    engine = Engine(weights, "v0", SchedulerLimits(), metrics.init("test", None))

    def broken() -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(engine._scheduler, "step", broken)

    async def ask() -> Completion:
        request = GenerationRequest("r", (2, 3), SAMPLED, 1)
        return await asyncio.wait_for(engine.submit(request).future, 20)

    engine.start()
    finish = asyncio.run(ask()).finish
    assert finish.kind == "error"
    assert "no room" in str(finish.message)
    assert isinstance(engine.error, MemoryError)
    assert not engine.alive
    engine.stop(10)
    with pytest.raises(EngineDead, match="no room"):
        engine.pause("abort")


def test_a_caller_that_gives_up_on_a_control_call_does_not_take_the_model_thread_along(folder: Path):
    weights = load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)
    engine = Engine(weights, "v0", SchedulerLimits(), metrics.init("test", None))
    engine.start()
    busy, go_on = threading.Event(), threading.Event()
    engine.call(lambda: busy.set() or go_on.wait(20))  # one long step
    assert busy.wait(20)
    given_up = engine.call(lambda: 1)
    assert given_up.cancel()
    go_on.set()
    assert engine.call(lambda: 2).result(20) == 2
    assert engine.alive
    engine.stop(10)

"""Penalties, biases, cuts and log-probs against plain recomputation; the cache under kept weights. No HTTP."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import sequence_logits
from areal_dta.rollout.server.kv_cache import KVCache
from areal_dta.rollout.server.sampler import SampleRow, draw
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, FinishReason, GenerationRequest, LogprobWants, SamplingParams
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from tests.unit.server_kit import add_byte_tokenizer, make_scheduler, run_requests
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(40, 70))
BASE = SamplingParams(max_new_tokens=24, temperature=0.8, ignore_eos=True)
PENALTIES = replace(BASE, frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=1.3, logit_bias=((7, 3.0),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    add_byte_tokenizer(path)
    return path


def run_one(scheduler: Scheduler, request: GenerationRequest) -> Completion:
    done: list[Completion] = []
    limit = len(request.input_ids) + request.sampling.max_new_tokens
    scheduler.add(ServerSequence(request, limit, frozenset(), lambda _, c: done.append(c)))
    while scheduler.has_work:
        scheduler.step()
    return done[0]


def penalised(logits: torch.Tensor, output: list[int], s: SamplingParams) -> torch.Tensor:
    """The same, token by token."""
    logits = logits.clone()
    for token, count in Counter(output).items():
        value = logits[token] - s.frequency_penalty * count - s.presence_penalty
        logits[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
    for token, bias in s.logit_bias:
        logits[token] += bias
    return logits


def test_penalties_count_the_output_and_every_logprob_has_its_distribution(folder: Path):
    scheduler = make_scheduler(folder, torch.float64)
    sampling = replace(PENALTIES, top_p=0.8, top_k=30)
    request = GenerationRequest("r", tuple(PROMPT), sampling, 5, wants=LogprobWants(raw=True, sampling=True, top=4))
    entries = run_one(scheduler, request).output
    output = [t.token for t in entries]
    rows = sequence_logits(scheduler.runner.weights, PROMPT + output)[len(PROMPT) - 1 : -1]
    for i, (entry, raw) in enumerate(zip(entries, rows, strict=True)):
        scaled = penalised(raw, output[:i], sampling) / sampling.temperature
        assert entry.raw == pytest.approx(float(raw.log_softmax(-1)[entry.token]), abs=1e-5)
        logprobs = scaled.log_softmax(-1)
        assert entry.logprob == pytest.approx(float(logprobs[entry.token]), abs=1e-5)
        best = logprobs.topk(4)
        assert [t for _, t in entry.top] == best.indices.tolist()
        assert [lp for lp, _ in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        kept = scaled.sort(descending=True)
        share = kept.values[:30].softmax(0)
        num_kept = int(((share.cumsum(0) - share) < 0.8).sum())
        cut = kept.values[:num_kept].log_softmax(0)
        assert entry.token in kept.indices[:num_kept]
        position = kept.indices.tolist().index(entry.token)
        assert entry.sampling == pytest.approx(float(cut[position]), abs=1e-5)


def test_penalised_draws_do_not_depend_on_the_batch(folder: Path):
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 300) for _ in range(rng.randrange(3, 50))] for _ in range(8)]
    sampling = replace(PENALTIES, min_p=0.02)
    together = run_requests(make_scheduler(folder, torch.float64), prompts, sampling)
    tight = run_requests(make_scheduler(folder, torch.float64, max_total_tokens=192), prompts, sampling)
    for i, prompt in enumerate(prompts):
        alone = run_requests(make_scheduler(folder, torch.float64), [prompt], sampling, [i])[0]
        assert alone.output_ids == together[i].output_ids == tight[i].output_ids


def test_a_bias_of_minus_100_bans_a_token(folder: Path):
    scheduler = make_scheduler(folder)
    first = run_requests(scheduler, [PROMPT], replace(BASE, temperature=0.0))[0].output_ids[0]
    banned = replace(BASE, temperature=0.0, logit_bias=((first, -100.0),))
    assert first not in run_requests(scheduler, [PROMPT], banned)[0].output_ids


def test_min_p_keeps_what_is_likely_enough_and_alters_nothing_else():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    probs = logits.softmax(0)
    for min_p, kept in ((0.0, 5), (0.3, 2), (0.1, 4), (1.0, 1)):
        assert int((probs >= min_p * probs[0]).sum()) == kept
        rows = [SampleRow(11, i, 1.0, 1.0, -1, min_p) for i in range(20_000)]
        drawn = draw(logits.repeat(len(rows), 1), rows)
        share = torch.bincount(drawn.tokens_B, minlength=5) / len(rows)
        expected = torch.zeros(5)
        expected[:kept] = logits[:kept].softmax(0)
        assert (share - expected).abs().max() < 0.015
        assert torch.allclose(drawn.sampling_logprobs(), expected.log()[drawn.tokens_B], atol=1e-5)
        assert torch.allclose(drawn.logprobs(), probs.log()[drawn.tokens_B], atol=1e-6)


def test_rows_with_different_cuts_are_drawn_as_if_alone():
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    rows = [
        SampleRow(1, 5, 0.0, min_p=0.5), SampleRow(2, 5, 1.3, min_p=0.2), SampleRow(3, 9, 0.7, 0.9, 40, 0.05),
        SampleRow(4, 2, 1.0, 1.0, 20), SampleRow(5, 2),
    ]  # fmt: skip
    together = draw(logits, rows)
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1], [row])
        assert int(alone.tokens_B) == int(together.tokens_B[i])
        assert float(alone.sampling_logprobs()) == pytest.approx(float(together.sampling_logprobs()[i]), abs=1e-6)


def test_a_restricted_row_is_an_exact_draw_from_what_is_allowed():
    logits = torch.linspace(2, -2, 300)
    chosen = {0, 5, 120, 299}
    rows = [SampleRow(3, i, 1.0, 0.999) for i in range(20_000)]
    tokens = draw(logits.repeat(len(rows), 1), rows, dict.fromkeys(range(len(rows)), chosen.__contains__)).tokens_B
    index = torch.tensor(sorted(chosen))
    share = torch.bincount(tokens, minlength=300)[index] / len(rows)
    assert (share - logits[index].softmax(0)).abs().max() < 0.015
    # Outside of the nucleus the cut gives way; with nothing allowed the row is marked, and no other.
    row = [SampleRow(3, 1, 1.0, 0.05)]
    assert int(draw(logits[None], row, {0: lambda t: t == 299}).tokens_B) == 299
    assert draw(logits.repeat(2, 1), row * 2, {0: lambda t: False, 1: lambda t: t == 7}).stuck == {0}


def test_a_constraint_that_allows_nothing_ends_its_request_only(folder: Path):
    class Stuck:
        complete = False

        def allows(self, token: int) -> bool:
            return False

        def accept(self, token: int) -> None:
            raise AssertionError(token)

    scheduler = make_scheduler(folder)
    done = run_one(scheduler, GenerationRequest("r", tuple(PROMPT), BASE, 1, constraint=Stuck))
    assert (done.finish.kind, done.output, scheduler.stats.aborted) == ("abort", (), {"stuck": 1})
    assert run_requests(scheduler, [PROMPT], BASE)[0].finish.kind == "length"


def test_prompt_scoring_gives_the_likeliest_tokens_too(folder: Path):
    scheduler = make_scheduler(folder, torch.float64, max_prefill_tokens=16)
    request = GenerationRequest("r", tuple(PROMPT), replace(BASE, max_new_tokens=1), 1, 0, LogprobWants(top=3))
    done = run_one(scheduler, request)
    expected = sequence_logits(scheduler.runner.weights, PROMPT)[:-1].topk(3).indices.tolist()
    assert done.input_top[0] is None
    assert [[t for _, t in top or ()] for top in done.input_top[1:]] == expected


@pytest.mark.parametrize("stop_after", [False, True])
def test_a_stop_string_is_found_across_tokens(stop_after: bool, folder: Path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = DecoderConfig.from_folder(folder)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    scheduler = Scheduler(load_decoder(folder, config, torch.float32), "v0", SchedulerLimits(), decode)
    printable = tuple((t, -100.0) for t in range(320) if not decode([t]).isascii() or not decode([t]).strip())
    sampling = replace(BASE, logit_bias=printable, max_new_tokens=40)
    whole = run_one(scheduler, GenerationRequest("r", tuple(PROMPT), sampling, 9)).output_ids
    text = decode(list(whole))
    stop = text[10:14]  # four tokens, one byte each
    kind = {"stop_after": (stop,)} if stop_after else {"stop": ("nowhere to be found", stop)}
    done = run_one(scheduler, GenerationRequest("r", tuple(PROMPT), replace(sampling, **kind), 9))
    assert done.finish == FinishReason("stop", matched=stop)
    assert done.output_ids == whole[: text.index(stop) + 4]


def test_kept_requests_go_on_with_their_context_and_share_it_with_nobody(folder: Path, tmp_path: Path):
    save_tiny_model(tmp_path, seed=1)
    new = load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float64)
    scheduler = make_scheduler(folder, torch.float64)
    prompt = PROMPT * 3
    old_only = run_requests(scheduler, [prompt] * 3, BASE)
    tokens_before = scheduler.stats.prompt_tokens - scheduler.stats.cached_tokens

    def swap(step: int) -> None:
        if step == 5:
            scheduler.swap_weights(new, "v1", keep_kv=True)
            assert [s.num_remaining for s in scheduler.running] == [1] * 3  # nothing to recompute
            assert scheduler.cache.num_cached == 0

    mixed = run_requests(scheduler, [prompt] * 3, BASE, between_steps=swap)
    for before, after in zip(old_only, mixed, strict=True):
        spans = [(s.version, s.start, s.end, s.mixed) for s in after.spans]
        assert spans == [("v0", 0, 6, False), ("v1", 6, 24, True)]
        assert before.output_ids[:6] == after.output_ids[:6]
    assert scheduler.stats.prompt_tokens - scheduler.stats.cached_tokens > tokens_before - 1
    assert scheduler.cache.num_available == scheduler.cache.num_pages
    assert scheduler.cache.num_cached == 0  # a context of two versions is not kept
    fresh = run_requests(scheduler, [prompt], BASE)[0]
    expected = sequence_logits(new, prompt + list(fresh.output_ids))[len(prompt) - 1 : -1] / BASE.temperature
    got = torch.tensor(fresh.output_logprobs)
    assert (expected.log_softmax(-1).gather(1, torch.tensor(fresh.output_ids)[:, None])[:, 0] - got).abs().max() < 1e-5


def test_forgotten_pages_come_back_when_their_last_user_leaves():
    cache = KVCache(8, 4)
    tokens = list(range(12))
    cache.store(tokens, [], cache.allocate(3), 12)
    path = cache.match(tokens, 8)
    cache.lock(path)
    cache.lock(path)
    cache.forget()
    assert cache.match(tokens, 12) == []
    assert (cache.num_cached, cache.num_available) == (0, 5)
    cache.unlock(path)
    assert cache.num_available == 5
    cache.unlock(path)
    assert cache.num_available == 7
    assert sorted(cache.allocate(7)) == list(range(1, 8))


def test_released_memory_is_gone_and_comes_back_empty(folder: Path):
    scheduler = make_scheduler(folder, max_total_tokens=65536)

    def tensor_bytes() -> int:
        gc.collect()
        tensors = (t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not t.is_mkldnn)
        stores = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors}
        return sum(stores.values())

    before = run_requests(scheduler, [PROMPT], BASE)[0]
    held = tensor_bytes()
    freed = scheduler.release_memory()
    assert freed > 30 << 20
    assert held - tensor_bytes() == freed
    assert scheduler.runner.kv.num_bytes == 0
    assert scheduler.resume_memory() == freed
    assert run_requests(scheduler, [PROMPT], BASE)[0].output_ids == before.output_ids
    assert scheduler.release_memory() == freed
    assert scheduler.release_memory() == 0

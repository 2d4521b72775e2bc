"""Speculation on the paged cache: the same tokens as plain decoding, whatever a drafter says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm, available_arms
from areal_dta.drafter.draft_tree import DraftTree
from areal_dta.drafter.ngram import NgramIndex
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.rollout.server import speculation as speculation_module
from areal_dta.rollout.server.ngram_drafter import PAPER_STEPS, NgramDrafter
from areal_dta.rollout.server.scheduler import Scheduler
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams, TokenLogprobs
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import Speculator
from tests.unit.server_kit import make_scheduler
from tests.unit.spec_kit import (
    ORACLE,
    Oracle,
    ScriptedTuner,
    answers_of,
    mixed_requests,
    run_all,
    same,
    speculating,
    spelling,
)
from tests.unit.tiny_models import FAMILIES, save_tiny_model

VOCAB = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        save_tiny_model(made[family], family)
    made["updated"] = tmp_path_factory.mktemp("updated")
    save_tiny_model(made["updated"], "qwen3", seed=1)
    return made


def different(plain: list[Completion], done: list[Completion]) -> list[str]:
    return [c.request.rid for c, d in zip(plain, done, strict=True) if not same(c, d)]


@pytest.mark.parametrize("at_once", [1, 3, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_draft_gives_the_tokens_of_plain_decoding(family: str, at_once: int, folders: dict[str, Path]):
    requests = mixed_requests(111, VOCAB, seed=at_once)
    plain = run_all(spelling(make_scheduler(folders[family], torch.float64)), requests, 8)
    assert any(isinstance(c.finish.matched, str) for c in plain)
    oracle = Oracle(answers_of(plain), 0.8, VOCAB, seed=0)
    scheduler = speculating(folders[family], torch.float64, oracle, (ORACLE, ORACLE, OFF, Arm("eagle", 2, 2, 3)))
    done = run_all(scheduler, requests, at_once)
    assert different(plain, done) == []
    assert scheduler.speculator is not None
    assert scheduler.speculator.stats.accept_length > 1.5
    assert scheduler.cache.num_available == scheduler.cache.num_pages  # nothing leaked
    assert sum(c.num_accepted for c in done) == scheduler.speculator.stats.accepted_tokens > 0


def test_every_ngram_arm_gives_the_tokens_of_plain_decoding(folders: dict[str, Path]):
    requests = mixed_requests(60, VOCAB, seed=7, num_prompts=3)
    plain = run_all(spelling(make_scheduler(folders["llama"], torch.float64)), requests, 8)
    scheduler = spelling(make_scheduler(folders["llama"], torch.float64))
    tuner = ScriptedTuner(available_arms(DEFAULT_ARMS, ("ngram",)))
    scheduler.speculator = Speculator(scheduler.cache, tuner, NgramDrafter(NgramIndex()))
    assert different(plain, run_all(scheduler, requests, 8)) == []
    assert scheduler.speculator.stats.accepted_tokens > 20


def test_evictions_retractions_pauses_and_a_full_pool_change_nothing(folders: dict[str, Path]):
    requests = mixed_requests(80, VOCAB, seed=11)
    plain = run_all(spelling(make_scheduler(folders["qwen3"], torch.float64)), requests, 8)
    oracle = Oracle(answers_of(plain), 0.9, VOCAB, seed=1)
    scheduler = speculating(
        folders["qwen3"], torch.float64, oracle, max_total_tokens=256, max_prefill_tokens=16, page_size=8
    )

    def disturb(step: int) -> None:
        if step % 17 == 9:
            scheduler.retract_all()

    assert different(plain, run_all(scheduler, requests, 12, disturb)) == []
    assert scheduler.speculator is not None
    assert scheduler.speculator.stats.starved > 0  # drafts went without pages rather than push a sequence out
    assert scheduler.stats.retractions > 0
    assert scheduler.cache.num_available == scheduler.cache.num_pages


@pytest.mark.parametrize("keep_kv", [False, True])
def test_updated_weights_replayed_at_the_recorded_spans_give_the_same_tokens(keep_kv: bool, folders: dict[str, Path]):
    requests = mixed_requests(40, VOCAB, seed=13, resumable=True)
    config = DecoderConfig.from_folder(folders["qwen3"])
    weights = [load_decoder(folders[name], config, torch.float64) for name in ("qwen3", "updated")]
    guesses = run_all(make_scheduler(folders["qwen3"], torch.float64), requests, 8)
    scheduler = speculating(folders["qwen3"], torch.float64, Oracle(answers_of(guesses), 0.9, VOCAB, seed=2))

    def update(step: int) -> None:
        if step % 9 == 5:
            version = int(scheduler.version[1:]) + 1
            scheduler.swap_weights(weights[version % 2], f"v{version}", keep_kv)

    done = run_all(scheduler, requests, 8, update)
    assert sum(len(c.spans) > 1 for c in done) > 5
    if keep_kv:  # mixed contexts cannot be replayed; that the spans cover every token can be told
        assert all([s.end for s in c.spans][-1:] == [len(c.output)][: len(c.spans)] for c in done)
        return
    # Versions alternate between two models, so the two plain schedulers can replay any of them.
    plain = [make_scheduler(folders[name], torch.float64) for name in ("qwen3", "updated")]
    for c in done:
        assert replayed(plain, c) == list(c.output_ids), c.request.rid


def replayed(plain: list[Scheduler], c: Completion) -> list[int]:
    """The same output by plain decoding, version span after version span."""
    out: list[int] = []
    for span in c.spans:
        prompt = (*c.request.input_ids, *out)
        sampling = replace(c.request.sampling, max_new_tokens=span.end - span.start)
        part = GenerationRequest(c.request.rid, prompt, sampling, c.request.seed)
        out += run_all(plain[int(span.version[1:]) % 2], [part], 1)[0].output_ids
    return out


def test_in_single_precision_only_near_ties_may_differ(folders: dict[str, Path]):
    requests = mixed_requests(60, VOCAB, seed=17)
    plain = run_all(spelling(make_scheduler(folders["qwen2"], torch.float32)), requests, 8)
    oracle = Oracle(answers_of(plain), 0.9, VOCAB, seed=3)
    done = run_all(speculating(folders["qwen2"], torch.float32, oracle), requests, 16)
    ties = 0
    for c, d in zip(plain, done, strict=True):
        if c.output_ids == d.output_ids:
            errors = [abs(a - b) for a, b in zip(c.output_logprobs, d.output_logprobs, strict=True)]
            assert max(errors, default=0.0) < 1e-5
        else:
            ties += 1
    assert ties <= 1, f"{ties} of {len(requests)} differ; random logits have a near-tie in far fewer"


def test_samples_without_seeds_have_plain_decodings_distribution_and_a_planted_bias_is_found(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """A two-sample chi-squared test on the last of three tokens after one prompt, with fresh noise on both sides."""
    sampling = SamplingParams(max_new_tokens=3, temperature=0.12)
    rng = np.random.default_rng(23)

    def draws(scheduler: Scheduler, count: int) -> list[Completion]:
        seeds = rng.integers(1 << 60, size=count).tolist()
        requests = [GenerationRequest(str(i), (5, 6, 7), sampling, seed) for i, seed in enumerate(seeds)]
        waves = [requests[i : i + 120] for i in range(0, count, 120)]  # only steps without prefill speculate
        return [c for wave in waves for c in run_all(scheduler, wave, 120)]

    plain = draws(make_scheduler(folders["llama"]), 3000)
    likeliest = Counter(c.output_ids for c in plain).most_common(6)

    class Guess(Oracle):
        """Drafts the answers that are common anyway, whatever the noise of the request at hand says."""

        def _tree(self, seq: ServerSequence, arm: Arm) -> DraftTree:
            return DraftTree.chain(likeliest[seq.request.seed % 6][0][seq.num_output :])

    def speculated() -> list[Completion]:
        scheduler = speculating(folders["llama"], torch.float32, Guess({}, 1.0, VOCAB, 0))
        done = draws(scheduler, 3000)
        assert scheduler.speculator is not None
        assert scheduler.speculator.stats.accepted_tokens > 300
        return done

    def deviation(other: list[Completion]) -> float:
        """Chi-squared in standard deviations from what equal distributions give."""
        a, b = (Counter(c.output_ids[-1] for c in done) for done in (plain, other))
        common = [t for t in a if a[t] + b[t] >= 20]
        table = np.array([[n[t] for t in common] + [sum(n.values()) - sum(n[t] for t in common)] for n in (a, b)])
        expected = table.sum(0) / 2
        freedom = table.shape[1] - 1
        return float((((table - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)

    assert deviation(speculated()) < 4

    honest = speculation_module.draw_tokens

    def eager(ready: list[ServerSequence], logits_RV: torch.Tensor, ahead: list[int]) -> list[TokenLogprobs | None]:
        """Takes what was drafted one time in five, although another token was drawn."""
        out = honest(ready, logits_RV, ahead)
        for i, seq in enumerate(ready):
            drafted = likeliest[seq.request.seed % 6][0][seq.num_output + ahead[i]]
            if seq.request.seed % 5 == 0:
                out[i] = TokenLogprobs(drafted, 0.0)
        return out

    monkeypatch.setattr(speculation_module, "draw_tokens", eager)
    assert deviation(speculated()) > 8


def test_a_drafter_that_fails_is_left_out_and_the_answers_stay(folders: dict[str, Path]):
    requests = mixed_requests(20, VOCAB, seed=29)
    plain = run_all(spelling(make_scheduler(folders["qwen3"], torch.float64)), requests, 4)

    class Failing(Oracle):
        """Runs out of memory in its third step."""

        calls = 0

        def draft(self, seqs: list[ServerSequence], arm: Arm) -> list[DraftTree]:
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("out of memory")
            return super().draft(seqs, arm)

    scheduler = speculating(folders["qwen3"], torch.float64, Failing(answers_of(plain), 0.9, VOCAB, seed=4))
    assert different(plain, run_all(scheduler, requests, 4)) == []
    assert scheduler.speculator is not None
    assert scheduler.speculator.drafter is None
    assert "out of memory" in str(scheduler.speculator.problem)


def test_tokens_drawn_ahead_are_those_drawn_level_by_level(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(40, VOCAB, seed=31, resumable=True)
    answers = answers_of(run_all(spelling(make_scheduler(folders["qwen3"], torch.float64)), requests, 8))
    honest, calls = speculation_module.draw_tokens, Counter[bool]()

    def counting(ready: list[ServerSequence], logits_RV: torch.Tensor, ahead: list[int]) -> list[TokenLogprobs | None]:
        calls[any(ahead)] += 1
        return honest(ready, logits_RV, ahead)

    monkeypatch.setattr(speculation_module, "draw_tokens", counting)
    done, num_calls = [], []
    for logits in (speculation_module.AHEAD_LOGITS, -(10**6)):
        monkeypatch.setattr(speculation_module, "AHEAD_LOGITS", logits)
        calls.clear()
        oracle = Oracle(answers, 0.9, VOCAB, seed=5)
        done.append(run_all(speculating(folders["qwen3"], torch.float64, oracle), requests, 4))
        num_calls.append(calls.total())
        assert (calls[True] > 0) == (logits > 0)
    assert different(*done) == []
    assert num_calls[0] < 0.7 * num_calls[1]


def test_on_paper_a_few_sequences_at_a_time_are_guessed_for_and_told_of_once_their_tokens_are_there() -> None:
    class Notes(ScriptedTuner):
        def __init__(self) -> None:
            super().__init__((OFF,))
            self.guesses: list[tuple[int, int]] = []

        def on_paper(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
            self.guesses.append((num_drafted, num_accepted))

    drafter, notes = NgramDrafter(NgramIndex()), Notes()
    sampling = SamplingParams(max_new_tokens=30)
    seqs = [
        ServerSequence(GenerationRequest(str(i), (5, 6, 7, 8, 5, 6), sampling, i), 40, frozenset(), lambda *_: None)
        for i in range(6)
    ]

    def plain_steps() -> None:
        for _ in range(PAPER_STEPS):
            drafter.try_on_paper(seqs, notes, 0.3)

    plain_steps()  # after 5 6 comes 7, perhaps; two such steps are less likely than 0.3
    for token in (7, 9):
        for seq in seqs:
            seq.append(TokenLogprobs(token, 0.0), "v0")
        plain_steps()
    assert notes.guesses[:4] == [(1, 1)] * 4
    assert len(notes.guesses) in (6, 7, 8) and set(notes.guesses) <= {(1, 1), (1, 0), (0, 0)}
    for seq in seqs:
        drafter.finish(seq)
    assert drafter._names == {}

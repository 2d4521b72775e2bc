"""Speculation under everything at once: whatever happens, the tokens are those of plain decoding and nothing is left.

Fp64, seeded. The drafters are real and untrained, so most drafts are wrong, and the n-gram index is right often enough;
what a good drafter does to the walk is `test_speculation`'s business. Not covered: CUDA, half precision.
"""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_dta import metrics
from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import TunerSettings
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.engine import Engine, Update
from areal_dta.rollout.server.feature_recorder import FeatureRecorder
from areal_dta.rollout.server.ngram_drafter import NgramDrafter
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, LogprobWants, Progress, SamplingParams
from areal_dta.rollout.server.spec_control import DrafterUpdate, SpecControl, SpecSettings
from areal_dta.rollout.server.speculation import Speculator
from areal_dta.rollout.server.tool_constraint import ToolCallConstraint
from tests.unit.server_kit import make_scheduler
from tests.unit.spec_kit import ScriptedTuner, mixed_requests, run_all, same, spelling
from tests.unit.tiny_models import save_tiny_model

VOCAB = 320
SMALL_ARMS = (OFF, Arm("ngram", 3, 1, 3), Arm("ngram", 6, 1, 6), Arm("eagle", 2, 2, 4), Arm("eagle", 3, 1, 3))
# Every arm looks cheap and trials cost nothing: the tuner's own choices visit all of them.
EAGER = TunerSettings(epsilon=0.9, max_regret=0.999, burst_steps=2, min_steps=2, stale_steps=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_tiny_model(made, "qwen3")
    return made


def fresh_drafter(target: DecoderWeights, kind: str, draft_vocab: int = 0) -> EagleWeights:
    config = EagleConfig.for_target(target.config, kind, draft_vocab)
    ids = torch.arange(0, VOCAB, 2)[:draft_vocab] if draft_vocab else None
    return init_weights(config, target, torch.Generator().manual_seed(1), ids)


def controlled(scheduler: Scheduler, **settings: Any) -> SpecControl:
    """With the real tuner, but a clock of its own: equal seeds give equal choices."""
    control, now = SpecControl(scheduler, SpecSettings(arms=SMALL_ARMS, tuner=EAGER, **settings)), [0.0]
    rng = random.Random(0)

    def clock() -> float:
        now[0] += rng.random()
        return now[0]

    control._speculator._clock = clock
    control._speculator.tuner.costs = StepCosts({1: 1.0, 512: 1.0})
    return control


def token_text(token: int) -> str:
    return chr(token - 2 + 32) if 2 <= token < 97 else "\n" if token == 97 else ""


def tool_call() -> ToolCallConstraint:
    return ToolCallConstraint(("go", "get"), token_text, frozenset())


def odd_requests(count: int, seed: int) -> list[GenerationRequest]:
    """What `mixed_requests` leaves out: forced calls, biases, scored prompts, extra log-probs, page-sized prompts."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, VOCAB, 64).tolist()
    requests = []
    for i, request in enumerate(mixed_requests(count, VOCAB, seed)):
        sampling, ids, kind = request.sampling, request.input_ids, i % 8
        if kind == 0:  # whole pages found in the cache, and the pending token
            ids = tuple(trunk[: 8 * int(rng.integers(0, 4)) + 1])
        if kind == 1:
            sampling = replace(sampling, logit_bias=((5, 4.0), (7, -3.0)))
        if kind == 2:
            sampling = replace(sampling, max_new_tokens=int(rng.choice([0, 1, 2])))
        request = replace(request, input_ids=ids, sampling=sampling)
        if kind in (2, 3, 4):
            start = int(rng.integers(0, len(ids)))
            request = replace(request, logprob_start=start, wants=LogprobWants(raw=True, sampling=True, top=3))
        if kind == 5:
            request = replace(request, constraint=tool_call)
        requests.append(request)
    return requests


def close(a: Completion, b: Completion) -> bool:
    """`same`, and every other log-prob that was asked for."""

    def numbers(c: Completion) -> list[float]:
        tops = [x for t in c.output for x in (t.raw, t.sampling, *(p for p, _ in t.top))]
        scored = [p for p, _ in c.input_logprobs]
        scored += [p for top in c.input_top for p, _ in top or ()]
        return [np.nan if x is None else x for x in (*tops, *scored)]

    return same(a, b) and np.allclose(numbers(a), numbers(b), rtol=0, atol=1e-6, equal_nan=True)


def assert_nothing_is_left(scheduler: Scheduler) -> None:
    assert scheduler.cache.num_available == scheduler.cache.num_pages
    speculator = scheduler.speculator
    assert speculator is not None
    if isinstance(speculator.drafter, EagleRuntime):
        assert speculator.drafter._tracks == {}
    if isinstance(speculator.recorder, FeatureRecorder):
        assert speculator.recorder._records == {}
    ngram = speculator._ngram
    assert isinstance(ngram, NgramDrafter)
    assert (ngram._names, ngram._known, ngram._index._recent) == ({}, {}, {})


@pytest.mark.parametrize(
    ("kind", "draft_vocab", "page_size", "tokens", "at_once"),
    [("eagle", 64, 8, 4096, 1), ("hass", 0, 8, 256, 7), ("eagle3", 64, 16, 320, 12), ("eagle", 0, 1, 400, 5)],
)
def test_whatever_is_asked_and_whatever_happens_the_answers_are_those_of_plain_decoding(
    kind: str, draft_vocab: int, page_size: int, tokens: int, at_once: int, folder: Path, tmp_path: Path
) -> None:
    requests = odd_requests(48, seed=at_once)
    plain = run_all(spelling(make_scheduler(folder, torch.float64)), requests, 8)
    scheduler = spelling(
        make_scheduler(folder, torch.float64, max_total_tokens=tokens, max_prefill_tokens=24, page_size=page_size)
    )
    # What is recorded for one kind's training ties a server to it.
    records = at_once > 5
    control = controlled(scheduler, buffer=tmp_path / "buffer" if records else None, eagle3=kind == "eagle3")
    alike = ("eagle3",) if kind == "eagle3" else ("eagle", "hass")
    target, rng = scheduler.runner.weights, random.Random(at_once)
    control.install(DrafterUpdate(fresh_drafter(target, kind, draft_vocab), "d0"))

    def disturb(step: int) -> None:
        event = rng.random()
        if event < 0.03:
            scheduler.retract_all()
        elif event < 0.045:  # the same weights, so that the answers stay the same whatever happens to the KV
            scheduler.swap_weights(target, f"v{step}", keep_kv=rng.random() < 0.5)
        elif event < 0.06:
            other = rng.choice(alike if records else ("eagle", "eagle3", "hass"))
            control.install(DrafterUpdate(fresh_drafter(target, other), f"d{step}"))
        elif event < 0.07:
            scheduler.retract_all()
            scheduler.release_memory()
            control.install(DrafterUpdate(fresh_drafter(target, kind), f"d{step}"))  # while there is no KV memory
            scheduler.resume_memory()

    done = run_all(scheduler, requests, at_once, disturb)
    control.close()
    assert [p.request.rid for p, d in zip(plain, done, strict=True) if not close(p, d)] == []
    steps = control.snapshot()["steps_by_arm"]
    assert {name.split("-")[0] for name in steps} == {"off", "ngram", "eagle"}
    assert sum(c.num_accepted for c in done) > 0
    assert_nothing_is_left(scheduler)


def test_streams_get_every_token_once_through_pauses_updates_and_new_drafters(folder: Path) -> None:
    requests = [replace(r, constraint=None) for r in odd_requests(48, seed=9) if r.sampling.max_new_tokens]
    plain = run_all(spelling(make_scheduler(folder, torch.float64)), requests, 8)
    target = make_scheduler(folder, torch.float64).runner.weights
    drafters = [DrafterUpdate(fresh_drafter(target, kind), kind) for kind in ("eagle", "eagle3")]
    settings = SpecSettings(arms=SMALL_ARMS, tuner=EAGER)
    limits = SchedulerLimits(max_total_tokens=512, page_size=8, max_batch=6)
    engine = Engine(target, "v0", limits, metrics.init("test", None), None, 0.02, speculation=settings)
    spelling(engine._scheduler)
    got: dict[str, list[Progress]] = {r.rid: [] for r in requests}
    control = engine.speculation
    assert control is not None

    async def serve() -> list[Completion]:
        tickets = [engine.submit(r, got[r.rid].append) for r in requests]
        everything = asyncio.gather(*(t.future for t in tickets))
        rng = random.Random(1)
        for turn in range(12):
            await asyncio.wrap_future(engine.pause(rng.choice(("in_place", "retract"))))
            await asyncio.wrap_future(engine.call(functools.partial(control.install, drafters[turn % 2])))
            how = rng.choice(("keep", "recompute"))
            await asyncio.wrap_future(engine.apply_update(Update(target, f"v{turn}"), how))
            await asyncio.wrap_future(engine.resume())
            control.snapshot()
            steps = engine.stats.steps
            while engine.stats.steps < steps + 6 and not everything.done():
                await asyncio.sleep(0.001)
        return await asyncio.wait_for(everything, 30)

    engine.start()
    try:
        done = asyncio.run(serve())
    finally:
        engine.stop(10)
    assert engine.error is None
    for p, d in zip(plain, done, strict=True):
        assert same(p, d), p.request.rid
        progress = got[p.request.rid]
        assert tuple(t for piece in progress for t in piece.new) == d.output
        assert [piece.done for piece in progress] == [None] * (len(progress) - 1) + [d]
    assert_nothing_is_left(engine._scheduler)


def test_aborts_at_any_moment_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    requests = odd_requests(80, seed=5)
    whole = {c.request.rid: c for c in run_all(spelling(make_scheduler(folder, torch.float64)), requests, 8)}
    scheduler = spelling(make_scheduler(folder, torch.float64, max_total_tokens=320, page_size=8))
    control = controlled(scheduler, buffer=tmp_path / "buffer")
    control.install(DrafterUpdate(fresh_drafter(scheduler.runner.weights, "eagle"), "d0"))
    rng = random.Random(0)

    def disturb(step: int) -> None:
        under_way = [*scheduler.running, *scheduler.waiting]
        if under_way and rng.random() < 0.2:
            scheduler.abort([rng.choice(under_way)], "gone", "client_gone")

    done = run_all(scheduler, requests, 10, disturb)
    control.close()
    aborted = [c for c in done if c.finish.kind == "abort" and c.finish.message == "gone"]
    assert 5 < len(aborted) < 70
    for c in done:
        assert c.output_ids == whole[c.request.rid].output_ids[: len(c.output)], c.request.rid
    assert_nothing_is_left(scheduler)


@pytest.mark.parametrize("length", [1, 17])
def test_prompts_of_which_only_the_last_token_is_to_be_computed_are_drafted_for_at_once(
    length: int, folder: Path
) -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    requests = [GenerationRequest(str(i), tuple(range(2, 2 + length)), sampling, i) for i in range(4)]
    plain = run_all(make_scheduler(folder, torch.float64), requests, 1)
    scheduler = make_scheduler(folder, torch.float64)
    weights = fresh_drafter(scheduler.runner.weights, "eagle")
    scheduler.rebuild(((weights.config.num_kv_heads, weights.config.head_dim),), ())
    tuner: Any = ScriptedTuner((Arm("eagle", 3, 2, 6),))
    scheduler.speculator = Speculator(scheduler.cache, tuner, None, EagleRuntime(scheduler.runner, weights, "d0"))
    assert all(same(p, d) for p, d in zip(plain, run_all(scheduler, requests, 1), strict=True))


def test_a_drafter_that_diverged_changes_no_token_and_spoils_no_later_one(folder: Path) -> None:
    requests = mixed_requests(12, VOCAB, seed=4)
    plain = run_all(make_scheduler(folder), requests, 4)
    scheduler = make_scheduler(folder, max_total_tokens=320)
    good = fresh_drafter(scheduler.runner.weights, "eagle")
    scheduler.rebuild(((good.config.num_kv_heads, good.config.head_dim),), ())
    runtime = EagleRuntime(scheduler.runner, replace(good, fc=good.fc * 1e30), "bad")
    tuner: Any = ScriptedTuner((Arm("eagle", 3, 2, 7),))
    speculator = scheduler.speculator = Speculator(scheduler.cache, tuner, None, runtime)
    drafted = []
    for _ in range(2):
        done = run_all(scheduler, requests, 4)
        assert [c.output_ids for c in done] == [c.output_ids for c in plain]
        drafted.append(speculator.stats.drafted_tokens)
        runtime.swap(good, "good")
    assert drafted[1] - drafted[0] > 800  # 500 where NaN keys stay behind


def test_drafts_cost_no_other_sequence_its_pages(folder: Path) -> None:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [tuple(rng.integers(2, VOCAB, 20).tolist()) for _ in range(16)]
    requests = [GenerationRequest(str(i), prompt, sampling, i) for i, prompt in enumerate(prompts)]
    plain = make_scheduler(folder, max_total_tokens=256, page_size=16)
    run_all(plain, requests, 16)
    scheduler = make_scheduler(folder, max_total_tokens=256, page_size=16)
    weights = fresh_drafter(scheduler.runner.weights, "eagle")
    scheduler.rebuild(((weights.config.num_kv_heads, weights.config.head_dim),), ())
    tuner: Any = ScriptedTuner((Arm("eagle", 7, 4, 31), OFF, OFF, OFF))
    scheduler.speculator = Speculator(scheduler.cache, tuner, None, EagleRuntime(scheduler.runner, weights, "d0"))
    run_all(scheduler, requests, 16)
    assert scheduler.speculator.stats.drafted_tokens > 0
    assert scheduler.stats.retractions <= plain.stats.retractions
    assert scheduler.stats.steps <= plain.stats.steps


def test_features_kept_for_drafting_do_not_keep_other_sequences_features_alive(folder: Path) -> None:
    scheduler = make_scheduler(folder)
    control = SpecControl(scheduler, SpecSettings(arms=(OFF,)))
    control.install(DrafterUpdate(fresh_drafter(scheduler.runner.weights, "eagle"), "d0"))
    runtime = scheduler.speculator.drafter if scheduler.speculator else None
    assert isinstance(runtime, EagleRuntime)
    long = GenerationRequest("0", (5, 6), SamplingParams(max_new_tokens=120, ignore_eos=True), 0)
    short = [GenerationRequest(str(i), (i,) * 500, SamplingParams(max_new_tokens=2), i) for i in range(2, 30)]
    most = 0.0

    def measure(step: int) -> None:
        nonlocal most
        rows = [row for track in runtime._tracks.values() for row in track.rows]
        alive = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in rows}
        most = max(most, sum(alive.values()) / max(sum(r.nbytes for r in rows), 1))

    run_all(scheduler, [long, *short], 3, measure)
    assert most < 5


def test_a_tiny_pool_serves_and_prompts_that_are_only_scored_teach_the_tuner_nothing(folder: Path) -> None:
    scheduler = make_scheduler(folder, max_total_tokens=32)  # less than the largest step of the calibration
    control = SpecControl(scheduler, SpecSettings())
    requests = [GenerationRequest(str(i), (5,), SamplingParams(max_new_tokens=0), i) for i in range(40)]
    assert [c.output for c in run_all(scheduler, requests, 1)] == [()] * 40
    assert control.snapshot()["tuner"]["steps"] == 0

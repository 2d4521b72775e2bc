"""A trained drafter on the server: its accept length holds along a long response and through updates of the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.packing import DraftSample, pack
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import GenerationRequest, SamplingParams
from areal_dta.rollout.server.speculation import Speculator
from tests.unit.eagle_kit import run_target, taught_target
from tests.unit.spec_kit import ScriptedTuner, run_all

ARM = Arm("eagle", 4, 2, 7)
RESPONSE_TOKENS = 2000


def request(index: int, num_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.8, ignore_eos=True)
    return GenerationRequest(str(index), (5 + index, 9, 11), sampling, index)


def answers(scheduler: Scheduler, count: int, num_tokens: int) -> Iterator[list[int]]:
    for done in run_all(scheduler, [request(i, num_tokens) for i in range(count)], count):
        yield [*done.request.input_ids, *done.output_ids]


@pytest.fixture(scope="module")
def target() -> DecoderWeights:
    taught = taught_target()
    return dataclasses.replace(taught, config=dataclasses.replace(taught.config, max_positions=4096))


@pytest.fixture(scope="module")
def drafter(target: DecoderWeights) -> EagleWeights:
    """Trained on whole long answers of the target: in short windows it would not learn to pick from a long context."""
    plain = Scheduler(target, "v0", SchedulerLimits(16, 16384))
    samples = []
    for ids in answers(plain, 6, RESPONSE_TOKENS):
        features_TF = run_target(target, torch.tensor([ids]))[1]
        samples.append(DraftSample(torch.tensor(ids), features_TF, 1, len(ids)))
    config = EagleConfig.for_target(target.config, "eagle")
    trainer = DrafterTrainer(init_weights(config, target, torch.Generator().manual_seed(0)), target, learning_rate=3e-3)
    for step in range(60):
        trainer.step(pack([samples[step % len(samples)]], 2048))
    return trainer.weights()


def speculate(target: DecoderWeights, drafter: EagleWeights) -> tuple[Scheduler, ScriptedTuner]:
    scheduler = Scheduler(target, "v0", SchedulerLimits(4, 8192))
    scheduler.rebuild(((drafter.config.num_kv_heads, drafter.config.head_dim),), drafter.config.hidden_layers)
    tuner = ScriptedTuner([ARM])
    runtime = EagleRuntime(scheduler.runner, drafter, "d0")
    scheduler.speculator = Speculator(scheduler.cache, tuner, None, runtime)
    return scheduler, tuner


def test_accept_length_does_not_decay_along_a_long_response(target: DecoderWeights, drafter: EagleWeights):
    scheduler, tuner = speculate(target, drafter)
    answer = next(answers(scheduler, 1, RESPONSE_TOKENS))
    assert len(answer) == 3 + RESPONSE_TOKENS
    lengths = [tokens for arm, _, tokens in tuner.records if arm != OFF]
    quarter = len(lengths) // 4
    first, last = sum(lengths[:quarter]) / quarter, sum(lengths[-quarter:]) / quarter
    assert first > 1.7
    assert last > 0.9 * first


def test_accept_length_holds_through_five_updates_of_the_policy(target: DecoderWeights, drafter: EagleWeights):
    scheduler, tuner = speculate(target, drafter)
    generator = torch.Generator().manual_seed(3)
    marks: list[int] = []

    def update(step: int) -> None:
        if step % 60 == 59 and len(marks) < 5:
            head_VD = target.head_VD * (1 + 0.01 * torch.randn(target.head_VD.shape, generator=generator))
            scheduler.swap_weights(dataclasses.replace(target, head_VD=head_VD), f"v{len(marks) + 1}")
            marks.append(len(tuner.records))

    done = run_all(scheduler, [request(7, 1000)], 1, update)[0]
    assert [s.version for s in done.spans] == [f"v{i}" for i in range(6)]
    lengths = [tokens for _, _, tokens in tuner.records]
    before = sum(lengths[: marks[0]]) / marks[0]
    after = sum(lengths[marks[-1] :]) / (len(lengths) - marks[-1])
    assert before > 1.7
    assert after > 0.85 * before

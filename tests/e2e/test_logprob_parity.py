"""Log-probs that a server reports are those that the trainer computes from the same weights and tokens, within 1e-4.

A tau2 episode runs through AReaL's workflow and client against a server process whose weights change on the way; the
trainer is AReaL's actor on the tree engine and on the dense engine. Compared are all generated tokens, each with the
weights that sampled it: a server that computes its context again after an update has every token's whole context from
one version. Requests that keep their context over an update (`running: keep`) are compared up to the update only.

Not covered: bf16, several trainer ranks, a policy that calls tools (the episodes' agent is untrained and talks).
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from safetensors.torch import load_file

from areal_dta.bridge import make_actor
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.rollout.server.sequence import Completion, SamplingParams
from areal_dta.rollout.worker_engine import RouterEngine
from areal_dta.weights import write_version
from experiments.tau2.workflow import Tau2Workflow
from tests.unit.server_kit import call, generate, load, make_scheduler, run_requests, server_process
from tests.unit.train_kit import build_engine, local_settings

BOUND = 1e-4
TEMPERATURE = 0.8  # of the actor too
EPISODE_TIMEOUT_S = 60.0
ENDPOINT_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def versions(untrained_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of one policy, written as the trainer publishes them; larger weights than an untrained model's,
    so that log-probs differ clearly."""
    old = {name: t * 4 if t.ndim > 1 else t for name, t in load_file(untrained_policy / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    folders = []
    for number in range(3):
        step = {n: t + 0.02 * number * torch.randn(t.shape, generator=generator) for n, t in old.items()}
        folder = tmp_path_factory.mktemp("weights") / f"v{number}"
        arrays = {name: tensor.numpy() for name, tensor in step.items()}
        write_version(folder, arrays, f"0:{number}", template=untrained_policy)
        folders.append(folder)
    return folders


class Trainer:
    """AReaL's actor on one version's weights."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.engine = build_engine(folder, local_settings(mode=mode), temperature=TEMPERATURE, optimizer=None)
        self._actor = make_actor(self.engine.config, self.engine)

    def logprobs(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of every token of padded rows [N, L]; 0 for the first."""
        batch = {**rows, "input_ids": rows["input_ids"].long()}
        shifted_NL = self._actor.compute_logp([batch])[0]  # position t speaks of token t + 1
        return shifted_NL.roll(1, -1)

    def after(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Of ``output`` as the continuation of ``prompt``."""
        ids = torch.tensor([[*prompt, *output]])
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        rows["loss_mask"] = torch.ones_like(ids, dtype=torch.int32)
        return self.logprobs(rows)[0, len(prompt) :]


@pytest.fixture(scope="module")
def trainers(versions: list[Path]) -> Iterator[list[Trainer]]:
    """One per version on the tree engine, and a dense one of version 0 at the end."""
    made = [Trainer(folder, "dta") for folder in versions] + [Trainer(versions[0], "disabled")]
    yield made
    for trainer in reversed(made):
        trainer.engine.destroy()


@pytest.fixture(scope="module")
def url(versions: list[Path]) -> Iterator[str]:
    with server_process(versions[0], "--max-total-tokens", "16384") as (_, url):
        yield url


@contextlib.contextmanager
def client(url: str) -> Iterator[RouterEngine]:
    config = InferenceEngineConfig(backend="sglang:d1", request_timeout=ENDPOINT_TIMEOUT_S, request_retries=1)
    engine = RouterEngine(config, patience_s=5.0)
    engine.initialize(engine_id="0", addr=url.removeprefix("http://"), train_data_parallel_size=1)
    try:
        yield engine
    finally:
        engine.destroy()


def update(url: str, folder: Path) -> None:
    status, answer = call(url, "/update_weights_from_disk", {"model_path": str(folder)})
    assert (status, answer["success"]) == (200, True), answer


class Updating:
    """AReaL's engine for one episode; before turn n the server gets ``before_turn[n]``."""

    def __init__(self, engine: RouterEngine, url: str, before_turn: dict[int, Path]) -> None:
        self._engine, self._url, self._before_turn = engine, url, before_turn
        self._num_turns = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        folder = self._before_turn.get(self._num_turns)
        if folder is not None:
            await asyncio.to_thread(update, self._url, folder)
        self._num_turns += 1
        return await self._engine.agenerate(req)


def play(url: str, policy: Path, task_id: str, before_turn: dict[int, Path]) -> dict[str, torch.Tensor]:
    """One tau2 episode: AReaL's padded rows, one per turn."""
    gconfig = GenerationHyperparameters(max_new_tokens=40, max_tokens=4096, temperature=TEMPERATURE)
    workflow = Tau2Workflow(gconfig, str(policy), {"domain": "mock", "max_steps": 40}, user_patience=8)

    async def episode() -> Any:
        with client(url) as engine:
            data = {"domain": "mock", "task_id": task_id, "_seed": 11}
            played = workflow.arun_episode(Updating(engine, url, before_turn), data)
            return await asyncio.wait_for(played, EPISODE_TIMEOUT_S)

    return dict(asyncio.run(episode()))


def worst_by_version(rows: dict[str, torch.Tensor], trainers: list[Trainer]) -> dict[int, float]:
    """Largest difference of the generated tokens' log-probs, each token with the weights of its version."""
    worst = {}
    for version in sorted(set(rows["versions"].flatten().tolist()) - {-1}):
        chosen_NL = rows["versions"] == version
        assert not (chosen_NL & (rows["loss_mask"] == 0)).any()
        difference_NL = (trainers[version].logprobs(rows) - rows["logprobs"]).abs()
        worst[version] = float(difference_NL[chosen_NL].max())
    return worst


def test_every_token_of_a_tau2_episode_has_the_trainers_logprob(
    url: str, versions: list[Path], trainers: list[Trainer]
) -> None:
    update(url, versions[0])
    before = load(url)
    rows = play(url, versions[0], "update_task_1", {})
    assert len(rows["rewards"]) >= 4
    assert int(rows["loss_mask"].sum()) > 100
    assert float(rows["logprobs"].min()) < -3, "the policy must not be uniform"
    assert worst_by_version(rows, trainers)[0] <= BOUND
    assert worst_by_version(rows, [trainers[-1]])[0] <= BOUND
    after = load(url)
    hit_tokens, tokens = (after[k] - before[k] for k in ("prompt_cached_tokens", "prompt_tokens"))
    assert hit_tokens / tokens > 0.5, "later turns must have read what earlier ones cached"


def test_after_an_update_between_turns_each_turn_has_the_logprobs_of_its_weights(
    url: str, versions: list[Path], trainers: list[Trainer]
) -> None:
    update(url, versions[0])
    rows = play(url, versions[0], "create_task_1", {2: versions[1], 4: versions[2]})
    generated = rows["loss_mask"].bool()
    by_turn = [set(rows["versions"][n][generated[n]].tolist()) for n in range(len(generated))]
    assert by_turn[:6] == [{0}, {0}, {1}, {1}, {2}, {2}]
    worst = worst_by_version(rows, trainers)
    assert max(worst.values()) <= BOUND, worst
    others = worst_by_version(rows, [trainers[1], trainers[2], trainers[0]])
    assert min(others.values()) > 100 * BOUND, "the versions must differ, or this shows nothing"


def test_the_first_request_after_an_update_finds_no_kv_and_has_the_new_weights_logprobs(
    url: str, versions: list[Path], trainers: list[Trainer]
) -> None:
    update(url, versions[0])
    prompt = [7 + i * i % 900 for i in range(200)]
    for number in (0, 1, 2, 0):
        update(url, versions[number])
        cached = []
        for _ in range(2):
            answer = generate(url, prompt, max_new_tokens=16, temperature=TEMPERATURE, sampling_seed=3)
            output = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
            got = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
            assert (trainers[number].after(prompt, output) - got).abs().max() <= BOUND
            assert answer["meta_info"]["weight_version"] == f"0:{number}"
            cached.append(answer["meta_info"]["cached_tokens"])
        assert cached[0] == 0
        assert cached[1] >= 192 - 16


def in_process(versions: list[Path], swap_at: int, keep: bool, forgets: bool = True) -> tuple[list[Completion], Any]:
    """Four requests during whose decoding version 1 comes, then the first prompt again; (completions, scheduler)."""
    scheduler = make_scheduler(versions[0])
    new = load_decoder(versions[1], DecoderConfig.from_folder(versions[1]), torch.float32)
    if not forgets:
        scheduler.cache.reset_tree = scheduler.cache.forget = lambda: None  # type: ignore[method-assign]

    def swap(step: int) -> None:
        if step == swap_at:
            scheduler.swap_weights(new, "v1", keep)

    prompts = [[7 + (i + 3) * k % 900 for k in range(60 + 20 * i)] for i in range(4)]
    sampling = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE, ignore_eos=True)
    completions = run_requests(scheduler, prompts, sampling, between_steps=swap)
    return [*completions, *run_requests(scheduler, [prompts[0]], sampling)], scheduler


def errors(completion: Completion, trainer: Trainer) -> torch.Tensor:
    output = list(completion.output_ids)
    expected = trainer.after(list(completion.request.input_ids), output)
    return (expected - torch.tensor(completion.output_logprobs)).abs()


def test_an_update_in_the_middle_of_a_turn_splits_it_into_spans_that_the_trainer_confirms(
    versions: list[Path], trainers: list[Trainer]
) -> None:
    completions, _ = in_process(versions, swap_at=9, keep=False)
    for completion in completions[:4]:
        old, new = completion.spans
        assert (old.version, new.version, old.start, new.end) == ("v0", "v1", 0, 24)
        assert 0 < old.end == new.start
        assert errors(completion, trainers[0])[: old.end].max() <= BOUND
        assert errors(completion, trainers[1])[new.start :].max() <= BOUND
    again = completions[4]
    assert {s.version for s in again.spans} == {"v1"}
    assert errors(again, trainers[1]).max() <= BOUND


def test_a_kept_context_is_the_old_versions_and_nobody_else_reads_it(
    versions: list[Path], trainers: list[Trainer]
) -> None:
    completions, _ = in_process(versions, swap_at=9, keep=True)
    for completion in completions[:4]:
        old, new = completion.spans
        assert errors(completion, trainers[0])[: old.end].max() <= BOUND
        assert errors(completion, trainers[1])[new.start :].max() > 10 * BOUND, "a mixed context is neither version's"
    again = completions[4]
    assert again.cached_tokens == 0
    assert errors(again, trainers[1]).max() <= BOUND


def test_kv_of_the_old_version_would_show_in_the_logprobs(versions: list[Path], trainers: list[Trainer]) -> None:
    """What the tests above would see if an update left the cache alone."""
    again = in_process(versions, swap_at=9, keep=False, forgets=False)[0][4]
    assert again.cached_tokens > 0
    assert errors(again, trainers[1]).max() > 10 * BOUND

"""tau2's workflow against an AReaL engine: rows, masks, versions, rewards, seeds; the sampler and the prepared run.

The engine here replays gold turns; servers and the executor are covered by the worker's tests. Not covered: real
models and templates.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import GenerationHyperparameters
from safetensors.torch import load_file, save_file

from areal_dta.config import ConfigError, load_config
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import sequence_logits
from experiments.tau2.chat import ChatRenderer
from experiments.tau2.dataset import write_dataset
from experiments.tau2.domains import task_ids
from experiments.tau2.episode import EpisodeLimits
from experiments.tau2.gold import gold_replies
from experiments.tau2.prepare import prepare, warm_start_settings
from experiments.tau2.sampler import BatchSampler, common_prefix_len, mean_reward
from experiments.tau2.warm_start import _Batch, _distractors, _play
from experiments.tau2.workflow import Tau2Workflow, WorkflowSettings, turn_seed, turns_to_rows

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart" / "quickstart.yaml"


class GoldEngine:
    """Answers with the gold turns of one task; token i of turn t has log-prob -0.5 and version t."""

    def __init__(self, renderer: ChatRenderer, domain: str, task_id: str) -> None:
        self.turns = [renderer.write_turn(message) for message in gold_replies(domain, task_id)]
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        turn = len(self.requests)
        self.requests.append(req)
        ids = self.turns[min(turn, len(self.turns) - 1)]
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=list(ids),
            output_logprobs=[-0.5] * len(ids),
            output_versions=[turn] * len(ids),
        )


def run(
    folder: Path, domain: str, task_id: str, econfig: dict[str, Any] | None = None, **data: Any
) -> tuple[Any, GoldEngine]:
    gconfig = GenerationHyperparameters(n_samples=8, max_new_tokens=64, max_tokens=32768, temperature=0.8)
    workflow = Tau2Workflow(gconfig, str(folder), {"domain": domain, **(econfig or {})})
    engine = GoldEngine(ChatRenderer.load(folder), domain, task_id)
    result = asyncio.run(workflow.arun_episode(engine, {"domain": domain, "task_id": task_id, **data}))  # type: ignore[arg-type]
    return result, engine


@pytest.mark.parametrize("task_id", task_ids("mock"))
def test_gold_turns_through_the_workflow_earn_tau2s_full_reward(untrained_policy: Path, task_id: str) -> None:
    result, _ = run(untrained_policy, "mock", task_id, _seed=3)
    assert result["rewards"].tolist() == [1.0, 1.0]
    assert result["episode_reward"].tolist() == [1.0, 1.0]


def test_a_long_retail_episode_runs_through_the_workflow(untrained_policy: Path) -> None:
    result, engine = run(untrained_policy, "retail", "3", {"max_steps": 100})
    assert result["episode_reward"][0] == 1.0
    assert len(result["rewards"]) == len(engine.requests) >= 5


def test_each_turn_is_a_row_that_extends_the_turns_before_it(untrained_policy: Path) -> None:
    result, engine = run(untrained_policy, "mock", "update_task_1", {"turn_discount": 0.5})
    ids, mask, loss = result["input_ids"], result["attention_mask"], result["loss_mask"]
    assert ids.shape == mask.shape == loss.shape == result["logprobs"].shape == result["versions"].shape
    assert result["rewards"].tolist() == [0.5, 1.0]
    lengths = mask.sum(1).tolist()
    for n, request in enumerate(engine.requests):
        assert ids[n, : lengths[n]].tolist() == [*request.input_ids, *engine.turns[n]]
        assert loss[n].nonzero()[:, 0].tolist() == list(range(len(request.input_ids), lengths[n]))
        generated = loss[n].bool()
        assert set(result["versions"][n][generated].tolist()) == {n}
        assert set(result["versions"][n][~generated].tolist()) == {-1}
        assert result["logprobs"][n].tolist() == (generated * -0.5).tolist()
    assert ids[1, : lengths[0]].tolist() == ids[0, : lengths[0]].tolist()


def test_requests_carry_one_sample_the_end_token_and_a_seed_fixed_by_the_episode(untrained_policy: Path) -> None:
    eos = ChatRenderer.load(untrained_policy).eos_id
    _, engine = run(untrained_policy, "mock", "create_task_1", _seed=7)
    assert [r.metadata["sampling_seed"] for r in engine.requests] == [turn_seed(7, 0), turn_seed(7, 1)]
    assert {(r.gconfig.n_samples, r.gconfig.greedy, r.gconfig.temperature) for r in engine.requests} == {
        (1, False, 0.8)
    }
    assert all(eos in r.gconfig.stop_token_ids for r in engine.requests)
    _, engine = run(untrained_policy, "mock", "create_task_1", _greedy=True)
    assert all(r.gconfig.greedy for r in engine.requests)


def test_a_malformed_call_costs_the_format_penalty_but_not_the_episode_reward(untrained_policy: Path) -> None:
    renderer = ChatRenderer.load(untrained_policy)
    workflow = Tau2Workflow(GenerationHyperparameters(), str(untrained_policy), {"invalid_format_penalty": 0.1})
    engine = GoldEngine(renderer, "mock", "create_task_1")
    engine.turns.insert(0, renderer.tokenizer.encode("<tool_call>{oops</tool_call><|im_end|>"))
    result = asyncio.run(workflow.arun_episode(engine, {"task_id": "create_task_1"}))  # type: ignore[arg-type]
    assert result["rewards"].tolist() == pytest.approx([0.9] * 3)
    assert result["episode_reward"].tolist() == [1.0] * 3


def test_errors_reach_the_caller(untrained_policy: Path) -> None:
    class Broken:
        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            raise RuntimeError("server gone")

    workflow = Tau2Workflow(GenerationHyperparameters(), str(untrained_policy))
    with pytest.raises(RuntimeError, match="server gone"):
        asyncio.run(workflow.arun_episode(Broken(), {"task_id": "create_task_1"}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no task 'x'"):
        asyncio.run(workflow.arun_episode(Broken(), {"task_id": "x"}))  # type: ignore[arg-type]
    small = Tau2Workflow(GenerationHyperparameters(max_tokens=50), str(untrained_policy))
    with pytest.raises(ValueError, match=r"raise gconfig\.max_tokens"):
        asyncio.run(small.arun_episode(Broken(), {"task_id": "create_task_1"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("econfig", "complaint"),
    [
        ({"domain": "bank"}, "econfig.domain='bank' is unknown"),
        ({"user_llm": "gpt"}, "econfig.user_llm='gpt' is not available"),
        ({"turn_discount": 0.0}, "econfig.turn_discount=0.0"),
        ({"max_steps": 0}, "econfig.max_steps=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(econfig: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        WorkflowSettings.of(econfig)


def test_an_episode_without_turns_has_no_rows() -> None:
    with pytest.raises(ValueError, match="no turn"):
        turns_to_rows([], 1.0)


def test_the_sampler_agrees_with_plain_decoding_and_with_itself(untrained_policy: Path, tmp_path: Path) -> None:
    folder = sharpened(untrained_policy, tmp_path)
    weights = load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)
    prompts = [[7, 8, 9, 10], [7, 8, 9, 11, 12, 13, 14], [7, 8, 9, 10], [7, 8, 9]]
    greedy = BatchSampler(folder, eos_id=1, temperature=0.0, max_new_tokens=6, seed=0).generate(prompts)
    for prompt, sample in zip(prompts, greedy):
        logits = sequence_logits(weights, [*prompt, *sample.ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(sample.ids)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
    first, second = (BatchSampler(folder, 1, 0.8, 12, seed=5).generate(prompts) for _ in range(2))
    assert [s.ids for s in first] == [s.ids for s in second]
    warm = sequence_logits(weights, [*prompts[1], *first[1].ids])[len(prompts[1]) - 1 : -1] / 0.8
    expected = warm.log_softmax(-1).gather(1, torch.tensor(first[1].ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(first[1].logprobs), expected, atol=1e-4, rtol=0)


def sharpened(folder: Path, tmp_path: Path) -> Path:
    """The untrained policy with larger weights, so that its predictions differ clearly."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v * 4 if v.ndim > 1 else v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_an_untrained_policy_earns_no_more_than_the_floor(untrained_policy: Path) -> None:
    renderer = ChatRenderer.load(untrained_policy)
    sampler = BatchSampler(untrained_policy, renderer.eos_id, 0.8, 16, seed=0)
    tasks = [("mock", task_id) for task_id in task_ids("mock")]
    assert mean_reward(sampler, renderer, tasks, EpisodeLimits(max_steps=12)) <= 1 / 9 + 1e-9


def test_the_common_prefix_is_that_of_all_rows() -> None:
    assert common_prefix_len([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2
    assert common_prefix_len([[1], [2]]) == 0
    assert common_prefix_len([[1, 2]]) == 2


def test_the_data_set_lists_tau2s_own_splits(tmp_path: Path) -> None:
    assert write_dataset(tmp_path / "mock", "mock") == (9, 9)
    assert write_dataset(tmp_path / "retail", "retail") == (74, 40)
    assert write_dataset(tmp_path / "airline", "airline") == (30, 20)
    first = json.loads((tmp_path / "retail" / "train.jsonl").read_text().splitlines()[0])
    assert set(first) == {"domain", "task_id", "split"}


def test_prepare_links_a_local_model_and_refuses_a_missing_one(untrained_policy: Path, tmp_path: Path) -> None:
    prepare(load_config(QUICKSTART, [f"actor.path={untrained_policy}"]), tmp_path)
    assert (tmp_path / "model" / "model.safetensors").resolve() == (untrained_policy / "model.safetensors").resolve()
    assert len((tmp_path / "dataset" / "train.jsonl").read_text().splitlines()) == 9
    with pytest.raises(ConfigError, match="neither a folder nor in the local Hugging Face cache"):
        prepare(load_config(QUICKSTART, ["actor.path=nobody/nothing"]), tmp_path)
    with pytest.raises(ConfigError, match=r"prepare_args\.gold is unknown"):
        warm_start_settings(load_config(QUICKSTART, ["+prepare_args.gold=1"]), "mock")


def test_warm_start_rows_weigh_what_the_agent_says_and_nothing_else(untrained_policy: Path) -> None:
    renderer = ChatRenderer.load(untrained_policy)
    gold = _play("mock", "update_task_1", "mock", "update_task_1", renderer)
    said = renderer.tokenizer.decode([i for i, out in zip(gold.ids, gold.is_output) if out])
    assert said == (
        '<tool_call>{"name": "update_task_status", '
        '"arguments": {"task_id": "task_1", "status": "completed"}}</tool_call>'
        "<|im_end|>Done. Your request has been completed.<|im_end|>"
    )
    batch = _Batch.of([gold, gold], [1.0, 0.25])
    assert float(batch.dlogp_T.sum()) == pytest.approx(-1.0)
    first, second = batch.dlogp_T[: len(gold.ids)], batch.dlogp_T[len(gold.ids) :]
    torch.testing.assert_close(second, first * 0.25)
    assert [bool(c) for c in first[:-1]] == gold.is_output[1:]  # position t speaks about token t+1


def test_distractors_let_every_task_see_every_other_action_once(untrained_policy: Path) -> None:
    renderer = ChatRenderer.load(untrained_policy)
    tasks = [("mock", task_id) for task_id in task_ids("mock")]
    distractors = _distractors(tasks, renderer)
    assert len(distractors) == len(tasks) * 3  # four distinct actions, one of them the task's own
    golds = {tuple(_play(*task, *task, renderer).ids) for task in tasks}
    assert not golds & {tuple(d.ids) for d in distractors}
    assert [d.ids for d in distractors] == [d.ids for d in _distractors(tasks, renderer)]

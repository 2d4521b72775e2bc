"""OpenAI-style agents under the worker, and tool calls without sglang or vllm."""

from __future__ import annotations

from tests.e2e.worker_fakes import FakeBatcher, FakeServer, answer, generated, lease, running_worker

# isort: split
import asyncio
import json
from collections.abc import Iterator
from typing import Any

import areal.experimental.openai.client as areal_client
import pytest
from areal.api import RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters
from areal.workflow.rlvr import RLVRWorkflow
from openai import APIStatusError, AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_dta.records import Lease
from areal_dta.rollout import worker_agent
from areal_dta.rollout.worker_agent import (
    AgentWorkflow,
    ToolCallParserMissing,
    install_tool_call_parser,
    parse_hermes,
    register_tool_call_parser,
)

CALL = '<tool_call>{"name":"look","arguments":{"x":1}}</tool_call>'
WORDS = ["<eos>", "<pad>", "user", "assistant", "tool", "hello", "done", CALL, "found"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(autouse=True)
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal_client, "process_tool_calls", areal_client.process_tool_calls)  # restored afterwards
    monkeypatch.setattr(worker_agent, "_parsers", dict(worker_agent._parsers))
    assert install_tool_call_parser()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer().start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.WordPiece(prefix="##")
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content or '' }} "
        '{% for c in m.tool_calls or [] %}<tool_call>{"name":"look","arguments":{"x":1}}</tool_call> {% endfor %}'
        "<eos> {% endfor %}assistant"
    )
    return fast


class Agent:
    """Asks for a tool, answers its call, and rewards the last completion; keeps its client for later."""

    reward: Any = 1.0

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        self.client = AsyncOpenAI(**extra, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        first = await self.ask(messages)
        call = first.choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"x": 1}
        messages += [first.choices[0].message, {"role": "tool", "content": "found", "tool_call_id": call.id}]
        self.last = await self.ask(messages)
        return self.reward

    async def ask(self, messages: list[Any]) -> Any:
        return await self.client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, max_completion_tokens=4
        )


def finish(server: FakeServer, workflow: RolloutWorkflow, what: Lease | None = None) -> FakeBatcher:
    async def scenario() -> FakeBatcher:
        batcher = FakeBatcher([what or lease(0)])
        async with asyncio.timeout(20), running_worker(batcher, server, workflow) as (_, task, _p):
            await task
        return batcher

    return asyncio.run(scenario())


def test_an_agent_trains_on_the_tokens_of_its_completions(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast
) -> None:
    server.script.extend([lambda b: answer([7, 0], version="0:3"), lambda b: answer([6, 0], version="0:4")])
    agent = Agent()
    workflow = AgentWorkflow(agent, tokenizer, max_tokens=64, turn_discount=0.5)
    trajectory = finish(server, workflow).accepted["lease_0"]
    assert trajectory.rewards_S.tolist() == [0.5, 1.0]
    assert generated(trajectory.input_ids_T, trajectory) == [7, 0, 6, 0]
    assert generated(trajectory.versions_T, trajectory) == [3, 3, 4, 4]
    assert server.requests[0]["input_ids"] == [2, 5, 0, 3]
    assert agent.last.choices[0].message.content == "done"
    assert not workflow._gateway._sessions, "its key is void when the episode is over"


def one_if_done(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float("done" in completion)


def test_areals_own_rlvr_workflow_runs_as_it_is(server: FakeServer, tokenizer: PreTrainedTokenizerFast) -> None:
    server.default = lambda b: answer([6, 0], version="0:2")
    workflow = RLVRWorkflow(one_if_done, GenerationHyperparameters(max_new_tokens=4, max_tokens=64), tokenizer)
    item = {"task_id": "a", "messages": [{"role": "user", "content": "hello"}]}
    trajectory = finish(server, workflow, lease(0, item=item)).accepted["lease_0"]
    assert (trajectory.reward, trajectory.input_ids_T.tolist()) == (1.0, [2, 5, 0, 3, 6, 0])
    assert trajectory.versions_T.tolist() == [-1] * 4 + [2, 2]


def test_an_agents_reward_must_be_a_number(server: FakeServer, tokenizer: PreTrainedTokenizerFast) -> None:
    class Silent(Agent):
        async def run(self, data: dict[str, Any], **extra: Any) -> float:
            return 1.0

    def cause(agent: Agent) -> tuple[str, str]:
        server.script.extend([lambda b: answer([7, 0]), lambda b: answer([6, 0])])
        found = finish(server, AgentWorkflow(agent, tokenizer)).rejected["lease_0"]
        server.script.clear()
        return found

    for reward in (None, "good", {}, {"other": 1.0}, float("nan")):
        agent = Agent()
        agent.reward = reward
        assert cause(agent)[0] == "bad_reward", reward
    assert cause(Silent())[0] == "empty"


def test_a_key_of_another_episode_and_a_streamed_request_without_messages_are_refused(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast
) -> None:
    class Nosy(Agent):
        async def run(self, data: dict[str, Any], **extra: Any) -> float:
            for change, status in (({"api_key": "guess"}, 401), ({}, 400)):
                client = AsyncOpenAI(**{**extra, **change}, max_retries=0)
                with pytest.raises(APIStatusError) as refused:
                    await client.chat.completions.create(model="any", messages=[], stream=True)
                assert refused.value.status_code == status
            return await super().run(data, **extra)

    server.script.extend([lambda b: answer([7, 0]), lambda b: answer([6, 0])])
    assert "lease_0" in finish(server, AgentWorkflow(Nosy(), tokenizer)).accepted


def test_an_agent_that_streams_gets_the_same_reply_and_trains_on_it(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast
) -> None:
    class Streaming(Agent):
        async def ask(self, messages: list[Any]) -> Any:
            self.chunks = []
            stream = self.client.chat.completions.stream(
                model="any",
                messages=messages,
                tools=TOOLS,
                max_completion_tokens=4,
                stream_options={"include_usage": True},
            )
            async with stream as events:
                async for event in events:
                    self.chunks.append(event.type)
                return await events.get_final_completion()

    server.script.extend([lambda b: answer([7, 0], version="0:3"), lambda b: answer([6, 0], version="0:4")])
    agent = Streaming()
    trajectory = finish(server, AgentWorkflow(agent, tokenizer, max_tokens=64)).accepted["lease_0"]
    assert generated(trajectory.input_ids_T, trajectory) == [7, 0, 6, 0]
    assert (agent.last.choices[0].message.content, agent.last.choices[0].finish_reason) == ("done", "stop")
    assert agent.last.usage.completion_tokens == 2
    assert "content.delta" in agent.chunks


def test_tools_without_a_parser_fail_loudly(server: FakeServer, tokenizer: PreTrainedTokenizerFast) -> None:
    server.default = lambda b: answer([7, 0])
    batcher = finish(server, AgentWorkflow(Agent(), tokenizer, tool_call_parser="llama3"))
    cause, detail = batcher.rejected["lease_0"]
    assert cause == "raised"
    assert "no parser for tool_call_parser='llama3'" in detail
    with pytest.raises(ToolCallParserMissing):
        areal_client.process_tool_calls("text", TOOLS, "llama3", "qwen3", "stop")
    register_tool_call_parser("llama3", lambda text: ("", [("look", "{}")]))
    calls, content, reason = areal_client.process_tool_calls(
        "text", TOOLS, "llama3", "qwen3", "stop", use_responses=True
    )
    assert ([c.name for c in calls], content, reason) == (["look"], "", "tool_calls")


def test_hermes_calls_are_read_outside_of_thoughts_and_malformed_ones_stay_text() -> None:
    assert parse_hermes(f"a {CALL}{CALL}") == ("a", [("look", '{"x": 1}')] * 2)
    assert parse_hermes(f"<think>{CALL}</think>{CALL}") == (f"<think>{CALL}</think>", [("look", '{"x": 1}')])
    for text in ("plain", f"<think>{CALL}</think>b", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>"):
        assert parse_hermes(text) == (text, [])

"""Tokens of a conversation: nothing sampled is re-tokenised, malformed turns stay valid messages, the tokenizer is
reproducible.

Not covered: the templates of real models (they are not in the repository); one that rewrites earlier turns stands in
for them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tau2.data_model.message import AssistantMessage, ToolMessage, UserMessage

from experiments.tau2.chat import ChatError, ChatRenderer, load_tokenizer
from experiments.tau2.domains import task_ids, tool_schemas
from experiments.tau2.episode import EpisodeLimits, Sample, TokenEpisode
from experiments.tau2.gold import gold_replies
from experiments.tau2.simulation import Simulation
from experiments.tau2.tokenizer import EOS, build_tokenizer, tokenizer_digest
from experiments.tau2.toolcalls import EMPTY_REPLY, INVALID_TOOL, parse_agent_turn

FORGETFUL_TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' and not loop.last -%}
<|im_start|>assistant
{{ m.content.split('</think>')[-1] }}<|im_end|>
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ChatRenderer:
    return ChatRenderer.load(folder)


def sampled(renderer: ChatRenderer, message: AssistantMessage) -> Sample:
    ids = renderer.write_turn(message)
    return Sample(ids, [0.0] * len(ids), [0] * len(ids))


def test_training_the_tokenizer_twice_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    assert tokenizer_digest(tmp_path) == tokenizer_digest(folder)
    assert len(load_tokenizer(str(folder))) == 2048


def test_a_missing_tokenizer_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="tokenizer_path"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_every_prompt_extends_the_previous_prompt_and_its_sample(renderer: ChatRenderer) -> None:
    for task_id in task_ids("mock"):
        episode = TokenEpisode("mock", task_id, renderer)
        prompt = episode.start()
        for message in gold_replies("mock", task_id):
            assert prompt is not None
            sample = sampled(renderer, message)
            following = episode.feed(sample)
            if following is not None:
                assert following[: len(prompt) + len(sample.ids)] == prompt + list(sample.ids)
            prompt = following
        assert prompt is None
        assert episode.outcome().reward == 1.0


def test_the_incremental_prompt_is_the_one_the_template_gives_for_the_whole_conversation(
    renderer: ChatRenderer,
) -> None:
    simulation = Simulation("mock", "create_task_1")
    messages = simulation.start()
    tools = tool_schemas("mock")
    ids = renderer.first_prompt(simulation.system_prompt, messages, tools)
    for message in gold_replies("mock", "create_task_1"):
        output = renderer.write_turn(message)
        incoming = simulation.reply(renderer.read_turn(output, turn=1))
        if incoming is None:
            return
        messages += [message, *incoming]
        ids = ids + output + renderer.continuation(output, incoming)
        assert ids == renderer.first_prompt(simulation.system_prompt, messages, tools)
    raise AssertionError("the conversation did not end")


def test_a_turn_cut_at_its_token_limit_is_closed_before_the_next_message(renderer: ChatRenderer) -> None:
    user = UserMessage(role="user", content="hello")
    whole = renderer.continuation([5, renderer.eos_id], [user])
    cut = renderer.continuation([5], [user])
    assert cut == [renderer.eos_id, *whole]


def test_a_template_that_rewrites_earlier_turns_does_not_change_their_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer.__wrapped__(str(folder))
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    renderer = ChatRenderer(tokenizer)
    output = tokenizer.encode("<think>long thoughts</think>yes" + EOS)
    tail = renderer.continuation(output, [ToolMessage(id="1", role="tool", content="result", requestor="assistant")])
    assert tokenizer.decode(tail) == "<|im_start|>tool\nresult<|im_end|><|im_start|>assistant\n"
    assert renderer.read_turn(output, turn=1).content == "yes"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} trailing</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_becomes_a_call_that_no_environment_knows(text: str) -> None:
    message = parse_agent_turn(text, turn=1)
    assert [call.name for call in message.tool_calls or []] == [INVALID_TOOL]
    simulation = Simulation("mock", "create_task_1")
    simulation.start()
    incoming = simulation.reply(message)
    assert incoming is not None
    assert incoming[0].content == f"Error: Tool '{INVALID_TOOL}' not found."


def test_turns_without_a_call_are_text_and_reasoning_is_hidden() -> None:
    assert parse_agent_turn("", 1).content == EMPTY_REPLY
    assert parse_agent_turn("<think>hm</think>\n  hello ", 1).content == "hello"
    both = parse_agent_turn('Sure. <tool_call>{"name": "f", "arguments": {}}</tool_call>', 2)
    assert (both.content, [c.name for c in both.tool_calls or []]) == (None, ["f"])
    missing_arguments = parse_agent_turn('<tool_call>{"name": "f"}</tool_call>', 2)
    assert (missing_arguments.tool_calls or [])[0].arguments == {}


def test_random_tokens_never_break_an_episode(renderer: ChatRenderer) -> None:
    rng = random.Random(0)
    for _ in range(30):
        episode = TokenEpisode("mock", rng.choice(task_ids("mock")), renderer, EpisodeLimits(max_steps=12))
        prompt = episode.start()
        while prompt is not None:
            ids = [rng.randrange(2048) for _ in range(rng.randrange(12))]
            prompt = episode.feed(Sample(ids, [0.0] * len(ids), [0] * len(ids)))
        assert episode.outcome().reward in (0.0, 1.0)


def test_an_episode_gives_up_when_its_context_is_full(renderer: ChatRenderer) -> None:
    episode = TokenEpisode("mock", "create_task_1_nl_eval", renderer, EpisodeLimits(max_tokens=800))
    assert episode.start() is not None
    assert episode.feed(sampled(renderer, gold_replies("mock", "create_task_1")[0])) is None
    assert (episode.outcome().reward, episode.outcome().termination) == (0.0, "max_steps")
    tiny = TokenEpisode("mock", "create_task_1", renderer, EpisodeLimits(max_tokens=10))
    assert tiny.start() is None
    assert tiny.outcome().reward == 0.0


def test_a_sample_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        Sample([1, 2], [0.0], [0, 0])

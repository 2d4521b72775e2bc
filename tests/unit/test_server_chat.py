"""Chat: how replies are split, forced calls, the previous turn's tokens, streams. Not covered: a trained model."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer, models

from areal_dta.rollout.server.chat import ReplyParser, ToolCall, parse_reply
from areal_dta.rollout.server.chat_fields import parse_chat
from areal_dta.rollout.server.chat_reply import ChoiceBuilder, ReplyForm
from areal_dta.rollout.server.chat_turns import TurnMemory, conversation_keys
from areal_dta.rollout.server.sampling_fields import Limits
from areal_dta.rollout.server.sequence import Completion, FinishReason, GenerationRequest, TokenLogprobs
from areal_dta.rollout.server.text_stream import TextStream, held_back
from areal_dta.rollout.server.tokenizer import TextCodec
from areal_dta.rollout.server.tool_constraint import JsonObject, ToolCallConstraint
from tests.unit.server_kit import add_byte_tokenizer, call, server_process
from tests.unit.tiny_models import save_tiny_model

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in ("look_up", "look_down")]
# Of the byte-level vocabulary: an untrained model would never close an object.
CLOSE_OBJECT = {str(ord("}") - ord("!") + 2): 12}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    add_byte_tokenizer(folder)
    with server_process(folder, "--dtype", "float64") as (_, url):
        yield url


def chat(url: str, **body: Any) -> dict[str, Any]:
    status, answer = call(url, "/v1/chat/completions", {"messages": [USER], "max_tokens": 12, "seed": 5, **body})
    assert status == 200, answer
    return answer


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, which must end with [DONE]."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert answer.getheader("X-Server-Instance")
    lines = [line for line in answer.read().decode().split("\n\n") if line]
    connection.close()
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_thought_is_split_off_and_not_searched_for_calls():
    reply = parse_reply(f"<think>\nmaybe {CALL}\n</think>\n\nSure. {CALL} Done.", reasoning=True)
    assert reply.reasoning == f"maybe {CALL}"
    assert (reply.text, reply.tool_calls) == ("Sure.  Done.", (ToolCall("f", '{"a": 1}'),))
    opened = parse_reply("so\n</think>yes", reasoning=True, in_thought=True)
    assert (opened.reasoning, opened.text) == ("so", "yes")
    assert parse_reply("<think>cut sho", reasoning=True).reasoning == "cut sho"
    assert parse_reply("no <think>x</think>", reasoning=True).text == "no <think>x</think>"
    assert parse_reply("<think>x</think>y").text == "<think>x</think>y"


@pytest.mark.parametrize("seed", range(30))
def test_however_a_reply_is_cut_its_pieces_are_the_same(seed: int):
    rng = random.Random(seed)
    parts = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "<t", "é", "{}"]
    text = "".join(rng.choices(parts, k=12))
    for tools, reasoning in ((True, True), (True, False), (False, True), (False, False)):
        whole = parse_reply(text, tools, reasoning)
        parser = ReplyParser(tools, reasoning)
        pieces = []
        position = 0
        while position < len(text):
            step = rng.randrange(1, 6)
            pieces += parser.feed(text[position : position + step])
            position += step
        pieces += parser.finish()
        assert "".join(str(p) for kind, p in pieces if kind == "text") == whole.text
        assert "".join(str(p) for kind, p in pieces if kind == "thought") == whole.reasoning
        assert tuple(p for kind, p in pieces if kind == "call") == whole.tool_calls
        if not tools and not reasoning:
            assert whole.text == text


def test_text_waits_for_whole_characters_and_for_possible_stops():
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    text = "naïve 😀 STOP"
    stream = TextStream(decode, ("STOP",))
    out = [stream.push([byte]) for byte in text.encode()]
    assert "\ufffd" not in "".join(out)
    assert "".join(out) == "naïve 😀 "
    assert "".join(out) + stream.finish("STOP") == "naïve 😀 "
    stream = TextStream(decode, ("STOP",))
    assert stream.push(b"a ST") + stream.push(b"AR") + stream.finish() == "a STAR"
    assert held_back("abcab", ("abcx", "ca")) == 2


@pytest.mark.parametrize(
    "text", ["{}", '{"a": 1}', '{"a":[1,-2.5e+3,0],"b":{"c":"\\u00e9\\n"},"d":[true,false,null,[],{}]}', '{"": ""}']
)
def test_json_objects_are_followed_to_their_end(text: str):
    json.loads(text)
    state: JsonObject | None = JsonObject()
    for i, ch in enumerate(text):
        assert state is not None
        assert not state.complete
        state = state.step(ch)
        assert state is not None, text[: i + 1]
    assert state is not None
    assert state.complete


@pytest.mark.parametrize(
    "text",
    [
        "[", '"', "{1", '{"a" 1', '{"a":1,}', '{"a":01', '{"a":-}', '{"a":[1,]', '{"a":tru}', '{"a":"\n', '{"a":1.}',
        "{}}", '{"a":  1',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_noticed(text: str):
    state: JsonObject | None = JsonObject()
    for ch in text:
        if state is None:
            break
        state = state.step(ch)
    assert state is None


def test_a_forced_call_admits_tokens_of_any_cut_and_no_special_ones():
    texts = [
        "<tool",
        '_call>\n{"name": "',
        "look_",
        "up",
        '", "argum',
        'ents": {',
        '"x": 1}',
        "}\n</tool_call>",
        "<|im_end|>",
        "",
    ]
    constraint = ToolCallConstraint(["look_up", "look_down"], texts.__getitem__, frozenset({8}))
    for token in range(8):
        assert [t for t in range(10) if constraint.allows(t)] == [token]
        assert not constraint.complete
        constraint.accept(token)
    assert constraint.complete
    with pytest.raises(ValueError, match="does not continue"):
        constraint.accept(0)


@pytest.mark.parametrize(("choice", "names"), [("required", {"look_up", "look_down"}), ("named", {"look_down"})])
def test_a_forced_choice_gives_one_well_formed_call(choice: str, names: set[str], url: str):
    tool_choice = {"type": "function", "function": {"name": "look_down"}} if choice == "named" else choice
    found = set()
    for seed in range(4):
        answer = chat(
            url,
            tools=TOOLS,
            tool_choice=tool_choice,
            max_tokens=400,
            seed=seed,
            logit_bias=CLOSE_OBJECT,
            return_token_ids=True,
        )
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] is None
        (tool_call,) = message["tool_calls"]
        assert isinstance(json.loads(tool_call["function"]["arguments"]), dict)
        found.add(tool_call["function"]["name"])
        assert answer["choices"][0]["token_ids"][-1] == 1  # ends with the stop token, as a free call does
    assert found <= names


def test_a_choice_that_cannot_be_forced_is_refused(url: str):
    for body, reason in (
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "must be 'auto'"),
        ({"tool_choice": {"function": {"name": "g"}}, "tools": TOOLS}, "tools are look_up, look_down"),
        ({"tool_choice": "required", "tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is outside"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls must be bool"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 10**10}, "max_new_tokens=10000000000 is outside"),
    ):
        status, answer = call(url, "/v1/chat/completions", {"messages": [USER], **body})
        assert status == 400
        assert reason in answer["error"]["message"]


def test_the_next_turn_extends_the_tokens_that_were_written(url: str):
    first = chat(url, return_token_ids=True)
    written = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    messages = [USER, first["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = chat(url, messages=messages, return_token_ids=True)
    assert second["metadata"]["prompt_source"] == "previous_turn"
    assert second["prompt_token_ids"][: len(written)] == written
    retokenised = chat(url, messages=messages, return_token_ids=True, reuse_token_ids=False)
    assert retokenised["metadata"]["prompt_source"] == "template"
    # Random bytes do not survive decoding: what the model wrote is not what its text tokenises to.
    assert retokenised["prompt_token_ids"] != second["prompt_token_ids"]
    added = second["prompt_token_ids"][len(written) :]
    assert added[-5:] == retokenised["prompt_token_ids"][-5:]
    third = chat(url, messages=[*messages, second["choices"][0]["message"], USER], return_token_ids=True)
    assert third["prompt_token_ids"][: len(second["prompt_token_ids"])] == second["prompt_token_ids"]
    changed = [USER, {**messages[1], "content": "something else"}, messages[2]]
    assert chat(url, messages=changed)["metadata"]["prompt_source"] == "template"
    cut = chat(url, messages=messages, tools=TOOLS)
    assert cut["metadata"]["prompt_source"] == "template"  # another system prompt


def test_a_thought_that_the_template_opens_is_split_off_and_closed_before_a_forced_call(tmp_path: Path):
    save_tiny_model(tmp_path)
    add_byte_tokenizer(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    opened = template.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    assert opened != template
    (tmp_path / "chat_template.jinja").write_text(opened)
    with server_process(tmp_path, "--reasoning-parser", "qwen3") as (_, url):
        message = chat(url)["choices"][0]["message"]
        assert message["reasoning_content"]
        assert message["content"] == ""
        assert chat(url, separate_reasoning=False)["choices"][0]["message"]["content"]
        body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "return_token_ids": True}
        answer = chat(url, **body, logit_bias=CLOSE_OBJECT)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == (None, None, 1)
        chunks = events(url, "/v1/chat/completions", {"messages": [USER], "max_tokens": 12, "seed": 5})
        assert any(c["choices"][0]["delta"].get("reasoning_content") for c in chunks)


def test_conversations_are_told_apart_and_old_ones_forgotten():
    spelled = conversation_keys([{"role": "user", "content": [{"type": "text", "text": "a"}]}], None)
    assert spelled == conversation_keys([{"role": "user", "content": "a", "name": None}], None)
    assert spelled != conversation_keys([{"role": "user", "content": "a"}], ["tool"])
    keys = conversation_keys([{"role": "user", "content": str(i)} for i in range(4)], None)
    memory = TurnMemory(max_bytes=40)
    memory.remember(keys[1], [1, 2, 3])
    memory.remember(keys[3], [4, 5, 6])
    assert memory.find(keys) == (4, [4, 5, 6])
    assert memory.find(keys[:3]) == (2, [1, 2, 3])
    memory.remember(b"x", [7] * 5)
    assert memory.find(keys[2:]) is None


def test_a_streamed_chat_is_the_whole_one_in_pieces(url: str):
    body = {"messages": [USER], "max_tokens": 40, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    body |= {"return_token_ids": True, "return_raw_logprob": True, "tools": TOOLS}
    whole = chat(url, **body)
    chunks = events(url, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["prompt_token_ids"] == whole["prompt_token_ids"]
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        text = "".join(c["delta"].get("content") or "" for c in own)
        assert text == (choice["message"]["content"] or "")
        entries = [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]]
        assert [e["token_id"] for e in entries] == choice["token_ids"] == own[-1]["token_ids"]
        assert [e["token_id"] for e in choice["logprobs"]["content"]] == choice["token_ids"]
        assert all(len(e["top_logprobs"]) == 2 and e["raw_logprob"] < 0 for e in entries)
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


def test_a_streamed_forced_call_comes_as_one_delta_and_usage_in_the_last_chunk(url: str):
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "logit_bias": CLOSE_OBJECT, "seed": 1}
    chunks = events(url, "/v1/chat/completions", {**body, "max_tokens": 400})
    calls = [c["choices"][0]["delta"]["tool_calls"] for c in chunks if c["choices"][0]["delta"].get("tool_calls")]
    assert len(calls) == 1
    assert calls[0][0]["function"]["name"] in ("look_up", "look_down")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] > 40


def test_without_parallel_calls_the_reply_ends_with_its_first_call():
    body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}
    parsed = parse_chat(body, Limits(1000, 320), False)
    assert parsed.sampling.stop_after == ("</tool_call>",)
    codec = TextCodec(Tokenizer(models.BPE({}, [])), {}, None)
    codec.decode_raw = lambda ids: bytes(ids).decode()  # type: ignore[method-assign]
    builder = ChoiceBuilder(codec, 0, ReplyForm(True, False, False, False, False), parsed.sampling)
    output = tuple(TokenLogprobs(b, -1.0) for b in CALL.encode())
    request = GenerationRequest("r", (1,), parsed.sampling, 1)
    reason = FinishReason("stop", matched="</tool_call>")
    done = Completion(request, output, (), (), reason, (), 0, "v", 0.0, None)
    builder.take(output, done)
    assert [c["function"]["name"] for c in builder.message()["tool_calls"]] == ["f"]
    assert builder.finish(done)["finish_reason"] == "tool_calls"
    assert parse_chat({**body, "parallel_tool_calls": True}, Limits(1000, 320), False).sampling.stop_after == ()

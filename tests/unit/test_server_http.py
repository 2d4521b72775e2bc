"""The server process over HTTP. Not covered: TLS, many hours of load."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load_file

from areal_dta.rollout.server.chat import parse_reply
from areal_dta.weights import write_version
from tests.unit.server_kit import (
    Background,
    Process,
    add_byte_tokenizer,
    call,
    generate,
    load,
    server_process,
    wait_until,
)
from tests.unit.server_nonsense import BAD
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(2, 60))
LONG: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    add_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[str]:
    with server_process(model, "--dtype", "float64") as (_, url):  # no near-ties between equal computations
        yield url


@pytest.fixture
def url(running: str) -> Iterator[str]:
    """The shared server, idle and unpaused before and after."""
    yield running
    call(running, "/continue_generation", {})
    call(running, "/abort_request", {"abort_all": True})
    wait_until(lambda: load(running)["num_running"] + load(running)["num_waiting"] == 0, "an idle server")


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two published versions, v1 and v2, of other weights."""
    root = tmp_path_factory.mktemp("weights")
    for number in (1, 2):
        other = root / f"seed{number}"
        save_tiny_model(other, seed=number)
        write_version(root / f"v{number}", load_file(other / "model.safetensors"), f"0:{number}", template=model)
    return root


def under_way(url: str, count: int = 1, **sampling: Any) -> list[Background]:
    """Long generations that have begun."""
    before = load(url)["generated_tokens"]
    calls = [Background(lambda i=i: generate(url, [*PROMPT, 2 + i], **{**LONG, **sampling})) for i in range(count)]
    wait_until(lambda: load(url)["num_running"] == count, "running requests")
    wait_until(lambda: load(url)["generated_tokens"] > before + 3 * count, "some tokens")
    return calls


def test_an_answer_has_the_fields_of_sglang(url: str):
    answer = generate(url, PROMPT, max_new_tokens=6, ignore_eos=True, temperature=0.0)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert isinstance(answer["text"], str)
    again = generate(url, PROMPT, max_new_tokens=6, ignore_eos=True, temperature=0.0)
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 48


def test_a_batch_is_answered_in_order_and_n_gives_samples(url: str):
    body = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    answers = call(url, "/generate", body)[1]
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 3]
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "n": 3, "sampling_seed": 4}}
    samples = call(url, "/generate", body)[1]
    assert [s["meta_info"]["sampling_seed"] for s in samples] == [4, 5, 6]
    assert generate(url, [5, 6], max_new_tokens=8, sampling_seed=5)["output_ids"] == samples[1]["output_ids"]


def test_text_is_accepted_and_stop_strings_cut_it(url: str):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 60, "sampling_seed": 1, "ignore_eos": True}}
    answer = call(url, "/generate", body)[1]
    assert answer["meta_info"]["prompt_tokens"] == 5
    text = answer["text"]
    printable = next(c for c in text[3:] if c.isascii())
    body["sampling_params"]["stop"] = printable
    cut = call(url, "/generate", body)[1]
    assert cut["text"] == text[: text.index(printable)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": printable}


def test_stop_token_ids_end_the_output_with_the_token(url: str):
    ids = generate(url, PROMPT, max_new_tokens=20, sampling_seed=2, min_new_tokens=20)["output_ids"]
    answer = generate(url, PROMPT, max_new_tokens=20, sampling_seed=2, stop_token_ids=[ids[4]])
    assert answer["output_ids"] == ids[: ids.index(ids[4]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[4]}


def test_scoring_returns_one_entry_per_asked_prompt_token(url: str):
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    for start in (0, 10):
        meta = call(url, "/generate", {**body, "logprob_start_len": start})[1]["meta_info"]
        assert [t for _, t, _ in meta["input_token_logprobs"]] == PROMPT[start:]
        assert (meta["input_token_logprobs"][0][0] is None) == (start == 0)
    params["max_new_tokens"] = 0
    meta = call(url, "/generate", {**body, "logprob_start_len": 0})[1]["meta_info"]
    assert meta["completion_tokens"] == 0
    assert len(meta["input_token_logprobs"]) == len(PROMPT)


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_nonsense_is_refused_with_its_reason(body: Any, status: int, message: str, url: str):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    got_status, answer = call(url, "/generate", raw=raw)
    assert got_status == status, answer
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_other_endpoints_refuse_nonsense_too(url: str):
    for path, body, status in (
        ("/pause_generation", {"mode": "later"}, 400),
        ("/pause_generation", {"modes": "abort"}, 400),
        ("/abort_request", {}, 400),
        ("/abort_request", {"rid": 5}, 400),
        ("/release_memory_occupation", {"tags": ["weights"]}, 400),
        ("/update_weights_from_disk", {}, 400),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": 3}, 400),
        ("/nowhere", {}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400),
        ("/update_weights_from_disk", {"model_path": "x", "weights": 1}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": 1}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_token": 1}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, 400),
    ):
        assert call(url, path, body)[0] == status, path
    assert call(url, "/generate")[0] == 405
    assert call(url, "/health")[0] == 200


def test_a_huge_body_is_refused(url: str):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\n\r\n")
        chunk = b" " * (1 << 20)
        try:
            for _ in range(70):
                sock.sendall(chunk)
        except OSError:
            return  # closed on us: refused as well
        assert b" 413 " in sock.recv(1000)


def test_pause_abort_answers_with_partial_output_and_later_requests_wait(url: str):
    begun = under_way(url, 2)
    assert call(url, "/pause_generation", {})[1]["num_paused_requests"] == 2
    partial = [b.result() for b in begun]
    for answer in partial:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 900
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    waiting = Background(lambda: generate(url, PROMPT, max_new_tokens=4, ignore_eos=True))
    wait_until(lambda: load(url)["num_waiting"] == 1, "a waiting request")
    assert call(url, "/health")[0] == call(url, "/health_generate")[0] == 200
    assert call(url, "/pause_generation", {"mode": "in_place"})[0] == 200
    assert waiting.is_alive()
    call(url, "/continue_generation", {})
    assert len(waiting.result()["output_ids"]) == 4


def test_a_request_that_never_ran_is_aborted_before_prefill(url: str):
    call(url, "/pause_generation", {"mode": "in_place"})
    waiting = Background(lambda: generate(url, PROMPT, max_new_tokens=4))
    wait_until(lambda: load(url)["num_waiting"] == 1, "a waiting request")
    call(url, "/pause_generation", {"mode": "abort"})
    reason = waiting.result()["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert reason["message"].startswith("Abort before prefill")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pausing_in_between_changes_no_token(mode: str, url: str):
    short = {"max_new_tokens": 500}
    whole = generate(url, [*PROMPT, 2], **{**LONG, **short})["output_ids"]
    begun = under_way(url, 1, **short)
    call(url, "/pause_generation", {"mode": mode})
    tokens = load(url)["generated_tokens"]
    assert load(url)["num_running"] == (1 if mode == "in_place" else 0)
    assert begun[0].is_alive()
    assert load(url)["generated_tokens"] == tokens
    call(url, "/continue_generation", {})
    assert begun[0].result()["output_ids"] == whole


def test_abort_by_rid_leaves_the_others(url: str):
    def start(rid: str) -> Background:
        body = {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": 600}, "rid": rid}
        return Background(lambda: call(url, "/generate", body)[1]["meta_info"])

    first, second = start("one"), start("two")
    wait_until(lambda: load(url)["num_running"] == 2, "two running requests")
    assert call(url, "/abort_request", {"rid": "one"})[1]["num_aborted"] == 1
    assert first.result()["finish_reason"]["type"] == "abort"
    assert second.result()["finish_reason"]["type"] == "length"


def test_flush_is_refused_while_busy_and_empties_the_cache(url: str):
    begun = under_way(url)
    assert call(url, "/flush_cache", {})[0] == 400
    call(url, "/abort_request", {"abort_all": True})
    begun[0].result()
    assert load(url)["cached_tokens_in_tree"] > 0
    assert call(url, "/flush_cache")[0] == 200
    assert load(url)["cached_tokens_in_tree"] == 0


def test_a_client_that_goes_away_frees_its_slot(url: str):
    address = urlsplit(url)
    body = json.dumps({"input_ids": PROMPT, "sampling_params": LONG}).encode()
    with socket.create_connection((address.hostname, address.port), timeout=20) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: load(url)["num_running"] == 1, "a running request")
        call(url, "/pause_generation", {"mode": "in_place"})
    try:
        wait_until(lambda: load(url)["num_running"] == 0, "the slot being freed")
    finally:
        call(url, "/continue_generation", {})


def test_weights_change_mid_generation_and_spans_say_where(url: str, versions: Path):
    short = {"max_new_tokens": 600}
    old = call(url, "/get_model_info")[1]["weight_version"]
    begun = under_way(url, 1, **short)
    call(url, "/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(versions / "v1"), "weight_version": "0:1", "flush_cache": True}
    assert call(url, "/update_weights_from_disk", body)[1]["num_paused_requests"] == 1
    call(url, "/continue_generation", {})
    meta = begun[0].result()["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == (old, "0:1")
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 600
    assert meta["weight_version"] == "0:1"
    # Without a pause, and with abort, as SGLang's clients ask for it.
    begun = under_way(url)
    body = {"model_path": str(versions / "v2"), "abort_all_requests": True}
    assert call(url, "/update_weights_from_disk", body)[1]["success"]
    assert begun[0].result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert call(url, "/health")[1]["weight_version"] == "0:2"


def test_bad_weights_are_refused_whole_and_the_old_version_serves(url: str, versions: Path, tmp_path: Path):
    before = generate(url, PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    torn, other, foreign = tmp_path / "torn", tmp_path / "other", tmp_path / "foreign"
    shutil.copytree(versions / "v1", torn)
    data = bytearray((torn / "model.safetensors").read_bytes())
    data[-7] ^= 255
    (torn / "model.safetensors").write_bytes(bytes(data))
    save_tiny_model(other, vocab_size=300)
    save_tiny_model(foreign, "qwen2")
    for folder, version, reason in (
        (torn, None, "digest"),
        (other, None, "shape"),
        (foreign, None, "tensor names differ"),
        (tmp_path / "missing", None, "no *.safetensors"),
        (versions / "v1", "0:7", "holds version 0:1, not 0:7"),
    ):
        body = {"model_path": str(folder), "weight_version": version}
        status, answer = call(url, "/update_weights_from_disk", body)
        assert (status, answer["success"]) == (400, False)
        assert reason in answer["message"]
    after = generate(url, PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == before["meta_info"]["weight_version"]


def test_chat_renders_the_template_and_reports_tokens(url: str):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "seed": 5,
        "logprobs": True,
        "return_token_ids": True,
    }
    status, answer = call(url, "/v1/chat/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    text = {"text": prompt, "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5}, "return_logprob": True}
    same = call(url, "/generate", text)[1]
    assert choice["token_ids"] == same["output_ids"]
    assert answer["usage"]["prompt_tokens"] == same["meta_info"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert got == pytest.approx([lp for lp, _, _ in same["meta_info"]["output_token_logprobs"]], abs=1e-5)
    assert choice["finish_reason"] in ("length", "stop")
    assert call(url, "/v1/models")[1]["data"][0]["id"] == answer["model"]


def test_tool_calls_go_in_through_the_template(url: str):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "tools": tools, "max_tokens": 2, "return_token_ids": True}
    status, answer = call(url, "/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 100
    called["function"]["arguments"] = "{broken"
    status, answer = call(url, "/v1/chat/completions", body)
    assert status == 400
    assert "not JSON" in answer["error"]["message"]


def test_tool_calls_come_out_parsed_and_broken_ones_stay_visible():
    reply = parse_reply('Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>')
    assert (reply.text, reply.tool_calls[0].name, reply.tool_calls[0].arguments) == ("Sure.", "f", '{"a": "é"}')
    two = parse_reply(
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> <tool_call>{"name": "g"}</tool_call>'
    )
    assert [(c.name, json.loads(c.arguments)) for c in two.tool_calls] == [("f", {"a": 1}), ("g", {})]
    for block in ("{", '"f"', '{"arguments": {}}', '{"name": "f", "arguments": [1]}'):
        text = f"<tool_call>{block}</tool_call>"
        assert parse_reply(text) == type(reply)(text, (), (block,))
    assert parse_reply('<tool_call>{"name": "f"}').tool_calls == ()


def test_the_api_key_guards_everything_but_health_and_sigterm_ends_the_server(model: Path):
    with server_process(model, "--api-key", "secret", "--seed", "7") as (process, url):
        assert call(url, "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert call(url, "/generate", {"input_ids": [2]}, **headers)[0] == 401
            assert call(url, "/get_server_info", None, **headers)[0] == 401
        auth = {"Authorization": "Bearer secret"}
        assert call(url, "/generate", {"input_ids": [2]}, **auth)[0] == 200
        body = {"input_ids": PROMPT, "sampling_params": LONG}
        running = Background(lambda: call(url, "/generate", body, **auth))
        wait_until(lambda: call(url, "/get_server_info", **auth)[1]["internal_states"][0]["num_running"] == 1, "a run")
        assert process.stop() == 0
        assert running.result()[0] == 503


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "config.json does not exist"),
        (["--model", "MODEL", "--host", "203.0.113.1"], "cannot serve"),
        (["--run", "nowhere"], "launch.json"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], message: str, model: Path):
    process = Process("areal_dta.rollout.server", *[a.replace("MODEL", str(model)) for a in arguments])
    assert process.child.wait(30) == 2
    wait_until(lambda: message in "".join(process.errors), message)

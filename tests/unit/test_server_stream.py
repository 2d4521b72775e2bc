"""The server over HTTP: streams, callers that go away, memory given back, limits, metrics."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.unit.server_kit import Background, add_byte_tokenizer, call, generate, load, server_process, wait_until
from tests.unit.test_server_chat import events
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(2, 60))
LONG: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True, "sampling_seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    add_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[str]:
    with server_process(model, "--dtype", "float64", "--max-waiting", "3", "--max-body-bytes", "100000") as (_, url):
        yield url


@pytest.fixture
def url(running: str) -> Iterator[str]:
    yield running
    call(running, "/continue_generation", {})
    call(running, "/resume_memory_occupation", {})
    call(running, "/abort_request", {"abort_all": True})
    wait_until(lambda: load(running)["num_running"] + load(running)["num_waiting"] == 0, "an idle server")


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics by name with labels."""
    with urlopen(url + "/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples = [re.fullmatch(r"([a-z_:]+(?:\{.*\})?) (\S+)", line) for line in lines if not line.startswith("#")]
    return {m.group(1): float(m.group(2)) for m in samples if m is not None}


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


def test_a_stream_gives_the_whole_answer_growing(url: str):
    sampling = {"max_new_tokens": 30, "sampling_seed": 4, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    whole = call(url, "/generate", body)[1]
    pieces = events(url, "/generate", body)
    assert len(pieces) > 3
    for earlier, later in itertools.pairwise(pieces):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    last, meta = pieces[-1], whole["meta_info"]
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
    for name in ("output_token_logprobs", "output_top_logprobs", "finish_reason", "weight_versions"):
        assert last["meta_info"][name] == meta[name]


def test_an_incremental_stream_gives_each_token_once(url: str):
    body = {"input_ids": [PROMPT, PROMPT[:9]], "incremental_streaming_output": True, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 20, "sampling_seed": 4, "ignore_eos": True}
    whole = call(url, "/generate", body)[1]
    pieces = events(url, "/generate", body)
    for index, answer in enumerate(whole):
        own = [p for p in pieces if p["index"] == index]
        assert [t for p in own for t in p["output_ids"]] == answer["output_ids"]
        assert "".join(p["text"] for p in own) == answer["text"]
        entries = [e for p in own for e in p["meta_info"]["output_token_logprobs"]]
        assert entries == answer["meta_info"]["output_token_logprobs"]


def test_a_streamed_stop_string_is_never_shown(url: str):
    bias = {str(t): -100 for t in range(320) if not 2 <= t < 96}  # printable ASCII only
    body: dict[str, Any] = {"input_ids": PROMPT}
    body["sampling_params"] = {"max_new_tokens": 60, "sampling_seed": 1, "logit_bias": bias}
    stop = call(url, "/generate", body)[1]["text"][20:23]
    body["sampling_params"]["stop"] = [stop, "\x00"]
    whole = call(url, "/generate", body)[1]
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    pieces = events(url, "/generate", body)
    assert pieces[-1]["text"] == whole["text"]
    assert all(whole["text"].startswith(p["text"]) for p in pieces)
    body["sampling_params"]["no_stop_trim"] = True
    assert call(url, "/generate", body)[1]["text"] == whole["text"] + stop


def test_a_streaming_caller_that_hangs_up_frees_its_slot_at_once(url: str):
    gone = metrics(url)['areal_dta:aborted_requests_total{cause="client_gone"}']
    address = urlsplit(url)
    for path, body in (
        ("/generate", {"input_ids": PROMPT, "sampling_params": LONG}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True},
        ),
    ):
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(20)
        assert load(url)["num_running"] == 1
        answer.close()
        connection.close()
        before = load(url)["generated_tokens"]
        wait_until(lambda: load(url)["num_running"] == 0, "the slot being freed")
        assert load(url)["generated_tokens"] - before < 800
    wait_until(
        lambda: metrics(url)['areal_dta:aborted_requests_total{cause="client_gone"}'] == gone + 2, "both being counted"
    )


def test_one_callers_end_leaves_another_with_the_same_rid_alone(url: str):
    body = {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": 600}, "rid": "same"}
    other = Background(lambda: call(url, "/generate", body)[1]["meta_info"]["finish_reason"]["type"])
    wait_until(lambda: load(url)["num_running"] == 1, "a running request")
    address = urlsplit(url)
    raw = json.dumps(body).encode()
    with socket.create_connection((address.hostname, address.port), timeout=20) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
        wait_until(lambda: load(url)["num_running"] == 2, "two running requests")
    assert other.result() == "length"


def test_an_error_before_the_first_token_is_an_ordinary_refusal(url: str):
    status, answer = call(url, "/generate", {"input_ids": [5], "stream": True, "sampling_params": {"n": 0}})
    assert (status, answer["error"]["code"]) == (400, 400)


def test_an_abort_ends_a_stream_with_its_reason(url: str):
    body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": "r"}
    streamed = Background(lambda: events(url, "/generate", body))
    wait_until(lambda: load(url)["num_running"] == 1, "a running stream")
    assert call(url, "/abort_request", {"rid": "r"})[1]["num_aborted"] == 1
    assert streamed.result()[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_too_many_waiting_and_too_large_bodies_are_refused(url: str):
    call(url, "/pause_generation", {"mode": "in_place"})
    refused = metrics(url)["areal_dta:refused_requests_total"]
    waiting = [Background(lambda: generate(url, PROMPT, max_new_tokens=1)) for _ in range(3)]
    wait_until(lambda: load(url)["num_waiting"] == 3, "three waiting requests")
    status, answer = call(url, "/generate", {"input_ids": PROMPT})
    assert (status, answer["error"]["type"]) == (503, "busy")
    assert "at most 3" in answer["error"]["message"]
    sampled = metrics(url)
    assert sampled["sglang:num_queue_reqs"] == 3
    assert sampled["areal_dta:paused"] == 1
    assert sampled["areal_dta:refused_requests_total"] == refused + 1
    call(url, "/continue_generation", {})
    assert all(len(w.result()["output_ids"]) == 1 for w in waiting)
    status, answer = call(url, "/generate", {"text": "x" * 100_001})
    assert (status, answer["error"]["type"]) == (413, "too_large")


def test_metrics_count_what_happened(url: str):
    before = metrics(url)
    for _ in range(2):
        generate(url, [7, *PROMPT], max_new_tokens=5, ignore_eos=True)
    after = metrics(url)
    assert after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"] == 10
    assert after["sglang:prompt_tokens_total"] - before["sglang:prompt_tokens_total"] == 2 * 59
    assert after["sglang:cached_tokens_total"] - before["sglang:cached_tokens_total"] >= 48
    assert 0 < after["sglang:cache_hit_rate"] < 1
    assert after["sglang:token_usage"] == 0
    assert after['areal_dta:weight_version_info{weight_version="default"}'] == 1
    assert not any("spec" in name or "draft" in name for name in after)  # speculation is off


def test_memory_is_really_given_back_and_requests_wait_or_are_refused(model: Path):
    with server_process(model, "--max-total-tokens", "300000") as (process, url):
        expected = generate(url, PROMPT, max_new_tokens=5, sampling_seed=1)["output_ids"]
        busy = Background(lambda: generate(url, PROMPT, **{**LONG, "max_new_tokens": 500}))
        wait_until(lambda: load(url)["num_running"] == 1, "a running request")
        assert call(url, "/release_memory_occupation", {})[0] == 400
        assert len(busy.result()["output_ids"]) == 500
        kv_bytes, held = load(url)["kv_bytes"], rss_bytes(process.child.pid)
        assert kv_bytes == 300_016 * 2 * 2 * 2 * 16 * 4
        for body, reason in (({"tags": ["weights"]}, "tags=['weights']"), ({"requests": "maybe"}, "wait, refuse")):
            status, answer = call(url, "/release_memory_occupation", body)
            assert status == 400
            assert reason in answer["error"]["message"]
        answer = call(url, "/release_memory_occupation", {"tags": ["kv_cache"]})[1]
        assert (answer["bytes_released"], load(url)["kv_bytes"]) == (kv_bytes, 0)
        if held > kv_bytes:  # untouched pages are not resident on every system
            assert held - rss_bytes(process.child.pid) > kv_bytes // 2
        assert call(url, "/get_server_info")[1]["memory_released"]
        assert call(url, "/health")[0] == call(url, "/health_generate")[0] == 200
        waiting = Background(lambda: generate(url, PROMPT, max_new_tokens=5, sampling_seed=1)["output_ids"])
        wait_until(lambda: load(url)["num_waiting"] == 1, "a waiting request")
        assert call(url, "/resume_memory_occupation", {})[1]["bytes_taken"] == kv_bytes
        assert waiting.result() == expected
        call(url, "/release_memory_occupation", {"requests": "refuse"})
        for stream in (False, True):
            status, answer = call(url, "/generate", {"input_ids": PROMPT, "stream": stream})
            assert (status, answer["error"]["type"]) == (503, "memory_released")
        call(url, "/resume_memory_occupation", {})
        assert generate(url, PROMPT, max_new_tokens=5, sampling_seed=1)["output_ids"] == expected

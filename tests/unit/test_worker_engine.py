"""The worker's HTTP client: versions per token, retries, refusals, and equality with AReaL's own client."""

from __future__ import annotations

from tests.e2e.worker_fakes import WAIT_S, FakeServer, answer, engine_for, lease

# isort: split
import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine

from areal_dta.rollout import worker_engine
from areal_dta.rollout.worker_engine import (
    EpisodeClosed,
    EpisodeEngine,
    GenerationError,
    RouterEngine,
    call_seed,
    token_versions,
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer().start()
    yield fake
    fake.stop()


def request(ids: list[int], **gconfig: Any) -> ModelRequest:
    return ModelRequest(
        input_ids=ids, gconfig=GenerationHyperparameters(**{"max_new_tokens": 8, "max_tokens": 32, **gconfig})
    )


def ask(engine: Any, req: ModelRequest) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(WAIT_S):
            return await engine.agenerate(req)

    return asyncio.run(bounded())


def test_versions_come_from_spans_then_from_the_answer_then_from_the_engine() -> None:
    spans = [{"version": "2:7", "start": 0, "end": 2}, {"version": "2:8", "start": 2, "end": 3}]
    assert token_versions({"weight_versions": spans, "weight_version": "2:8"}, 3, 0) == [7, 7, 8]
    assert token_versions({"weight_version": "2:8"}, 2, 0) == [8, 8]
    assert token_versions({}, 2, 5) == [5, 5]
    assert token_versions({"weight_versions": []}, 0, 5) == []
    with pytest.raises(GenerationError, match="leave output token 3 of 4 without a version"):
        token_versions({"weight_versions": spans}, 4, 0)


def test_a_foreign_version_string_counts_as_the_engines_version_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(worker_engine.log, "warning", lambda text, *args: said.append(text % args))
    versions = worker_engine._Versions()
    for _ in range(3):
        assert token_versions({"weight_version": "default"}, 2, 4, versions) == [4, 4]
    assert said == ["server reports weight version 'default', not EPOCH:NUMBER; using the engine's 4"]
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def test_it_answers_as_areals_own_client_does(server: FakeServer) -> None:
    def script() -> None:
        server.script.extend(
            [lambda b: answer([4, 5], version=None, reason="abort"), lambda b: answer([6], version=None)]
        )

    config = InferenceEngineConfig(
        backend="sglang:d1", max_concurrent_rollouts=4, request_timeout=WAIT_S, setup_timeout=WAIT_S
    )
    areals = RemoteSGLangEngine(config)
    areals.initialize(engine_id="1", addr=server.address, train_data_parallel_size=1)
    areals.set_version(6)
    try:
        script()
        expected = ask(areals, request([1, 2], temperature=0.5, top_k=9))
        with engine_for(server) as engine:
            engine.set_version(6)
            script()
            found = ask(engine, request([1, 2], temperature=0.5, top_k=9))
    finally:
        areals.destroy()
    for name in ("input_tokens", "output_tokens", "output_logprobs", "output_versions", "stop_reason"):
        assert getattr(found, name) == getattr(expected, name), name
    sent = [{k: v for k, v in r.items() if k != "rid"} for r in server.requests]
    assert sent[:2] == sent[2:]


def test_a_router_that_is_away_is_waited_for_and_a_refusal_is_not(server: FakeServer) -> None:
    with engine_for(server) as engine:
        server.script.extend([lambda b: 503, lambda b: 502, lambda b: answer([4])])
        assert ask(engine, request([1])).output_tokens == [4]
        assert len({r["rid"] for r in server.requests}) == 3
        server.script.append(lambda b: 400)
        with pytest.raises(GenerationError, match="answered 400: scripted"):
            ask(engine, request([1]))
        server.script.extend([lambda b: 500, lambda b: 500, lambda b: answer([4])])
        with pytest.raises(GenerationError, match="2 failures: .* answered 500"):
            ask(engine, request([1]))


def test_a_router_that_stays_away_is_given_up_after_the_patience(server: FakeServer) -> None:
    with engine_for(server, patience_s=0.2) as engine:
        engine._engine.addresses[:] = ["127.0.0.1:9"]
        with pytest.raises(GenerationError, match=r"gave up after 0.2 s .*127.0.0.1:9"):
            ask(engine, request([1]))


def test_an_abort_that_is_a_refusal_does_not_loop(server: FakeServer) -> None:
    refused = answer([], reason="abort")
    refused["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "prompt too long"}
    server.script.append(lambda b: refused)
    with (
        engine_for(server) as engine,
        pytest.raises(GenerationError, match=r"refused the request \(400\): prompt too long"),
    ):
        ask(engine, request([1]))


def test_a_completion_that_fills_its_budget_while_interrupted_ends_by_length(server: FakeServer) -> None:
    server.script.append(lambda b: answer([3, 4], reason="abort"))
    with engine_for(server) as engine:
        response = ask(engine, request([1], max_new_tokens=2))
    assert (response.output_tokens, response.stop_reason, len(server.requests)) == ([3, 4], "length", 1)


def test_impossible_requests_are_refused_here(server: FakeServer) -> None:
    with engine_for(server) as engine:
        with pytest.raises(ValueError, match=r"prompt of 3 tokens .* max_tokens=3"):
            ask(engine, request([1, 2, 3], max_tokens=3))
        with pytest.raises(ValueError, match="n_samples=2"):
            ask(engine, request([1], n_samples=2))
    assert not server.requests


def test_the_api_key_is_sent_also_to_the_health_check() -> None:
    server = FakeServer(api_key="secret").start()
    try:
        with engine_for(server) as engine:
            assert ask(engine, request([1])).output_tokens == [7, 8, 9]
            keyless = RouterEngine(engine.config, None)
            assert not keyless._engine.check_health(f"http://{server.address}")
    finally:
        server.stop()


def test_an_episode_fills_in_seed_and_affinity_unless_the_workflow_did(server: FakeServer) -> None:
    with engine_for(server) as engine:
        bound = EpisodeEngine(engine, lease(3))
        ask(bound, request([1]))
        ask(bound, request([1]))
        ask(bound, ModelRequest(input_ids=[1], metadata={"sampling_seed": 77, "affinity_key": "mine"}))
        assert bound.get_version() == engine.get_version()
    seeds = [r["sampling_params"]["sampling_seed"] for r in server.requests]
    assert seeds == [call_seed(1003, 0), call_seed(1003, 1), 77]
    assert [r["rid"].split("/")[0] for r in server.requests] == ["group-1", "group-1", "mine"]
    assert (bound.num_generations, bound.num_output_tokens) == (3, 9)
    assert bound.num_row_tokens == 9 + sum(len(r["input_ids"]) for r in server.requests[-3:])


def test_a_finished_episode_gets_no_more_tokens(server: FakeServer) -> None:
    with engine_for(server) as engine:
        bound = EpisodeEngine(engine, lease(0))
        bound.close("timed out")
        with pytest.raises(EpisodeClosed, match=r"lease_0 is over \(timed out\)"):
            ask(bound, request([1]))

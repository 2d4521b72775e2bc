"""The router with real servers, and its choice of server alone. Not covered: a network that drops packets silently."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load_file

from areal_dta.rollout.router import recall
from areal_dta.rollout.router_affinity import PREFIX_BLOCK, Affinity, request_keys
from areal_dta.weights import VersionManifest, verify, write_version
from tests.unit.server_kit import Background, Process, call, generate, load, router_process, server_process, wait_until
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(2, 60))
LONG: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True, "sampling_seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for number in range(1, 5):
        save_tiny_model(root / "new", seed=number)
        write_version(root / f"v{number}", load_file(root / "new" / "model.safetensors"), f"0:{number}", template=model)
    return root


class Cluster:
    """Two servers on fixed ports behind a router."""

    def __init__(self, model: Path, servers: list[tuple[Process, str]], router: str) -> None:
        self.model = model
        self.processes = [p for p, _ in servers]
        self.urls = [u for _, u in servers]
        self.router = router

    def restart(self, index: int) -> None:
        port = str(urlsplit(self.urls[index]).port)
        args = ("--model", str(self.model), "--port", port, "--dtype", "float64")
        self.processes[index] = Process("areal_dta.rollout.server", *args)
        self.processes[index].ready()

    def info(self) -> dict[str, Any]:
        return call(self.router, "/get_server_info")[1]

    def wait_alive(self, count: int) -> None:
        wait_until(lambda: call(self.router, "/health")[1]["alive"] == count, f"{count} live servers")

    def publish(self, folder: Path, manifest: VersionManifest | None = None) -> tuple[int, dict[str, Any]]:
        manifest = manifest or verify(folder)
        body = {"model_path": str(folder), "weight_version": manifest.weight_version, "digest": manifest.digest}
        return call(self.router, "/publish", body)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state = tmp_path_factory.mktemp("state") / "current.json"
    double = ("--dtype", "float64")
    with server_process(model, *double) as first, server_process(model, *double) as second:
        with router_process([first[1], second[1]], "--state-file", str(state)) as (_, url):
            cluster = Cluster(model, [first, second], url)
            yield cluster
            for process in cluster.processes:
                process.kill()


def test_generation_through_the_router_equals_a_servers_own(cluster: Cluster):
    own = generate(cluster.urls[0], PROMPT, max_new_tokens=9, sampling_seed=5)
    assert generate(cluster.router, PROMPT, max_new_tokens=9, sampling_seed=5)["output_ids"] == own["output_ids"]
    assert call(cluster.router, "/generate", {"input_ids": []})[0] == 400
    assert call(cluster.router, "/generate", raw=b"{")[0] == 400
    assert call(cluster.router, "/get_model_info")[0] == call(cluster.router, "/v1/models")[0] == 200


def test_a_follow_up_goes_where_its_prefix_is_cached(cluster: Cluster):
    rng = random.Random(1)
    conversations = [[rng.randrange(2, 300) for _ in range(3 * PREFIX_BLOCK)] for _ in range(6)]
    for ids in conversations:
        generate(cluster.router, ids, max_new_tokens=2, ignore_eos=True)
    assert all(load(url)["prompt_tokens"] > 0 for url in cluster.urls)
    for ids in conversations:
        meta = generate(cluster.router, [*ids, 5, 6, 7], max_new_tokens=2)["meta_info"]
        assert meta["cached_tokens"] >= len(ids) - 16


def test_a_killed_servers_requests_are_finished_by_the_other_and_it_catches_up(cluster: Cluster, weights: Path):
    assert cluster.publish(weights / "v1")[1]["success"]
    expected = [generate(cluster.urls[1], [*PROMPT, 2 + i], **LONG)["output_ids"] for i in range(2)]
    # Affinity by header so that the test decides: both go where "here" goes.
    before = [load(u)["num_running"] for u in cluster.urls]
    assert before == [0, 0]

    def ask(i: int) -> list[int]:
        body = {"input_ids": [*PROMPT, 2 + i], "sampling_params": LONG}
        status, answer = call(cluster.router, "/generate", body, **{"X-Affinity": "here"})
        assert status == 200, answer
        return answer["output_ids"]

    asked = [Background(lambda i=i: ask(i)) for i in range(2)]
    wait_until(lambda: max(load(u)["num_running"] for u in cluster.urls) == 2, "both requests running")
    victim = next(i for i, u in enumerate(cluster.urls) if load(u)["num_running"] == 2)
    cluster.processes[victim].kill()
    assert [a.result() for a in asked] == expected
    cluster.wait_alive(1)
    # A version published meanwhile is what the restarted server must serve from its first request on.
    status, answer = cluster.publish(weights / "v2")
    assert (status, answer["success"], list(answer["servers"].values())) == (200, True, ["0:2"])
    cluster.restart(victim)
    cluster.wait_alive(2)
    assert call(cluster.urls[victim], "/health")[1]["weight_version"] == "0:2"
    assert {s["weight_version"] for s in cluster.info()["servers"].values()} == {"0:2"}


def test_publish_changes_all_servers_while_requests_run(cluster: Cluster, weights: Path):
    asked = [Background(lambda i=i: generate(cluster.router, [*PROMPT, 9, i + 2], **LONG)) for i in range(4)]
    wait_until(lambda: sum(load(u)["num_running"] for u in cluster.urls) == 4, "requests on the servers")
    wait_until(lambda: all(load(u)["num_running"] > 0 for u in cluster.urls), "both servers busy")
    status, answer = cluster.publish(weights / "v3")
    assert (status, answer["servers"]) == (200, dict.fromkeys(cluster.urls, "0:3"))
    assert 0 < answer["update_s"] <= answer["pause_s"] < 10
    for background in asked:
        spans = background.result()["meta_info"]["weight_versions"]
        assert [s["version"] for s in spans][-1] == "0:3"
        assert spans[-1]["end"] == 900
    assert cluster.info()["weight_version"] == "0:3"
    assert not any(load(u)["num_waiting"] for u in cluster.urls)


def test_torn_or_misnamed_weights_are_refused_and_nothing_changes(cluster: Cluster, weights: Path, tmp_path: Path):
    before = cluster.info()["weight_version"]
    torn = tmp_path / "torn"
    shutil.copytree(weights / "v4", torn)
    manifest = verify(torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-1])
    assert cluster.publish(torn, manifest)[0] == 400
    other = VersionManifest("0:9", manifest.digest, {})
    assert cluster.publish(weights / "v4", other)[0] == 400
    assert cluster.publish(weights / "v4", VersionManifest("0:4", "0" * 64, {}))[0] == 400
    save_tiny_model(tmp_path / "wide", vocab_size=400)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    wide = write_version(tmp_path / "sealed", tensors, "0:8")
    status, answer = cluster.publish(tmp_path / "sealed", wide)
    assert (status, answer["success"], answer["servers"]) == (500, False, {})
    assert "old version keeps serving" in answer["message"]
    assert call(cluster.router, "/publish", {"model_path": "x"})[0] == 400
    assert cluster.info()["weight_version"] == before
    assert generate(cluster.router, PROMPT, max_new_tokens=3)["meta_info"]["weight_version"] == before


def test_control_requests_reach_every_server(cluster: Cluster):
    asked = [Background(lambda i=i: generate(cluster.router, [*PROMPT, 8, i + 2], **LONG)) for i in range(2)]
    wait_until(lambda: sum(load(u)["num_running"] for u in cluster.urls) == 2, "requests on the servers")
    assert call(cluster.router, "/flush_cache", {})[0] == 400
    assert call(cluster.router, "/pause_generation", {"mode": "never"})[0] == 400
    assert call(cluster.router, "/pause_generation", {})[0] == 200
    assert {a.result()["meta_info"]["finish_reason"]["type"] for a in asked} == {"abort"}
    assert all(call(u, "/get_server_info")[1]["paused"] for u in cluster.urls)
    waiting = Background(lambda: generate(cluster.router, PROMPT, max_new_tokens=3, ignore_eos=True))
    wait_until(lambda: sum(load(u)["num_waiting"] for u in cluster.urls) == 1, "a waiting request")
    assert call(cluster.router, "/continue_generation", {})[0] == 200
    assert len(waiting.result()["output_ids"]) == 3
    assert call(cluster.router, "/abort_request", {"abort_all": True})[0] == 200
    assert call(cluster.router, "/flush_cache", {})[0] == 200


def test_a_router_that_restarts_knows_the_current_version(cluster: Cluster, weights: Path, tmp_path: Path):
    state = tmp_path / "current.json"
    manifest = verify(weights / "v4")
    state.write_text(
        json.dumps({"model_path": str(weights / "v4"), "weight_version": "0:4", "digest": manifest.digest})
    )
    with router_process(cluster.urls, "--state-file", str(state)) as (_, url):
        assert call(url, "/get_server_info")[1]["weight_version"] == "0:4"
        assert [call(u, "/health")[1]["weight_version"] for u in cluster.urls] == ["0:4", "0:4"]
    assert recall(state, 0) is not None
    assert recall(state, 1) is None


def test_without_a_live_server_requests_get_a_named_refusal(tmp_path: Path):
    process = Process("areal_dta.rollout.router", "--servers", "http://127.0.0.1:9", "--port", "0", "--wait-s", "0.3")
    try:
        url = process.ready()
        status, answer = call(url, "/generate", {"input_ids": [2]})
        assert status == 503
        assert "http://127.0.0.1:9" in answer["error"]["message"]
        assert call(url, "/health")[1]["alive"] == 0
    finally:
        process.kill()


def test_affinity_prefers_the_known_server_until_it_is_overloaded():
    affinity = Affinity(spill_above=4)
    ids = list(range(5 * PREFIX_BLOCK))
    first = affinity.pick(request_keys(None, {"input_ids": ids[: 2 * PREFIX_BLOCK + 3]}), {"a": 0, "b": 0})
    other = "b" if first == "a" else "a"
    longer = request_keys(None, {"input_ids": ids})
    assert affinity.pick(longer, {first: 4, other: 0}) == first
    assert affinity.pick(longer, {first: 5, other: 0}) == other
    assert affinity.pick(longer, {first: 0, other: 0}) == other  # it has moved
    assert affinity.pick(longer, {first: 3}) == first
    named = request_keys("conversation", None)
    assert len({affinity.pick(named, {"a": 0, "b": 0}) for _ in range(6)}) == 1


def test_unknown_requests_spread_over_idle_servers():
    affinity = Affinity()
    load = {"a": 0, "b": 0, "c": 2}
    assert {affinity.pick(request_keys(f"r{i}", None), load) for i in range(6)} == {"a", "b"}


def test_what_a_request_says_about_itself_is_read_without_trusting_it():
    assert request_keys("x", {"rid": "y"}).name == "x"
    assert request_keys("", {"rid": "y"}).name == "y"
    for body in ({}, {"rid": 3}, {"input_ids": 7}, {"input_ids": [[]]}, {"input_ids": [[{}]]}, {"messages": [1]}):
        assert request_keys(None, body).name is None
    same = [request_keys(None, {"messages": [{"role": "system"}, {"role": "user"}, extra]}) for extra in ({}, {"x": 1})]
    assert same[0] == same[1]


def test_affinity_forgets_the_oldest():
    affinity = Affinity(max_entries=2)
    for name in ("a", "b", "c"):
        affinity.pick(request_keys(name, None), {"s": 0})
    assert len(affinity._where) == 2

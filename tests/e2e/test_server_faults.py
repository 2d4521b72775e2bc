"""Real servers and a real router when a server dies in the middle of something, and what cannot be loaded or read.

Elsewhere: bodies that are nonsense (tests/unit/server_nonsense.py), a death during decoding and torn weights behind the
router (tests/unit/test_router.py), dying streams and overload (tests/unit/test_router_faults.py), senders that break
off (tests/unit/test_server_group.py). Not covered: a machine that vanishes without closing its connections.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load_file

from areal_dta.weights import VersionManifest, seal_version, write_version
from tests.unit.server_kit import Background, Process, call, generate, load, router_process, server_process, wait_until
from tests.unit.server_nonsense import BAD
from tests.unit.tiny_models import save_tiny_model

BOUND_S = 25.0  # a client hears within this time, whatever died
LONG_PROMPT = [2 + i % 300 for i in range(3000)]
PROMPT = LONG_PROMPT[:60]
OPTIONS = ("--dtype", "float64", "--max-prefill-tokens", "16")  # a long prompt is hundreds of steps
SIZES = {"max_position_embeddings": 4096, "vocab_size": 100_000}  # weights that take a moment to read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def new(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VersionManifest]:
    root = tmp_path_factory.mktemp("weights")
    save_tiny_model(root / "seed", seed=1, **SIZES)
    return root / "v1", write_version(
        root / "v1", load_file(root / "seed" / "model.safetensors"), "0:1", template=model
    )


class Cluster:
    """Two servers behind a router; a killed one can be started again on its port."""

    def __init__(self, model: Path, servers: list[tuple[Process, str]], router: str) -> None:
        self._model = model
        self.processes = [process for process, _ in servers]
        self.urls = [url for _, url in servers]
        self.router = router

    def revive(self) -> None:
        """Start what is dead again and wait until the router uses it."""
        for index, process in enumerate(self.processes):
            if process.child.poll() is not None:
                port = str(urlsplit(self.urls[index]).port)
                options = ("--model", str(self._model), "--port", port, *OPTIONS)
                self.processes[index] = Process("areal_dta.rollout.server", *options)
        wait_until(lambda: call(self.router, "/health")[1]["alive"] == 2, "both servers alive", 60.0)

    def busy(self, condition: Callable[[dict[str, Any]], bool]) -> int:
        """Index of the server whose load fulfils ``condition``, once there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [i for i, url in enumerate(self.urls) if condition(load(url))]
            return bool(found)

        wait_until(look, "a server at work")
        return found[0]


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[Cluster]:
    with server_process(model, *OPTIONS) as first, server_process(model, *OPTIONS) as second:
        with router_process([first[1], second[1]], "--wait-s", "3") as (_, url):
            cluster = Cluster(model, [first, second], url)
            yield cluster
            for process in cluster.processes:
                process.kill()


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    started.revive()
    return started


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.monotonic()
    result = function()
    return time.monotonic() - began_s, result


def test_a_server_that_dies_during_prefill_is_replaced(cluster: Cluster):
    before = [load(url)["generated_tokens"] for url in cluster.urls]
    asked = Background(lambda: timed(lambda: generate(cluster.router, LONG_PROMPT, max_new_tokens=3, temperature=0.0)))
    victim = cluster.busy(lambda found: found["num_running"] == 1)
    assert load(cluster.urls[victim])["generated_tokens"] == before[victim]  # not a token yet
    cluster.processes[victim].kill()
    took_s, answer = asked.result()
    assert took_s < BOUND_S
    survivor = cluster.urls[1 - victim]
    assert generate(survivor, LONG_PROMPT, max_new_tokens=3, temperature=0.0)["output_ids"] == answer["output_ids"]


def test_a_stream_whose_server_dies_during_decoding_ends_with_an_error(cluster: Cluster):
    before = [load(url)["generated_tokens"] for url in cluster.urls]
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    request = urllib.request.Request(
        cluster.router + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        assert json.loads(answer.readline().removeprefix(b"data: "))["output_ids"]
        victim = cluster.busy(lambda found: found["num_running"] == 1)
        assert load(cluster.urls[victim])["generated_tokens"] > before[victim]
        cluster.processes[victim].kill()
        took_s, rest = timed(answer.read)
    assert took_s < BOUND_S
    events = [event.strip().removeprefix(b"data: ") for event in rest.split(b"\n\n") if event.strip()]
    assert events[-1] == b"[DONE]"
    assert "the stream broke off" in json.loads(events[-2])["error"]["message"]


def test_a_server_that_dies_during_an_update_is_left_behind_and_catches_up(
    cluster: Cluster, new: tuple[Path, VersionManifest]
):
    folder, manifest = new
    asked = [
        Background(lambda i=i: generate(cluster.router, [*PROMPT, i + 2], max_new_tokens=60, ignore_eos=True))
        for i in range(4)
    ]
    wait_until(lambda: all(load(url)["num_running"] for url in cluster.urls), "both servers busy")
    body = {"model_path": str(folder), "weight_version": "0:1", "digest": manifest.digest}
    publishing = Background(lambda: timed(lambda: call(cluster.router, "/publish", body)))
    wait_until(lambda: call(cluster.urls[0], "/get_server_info")[1]["paused"], "the update")
    cluster.processes[0].kill()
    took_s, (status, answer) = publishing.result()
    assert took_s < BOUND_S
    assert (status, answer["success"], answer["servers"]) == (200, True, {cluster.urls[1]: "0:1"})
    assert cluster.urls[0] in answer["message"]
    for background in asked:
        meta = background.result()["meta_info"]
        assert meta["weight_version"] == "0:1"
        assert meta["completion_tokens"] == 60
    cluster.revive()
    infos = [call(url, "/get_model_info")[1] for url in cluster.urls]
    assert [(i["weight_version"], i["weights_digest"]) for i in infos] == [("0:1", manifest.digest)] * 2


def test_what_a_server_refuses_is_passed_on_and_asked_of_no_other(cluster: Cluster):
    def retries() -> str:
        with urllib.request.urlopen(cluster.router + "/metrics", timeout=BOUND_S) as answer:
            return next(line for line in answer.read().decode().splitlines() if "router_retries_total " in line)

    before = retries()
    for body, status, message in BAD[:12]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        got, answer = call(cluster.router, "/generate", raw=raw)
        assert (got, answer["error"]["code"]) == (status, status)
        assert message in answer["error"]["message"]
    got, answer = call(cluster.router, "/generate", {"input_ids": [2] * 4096})
    assert got == 400 and "the prompt has 4096 tokens" in answer["error"]["message"]
    assert retries() == before


def test_a_router_with_a_key_lets_nobody_else_in_and_refuses_huge_bodies(cluster: Cluster):
    with router_process(cluster.urls, "--api-key", "secret") as (_, url):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert call(url, "/generate", {"input_ids": [2]}, **headers)[0] == 401
            assert call(url, "/publish", {"model_path": "x"}, **headers)[0] == 401
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=BOUND_S) as sock:
            head = "POST /generate HTTP/1.1", "Host: x", "Authorization: Bearer secret", "Content-Length: 99000000"
            sock.sendall("".join(f"{line}\r\n" for line in [*head, ""]).encode())
            try:
                for _ in range(70):
                    sock.sendall(b" " * (1 << 20))
            except OSError:
                pass  # closed on us: refused as well
            else:
                assert b" 413 " in sock.recv(1000)
        assert call(url, "/health")[0] == 200


def test_with_every_server_dead_a_request_ends_in_a_named_error(cluster: Cluster):
    asked = Background(
        lambda: timed(
            lambda: call(
                cluster.router, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4000}}
            )
        )
    )
    cluster.busy(lambda found: found["num_running"] == 1)
    for process in cluster.processes:
        process.kill()
    took_s, (status, answer) = asked.result()
    assert took_s < BOUND_S
    assert status == 503
    assert all(url in answer["error"]["message"] for url in cluster.urls)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    missing(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def broken_manifest(folder: Path) -> None:
    (folder / "version.json").write_text('{"weight_version": "0:1"')


def another_shard(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")


def seal(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The damage under a manifest that fits it: nothing but reading the weights can tell."""

    def apply(folder: Path) -> None:
        damage(folder)
        seal_version(folder, "0:1")

    apply.__name__ = f"sealed_{damage.__name__}"
    return apply


DAMAGES = [cut, empty, no_header, missing, pickled, broken_manifest, another_shard]
DAMAGES += [seal(d) for d in (cut, empty, no_header, another_shard)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of small weights, and a sealed folder of others."""
    root = tmp_path_factory.mktemp("small")
    save_tiny_model(root / "model")
    save_tiny_model(root / "other", seed=1)
    tensors = load_file(root / "other" / "model.safetensors")
    write_version(root / "sealed", tensors, "0:1", template=root / "model")
    with server_process(root / "model") as (_, url):
        yield url, root / "sealed"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_torn_weights_are_refused_and_the_old_ones_serve(
    damage: Callable[[Path], None], small: tuple[str, Path], tmp_path: Path
):
    url, sealed = small
    before = generate(url, PROMPT, max_new_tokens=5, temperature=0.0)
    folder = tmp_path / "torn"
    shutil.copytree(sealed, folder)
    damage(folder)
    running = Background(lambda: generate(url, PROMPT, max_new_tokens=200, ignore_eos=True, sampling_seed=1))
    status, answer = call(url, "/update_weights_from_disk", {"model_path": str(folder)})
    assert (status, answer["success"]) == (400, False), answer
    assert "keeps serving" in answer["message"]
    assert len(running.result()["meta_info"]["weight_versions"]) == 1
    after = generate(url, PROMPT, max_new_tokens=5, temperature=0.0)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == before["meta_info"]["weight_version"]
    assert call(url, "/get_model_info")[1]["weights_digest"] is None  # of the folder it started from, which has none

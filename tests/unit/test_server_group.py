"""Weights over a process group: whole updates are used, everything else leaves the old version serving.

Not covered: nccl, more than one receiver, a network that stalls for minutes.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from areal_dta.rollout.server.weight_group import GroupSpec, Staging, UpdateRefused, WeightGroup
from tests.unit.server_kit import Background, call, generate, load, server_process, wait_until
from tests.unit.tiny_models import save_tiny_model

PROMPT = list(range(2, 60))
TIMEOUT_S = 20.0
Tensors = dict[str, torch.Tensor]
Send = Callable[..., tuple[int, dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> list[Tensors]:
    """Three other sets of weights."""
    folders = [tmp_path_factory.mktemp(f"seed{seed}") for seed in (1, 2, 3)]
    for seed, folder in enumerate(folders, start=1):
        save_tiny_model(folder, seed=seed)
    return [load_file(folder / "model.safetensors") for folder in folders]


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with server_process(model) as (_, url):
        yield url


def join(url: str, name: str, timeout_s: float = TIMEOUT_S) -> WeightGroup:
    """This process as the sender, the server as rank 1."""
    spec = GroupSpec(name, "127.0.0.1", free_port(), 0, 2, timeout_s=timeout_s)
    body = {"master_address": spec.master_address, "master_port": str(spec.master_port), "rank_offset": 1}
    body |= {"world_size": 2, "group_name": name, "backend": "gloo", "timeout_s": timeout_s}
    answer = Background(lambda: call(url, "/init_weights_update_group", body))
    group = WeightGroup(spec)
    assert answer.result()[1]["success"]
    return group


@pytest.fixture(scope="module")
def send(url: str) -> Iterator[Send]:
    group = join(url, "weights")

    def send(tensors: Mapping[str, torch.Tensor], **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype) for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": "weights",
            **fields,
        }
        answer = Background(lambda: call(url, "/update_weights_from_distributed", body))
        group.send(tensors)
        return answer.result()

    yield send
    group.close()


def served(url: str) -> tuple[str, list[int]]:
    answer = generate(url, PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return answer["meta_info"]["weight_version"], answer["output_ids"]


def in_parts(tensors: Tensors, count: int) -> list[Tensors]:
    items = list(tensors.items())
    size = -(-len(items) // count)
    return [dict(items[i : i + size]) for i in range(0, len(items), size)]


def test_a_whole_model_in_one_call_is_what_the_disk_would_give(
    url: str, send: Send, new: list[Tensors], tmp_path: Path
):
    status, answer = send(new[0], weight_version="0:1")
    assert (status, answer["success"], answer["weight_version"]) == (200, True, "0:1")
    version, tokens = served(url)
    assert version == "0:1"
    save_tiny_model(tmp_path, seed=1)
    with server_process(tmp_path) as (_, other):
        assert served(other)[1] == tokens


def test_an_update_in_parts_takes_effect_with_its_last_one(url: str, send: Send, new: list[Tensors]):
    before = served(url)
    parts = in_parts(new[1], 3)
    for part in parts[:-1]:
        answer = send(part)[1]
        assert (answer["success"], answer.get("weight_version")) == (True, None)
        assert served(url) == before
    version = send(parts[-1])[1]["weight_version"]
    assert version.startswith("sha256:")
    assert served(url)[0] == version
    # Torn after two parts; the next update must be used alone.
    for part in in_parts(new[0], 3)[:2]:
        send(part)
    answer = [send(part)[1] for part in parts]
    assert "was dropped" in answer[0]["message"]
    assert answer[-1]["weight_version"] == version


def test_between_begin_and_end_all_or_nothing(url: str, send: Send, new: list[Tensors]):
    before = served(url)
    parts = in_parts(new[2], 2)
    assert call(url, "/begin_weight_update", {"selector": "draft"})[0] == 400
    assert call(url, "/end_weight_update", {})[0] == 400
    call(url, "/begin_weight_update", {"selector": "target"})
    send(parts[1])
    status, answer = call(url, "/end_weight_update", {})
    assert (status, answer["success"]) == (400, False)
    assert "missing" in answer["message"]
    assert served(url) == before
    call(url, "/begin_weight_update", {"selector": "all"})
    send(parts[1])
    assert call(url, "/update_weights_from_disk", {"model_path": "x"})[0] == 400
    send(parts[0])
    assert served(url) == before
    assert call(url, "/end_weight_update", {"weight_version": "0:3"})[1]["weight_version"] == "0:3"
    assert served(url)[0] == "0:3"
    assert served(url)[1] != before[1]


@pytest.mark.parametrize("explicit", [False, True], ids=["bare", "begin-end"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("shape", "has shape (7, 3)"), ("name", "unknown 'model.extra'"), ("nan", "holds NaN"), ("twice", "came twice")],
)
def test_a_wrong_update_is_refused_whole(
    fault: str, reason: str, explicit: bool, url: str, send: Send, new: list[Tensors]
):
    before = served(url)
    bad = dict(new[1])
    last = list(bad)[-1]
    if fault == "shape":
        bad[last] = torch.zeros(7, 3)
    elif fault == "name":
        bad["model.extra"] = torch.zeros(3)
    elif fault == "nan":
        bad[last] = torch.full_like(bad[last], float("nan"))
    if explicit:
        call(url, "/begin_weight_update", {})
    first, middle, rest = in_parts(bad, 3)
    answers = [send(part) for part in (first, middle, *([middle] if fault == "twice" else []), rest)]
    if explicit:
        answers.append(call(url, "/end_weight_update", {}))
    assert answers[-1][0] == 400
    assert "keeps serving" in answers[-1][1]["message"]
    assert any(reason in answer["message"] for _, answer in answers)
    assert served(url) == before
    # The rest of a refused update does not become part of the next.
    if not explicit:
        assert send(rest)[0] == 400
    assert send(new[2], weight_version="0:9")[1]["weight_version"] == "0:9"


@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_running_requests_are_recomputed_kept_or_aborted(running: str, url: str, send: Send, new: list[Tensors]):
    old = served(url)[0]
    sampling = {"max_new_tokens": 700, "ignore_eos": True, "sampling_seed": 2}
    begun = Background(lambda: generate(url, PROMPT, **sampling)["meta_info"])
    wait_until(lambda: load(url)["num_running"] == 1, "a running request")
    retractions = load(url)["retractions"]
    assert send(new[0], weight_version=f"1:{running}", running=running)[1]["num_paused_requests"] == 1
    meta = begun.result()
    assert load(url)["retractions"] - retractions == (1 if running == "recompute" else 0)
    versions = [s["version"] for s in meta["weight_versions"]]
    assert versions == ([old] if running == "abort" else [old, f"1:{running}"])
    assert meta["finish_reason"]["type"] == ("abort" if running == "abort" else "length")
    assert served(url)[0] == f"1:{running}"


def test_a_sender_that_breaks_off_leaves_the_old_version_and_can_come_again(url: str, new: list[Tensors]):
    before = served(url)
    group = join(url, "torn", timeout_s=3.0)
    names = list(new[0])
    body = {"names": names, "dtypes": ["float32"] * len(names), "group_name": "torn"}
    body["shapes"] = [list(t.shape) for t in new[0].values()]
    answer = Background(lambda: call(url, "/update_weights_from_distributed", body))
    group.send({names[0]: new[0][names[0]]})
    group.close()
    status, refused = answer.result()
    assert (status, refused["success"]) == (400, False)
    assert "broke off" in refused["message"]
    assert served(url) == before
    assert "not known" in call(url, "/update_weights_from_distributed", body)[1]["error"]["message"]
    again = join(url, "torn")
    answer = Background(lambda: call(url, "/update_weights_from_distributed", {**body, "weight_version": "2:0"}))
    again.send(new[0])
    assert answer.result()[1]["weight_version"] == "2:0"
    again.close()
    assert call(url, "/destroy_weights_update_group", {"group_name": "torn"})[1]["success"]


def test_nonsense_is_refused_with_its_field(url: str):
    group = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    update = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
    for path, body, reason in (
        ("/init_weights_update_group", {**group, "backend": "nccl"}, "backend='nccl'"),
        ("/init_weights_update_group", {**group, "world_size": 1}, "world_size=1"),
        ("/init_weights_update_group", {**group, "rank_offset": 2}, "rank_offset=2"),
        ("/init_weights_update_group", {**group, "master_port": "x"}, "master_port"),
        ("/init_weights_update_group", {**group, "rank": 2}, "unknown field body.rank"),
        ("/update_weights_from_distributed", {**update, "group_name": "none"}, "group_name='none' is not known"),
        ("/update_weights_from_distributed", {**update, "dtypes": ["int4"]}, "dtypes[0]='int4'"),
        ("/update_weights_from_distributed", {**update, "shapes": []}, "send one of each"),
        ("/update_weights_from_distributed", {**update, "shapes": [[-1]]}, "shapes[0]=-1"),
        ("/update_weights_from_distributed", {**update, "running": "stop"}, "running='stop'"),
        ("/end_weight_update", {}, "no update is under way"),
    ):
        status, answer = call(url, path, body)
        assert status == 400, (path, body)
        assert reason in answer["error"]["message"]
    status, answer = call(url, "/init_weights_update_group", {**group, "timeout_s": 0.5})
    assert (status, answer["success"]) == (400, False)
    assert "cannot join" in answer["message"]


def test_the_rest_of_a_torn_update_is_not_mixed_into_another():
    old, new = ({n: torch.full((1,), float(v)) for n in "abc"} for v in (1, 2))
    staging = Staging()
    staging.add({"a": old["a"]}, None)
    with pytest.raises(UpdateRefused, match="came twice"):
        staging.add({"b": old["b"]}, None) or staging.add({"b": old["b"]}, None)
    with pytest.raises(UpdateRefused, match="continues an update"):
        staging.add({"c": old["c"]}, None)
    staging.add({"a": new["a"], "b": new["b"]}, "v2")
    with pytest.raises(UpdateRefused, match="versions v2 and v3"):
        staging.add({"c": new["c"]}, "v3")
    assert staging.tensors == {}


def test_a_transfer_ends_although_its_caller_hung_up_and_the_next_one_waits_for_it(url: str, new: list[Tensors]):
    group = join(url, "left", timeout_s=TIMEOUT_S)
    body = {"names": list(new[1]), "dtypes": ["float32"] * len(new[1]), "group_name": "left"}
    body["shapes"] = [list(t.shape) for t in new[1].values()]
    caller = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    caller.request("POST", "/update_weights_from_distributed", json.dumps({**body, "weight_version": "3:0"}))
    load(url)  # answered after the server has begun to receive
    caller.close()
    load(url)
    fields = {**body, "weight_version": "3:1"}
    answer = Background(lambda: call(url, "/update_weights_from_distributed", fields))
    group.send(new[1])
    wait_until(lambda: served(url)[0] == "3:0", "the transfer without a caller")
    group.send(new[2])
    assert answer.result()[1]["weight_version"] == "3:1"
    group.close()

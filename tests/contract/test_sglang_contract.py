"""What clients rely on, asked of the embedded server always, and of a real SGLang where one is installed.

``AREAL_DTA_SGLANG_PYTHON`` names the interpreter of an environment that holds SGLang (0.5.10.post1 and 0.5.23 are the
releases that `sglang_contract` was read from); ``pytest -m sglang tests/contract/test_sglang_contract.py`` then starts
it on the CPU with the toy model, which takes minutes. Not covered: speculation, LoRA, several GPUs, memory release.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_dta.rollout.server.weight_group import GroupSpec, WeightGroup
from areal_dta.rollout.sglang_contract import Contract, contract_of_info
from areal_dta.weights import write_version
from tests.unit import server_kit
from tests.unit.server_kit import Background, add_byte_tokenizer, call, server_process, wait_until
from tests.unit.tiny_models import save_tiny_model

PYTHON_VARIABLE = "AREAL_DTA_SGLANG_PYTHON"
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 240.0
PROMPT = list(range(2, 60))
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
    "--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "8192", "--random-seed", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server under test; ``num_long`` tokens take it a second or more."""

    url: str
    contract: Contract
    num_long: int

    def generate(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "ignore_eos": True, **fields.pop("sampling", {})}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **fields}
        status, answer = call(self.url, "/generate", body)
        assert status == 200, answer
        return answer

    def long(self, rid: str) -> Background:
        """A long generation that has begun."""
        body = [*PROMPT, 2 + len(rid)]
        begun = Background(lambda: self.generate(body, sampling={"max_new_tokens": self.num_long}, rid=rid))
        wait_until(lambda: self.num_running() > 0, "a running request", CALL_TIMEOUT_S)
        return begun

    def num_running(self) -> int:
        info = call(self.url, "/server_info")[1]["internal_states"][0]
        if "num_running" in info:
            return int(info["num_running"])
        with urllib.request.urlopen(self.url + "/v1/loads", timeout=30) as answer:
            return sum(int(load.get("num_running_reqs", 0)) for load in json.load(answer)["loads"])

    def version(self) -> str:
        return str(call(self.url, "/get_model_info")[1]["weight_version"])

    def control(self, path: str, **body: Any) -> dict[str, Any]:
        """A control request that must succeed; some answers of SGLang are plain text."""
        raw = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(raw, timeout=CALL_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else {}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def sglang_process(python: str, model: Path, log: Path) -> Iterator[str]:
    """A real SGLang on the CPU, started as a run starts it."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "areal_dta.rollout.sglang", python, "-m", "sglang.launch_server"]
    command += ["--model-path", str(model), "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1], *CPU_FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: answers(url, process, log), "a healthy SGLang", START_TIMEOUT_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    add_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "embedded":
        with server_process(model, "--dtype", "float64") as (_, url):
            yield Served(url, contract_of_info(call(url, "/server_info")[1]), 600)
        return
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        pytest.skip(f"{PYTHON_VARIABLE} names no interpreter with SGLang")
    patch = pytest.MonkeyPatch()
    patch.setattr(server_kit, "CALL_TIMEOUT_S", CALL_TIMEOUT_S)
    with sglang_process(python, model, tmp_path_factory.mktemp("log") / "sglang.log") as url:
        yield Served(url, contract_of_info(call(url, "/server_info")[1]), 60)
    patch.undo()


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sealed folders of other weights, as versions 0:1 and 0:2."""
    root = tmp_path_factory.mktemp("weights")
    for number in (1, 2):
        save_tiny_model(root / f"seed{number}", seed=number)
        tensors = {k: v.numpy() for k, v in load_file(root / f"seed{number}" / "model.safetensors").items()}
        write_version(root / f"v{number}", tensors, f"0:{number}", template=model)
    return [root / "v1", root / "v2"]


def test_it_says_what_it_is(served: Served):
    assert call(served.url, "/get_model_info")[1]["is_generation"] is True
    assert served.contract.name.startswith(("the embedded server", "SGLang 0."))
    assert call(served.url, "/v1/models")[1]["data"][0]["id"]
    for path in ("/health", "/health_generate"):
        with urllib.request.urlopen(served.url + path, timeout=CALL_TIMEOUT_S) as answer:
            assert answer.status == 200


def test_an_answer_names_tokens_logprobs_reason_and_version(served: Served):
    answer = served.generate(PROMPT, sampling={"max_new_tokens": 6})
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["weight_version"] == served.version()
    again = served.generate(PROMPT, sampling={"max_new_tokens": 6})
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["cached_tokens"] > 0


def test_a_batch_is_answered_in_order_and_stop_tokens_end_the_output(served: Served):
    body = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    assert [a["meta_info"]["prompt_tokens"] for a in call(served.url, "/generate", body)[1]] == [2, 3]
    ids = served.generate(PROMPT, sampling={"max_new_tokens": 8})["output_ids"]
    stopped = served.generate(PROMPT, sampling={"max_new_tokens": 8, "ignore_eos": False, "stop_token_ids": [ids[3]]})
    assert stopped["output_ids"][-1] == ids[3]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}


def test_scoring_gives_a_logprob_for_each_prompt_token(served: Served):
    meta = served.generate(PROMPT, sampling={"max_new_tokens": 1}, logprob_start_len=0)["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    assert all(entry[0] < 0 for entry in meta["input_token_logprobs"][1:])


def test_a_stream_grows_to_the_whole_answer(served: Served):
    whole = served.generate(PROMPT, sampling={"max_new_tokens": 8})["output_ids"]
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(served.url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
        lines = [line.removeprefix(b"data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    outputs = [json.loads(line)["output_ids"] for line in lines[:-1]]
    assert outputs[-1] == whole
    assert all(later[: len(sooner)] == sooner for sooner, later in itertools.pairwise(outputs))


def test_an_abort_answers_with_what_there_is(served: Served):
    begun = served.long("one")
    served.control("/abort_request", rid="one")
    answer = begun.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < served.num_long


def test_pausing_with_abort_answers_and_holds_later_requests(served: Served):
    begun = served.long("two")
    served.control("/pause_generation", mode="abort")
    assert begun.result()["meta_info"]["finish_reason"]["type"] == "abort"
    held = Background(lambda: served.generate(PROMPT, sampling={"max_new_tokens": 2}))
    served.control("/pause_generation", mode="in_place")  # AReaL's client pauses twice
    held.join(0.5)
    assert held.is_alive()
    served.control("/continue_generation")
    assert len(held.result()["output_ids"]) == 2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_that_keeps_requests_changes_no_token(mode: str, served: Served):
    begun = served.long(mode)
    served.control("/pause_generation", mode=mode)
    served.control("/continue_generation")
    whole = served.generate([*PROMPT, 2 + len(mode)], sampling={"max_new_tokens": served.num_long})["output_ids"]
    assert begun.result()["output_ids"] == whole


def test_the_cache_is_flushed_when_nothing_runs(served: Served):
    begun = served.long("four")
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.control("/flush_cache")
    assert refused.value.code == 400
    served.control("/abort_request", abort_all=True)
    begun.result()
    wait_until(lambda: served.num_running() == 0, "an idle server", CALL_TIMEOUT_S)
    served.control("/flush_cache")
    assert served.generate(PROMPT, sampling={"max_new_tokens": 1})["meta_info"]["cached_tokens"] == 0


def test_weights_from_disk_serve_running_requests_as_the_contract_says(served: Served, versions: list[Path]):
    old = served.version()
    begun = served.long("five!")
    served.control("/pause_generation", mode=served.contract.update_pause)
    body = {"model_path": str(versions[0]), "weight_version": "0:1", "flush_cache": True}
    assert served.control("/update_weights_from_disk", **body)["success"]
    served.control("/continue_generation")
    answer = begun.result()
    assert served.version() == "0:1"
    if served.contract.flush_under_retracted:
        assert len(answer["output_ids"]) == served.num_long
    else:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["weight_version"] == old
    if served.contract.version_spans and served.contract.flush_under_retracted:
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == [old, "0:1"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, served.num_long)
    assert served.generate(PROMPT, sampling={"max_new_tokens": 1})["meta_info"]["weight_version"] == "0:1"


def test_a_folder_that_cannot_be_used_leaves_the_old_weights(served: Served, tmp_path: Path):
    before = served.version(), served.generate(PROMPT, sampling={"max_new_tokens": 6})["output_ids"]
    body = {"model_path": str(tmp_path / "missing"), "weight_version": "0:9"}
    status, answer = call(served.url, "/update_weights_from_disk", body)
    assert (status, answer["success"]) == (400, False)
    assert (served.version(), served.generate(PROMPT, sampling={"max_new_tokens": 6})["output_ids"]) == before


def test_weights_over_a_group_become_the_policy(served: Served, versions: list[Path]):
    tensors = load_file(versions[1] / "model.safetensors")
    served.control("/update_weights_from_disk", model_path=str(versions[1]), weight_version="0:2")
    expected = served.generate(PROMPT, sampling={"max_new_tokens": 6})["output_ids"]
    served.control("/update_weights_from_disk", model_path=str(versions[0]), weight_version="0:1")
    assert served.generate(PROMPT, sampling={"max_new_tokens": 6})["output_ids"] != expected
    group = join(served)
    if served.contract.update_sessions or served.contract.optional_sessions:
        served.control("/begin_weight_update", selector="target")
    body = describe(tensors) | {"group_name": "contract", "flush_cache": True, "weight_version": "0:3"}
    taking = Background(lambda: served.control("/update_weights_from_distributed", **body))
    group.send(tensors)
    assert taking.result()["success"]
    if served.contract.update_sessions or served.contract.optional_sessions:
        served.control("/end_weight_update")
    assert served.generate(PROMPT, sampling={"max_new_tokens": 6})["output_ids"] == expected
    assert served.version() == "0:3"
    served.control("/destroy_weights_update_group", group_name="contract")
    group.close()


def join(served: Served) -> WeightGroup:
    """This process as the sender, the server as rank 1."""
    spec = GroupSpec("contract", "127.0.0.1", free_port(), 0, 2, timeout_s=CALL_TIMEOUT_S)
    body = {"master_address": spec.master_address, "master_port": spec.master_port, "rank_offset": 1}
    body |= {"world_size": 2, "group_name": spec.name, "backend": "gloo"}
    joining = Background(lambda: served.control("/init_weights_update_group", **body))
    group = WeightGroup(spec)
    assert joining.result()["success"]
    return group


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    values = tensors.values()
    return {
        "names": list(tensors),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in values],
        "shapes": [list(t.shape) for t in values],
    }


def test_chat_reports_logprobs_and_token_ids_where_it_can(served: Served):
    body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    body |= {"temperature": 0, "logprobs": True}
    if served.contract.chat_token_ids:
        body["return_token_ids"] = True
    status, answer = call(served.url, "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    num_tokens = answer["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == num_tokens
    if served.contract.chat_token_ids:
        assert len(choice["token_ids"]) == num_tokens
        assert len(answer.get("prompt_token_ids") or choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'{"input_ids": "abc"}'])
def test_nonsense_gets_a_4xx(raw: bytes, served: Served):
    request = urllib.request.Request(served.url + "/generate", raw, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S)
    assert 400 <= refused.value.code < 500


def test_a_prompt_longer_than_the_context_is_refused(served: Served):
    body = {"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 2}}
    request = urllib.request.Request(
        served.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S)
    assert refused.value.code == 400
    assert len(served.generate(PROMPT, sampling={"max_new_tokens": 1})["output_ids"]) == 1

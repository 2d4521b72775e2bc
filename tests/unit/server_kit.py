"""Start real server and router processes for tests, and talk to them; plus in-process schedulers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from tests.unit.tiny_models import EOS

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0

CHAT_TEMPLATE = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def add_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 2 special tokens and 256 bytes, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<|im_end|>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}, "<|im_start|>": 258}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<|im_end|>", "<|im_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


class Process:
    """A child process that prints ``READY url``; its stderr is kept for the assertion message."""

    def __init__(self, module: str, *args: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        threading.Thread(target=self._pump, args=(self.child.stdout, self._lines.put), daemon=True).start()
        threading.Thread(target=self._pump, args=(self.child.stderr, self.errors.append), daemon=True).start()

    @staticmethod
    def _pump(stream: Any, put: Callable[[str], None]) -> None:
        for line in stream:
            put(line)

    def ready(self) -> str:
        """The URL it announces; fails with its stderr when it does not in time."""
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise AssertionError(f"not ready: {''.join(self.errors)}") from None
        assert line.startswith("READY "), line
        return line.split()[1]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(10)

    def stop(self) -> int:
        self.child.terminate()
        return self.child.wait(20)


@contextlib.contextmanager
def server_process(model: Path, *args: str) -> Iterator[tuple[Process, str]]:
    """A running server: (process, URL)."""
    process = Process("areal_dta.rollout.server", "--model", str(model), "--port", "0", *args)
    try:
        yield process, process.ready()
    finally:
        process.kill()


@contextlib.contextmanager
def router_process(servers: Sequence[str], *args: str) -> Iterator[tuple[Process, str]]:
    """A running router before ``servers``, once all of them are alive."""
    process = Process("areal_dta.rollout.router", "--servers", ",".join(servers), "--port", "0", *args)
    try:
        url = process.ready()
        wait_until(lambda: call(url, "/health")[1]["alive"] == len(servers), "all servers alive")
        yield process, url
    finally:
        process.kill()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
    """Poll until true; fails naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def call(url: str, path: str, body: Any = None, raw: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """One request (GET without body); (status, parsed JSON)."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def generate(url: str, ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    """A /generate that must succeed."""
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
    status, answer = call(url, "/generate", body)
    assert status == 200, answer
    return answer


class Background(threading.Thread):
    """A call under way on its own thread; ``result()`` waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self) -> Any:
        self.join(CALL_TIMEOUT_S)
        assert not self.is_alive(), "the call has not returned"
        if self._error is not None:
            raise self._error
        return self._outcome


def load(url: str) -> dict[str, Any]:
    return call(url, "/get_server_info")[1]["internal_states"][0]


def make_scheduler(folder: Path, dtype: torch.dtype = torch.float32, **limits: int) -> Scheduler:
    """A scheduler without thread or HTTP."""
    config = DecoderConfig.from_folder(folder)
    return Scheduler(load_decoder(folder, config, dtype), "v0", SchedulerLimits(**limits))


def run_requests(
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int] | None = None,
    logprob_start: int | None = None,
    between_steps: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Generate for all prompts to the end; ``between_steps(step)`` runs after every step."""
    done: dict[int, Completion] = {}
    stop_ids = frozenset() if sampling.ignore_eos else frozenset({EOS})
    for i, prompt in enumerate(prompts):
        request = GenerationRequest(str(i), tuple(prompt), sampling, seeds[i] if seeds else i, logprob_start)

        def finish(seq: ServerSequence, completion: Completion, i: int = i) -> None:
            done[i] = completion

        scheduler.add(ServerSequence(request, len(prompt) + sampling.max_new_tokens, stop_ids, finish))
    step = 0
    while scheduler.has_work:
        scheduler.step()
        if between_steps is not None:
            between_steps(step)
        step += 1
        assert step < 10_000, "the scheduler makes no progress"
    return [done[i] for i in range(len(prompts))]

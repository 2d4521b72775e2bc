"""A server process with a small random model, for benchmarks that go through HTTP, and how to talk to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import aiohttp
import torch
from safetensors.torch import save_file

from areal_dta.nn import DecoderConfig
from areal_dta.nn.loading import expected_shapes
from areal_dta.weights import seal_version
from scripts.benchlib.report import end

__all__ = ["VOCAB_SIZE", "ServerError", "events", "post", "routing", "serving", "write_model"]

VOCAB_SIZE = 2048
START_TIMEOUT_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_SPREAD = 0.05  # standard deviation of the weights


class ServerError(RuntimeError):
    """A server did not start, or answered what it must not; the message has its words."""


def write_model(folder: Path, version: str, seed: int, layers: int = 4, hidden: int = 192) -> dict[str, torch.Tensor]:
    """A sealed Hugging Face folder of random Llama weights; returns its tensors. The same sizes give the same names."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": hidden // 6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e5,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * _SPREAD + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in expected_shapes(DecoderConfig.from_folder(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    seal_version(folder, version)
    return tensors


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[int, str]]:
    """A server of ``model`` on a free port: (process id, URL). It is ended on leaving; raises ServerError."""
    with _process("areal_dta.rollout.server", model.parent / "server.log", "--model", str(model), *options) as started:
        yield started


@contextmanager
def routing(server: str, folder: Path) -> Iterator[tuple[int, str]]:
    """A router before the server at this URL: (process id, URL). ``folder`` keeps its log."""
    with _process("areal_dta.rollout.router", folder / "router.log", "--servers", server) as started:
        yield started


@contextmanager
def _process(module: str, log: Path, *options: str) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", module, "--port", "0", *options]
    with log.open("wb") as errors:
        env = {**os.environ, "PYTHONPATH": str(_ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
    try:
        yield process.pid, _ready(process, log)
    finally:
        end(process)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the process announces, read on a thread of its own so that silence has a limit."""
    lines: Queue[bytes] = Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    try:
        line = lines.get(timeout=START_TIMEOUT_S).decode()
    except Empty:
        line = ""
    if not line.startswith("READY "):
        raise ServerError(f"it ended or was not ready within {START_TIMEOUT_S:g} s: {log.read_text()[-2000:]}")
    return line.split()[1]


def _pump(stream: Any, lines: Queue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")  # it ended


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """(status, answer) of one request."""
    async with session.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream until its end mark; raises ServerError when it ends without one."""
    async for line in answer.content:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise ServerError("a stream ended without [DONE]")

"""``bench.py weights``: how long new weights take to reach a server under load, and how long it stands still for them.

A server process, small random weights, ``--streams`` requests that are streamed all the time. Each path is used
``--updates`` times with each way to treat running requests that it has; medians count:

- ``disk``: ``/update_weights_from_disk`` of a sealed folder;
- ``group``: one ``/update_weights_from_distributed`` with all tensors over gloo, as older clients do;
- ``session``: begin, the tensors in ``--parts`` calls, end;
- ``router``: ``/update_weights_from_disk`` of a router, which pauses the server, updates, verifies and continues.

``latency_ms`` runs from the first request to the last answer, ``pause_ms`` is the longest time around it in which none
of the streams got a token; ``idle_gap_ms`` is the same measure of an equal stretch without an update, in which new
prompts are computed as well. Not measured: nccl, large models, the network.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from areal_dta.rollout.server.weight_group import GroupSpec, WeightGroup
from scripts.benchlib.report import at_least, commit, free_port, progress
from scripts.benchlib.serving import VOCAB_SIZE, ServerError, events, post, routing, serving, write_model

__all__ = ["add_arguments", "parts_of", "pause_s", "run", "summary"]

MODES = ("recompute", "keep", "abort")
GROUP = "bench"
TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=8, help="requests that are streamed all the time")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each")
    parser.add_argument("--new-tokens", type=int, default=512, help="output tokens of each; a new one follows")
    parser.add_argument("--updates", type=int, default=3, help="updates of each path and mode")
    parser.add_argument("--parts", type=int, default=4, help="calls of a session")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192, help="width of the model, a multiple of 12")


def pause_s(arrivals: Sequence[float], began_s: float, ended_s: float) -> float:
    """The longest time without an arrival that overlaps [began, ended]; ``arrivals`` ascending, some before and after.

    Raises ValueError when they do not reach beyond both ends.
    """
    if not arrivals or arrivals[0] > began_s or arrivals[-1] < ended_s:
        raise ValueError(f"{len(arrivals)} arrivals do not span the update from {began_s} to {ended_s}")
    return max(after - before for before, after in itertools.pairwise(arrivals) if after > began_s and before < ended_s)


def parts_of(tensors: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """At most ``count`` consecutive parts of about equal numbers of tensors."""
    items = list(tensors.items())
    size = -(-len(items) // count)
    return [dict(items[lo : lo + size]) for lo in range(0, len(items), size)]


def summary(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians and worst pause of (latency, pause) in seconds."""
    latencies, pauses = zip(*samples, strict=True)
    return {
        "latency_ms": statistics.median(latencies) * 1e3,
        "pause_ms": statistics.median(pauses) * 1e3,
        "worst_pause_ms": max(pauses) * 1e3,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "streams", "prompt", "new_tokens", "updates", "parts", "layers")
    at_least(args, 12, "hidden")
    with tempfile.TemporaryDirectory(prefix="areal-dta-bench-") as root:
        folders = [Path(root) / f"v{i}" for i in range(2)]
        tensors = [write_model(f, f"0:{i}", i, args.layers, args.hidden // 12 * 12) for i, f in enumerate(folders)]
        num_bytes = sum(t.nbytes for t in tensors[0].values())
        with serving(folders[0]) as (_, url), routing(url, Path(root)) as (_, router):
            measured = asyncio.run(_measure(args, url, router, folders, tensors))
    return {"commit": commit(), "streams": args.streams, "weights_mb": num_bytes / 1e6, **measured}


class _Load:
    """Streams that never end, and when their tokens arrived."""

    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace) -> None:
        self._session = session
        self._args = args
        self.arrivals: list[float] = []
        self._came = asyncio.Event()

    async def stream(self, index: int) -> None:
        for turn in itertools.count():
            prompt = [2 + (index * 131 + turn * 17 + i * 7) % (VOCAB_SIZE - 2) for i in range(self._args.prompt)]
            body = {"input_ids": prompt, "stream": True, "incremental_streaming_output": True}
            body["sampling_params"] = {"max_new_tokens": self._args.new_tokens, "ignore_eos": True}
            async with self._session.post("/generate", json=body) as answer:
                if answer.status != 200:
                    raise ServerError(f"/generate answered {answer.status}: {await answer.text()}")
                async for event in events(answer):
                    if event.get("output_ids"):
                        self.arrivals.append(time.perf_counter())
                        self._came.set()

    async def wait_for_token(self, after_s: float) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.arrivals or self.arrivals[-1] <= after_s:
                self._came.clear()
                await self._came.wait()


async def _measure(
    args: argparse.Namespace, url: str, router: str, folders: list[Path], tensors: list[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(url, timeout=timeout) as session,
        aiohttp.ClientSession(router, timeout=timeout) as routed,
    ):
        async with _sender(session) as (group, joined_s):
            load = _Load(session, args)
            streams = [asyncio.create_task(load.stream(i)) for i in range(args.streams)]
            try:
                measuring = asyncio.create_task(_paths(args, session, routed, group, load, folders, tensors))
                await asyncio.wait({measuring, *streams}, return_when=asyncio.FIRST_COMPLETED)
                for stream in streams:
                    if stream.done():
                        stream.result()  # raises: a stream ends by its error only
                paths, idle = await measuring
            finally:
                for task in (measuring, *streams):
                    task.cancel()
                await asyncio.gather(measuring, *streams, return_exceptions=True)
    return {"join_ms": joined_s * 1e3, "idle_gap_ms": idle * 1e3, "paths": paths}


@asynccontextmanager
async def _sender(session: aiohttp.ClientSession) -> AsyncIterator[tuple[WeightGroup, float]]:
    """This process as rank 0 of a group with the server, and the seconds to form it."""
    spec = GroupSpec(GROUP, "127.0.0.1", free_port(), 0, 2, timeout_s=TIMEOUT_S)
    body = {"master_address": spec.master_address, "master_port": spec.master_port, "rank_offset": 1}
    body |= {"world_size": 2, "group_name": GROUP, "backend": "gloo", "timeout_s": TIMEOUT_S}
    began_s = time.perf_counter()
    joining = asyncio.create_task(_must(session, "/init_weights_update_group", body))
    group = await asyncio.to_thread(WeightGroup, spec)
    await joining
    try:
        yield group, time.perf_counter() - began_s
    finally:
        await _must(session, "/destroy_weights_update_group", {"group_name": GROUP})
        await asyncio.to_thread(group.close)


async def _must(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    status, answer = await post(session, path, body)
    if status != 200:
        raise ServerError(f"{path} answered {status}: {answer}")


async def _paths(
    args: argparse.Namespace,
    session: aiohttp.ClientSession,
    routed: aiohttp.ClientSession,
    group: WeightGroup,
    load: _Load,
    folders: list[Path],
    tensors: list[dict[str, torch.Tensor]],
) -> tuple[dict[str, dict[str, float]], float]:
    """Medians by path and mode, and the longest gap of a stretch without an update."""

    async def send(part: dict[str, torch.Tensor], **fields: Any) -> None:
        body = {
            "names": list(part),
            "dtypes": [str(t.dtype) for t in part.values()],
            "shapes": [list(t.shape) for t in part.values()],
            "group_name": GROUP,
            **fields,
        }
        taking = asyncio.create_task(_must(session, "/update_weights_from_distributed", body))
        await asyncio.to_thread(group.send, part)
        await taking

    async def disk(number: int, version: str, mode: str) -> None:
        folder = folders[number]
        await _must(session, "/update_weights_from_disk", {"model_path": str(folder), "running": mode})

    async def whole(number: int, version: str, mode: str) -> None:
        await send(tensors[number], weight_version=version, running=mode)

    async def session_of(number: int, version: str, mode: str) -> None:
        await _must(session, "/begin_weight_update", {"selector": "target"})
        for part in parts_of(tensors[number], args.parts):
            await send(part)
        await _must(session, "/end_weight_update", {"weight_version": version, "running": mode})

    async def through_router(number: int, version: str, mode: str) -> None:
        body = {"model_path": str(folders[number]), "abort_all_requests": mode == "abort"}
        await _must(routed, "/update_weights_from_disk", body)

    await load.wait_for_token(time.perf_counter())
    found: dict[str, dict[str, float]] = {}
    numbers = itertools.cycle((1, 0))
    longest_s = 0.0
    for name, update, modes in (
        ("disk", disk, MODES),
        ("group", whole, MODES),
        ("session", session_of, MODES),
        ("router", through_router, ("recompute", "abort")),
    ):
        for mode in modes:
            samples = []
            for _ in range(args.updates):
                await _settle(load)
                number = next(numbers)
                began_s = time.perf_counter()
                await update(number, f"0:{number}", mode)
                ended_s = time.perf_counter()
                await load.wait_for_token(ended_s)
                samples.append((ended_s - began_s, pause_s(load.arrivals, began_s, ended_s)))
                longest_s = max(longest_s, ended_s - began_s)
            found[f"{name}_{mode}"] = summary(samples)
            row = found[f"{name}_{mode}"]
            progress(f"{name}, {mode}: {row['latency_ms']:.1f} ms, of which {row['pause_ms']:.1f} ms without a token")
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + longest_s:
        await load.wait_for_token(time.perf_counter())
    return found, pause_s(load.arrivals, began_s, load.arrivals[-1])


async def _settle(load: _Load) -> None:
    """Wait until every stream had time for some tokens after what came before."""
    before = len(load.arrivals)
    async with asyncio.timeout(TIMEOUT_S):
        while len(load.arrivals) < before + 50:
            await load.wait_for_token(time.perf_counter())
    if len(load.arrivals) > 10_000:
        del load.arrivals[:-1000]

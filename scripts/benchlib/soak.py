"""``bench.py soak``: one server process under mixed load for minutes; at the end nothing may have been left behind.

``--concurrency`` clients send short, long, streamed, cut, abandoned, scored and nonsensical requests over HTTP. An
operator pauses, aborts, updates weights (whole, torn, from disk, over a group), flushes and gives memory back. The KV
pool is small, so that requests are retracted too. Afterwards the server is compared with itself after a warm-up:
running and waiting requests, KV pages, request ids, threads and file descriptors; every answer was checked as it came.
The command fails (exit code 1) and names what leaked or went wrong. ``rss_mb`` is for the reader: caches are bounded
but fill up. Not covered: chat, speculation, a router.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from areal_dta.rollout.server.weight_group import GroupSpec, WeightGroup
from scripts.benchlib.report import UsageError, at_least, commit, free_port, progress
from scripts.benchlib.serving import ServerError, post, serving, write_model
from scripts.benchlib.soak_load import GROUP, Clients, Operator, Tally, tear

__all__ = ["HELPER_THREADS", "Footprint", "add_arguments", "leaks", "metric", "run"]

SETTLE_S = 20.0
SAY_EVERY_S = 15.0
GROUP_TIMEOUT_S = 120.0
MAX_MINUTES = 120.0
# asyncio.to_thread starts its helpers one by one, up to this many: how many the warm-up needed is a matter of timing.
HELPER_THREADS = min(32, (os.cpu_count() or 1) + 4)


class Footprint(dict[str, float]):
    """What an idle server holds, by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help=f"at most {MAX_MINUTES:g}")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--interval-s", type=float, default=0.5, help="mean time between two acts of the operator")
    parser.add_argument("--max-total-tokens", type=int, default=16384, help="KV pool of the server")
    parser.add_argument("--request-timeout-s", type=float, default=180.0, help="a longer request is a fault")
    parser.add_argument("--server-options", default="", help='more options of the server: "--speculation auto"')
    parser.add_argument("--seed", type=int, default=0)


def metric(text: str, name: str) -> float:
    """Sum of the samples of one metric in a Prometheus exposition; raises KeyError when there is none."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == name and not line.startswith("#")
    ]
    if not values:
        raise KeyError(name)
    return sum(values)


def leaks(before: Footprint, after: Footprint) -> list[str]:
    """What the idle server holds now and did not after its warm-up, in words."""
    found = [
        f"{name}: {after[name]:g} left of an idle, flushed server"
        for name in ("running", "waiting", "cached_tokens", "kv_use", "live_requests", "paused", "memory_released")
        if after[name]
    ]
    for name, spare in (("threads", HELPER_THREADS), ("descriptors", 0), ("kv_bytes", 0)):
        if after[name] > before[name] + spare:
            found.append(f"{name}: {after[name]:g}, after the warm-up {before[name]:g}")
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "concurrency")
    at_least(args, 2048, "max_total_tokens")
    if not 0 < args.minutes <= MAX_MINUTES:
        raise UsageError(f"--minutes {args.minutes} must be above 0 and at most {MAX_MINUTES:g}")
    with tempfile.TemporaryDirectory(prefix="areal-dta-soak-") as root:
        folders = [Path(root) / f"v{i}" for i in range(2)]
        tensors = [write_model(folder, f"0:{i}", i, 2, 96) for i, folder in enumerate(folders)]
        folders.append(tear(folders[1], Path(root) / "torn"))
        options = ("--max-total-tokens", str(args.max_total_tokens), *shlex.split(args.server_options))
        with serving(folders[0], *options) as (pid, url):
            result = asyncio.run(_soak(args, psutil.Process(pid), url, folders, tensors))
    return {"commit": commit(), "minutes": args.minutes, "concurrency": args.concurrency, **result}


async def _soak(
    args: argparse.Namespace,
    process: psutil.Process,
    url: str,
    folders: list[Path],
    tensors: list[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    tally, rng = Tally(), random.Random(args.seed)
    async with _session(url, 0) as control:
        group = await _join(control)
        operator = Operator(control, tally, rng, folders, tensors, group)
        await _load(args, url, operator, tally, rng, min(3.0, 30 * args.minutes))
        await operator.each_once()
        before = await _footprint(control, process, tally)
        progress(f"after the warm-up: {dict(before)}")
        began_s = time.monotonic()
        talking = asyncio.create_task(_say(tally, began_s))
        await _load(args, url, operator, tally, rng, 60 * args.minutes)
        took_s = time.monotonic() - began_s
        talking.cancel()
        after = await _footprint(control, process, tally)
        deadline_s = time.monotonic() + SETTLE_S  # sockets that clients closed are noticed within a step
        while leaks(before, after) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
            after = await _footprint(control, process, tally)
        await post(control, "/destroy_weights_update_group", {"group_name": GROUP})
        await asyncio.to_thread(group.close)
    found = [*leaks(before, after), *tally.faults]
    for problem in found:
        progress(problem)
    return {
        "problems": found,
        "passed": not found,
        "requests": sum(count for name, count in tally.outcomes.items() if not name.startswith("finished_")),
        "outcomes": dict(tally.outcomes),
        "refused": dict(tally.refused),
        "operations": dict(tally.operations),
        "tokens_per_s": tally.num_tokens / took_s,
        "before": before,
        "after": after,
    }


def _session(url: str, limit: int) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=GROUP_TIMEOUT_S)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=limit))


async def _load(
    args: argparse.Namespace, url: str, operator: Operator, tally: Tally, rng: random.Random, seconds: float
) -> None:
    """Clients and operator for so long; afterwards all connections of the clients are closed."""
    ends_s = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = Clients(session, tally, rng, ends_s, args.request_timeout_s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(operator.loop(ends_s, args.interval_s))
            for index in range(args.concurrency):
                tasks.create_task(clients.loop(index))


async def _join(session: aiohttp.ClientSession) -> WeightGroup:
    spec = GroupSpec(GROUP, "127.0.0.1", free_port(), 0, 2, timeout_s=GROUP_TIMEOUT_S)
    body = {"master_address": spec.master_address, "master_port": spec.master_port, "rank_offset": 1}
    body |= {"world_size": 2, "group_name": GROUP, "backend": "gloo", "timeout_s": GROUP_TIMEOUT_S}
    joining = asyncio.create_task(post(session, "/init_weights_update_group", body))
    group = await asyncio.to_thread(WeightGroup, spec)
    status, answer = await joining
    if status != 200:
        raise ServerError(f"the server did not join the group: {status} {answer}")
    return group


async def _footprint(session: aiohttp.ClientSession, process: psutil.Process, tally: Tally) -> Footprint:
    """Of the server, flushed. Ids are looked for by aborting them: an idle server must know none."""
    await post(session, "/flush_cache", {})
    live = 0
    for rid in [*tally.rids][-500:]:
        live += (await post(session, "/abort_request", {"rid": rid}))[1]["num_aborted"]
    live += (await post(session, "/abort_request", {"abort_all": True}))[1]["num_aborted"]
    async with session.get("/metrics") as answer:
        text = await answer.text()
    async with session.get("/get_server_info") as answer:
        load = (await answer.json())["internal_states"][0]
    with process.oneshot():
        return Footprint(
            running=metric(text, "sglang:num_running_reqs"),
            waiting=metric(text, "sglang:num_queue_reqs"),
            cached_tokens=metric(text, "areal_dta:cached_tokens"),
            kv_use=load["kv_use"],
            kv_bytes=metric(text, "areal_dta:kv_bytes"),
            live_requests=live,
            paused=metric(text, "areal_dta:paused"),
            memory_released=metric(text, "areal_dta:memory_released"),
            retractions=metric(text, "areal_dta:retractions_total"),
            threads=process.num_threads(),
            descriptors=process.num_fds(),
            rss_mb=process.memory_info().rss / 1e6,
        )


async def _say(tally: Tally, began_s: float) -> None:
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        finished = sum(count for name, count in tally.outcomes.items() if name.startswith("finished_"))
        progress(f"{time.monotonic() - began_s:.0f} s: {finished} answers, {len(tally.faults)} faults")

"""The mixed load of a soak: clients that behave, clients that do not, and an operator who never rests."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from areal_dta.rollout.server.weight_group import WeightGroup
from scripts.benchlib.serving import VOCAB_SIZE, ServerError, events, post

__all__ = ["GROUP", "Clients", "Operator", "Tally", "tear"]

GROUP = "soak"
RIDS_KEPT = 20_000
BACK_OFF_S = 0.05
_SHARED = list(range(2, 130))  # prompts begin with some of it


def tear(folder: Path, target: Path) -> Path:
    """A copy of a sealed folder that lacks its last bytes."""
    shutil.copytree(folder, target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    return target


@dataclass
class Tally:
    """What happened: outcomes by kind, refusals by code, everything that should not have been, rids that were used."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rids: deque[str] = field(default_factory=lambda: deque(maxlen=RIDS_KEPT))
    num_tokens: int = 0

    def fault(self, what: str) -> None:
        if len(self.faults) < 100:
            self.faults.append(what[:500])


class Clients:
    """``concurrency`` closed loops; each picks what to ask at random. Every wait ends after ``timeout_s``."""

    def __init__(
        self, session: aiohttp.ClientSession, tally: Tally, rng: random.Random, ends_s: float, timeout_s: float
    ) -> None:
        self._session = session
        self._tally = tally
        self._rng = rng
        self._ends_s = ends_s
        self._timeout_s = timeout_s
        self._kinds: list[tuple[str, Callable[[str], Awaitable[None]], int]] = [
            ("short", self._short, 40),
            ("long", self._long, 12),
            ("samples", self._samples, 6),
            ("stream", self._stream, 20),
            ("cut_stream", self._cut_stream, 12),
            ("hang_up", self._hang_up, 6),
            ("score", self._score, 4),
            ("nonsense", self._nonsense, 4),
        ]

    async def loop(self, index: int) -> None:
        number = 0
        while time.monotonic() < self._ends_s:
            number += 1
            name, ask, _ = self._rng.choices(self._kinds, [weight for *_, weight in self._kinds])[0]
            rid = f"{index}/{number}"
            self._tally.rids.append(rid)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await ask(rid)
                self._tally.outcomes[name] += 1
            except TimeoutError:
                self._tally.fault(f"{name} {rid}: no answer within {self._timeout_s:g} s")
            except (aiohttp.ClientError, ServerError) as error:
                self._tally.fault(f"{name} {rid}: {error!r}")

    def _body(self, rid: str, low: int, high: int, **fields: Any) -> dict[str, Any]:
        rng = self._rng
        prompt = _SHARED[: rng.randrange(1, len(_SHARED))] + [rng.randrange(2, VOCAB_SIZE) for _ in range(8)]
        sampling = {"max_new_tokens": rng.randint(low, high), "ignore_eos": rng.random() < 0.8, "temperature": 1.0}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "rid": rid, **fields}

    async def _ask(self, body: dict[str, Any]) -> None:
        status, answer = await post(self._session, "/generate", body)
        if status == 200:
            for one in answer if isinstance(answer, list) else [answer]:
                self._check(one, body["sampling_params"]["max_new_tokens"])
        else:
            await self._refusal(status, answer, "/generate")

    async def _refusal(self, status: int, answer: Any, what: str) -> None:
        """A full queue and released memory may refuse, and the client waits a little; nothing else may."""
        kind = answer.get("error", {}).get("type") if isinstance(answer, dict) else None
        self._tally.refused[f"{status} {kind}"] += 1
        if status != 503 or kind not in ("busy", "memory_released"):
            self._tally.fault(f"{what} answered {status}: {answer}")
        await asyncio.sleep(BACK_OFF_S)

    def _check(self, answer: dict[str, Any], limit: int) -> None:
        meta, ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]["type"]
        self._tally.outcomes[f"finished_{reason}"] += 1
        self._tally.num_tokens += len(ids)
        spans = meta["weight_versions"]
        edges = [0, *(s["end"] for s in spans)]
        if reason == "length" and len(ids) != limit:
            self._tally.fault(f"{meta['id']}: {len(ids)} tokens, {limit} were asked for")
        if len(meta["output_token_logprobs"]) != len(ids):
            self._tally.fault(f"{meta['id']}: log-probs of {len(meta['output_token_logprobs'])} of {len(ids)} tokens")
        if ids and (edges[-1] != len(ids) or [s["start"] for s in spans] != edges[:-1]):
            self._tally.fault(f"{meta['id']}: versions {spans} do not cover {len(ids)} tokens")

    async def _short(self, rid: str) -> None:
        await self._ask(self._body(rid, 1, 24))

    async def _long(self, rid: str) -> None:
        await self._ask(self._body(rid, 100, 400))

    async def _samples(self, rid: str) -> None:
        body = self._body(rid, 4, 24)
        body["sampling_params"]["n"] = 4
        await self._ask(body)

    async def _score(self, rid: str) -> None:
        await self._ask(self._body(rid, 0, 1, logprob_start_len=0))

    async def _stream(self, rid: str) -> None:
        body = self._body(rid, 4, 60, stream=True)
        last: dict[str, Any] | None = None
        async with self._session.post("/generate", json=body) as answer:
            if answer.status != 200:
                await self._refusal(answer.status, await answer.json(), "a stream")
                return
            async for event in events(answer):
                last = event
        if last is None or "error" in last:
            self._tally.fault(f"stream {rid} ended with {last}")
        else:
            self._check(last, body["sampling_params"]["max_new_tokens"])

    async def _cut_stream(self, rid: str) -> None:
        body = self._body(rid, 200, 400, stream=True)
        body["sampling_params"]["ignore_eos"] = True
        wanted = self._rng.randint(0, 6)
        async with self._session.post("/generate", json=body) as answer:
            if answer.status != 200:
                await self._refusal(answer.status, await answer.json(), "a stream")
                return
            seen = 0
            async for _ in events(answer):
                seen += 1
                if seen > wanted:
                    break
            answer.close()

    async def _hang_up(self, rid: str) -> None:
        asking = asyncio.ensure_future(self._ask(self._body(rid, 200, 400)))
        await asyncio.wait({asking}, timeout=self._rng.random())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _nonsense(self, rid: str) -> None:
        body = self._body(rid, 1, 4)
        body |= self._rng.choice([{"input_ids": []}, {"input_ids": [-1]}, {"lora_path": "x"}, {"stream": "yes"}])
        status, answer = await post(self._session, "/generate", body)
        if status != 400:
            self._tally.fault(f"nonsense {rid} was answered with {status}: {answer}")


class Operator:
    """Pauses, aborts, updates, flushes and gives memory back, one thing after another. The last folder is torn."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tally: Tally,
        rng: random.Random,
        folders: list[Path],
        tensors: list[dict[str, torch.Tensor]],
        group: WeightGroup,
    ) -> None:
        self._session = session
        self._tally = tally
        self._rng = rng
        self._folders = folders
        self._tensors = tensors
        self._group = group
        self._kinds = [
            self.pause, self.abort_one, self.abort_all, self.update_from_disk, self.update_over_group, self.torn_update,
            self.flush, self.give_memory_back,
        ]  # fmt: skip

    async def loop(self, ends_s: float, interval_s: float) -> None:
        while time.monotonic() < ends_s:
            await self._rng.choice(self._kinds)()
            await asyncio.sleep(self._rng.random() * 2 * interval_s)

    async def each_once(self) -> None:
        """Everything once, so that what is made at first use is there."""
        for kind in self._kinds:
            await kind()

    async def _call(self, path: str, body: dict[str, Any], *accepted: int) -> None:
        status, answer = await post(self._session, path, body)
        self._tally.operations[f"{path} {status}"] += 1
        if status not in (accepted or (200,)):
            self._tally.fault(f"{path} answered {status}: {answer}")

    async def pause(self) -> None:
        await self._call("/pause_generation", {"mode": self._rng.choice(["abort", "retract", "in_place"])})
        await asyncio.sleep(self._rng.random() * 0.2)
        await self._call("/continue_generation", {})

    async def abort_one(self) -> None:
        for rid in [*self._tally.rids][-20:]:
            await self._call("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._call("/abort_request", {"abort_all": True})

    def _running(self) -> str:
        return self._rng.choice(["recompute", "keep", "abort"])

    async def update_from_disk(self) -> None:
        folder = self._rng.choice(self._folders)
        expected = 400 if folder is self._folders[-1] else 200
        await self._call("/update_weights_from_disk", {"model_path": str(folder), "running": self._running()}, expected)

    async def _send(self, tensors: dict[str, torch.Tensor], *accepted: int, **fields: Any) -> None:
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype) for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": GROUP,
            **fields,
        }
        taking = asyncio.create_task(self._call("/update_weights_from_distributed", body, *accepted))
        await asyncio.to_thread(self._group.send, tensors)
        await taking

    async def update_over_group(self) -> None:
        number = self._rng.randrange(len(self._tensors))
        await self._call("/begin_weight_update", {"selector": "target"})
        await self._send(self._tensors[number])
        await self._call("/end_weight_update", {"weight_version": f"0:{number}", "running": self._running()})

    async def torn_update(self) -> None:
        """Half a model, which must be refused at the end."""
        half = dict(list(self._tensors[0].items())[::2])
        await self._call("/begin_weight_update", {})
        await self._send(half)
        await self._call("/end_weight_update", {}, 400)

    async def flush(self) -> None:
        await self._call("/flush_cache", {}, 200, 400)  # 400 while requests run

    async def give_memory_back(self) -> None:
        await self._call("/pause_generation", {"mode": "retract"})
        await self._call("/release_memory_occupation", {"requests": self._rng.choice(["wait", "refuse"])})
        await asyncio.sleep(self._rng.random() * 0.2)
        await self._call("/resume_memory_occupation", {})
        await self._call("/continue_generation", {})

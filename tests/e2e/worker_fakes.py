"""For tests of the rollout worker: a scripted SGLang server (own thread), a scripted batcher, small workflows."""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from aiohttp import web
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig

from areal_dta import metrics
from areal_dta.channel import AsyncRpcClient, Reply, Request, RpcServer
from areal_dta.records import Lease, Trajectory, unpack
from areal_dta.rollout.worker_convert import Limits
from areal_dta.rollout.worker_engine import RouterEngine
from areal_dta.rollout.worker_loop import Worker
from areal_dta.rollout.worker_setup import WorkerSettings

WAIT_S = 10.0
SETTINGS = WorkerSettings(
    name="worker.0",
    capacity=4,
    episode_timeout_s=WAIT_S,
    limits=Limits(64, "refuse"),
    heartbeat_s=0.05,
    batcher_timeout_s=WAIT_S,
    lease_wait_s=0.2,
    stop_timeout_s=4.0,
)

Answer = Callable[[dict[str, Any]], dict[str, Any] | int]


def answer(
    tokens: list[int], *, spans: Any = None, version: str | None = "0:0", reason: str = "stop"
) -> dict[str, Any]:
    """A ``/generate`` reply with the given output tokens; log-prob of token t is -t/100."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-t / 100, t, None] for t in tokens],
        "completion_tokens": len(tokens),
    }
    if version is not None:
        meta["weight_version"] = version
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"text": "", "output_ids": tokens, "meta_info": meta}


class FakeServer:
    """SGLang's ``/generate`` and ``/health``. Answers come from ``script`` while it lasts, then from ``default``.

    ``hold`` cleared makes requests wait (on the server) until it is set again.
    """

    def __init__(self, api_key: str | None = None) -> None:
        self.script: deque[Answer] = deque()
        self.default: Answer = lambda body: answer([7, 8, 9])
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.api_key = api_key
        self.arrived = threading.Semaphore(0)
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._hold = asyncio.Event()
        self._hold.set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def hold(self, yes: bool) -> None:
        self._loop.call_soon_threadsafe(self._hold.clear if yes else self._hold.set)

    def start(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _allowed(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._allowed(request) else 401)

    async def _generate(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return web.Response(status=401, text="API key missing")
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.release()
        await self._hold.wait()
        make = self.script.popleft() if self.script else self.default
        reply = make(body)
        return web.Response(status=reply, text="scripted") if isinstance(reply, int) else web.json_response(reply)


def lease(i: int, **changes: Any) -> Lease:
    item = {"task_id": f"task_{i}", "ids": [2, 3, 4 + i % 50]}
    base = Lease(f"lease_{i}", group_id=i // 2, sample=i % 2, attempt=0, item=item, version=0, epoch=0, seed=1000 + i)
    return replace(base, **changes)


class FakeBatcher:
    """Hands out ``leases``, records what comes back, drains once each of them is settled (if ``drain``).

    ``statuses`` scripts the answers to deliveries: "busy", "duplicate", ...; afterwards "accepted".
    """

    def __init__(self, leases: list[Lease], *, drain: bool = True, version: int = 0) -> None:
        self.waiting = deque(leases)
        self.total = len(leases)
        self.drain = drain
        self.version = version
        self.statuses: deque[str] = deque()
        self.accepted: dict[str, Trajectory] = {}
        self.answered: list[tuple[str, str]] = []
        self.rejected: dict[str, tuple[str, str]] = {}
        self.lengths: dict[str, int] = {}  # of rejected episodes
        self.beats: list[list[str]] = []
        self.unknown: set[str] = set()
        self.max_leased = 0
        self._leased: set[str] = set()
        self._changed = asyncio.Condition()
        self.server = RpcServer("tcp://127.0.0.1:0", self._handlers())

    def _handlers(self) -> dict[str, Any]:
        kinds = ("hello", "lease", "trajectory", "reject", "heartbeat")
        return {kind: getattr(self, f"_on_{kind}") for kind in kinds}

    async def restart(self) -> None:
        """Stop answering and come back at the same address with no memory of requests."""
        await self.server.stop()
        self.server = RpcServer(self.server.address, self._handlers())
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await self.server.start()
                except OSError:  # ZeroMQ frees the port a moment after the socket is closed
                    await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    def lease_more(self, leases: list[Lease]) -> None:
        self.waiting.extend(leases)
        self.total += len(leases)

    @property
    def settled(self) -> int:
        return len(self.accepted) + len(self.rejected) + sum(s == "duplicate" for _, s in self.answered)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _on_hello(self, request: Request) -> Reply:
        return Reply({"epoch": 0, "version": self.version})

    async def _on_lease(self, request: Request) -> Reply:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.body["wait_s"]), self._changed:
                await self._changed.wait_for(lambda: bool(self.waiting) or (self.drain and self.settled >= self.total))
        granted = [self.waiting.popleft() for _ in range(min(len(self.waiting), request.body["capacity"]))]
        self._leased |= {x.lease_id for x in granted}
        self.max_leased = max(self.max_leased, len(self._leased))
        done = self.drain and not self.waiting and self.settled >= self.total
        return Reply({"leases": [asdict(x) for x in granted], "draining": done})

    async def _on_trajectory(self, request: Request) -> Reply:
        trajectory = unpack(Trajectory, request.body, request.arrays)
        status = self.statuses.popleft() if self.statuses else "accepted"
        self.answered.append((trajectory.lease_id, status))
        if status == "accepted":
            trajectory.validate()
            self.accepted[trajectory.lease_id] = trajectory
        if status != "busy":
            self._leased.discard(trajectory.lease_id)
        await self._notify()
        return Reply({"status": status, "cause": ""})

    async def _on_reject(self, request: Request) -> Reply:
        self.rejected[request.body["lease_id"]] = (request.body["cause"], request.body["detail"])
        self.lengths[request.body["lease_id"]] = request.body["num_tokens"]
        self._leased.discard(request.body["lease_id"])
        await self._notify()
        return Reply()

    async def _on_heartbeat(self, request: Request) -> Reply:
        self.beats.append(request.body["lease_ids"])
        assert len(request.body["num_tokens"]) == len(request.body["lease_ids"])
        await self._notify()
        return Reply({"unknown": [x for x in request.body["lease_ids"] if x in self.unknown]})


class RecordingPublisher(metrics.NullPublisher):
    def __init__(self) -> None:
        super().__init__("worker.0")
        self.records: list[metrics.MetricRecord] = []

    def _send(self, record: metrics.MetricRecord) -> None:
        self.records.append(record)

    def values(self, name: str) -> list[float | None]:
        return [r.value for r in self.records if r.name == name]


@contextlib.contextmanager
def engine_for(server: FakeServer, **options: Any) -> Iterator[RouterEngine]:
    config = InferenceEngineConfig(
        backend="sglang:d1",
        max_concurrent_rollouts=64,
        queue_size=1024,
        consumer_batch_size=1,
        max_head_offpolicyness=1 << 40,
        request_timeout=WAIT_S,
        request_retries=2,
        setup_timeout=WAIT_S,
    )
    engine = RouterEngine(config, server.api_key, patience_s=options.pop("patience_s", 2.0))
    engine.initialize(engine_id="0", addr=server.address, train_data_parallel_size=1)
    try:
        yield engine
    finally:
        server.hold(False)
        engine.destroy()


@contextlib.asynccontextmanager
async def running_worker(
    batcher: FakeBatcher, server: FakeServer, workflow: RolloutWorkflow, **changes: Any
) -> AsyncIterator[tuple[Worker, asyncio.Task[None], RecordingPublisher]]:
    """A worker at work in this loop; its task must end before the body is left for good."""
    await batcher.server.start()
    publisher = RecordingPublisher()
    rpc = AsyncRpcClient(batcher.server.address, "worker.0")
    with engine_for(server) as engine:
        worker = Worker(replace(SETTINGS, **changes), rpc, engine, workflow, publisher)
        task = asyncio.create_task(worker.run())
        try:
            yield worker, task, publisher
            await asyncio.wait([task], timeout=WAIT_S)
            assert task.done()
        finally:
            worker.stop()
            await asyncio.wait([task], timeout=WAIT_S)
            await rpc.close()
            await batcher.server.stop()


class OneTurn(RolloutWorkflow):
    """Completes ``data["ids"]`` once and rewards 1.0; subclasses override `reward`."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=8, max_tokens=64)
        response = await engine.agenerate(ModelRequest(input_ids=list(data["ids"]), gconfig=gconfig))
        return row(response, await self.reward(data))

    async def reward(self, data: dict[str, Any]) -> float:
        return 1.0


def row(response: Any, reward: float) -> dict[str, torch.Tensor]:
    n, m = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, n + m, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * n + [1] * m]),
        "logprobs": torch.tensor([[0.0] * n + response.output_logprobs]),
        "versions": torch.tensor([[-1] * n + response.output_versions]),
        "rewards": torch.tensor([reward]),
    }


def generated(array: np.ndarray, trajectory: Trajectory) -> list[Any]:
    """Values of the generated tokens of a trajectory."""
    return array[trajectory.loss_mask_T.astype(bool)].tolist()

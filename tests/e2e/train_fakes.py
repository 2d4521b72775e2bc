"""What stands around a trainer in tests: a batcher and a router that record, and a run directory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import zmq

from areal_dta.channel import Reply, Request, RpcServer
from areal_dta.config import make_config
from areal_dta.records import LaunchPlan, Shard, pack

REPO = Path(__file__).resolve().parents[2]
WAIT_S = 180.0


class FakeBatcher:
    """Serves prepared shards by ``(step, rank)`` on its own thread; a missing one is never ready."""

    def __init__(self, shards: dict[tuple[int, int], Shard | None]) -> None:
        self.shards = shards
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        kinds = ("hello", "shard", "published", "commit", "eval_start", "eval_result", "finish")
        self._server = RpcServer("tcp://127.0.0.1:0", dict.fromkeys(kinds, self._answer))
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(10)
        self.address = self._server.address

    async def _answer(self, request: Request) -> Reply:
        with self._changed:
            self.calls.append((request.kind, {**request.body, "client": request.client}))
            self._changed.notify_all()
        if request.kind == "shard":
            return await self._shard(request)
        bodies: dict[str, dict[str, Any]] = {
            "hello": {"epoch": 0, "version": 0},
            "eval_start": {"total": 2},
            "eval_result": {"done": 2, "total": 2, "finished": True, "mean_reward": 0.5, "rewards": {"a": [0.0, 1.0]}},
        }
        return Reply(bodies.get(request.kind, {}))

    async def _shard(self, request: Request) -> Reply:
        shard = self.shards.get((request.body["step"], request.body["rank"]))
        if shard is None:
            await asyncio.sleep(min(0.2, request.body["wait_s"]))
            return Reply({"status": "wait", "have": 1, "need": 4, "why": "workers are slow"})
        body, arrays = pack(shard)
        return Reply({"status": "ready", **body}, arrays)

    def give(self, step: int, rank: int, shard: Shard) -> None:
        self.shards[step, rank] = shard

    def wait_for(self, found: Callable[[list[tuple[str, dict[str, Any]]]], bool], timeout_s: float = WAIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: found(self.calls), timeout_s), self.calls

    def of(self, *kinds: str) -> list[tuple[str, Any]]:
        """(kind, number, step or tag) of the calls of some kinds, in order."""
        names = ("number", "step", "tag")
        return [(kind, *[body[n] for n in names if n in body]) for kind, body in self.calls if kind in kinds]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class FakeRouter:
    """Answers ``POST /publish``; the first `failures` requests with success false."""

    def __init__(self, failures: int = 0) -> None:
        self.published: list[dict[str, Any]] = []
        self.refused = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ok = outer.refused >= failures
                if ok:
                    outer.published.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
                else:
                    outer.refused += 1
                answer = json.dumps({"success": ok, "message": "" if ok else "no server is up", "servers": {}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class MetricsSink:
    """Collects what trainers publish."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def read(self) -> list[dict[str, Any]]:
        records = []
        while self._socket.poll(500):
            records.append(msgpack.unpackb(self._socket.recv()))
        return records

    def close(self) -> None:
        self._socket.close(0)


def write_run(
    run_dir: Path, model: Path, batcher: str, router: str, port: int, dp: int, metrics: str | None = None, **extra: Any
) -> LaunchPlan:
    """A run directory as the launcher leaves it: 3 steps, a checkpoint every 2, evaluation before and after."""
    (run_dir / "dataset").mkdir(parents=True)
    (run_dir / "model").symlink_to(model)
    (run_dir / "dataset" / "eval.jsonl").write_text('{"task_id": "a"}\n')
    (run_dir / "dataset" / "train.jsonl").write_text('{"task_id": "a"}\n' * 4)
    given = {
        "experiment_name": "e",
        "trial_name": "t",
        "workflow": "package.module.Workflow",
        "total_train_epochs": 10,
        "total_train_steps": 3,
        "train_dataset": {"batch_size": 4},
        "gconfig": {"n_samples": 2, "temperature": 0.8},
        "rollout": {"backend": "embedded:d1"},
        "cluster": {"fileroot": "runs"},
        "actor": {
            "backend": f"megatron:d{dp}",
            "path": "model",
            "dtype": "float32",
            "kl_ctl": 0.0,
            "use_decoupled_loss": True,
            "ppo_n_minibatches": 1,
            "adv_norm": {"mean_level": "batch", "std_level": "batch"},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0, "warmup_steps_proportion": 0.0},
        },
        "recover": {"mode": "auto", "freq_steps": 2},
        "runtime": {"step_timeout_s": 60},
    }
    for key, value in extra.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    (run_dir / "config.yaml").write_text(make_config(given).to_yaml())
    plan = LaunchPlan(
        run_dir=str(run_dir),
        epoch=0,
        batcher=batcher,
        metrics=metrics,  # type: ignore[arg-type]  # None: no run store
        router=router,
        servers=(),
        trainer_master_addr="127.0.0.1",
        trainer_master_port=port,
        dp=dp,
        tp=1,
        pp=1,
        num_workers=0,
        api_key="secret",
    )
    plan.write(run_dir / "launch.json")
    return plan


def relaunch(run_dir: Path, plan: LaunchPlan, **fields: Any) -> LaunchPlan:
    """The plan of a later launch of the same run."""
    plan = dataclasses.replace(plan, **fields)
    plan.write(run_dir / "launch.json")
    return plan


class Ranks:
    """Trainer processes; logs in ``run_dir/rank_N.log``. Whatever still runs at the end is killed."""

    def __init__(self, run_dir: Path, dp: int) -> None:
        self.logs = [run_dir / f"rank_{r}.log" for r in range(dp)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = [sys.executable, "-m", "areal_dta.trainer", "--run", str(run_dir), "--index", str(rank)]
            with log.open("wb") as file:
                self.processes.append(subprocess.Popen(command, cwd=REPO, stdout=file, stderr=subprocess.STDOUT))

    def wait(self, rank: int, timeout_s: float = WAIT_S) -> int:
        try:
            return self.processes[rank].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} still runs:\n{self.log(rank)[-3000:]}") from None

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def last_line(self, rank: int) -> str:
        return self.log(rank).strip().splitlines()[-1]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)

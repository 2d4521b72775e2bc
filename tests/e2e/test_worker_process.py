"""The worker's entry point: exit codes, SIGTERM, and what it builds from a run directory."""

from __future__ import annotations

from tests.e2e.worker_fakes import WAIT_S, FakeBatcher, FakeServer, OneTurn, lease

# isort: split
import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_dta.config import make_config
from areal_dta.records import LaunchPlan
from areal_dta.rollout.worker import main
from areal_dta.rollout.worker_setup import WorkflowError, areal_config, load_workflow, settings_of, split_capacity

ROOT = Path(__file__).parents[2]
START_S = 90.0  # importing AReaL on a loaded machine


class NamedParameters(OneTurn):
    def __init__(self, gconfig: Any, econfig: Any, tokenizer_path: str, scale: float = 1.0, **extra: Any) -> None:
        self.given = (gconfig, econfig, tokenizer_path, scale, extra)


class WantsMore(OneTurn):
    def __init__(self, judge: Any) -> None:
        raise AssertionError("never constructed")


def write_run(run: Path, batcher: str, server: FakeServer, **values: Any) -> None:
    config = make_config(
        {
            "experiment_name": "worker",
            "trial_name": "t",
            "workflow": "tests.e2e.worker_fakes.OneTurn",
            "total_train_epochs": 1,
            "actor": {"backend": "megatron:d1", "path": "model", "ppo_n_minibatches": 1},
            "rollout": {"backend": "embedded:d1", "max_concurrent_rollouts": 3, "request_timeout": 30},
            "gconfig": {"n_samples": 4, "max_new_tokens": 8},
            "train_dataset": {"batch_size": 2},
            "runtime": {"num_workers": 1, "step_timeout_s": 20.0, "stop_timeout_s": 8.0, "start_timeout_s": 5.0},
            **values,
        }
    )
    (run / "config.yaml").write_text(config.to_yaml())
    plan = LaunchPlan(
        str(run),
        0,
        batcher,
        "tcp://127.0.0.1:9",
        f"http://{server.address}",
        (),
        "127.0.0.1",
        0,
        1,
        1,
        1,
        num_workers=1,
    )
    plan.write(run / "launch.json")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer(api_key=None).start()
    yield fake
    fake.stop()


def test_sigterm_hands_the_leases_back_and_exits_zero_within_seconds(server: FakeServer, tmp_path: Path) -> None:
    async def scenario() -> tuple[FakeBatcher, int, float]:
        batcher = FakeBatcher([lease(i) for i in range(3)])
        await batcher.server.start()
        write_run(tmp_path, batcher.server.address, server)
        server.hold(True)
        command = [sys.executable, "-m", "areal_dta.rollout.worker", "--run", str(tmp_path), "--index", "0"]
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process,
        ):
            try:
                for _ in range(3):
                    assert await asyncio.to_thread(server.arrived.acquire, timeout=START_S), (
                        tmp_path / "log"
                    ).read_text()
                start = asyncio.get_running_loop().time()
                process.send_signal(signal.SIGTERM)
                code = await asyncio.to_thread(process.wait, WAIT_S)
                took_s = asyncio.get_running_loop().time() - start
            finally:
                process.kill()
        await batcher.server.stop()
        return batcher, code, took_s

    batcher, code, took_s = asyncio.run(scenario())
    assert code == 0, (tmp_path / "log").read_text()
    assert took_s < WAIT_S
    assert {x: cause for x, (cause, _) in batcher.rejected.items()} == {f"lease_{i}": "aborted" for i in range(3)}


def test_main_returns_zero_after_draining(server: FakeServer, tmp_path: Path) -> None:
    ready, finished, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        batcher = FakeBatcher([lease(i) for i in range(5)])
        await batcher.server.start()
        found.append(batcher)
        ready.set()
        await asyncio.to_thread(finished.wait, 3 * WAIT_S)
        await batcher.server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        write_run(tmp_path, found[0].server.address, server)
        assert main(["--run", str(tmp_path), "--index", "0"]) == 0
    finally:
        finished.set()
        thread.join(WAIT_S)
    assert len(found[0].accepted) == 5


def test_main_returns_one_and_says_why_when_it_cannot_work(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "tcp://127.0.0.1:9", server, workflow="tests.e2e.worker_fakes.Nowhere")
    assert main(["--run", str(tmp_path), "--index", "0"]) == 1
    assert "has no attribute 'Nowhere'" in capsys.readouterr().out
    runtime = {"step_timeout_s": 0.5, "stop_timeout_s": 8.0, "start_timeout_s": 5.0}
    write_run(tmp_path, "tcp://127.0.0.1:9", server, runtime=runtime)
    assert main(["--run", str(tmp_path), "--index", "0"]) == 1
    assert "no answer to 'hello' from tcp://127.0.0.1:9 within 0.5 s" in capsys.readouterr().out
    server.api_key = "another"
    write_run(tmp_path, "tcp://127.0.0.1:9", server, runtime={**runtime, "start_timeout_s": 0.5})
    assert main(["--run", str(tmp_path), "--index", "0"]) == 1
    assert "was not healthy within 0.5 s" in capsys.readouterr().out


def test_a_workflow_gets_the_parameters_it_names(server: FakeServer, tmp_path: Path) -> None:
    def load(name: str, **args: Any) -> Any:
        write_run(tmp_path, "tcp://127.0.0.1:9", server)
        base = make_config({**config_of(tmp_path), "workflow": f"{__name__}.{name}", "workflow_args": args})
        return load_workflow(base, tmp_path)

    sys.modules.setdefault(__name__, sys.modules[NamedParameters.__module__])
    gconfig, econfig, tokenizer_path, scale, extra = load("NamedParameters", scale=2.0, more=1).given
    assert (gconfig.n_samples, gconfig.max_new_tokens) == (1, 8), "one lease is one sample"
    assert econfig.domain == "mock"
    assert tokenizer_path == str(tmp_path / "model")
    assert (scale, extra) == (2.0, {"more": 1})
    with pytest.raises(WorkflowError, match=r"wants a parameter 'judge'.*workflow_args.judge"):
        load("WantsMore")
    with pytest.raises(WorkflowError, match="has no parameter 'scales'; remove it"):
        load("WantsMore", scales=1)
    with pytest.raises(WorkflowError, match=r"gives a .*expected an areal.api.RolloutWorkflow"):
        load("ROOT")


def config_of(run: Path) -> dict[str, Any]:
    from areal_dta.config import load_run_config

    return load_run_config(run).raw


def test_the_capacity_is_split_over_the_workers() -> None:
    assert [split_capacity(10, 4, i) for i in range(4)] == [3, 3, 2, 2]
    assert split_capacity(1, 2, 1) == 1
    with pytest.raises(ValueError, match="outside 0..1"):
        split_capacity(4, 2, 2)


def test_settings_follow_the_configuration(server: FakeServer, tmp_path: Path) -> None:
    write_run(tmp_path, "tcp://127.0.0.1:9", server, dta={"max_len": 77, "too_long": "drop"})
    config = make_config(config_of(tmp_path))
    settings = settings_of(config, LaunchPlan.read(tmp_path / "launch.json"), 0)
    assert (settings.name, settings.capacity, settings.episode_timeout_s) == ("worker.0", 3, 30)
    assert (settings.limits.max_len, settings.limits.too_long) == (77, "drop")
    assert settings.heartbeat_s * 3 < config.batcher.lease_timeout_s
    engine = areal_config(config, settings)
    assert engine.max_head_offpolicyness > 10**9, "admission is the batcher's"
    assert engine.max_concurrent_rollouts > settings.capacity
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"

"""Which processes a run consists of, where they run and how they reach each other. Nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from areal_dta.config import Config
from areal_dta.records import LaunchPlan
from areal_dta.rollout.sglang import build_command
from launcher import ports
from launcher.redact import redact_command

__all__ = [
    "OPTIONAL_ROLES",
    "QUIET_ENV",
    "Placement",
    "Ports",
    "ProcessSpec",
    "choose_ports",
    "describe",
    "launch_plan",
    "planned_ports",
    "prepare_env",
    "process_table",
    "trains_drafter",
    "worker_env",
]

QUIET_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "WANDB_MODE": "disabled",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# Megatron and torch warn dozens of times about packages that are optional; set PYTHONWARNINGS=default to see them.
NOISE = "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning"
Role = Literal["server", "router", "worker", "batcher", "trainer", "coordinator", "drafter"]
OPTIONAL_ROLES = ("coordinator", "drafter")  # a run goes on without them


@dataclass(frozen=True)
class Ports:
    """One port for each listening process; 0 means that any free one will be picked at the start."""

    servers: tuple[int, ...]
    router: int
    batcher: int
    metrics: int
    master: int
    coordinator: int


@dataclass(frozen=True)
class Placement:
    """Host and devices (CUDA indices) of a process; no devices: CPU."""

    host: str
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.host} " + (f"gpu {','.join(map(str, self.devices))}" if self.devices else "cpu")


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one process. ``health`` is the URL that answers 200 once it is ready (servers and router)."""

    name: str
    role: Role
    argv: tuple[str, ...]
    placement: Placement
    port: int | None = None
    health: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def restartable(self) -> bool:
        """A dead trainer rank stops the run; everything else is started again."""
        return self.role != "trainer"


def planned_ports(config: Config) -> Ports:
    """The fixed ports, 0 for the rest."""
    count = config.rollout_allocation.dp
    servers = config.embedded.ports if config.rollout_allocation.backend == "embedded" else ()
    return Ports(servers or (0,) * count, config.runtime.router_port, config.batcher.port, 0, 0, 0)


def choose_ports(config: Config) -> Ports:
    """The fixed ports, and free ones for the rest."""
    planned = planned_ports(config)
    wanted = [*planned.servers, planned.router, planned.batcher, planned.metrics, planned.master, planned.coordinator]
    free = iter(ports.pick_free(wanted.count(0), config.runtime.host, {p for p in wanted if p}))
    got = [p or next(free) for p in wanted]
    n = len(planned.servers)
    return Ports(tuple(got[:n]), *got[n:])


def launch_plan(config: Config, run_dir: Path, chosen: Ports, epoch: int, resume_step: int | None) -> LaunchPlan:
    host, alloc = config.runtime.host, config.train_allocation
    return LaunchPlan(
        run_dir=str(run_dir),
        epoch=epoch,
        batcher=f"tcp://{host}:{chosen.batcher}",
        metrics=f"tcp://{host}:{chosen.metrics}",
        router=f"http://{host}:{chosen.router}",
        servers=tuple(f"http://{host}:{port}" for port in chosen.servers),
        trainer_master_addr=host,
        trainer_master_port=chosen.master,
        dp=alloc.dp,
        tp=alloc.tp,
        pp=alloc.pp,
        num_workers=config.runtime.num_workers,
        resume_step=resume_step,
        api_key=config.runtime.api_key,
        coordinator=f"tcp://{host}:{chosen.coordinator}" if trains_drafter(config) else None,
    )


def trains_drafter(config: Config) -> bool:
    return config.tlt.train and config.rollout_allocation.backend == "embedded"


def process_table(config: Config, plan: LaunchPlan, chosen: Ports) -> list[ProcessSpec]:
    """Every process but the launcher itself, in the order of their dependencies."""
    host, rollout = config.runtime.host, config.rollout_allocation
    gpus = rollout.backend == "sglang"
    per_server = rollout.tp * rollout.pp
    run = ("--run", plan.run_dir)
    table: list[ProcessSpec] = []
    for i, port in enumerate(chosen.servers):
        devices = tuple(range(i * per_server, (i + 1) * per_server)) if gpus else ()
        if gpus:
            command = build_command(config, i, port, model_path=str(Path(plan.run_dir) / "model"))
            argv = _module("areal_dta.rollout.sglang", *command)
        else:
            argv = _module("areal_dta.rollout.server", *run, "--index", str(i))
        table.append(_spec(f"server.{i}", "server", argv, Placement(host, devices), port, plan.servers[i] + "/health"))
    table.append(_spec("batcher", "batcher", _module("areal_dta.batcher", *run), Placement(host), chosen.batcher, None))
    for rank in range(plan.trainer_world_size):
        devices = (rollout.world_size + rank,) if gpus else ()
        argv = _module("areal_dta.trainer", *run, "--index", str(rank))
        table.append(_spec(f"trainer.{rank}", "trainer", argv, Placement(host, devices), None, None))
    router = _module("areal_dta.rollout.router", *run)
    table.append(_spec("router", "router", router, Placement(host), chosen.router, plan.router + "/health"))
    for i in range(plan.num_workers):
        argv = _module("areal_dta.rollout.worker", *run, "--index", str(i))
        table.append(_spec(f"worker.{i}", "worker", argv, Placement(host), None, None))
    if plan.coordinator is not None:
        settings = str(Path(plan.run_dir) / "drafter" / "coordinator.json")
        argv = _module("areal_dta.drafter.coordinator", "--settings", settings)
        table.append(_spec("coordinator", "coordinator", argv, Placement(host), chosen.coordinator, None))
        for i in range(len(chosen.servers)):
            argv = _module("areal_dta.drafter.worker", *run, "--index", str(i))
            table.append(_spec(f"drafter.{i}", "drafter", argv, Placement(host), None, None))
    return table


def _module(name: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *args)


def _spec(
    name: str, role: Role, argv: tuple[str, ...], placement: Placement, port: int | None, health: str | None
) -> ProcessSpec:
    return ProcessSpec(name, role, argv, placement, port, health, device_env(placement.devices))


def device_env(devices: Sequence[int]) -> dict[str, str]:
    """Shows a process its own devices only; without any it sees none, also on a machine that has some."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


def prepare_env(config: Config) -> dict[str, str]:
    """Environment of `prepare`, which runs alone: every core; GPUs only where the run has some."""
    threads = str(os.cpu_count() or 1)
    devices = {} if config.rollout_allocation.backend == "sglang" else device_env(())
    return {**worker_env(config), **devices, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def worker_env(config: Config) -> dict[str, str]:
    """Environment of every process of a run: no network look-ups, and no more threads than asked for."""
    threads = str(config.runtime.threads_per_process)
    warnings = os.environ.get("PYTHONWARNINGS", NOISE)
    return {**QUIET_ENV, "PYTHONWARNINGS": warnings, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def describe(spec: ProcessSpec) -> dict[str, Any]:
    """One row of ``--dry-run``: name, role, host, devices, port (0: any free one), command without keys."""
    return {
        "name": spec.name,
        "role": spec.role,
        "host": spec.placement.host,
        "devices": list(spec.placement.devices),
        "port": spec.port,
        "command": redact_command(spec.argv),
    }

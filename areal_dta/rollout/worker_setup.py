"""From the run's configuration to what a worker needs: settings, AReaL's client configuration, the workflow object."""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api import RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.utils.dynamic_import import import_from_string
from areal.utils.hf_utils import load_hf_tokenizer

from areal_dta.config import Config
from areal_dta.config_schema import GenerationHyperparameters as GenerationKeys
from areal_dta.records import LaunchPlan
from areal_dta.rollout.worker_agent import AgentWorkflow
from areal_dta.rollout.worker_convert import Limits

__all__ = ["WorkerSettings", "WorkflowError", "areal_config", "load_workflow", "settings_of", "split_capacity"]

# AReaL's executor admits (max_head_offpolicyness + version + 1) * consumer_batch_size episodes over its lifetime. The
# batcher owns admission (several executors would each admit that many), so this gate is set where it never closes.
_OPEN_GATE = 1 << 40
_AGENT_KEYS = ("turn_discount", "export_style", "tool_call_parser", "reasoning_parser", "chat_template_type")


class WorkflowError(ValueError):
    """The configured workflow cannot be loaded or constructed; the text says what to change."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What `worker.Worker` needs to know; times in seconds, ``capacity`` in concurrent episodes."""

    name: str
    capacity: int
    episode_timeout_s: float
    limits: Limits
    heartbeat_s: float = 5.0
    batcher_timeout_s: float = 1200.0
    lease_wait_s: float = 2.0
    stop_timeout_s: float = 30.0
    stats_interval_s: float = 10.0
    stuck_grace_s: float = 30.0


def split_capacity(total: int, num_workers: int, index: int) -> int:
    """Concurrent episodes of worker ``index`` so that all workers together have ``total`` (at least one each)."""
    if not 0 <= index < num_workers:
        raise ValueError(f"worker index {index} is outside 0..{num_workers - 1}")
    return max(1, total // num_workers + (index < total % num_workers))


def settings_of(config: Config, plan: LaunchPlan, index: int) -> WorkerSettings:
    """Settings of worker ``index`` of the launch ``plan``."""
    total = config.rollout.max_concurrent_rollouts or config.episodes_per_step
    runtime = config.runtime
    return WorkerSettings(
        name=f"worker.{index}",
        capacity=split_capacity(total, plan.num_workers, index),
        episode_timeout_s=config.rollout.request_timeout,
        limits=Limits(config.dta.max_len, config.dta.too_long),
        # Several heartbeats may be lost before the batcher gives a lease to someone else.
        heartbeat_s=min(5.0, config.batcher.lease_timeout_s / 6),
        batcher_timeout_s=runtime.step_timeout_s,
        stop_timeout_s=runtime.stop_timeout_s,
    )


def areal_config(config: Config, settings: WorkerSettings) -> InferenceEngineConfig:
    """AReaL's client configuration for one worker; the router is "one server" to it."""
    rollout = config.rollout
    return InferenceEngineConfig(
        experiment_name=config.experiment_name,
        trial_name=config.trial_name or "trial",
        fileroot=config.cluster.fileroot,
        backend="sglang:d1",
        # Leases bound what runs at once; twice that leaves the executor's own limit slack.
        max_concurrent_rollouts=2 * settings.capacity,
        queue_size=max(1024, 4 * settings.capacity),
        consumer_batch_size=1,
        max_head_offpolicyness=_OPEN_GATE,
        request_timeout=rollout.request_timeout,
        request_retries=rollout.request_retries,
        setup_timeout=config.runtime.start_timeout_s,
        check_trajectory_format=rollout.check_trajectory_format,
        dump_to_file=rollout.dump_to_file,
        tokenizer_path=config.tokenizer_path,
    )


def load_workflow(config: Config, run_dir: Path) -> RolloutWorkflow:
    """Import and construct ``config.workflow``; see `instantiate` for what it may be and what it is given."""
    tokenizer_path = config.tokenizer_path or str(run_dir / "model")
    gconfig = _areal_gconfig(config.gconfig)
    agent_keys = {key: value for key, value in _agent_section(config).items() if key in _AGENT_KEYS}
    offers: dict[str, Callable[[], Any]] = {
        "config": lambda: config,
        "run_dir": lambda: run_dir,
        "tokenizer": lambda: load_hf_tokenizer(tokenizer_path),
        "tokenizer_path": lambda: tokenizer_path,
        "gconfig": lambda: gconfig,
        "eval_gconfig": lambda: _areal_gconfig(config.eval_gconfig or config.gconfig),
        "econfig": lambda: config.econfig,
    }

    def adapt(agent: Any) -> RolloutWorkflow:
        return AgentWorkflow(
            agent, load_hf_tokenizer(tokenizer_path), max_tokens=config.gconfig.max_tokens, **agent_keys
        )

    return instantiate(config.workflow, config.workflow_args, offers, adapt)


def _agent_section(config: Config) -> Mapping[str, Any]:
    agent = dict((config.raw.get("rollout") or {}).get("agent") or {})
    mode = agent.get("mode", "inline")
    if mode != "inline":
        raise WorkflowError(f"rollout.agent.mode={mode!r} needs AReaL's proxy processes; only 'inline' runs here")
    return agent


def _areal_gconfig(keys: GenerationKeys) -> GenerationHyperparameters:
    """AReaL's record of the generation keys; one lease is one sample, whatever ``n_samples`` says."""
    values = dataclasses.asdict(keys) | {
        "n_samples": 1,
        "stop_token_ids": list(keys.stop_token_ids),
        "stop": None if keys.stop is None else list(keys.stop),
    }
    return GenerationHyperparameters(**values)


def instantiate(
    path: str,
    args: Mapping[str, Any],
    offers: Mapping[str, Callable[[], Any]],
    adapt: Callable[[Any], RolloutWorkflow],
) -> RolloutWorkflow:
    """The workflow at the dotted ``path``: a `RolloutWorkflow` class or instance, or an agent with ``async run(data)``.

    A class is constructed with ``args`` and with those of ``offers`` (name -> value, made on demand) that its
    constructor names. An agent goes through ``adapt``. Raises WorkflowError for a path that does not import and for
    parameters that do not fit.
    """
    if not path:
        raise WorkflowError("no workflow configured; set workflow=package.module.Class")
    try:
        target = import_from_string(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise WorkflowError(f"workflow={path!r} does not import: {error}") from error
    if isinstance(target, type):
        target = target(**_arguments(path, target, args, offers))
    elif args:
        raise WorkflowError(
            f"workflow={path!r} is an object, not a class; workflow_args {sorted(args)} would be ignored"
        )
    if isinstance(target, RolloutWorkflow):
        return target
    if inspect.iscoroutinefunction(getattr(target, "run", None)):
        return adapt(target)
    raise WorkflowError(
        f"workflow={path!r} gives a {type(target).__name__}; expected an areal.api.RolloutWorkflow "
        "or an agent class with 'async def run(self, data, **extra)'"
    )


def _arguments(
    path: str, target: type, args: Mapping[str, Any], offers: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = sorted(set(args) - {p.name for p in named})
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise WorkflowError(f"workflow={path!r} has no parameter {unknown[0]!r}; remove it from workflow_args")
    arguments = dict(args)
    for p in named:
        if p.name in arguments:
            continue
        if p.name in offers:
            arguments[p.name] = offers[p.name]()
        elif p.default is p.empty:
            raise WorkflowError(
                f"workflow={path!r} wants a parameter {p.name!r}; the worker supplies {', '.join(sorted(offers))}, "
                f"anything else comes from workflow_args.{p.name}"
            )
    return arguments

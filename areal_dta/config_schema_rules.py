"""Rules over several keys: what is derived from what (`derive`), and which values cannot run (`check_values`).

`derive` works on the mapping before defaults are filled in, so that a value the user gave is told from a default.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from areal_dta.config_schema import EmbeddedConfig, PPOConfig
from areal_dta.config_schema_alloc import Allocation, parse_allocation
from areal_dta.config_schema_check import ConfigError
from areal_dta.config_schema_tlt import check_tlt

__all__ = ["check_supported", "check_values", "derive"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEFAULT_BATCH = 1
_POSITIVE = (
    "train_dataset.batch_size",
    "gconfig.n_samples",
    "gconfig.max_new_tokens",
    "gconfig.max_tokens",
    "gconfig.temperature",
    "total_train_epochs",
    "total_train_steps",
    "rollout.max_concurrent_rollouts",
    "rollout.request_timeout",
    "actor.ppo_n_minibatches",
    "actor.eps_clip",
    "actor.mb_spec.max_tokens_per_mb",
    "dta.max_block_tokens",
    "dta.max_len",
    "batcher.lease_timeout_s",
    "batcher.max_attempts",
    "batcher.intake_limit",
    "batcher.spool_bytes",
    "batcher.group_timeout_s",
    "embedded.max_batch",
    "embedded.max_total_tokens",
    "embedded.max_prefill_tokens",
    "embedded.max_waiting",
    "embedded.threads",
    "tlt.max_batch",
    "tlt.ngram_tokens",
    "tlt.record_tokens",
    "tlt.buffer_bytes",
    "tlt.min_idle_servers",
    "tlt.publish_steps",
    "tlt.learning_rate",
    "telemetry.interval_s",
    "runtime.num_workers",
    "runtime.threads_per_process",
    "runtime.start_timeout_s",
    "runtime.stop_timeout_s",
    "runtime.step_timeout_s",
    "runtime.prepare_timeout_s",
    "econfig.max_steps",
    "cluster.n_nodes",
    "cluster.n_gpus_per_node",
    "saver.freq_steps",
    "recover.freq_steps",
    "evaluator.freq_steps",
)
_NOT_NEGATIVE = (
    "seed",
    "rollout.max_head_offpolicyness",
    "rollout.request_retries",
    "actor.optimizer.lr",
    "actor.optimizer.weight_decay",
    "actor.optimizer.gradient_clipping",
    "actor.kl_ctl",
    "batcher.stale_reissues",
    "runtime.restart_limit",
)
# AReaL features that would be ignored silently: the only values accepted, and the remedy is always to drop the key.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "critic": (None,),
    "teacher": (None,),
    "dynamic_bs": (False,),
    "total_train_n_seqs": (None,),
    "actor.is_critic": (False,),
    "actor.use_lora": (False,),
    "actor.offload": (False,),
    "actor.init_from_scratch": (False,),
    "actor.log_agent_stats": (False,),
    "actor.overlong_reward_penalty": (False,),
    "actor.mask_no_eos_with_zero": (False,),
    "actor.m2_threshold": (None,),
    "actor.megatron.virtual_pipeline_parallel_size": (0, 1),
    "actor.megatron.fp8_config": (None,),
    "actor.weight_update_mode": ("disk",),
    "actor.prox_logp_method": ("recompute",),
    "rollout.use_lora": (False,),
    "rollout.agent.mode": ("inline",),
    "rollout.agent.agent_cls_path": ("",),
    "gconfig.use_beam_search": (False,),
    "gconfig.frequency_penalty": (0.0, 0),
    "gconfig.min_new_tokens": (0,),
    "evaluator.freq_secs": (None,),
    "recover.no_save_optim": (False,),
    "recover.no_load_optim": (False,),
}
# What to do instead, where dropping the key is not all.
_INSTEAD = {
    "actor.mask_no_eos_with_zero": "it depends on how rows are padded, so on the partition; give the workflow's reward",
    "actor.m2_threshold": "it is chosen from one rank's tokens, so it depends on the partition; set it to null",
    "gconfig.frequency_penalty": "the trainer could not recompute the log-probs; set it to 0",
    "gconfig.min_new_tokens": "the trainer could not recompute the log-probs; set it to 0",
    "actor.init_from_scratch": "give actor.path a model folder, or set prepare to a function that builds one",
    "actor.log_agent_stats": "set it to false; batcher and workers publish rewards, turns and tokens of every episode",
    "rollout.agent.mode": "agents run inside the rollout workers; set rollout.agent.mode=inline",
    "rollout.agent.agent_cls_path": "remove it and set workflow to that name",
    "evaluator.freq_secs": "evaluations are counted in steps; set evaluator.freq_steps or evaluator.freq_epochs",
}
_UNIT = ("actor.optimizer.beta1", "actor.optimizer.beta2", "actor.optimizer.warmup_steps_proportion")


def derive(given: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Add the values that follow from others; raise ConfigError where the file contradicts one."""
    raw: dict[str, Any] = copy.deepcopy(dict(given))
    gconfig, actor, rollout, dataset = (_section(raw, n) for n in ("gconfig", "actor", "rollout", "train_dataset"))
    batch = dataset.get("batch_size", _DEFAULT_BATCH)
    _same(rollout, "rollout.consumer_batch_size", batch, "train_dataset.batch_size")
    _same(actor, "actor.temperature", gconfig.get("temperature", 1.0), "gconfig.temperature")
    for name in ("reward_norm", "adv_norm"):
        norm = actor.get(name)
        if isinstance(norm, dict) and "group" in (norm.get("mean_level"), norm.get("std_level")):
            _same(norm, f"actor.{name}.group_size", gconfig.get("n_samples", 1), "gconfig.n_samples")
    if actor.get("optimizer") is None:
        actor["optimizer"] = {}
    if raw.get("eval_gconfig") is None:
        raw["eval_gconfig"] = {**gconfig, "greedy": True, "n_samples": 1}
    partition = "ffd_tokens" if raw.get("packing_algorithm") == "ffd" else None
    if partition is not None:
        _same(_section(raw, "batcher"), "batcher.partition", partition, "packing_algorithm=ffd's method")
    mode, dta = raw.get("tree_training_mode", "dta"), _section(raw, "dta")
    for key, default in (("plan", "auto"), ("calibrate", False)):
        if mode != "dta" and dta.get(key, default) != default:
            notices.append(f"dta.{key}={dta[key]} has no effect with tree_training_mode={mode}")
    if raw.get("async_training") is False and rollout.get("max_head_offpolicyness", 0) != 0:
        notices.append(
            f"async_training=false: rollout.max_head_offpolicyness={rollout['max_head_offpolicyness']} becomes 0"
        )
        rollout["max_head_offpolicyness"] = 0
    if raw.get("ref") is None and actor.get("kl_ctl", 0.1):
        notices.append(
            f"actor.kl_ctl={actor.get('kl_ctl', 0.1)} without a ref model rewards unlikely tokens (as in AReaL); "
            "set it to 0"
        )
    if isinstance(raw.get("ref"), dict):
        raw["ref"].setdefault("backend", actor.get("backend"))
        if not actor.get("kl_ctl", 0.1):
            notices.append("ref is not loaded: actor.kl_ctl is 0")
    return raw


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.setdefault(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={value!r} must be a section (a mapping of keys)")
    return value


def _same(section: dict[str, Any], where: str, value: Any, source: str) -> None:
    key = where.rsplit(".", 1)[-1]
    if section.setdefault(key, value) != value:
        raise ConfigError(f"{where}={section[key]} must equal {source}={value}; remove {where} or write ${{{source}}}")


def check_values(config: PPOConfig) -> None:
    """Raise ConfigError for the first value or combination that cannot run."""
    for where, test, rule in (
        *((k, lambda v: v > 0, "must be positive") for k in _POSITIVE),
        *((k, lambda v: v >= 0, "must not be negative") for k in _NOT_NEGATIVE),
        *((k, lambda v: 0 <= v < 1, "must be at least 0 and below 1") for k in _UNIT),
        ("gconfig.top_p", lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    ):
        value = _lookup(config, where)
        if value is not None and not test(value):
            raise ConfigError(f"{where}={value} {rule}")
    for where in ("experiment_name", "trial_name"):
        name = getattr(config, where)
        if (name or where == "experiment_name") and not _NAME.fullmatch(name):
            raise ConfigError(f"{where}={name!r} becomes a folder name; use letters, digits, dots, dashes, underscores")
    _check_dotted(config)
    _check_dta(config)
    _check_train(config)
    _check_rollout(config)


def check_supported(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError where a filled mapping asks for a feature that does not exist here."""
    for where, allowed in _UNSUPPORTED.items():
        value: Any = raw
        for name in where.split("."):
            value = value.get(name, allowed[-1]) if isinstance(value, Mapping) else allowed[-1]
        if value not in allowed:
            shown = "{...}" if isinstance(value, Mapping) else value
            remedy = _INSTEAD.get(where, f"remove it (the only accepted value is {allowed[-1]})")
            raise ConfigError(f"{where}={shown} is not supported; {remedy}")
    adv_norm = raw["actor"]["adv_norm"] or {}
    for level in ("mean_level", "std_level"):
        if adv_norm.get(level) == "group":
            raise ConfigError(
                f"actor.adv_norm.{level}=group is not supported: a partition may split a group over ranks; use batch "
                "here and normalise rewards by group in actor.reward_norm"
            )


def _lookup(config: Any, where: str) -> Any:
    for name in where.split("."):
        config = getattr(config, name)
        if config is None:
            return None
    return config


def _check_dotted(config: PPOConfig) -> None:
    for where, name in (("workflow", config.workflow), ("prepare", config.prepare)):
        if name is None and where == "prepare":
            continue
        if not name or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
            raise ConfigError(f"{where}={name!r} must be a dotted name such as package.module.Name")


def _check_dta(config: PPOConfig) -> None:
    dta = config.dta
    for key, needed in (("leaf_merge", "dense"), ("cut_tail", "classic")):
        if not getattr(dta, key) and dta.plan != needed:
            raise ConfigError(
                f"dta.{key}=false has no meaning with dta.plan={dta.plan}; remove it or set dta.plan={needed}"
            )
    if dta.fused_loss:
        for where in ("actor.importance_sampling_level", "actor.rejection_sampling.level"):
            if _lookup(config, where) not in (None, "token"):
                raise ConfigError(
                    f"dta.fused_loss=true with {where}={_lookup(config, where)}: a fused loss sums over tokens; set "
                    f"dta.fused_loss=false or {where}=token"
                )


def _check_train(config: PPOConfig) -> None:
    alloc = parse_allocation(config.actor.backend, "actor.backend")
    where = f"actor.backend={config.actor.backend}"
    if alloc.backend != "megatron":
        raise ConfigError(f"{where}: training runs on megatron; write megatron:{str(alloc).partition(':')[2]}")
    if alloc.cp > 1:
        raise ConfigError(f"{where}: context parallelism (c{alloc.cp}) is not supported on a prefix tree; use c1 or t")
    if alloc.ep > 1:
        raise ConfigError(f"{where}: expert parallelism (e{alloc.ep}) is not supported; use e1")
    groups, episodes = config.train_dataset.batch_size, config.train_dataset.batch_size * config.gconfig.n_samples
    if episodes < alloc.dp:
        raise ConfigError(
            f"{where}: {alloc.dp} data-parallel ranks for {episodes} episodes (train_dataset.batch_size={groups} "
            f"x gconfig.n_samples={config.gconfig.n_samples}); raise train_dataset.batch_size or lower d{alloc.dp}"
        )
    if config.batcher.intake_limit < episodes:
        raise ConfigError(
            f"batcher.intake_limit={config.batcher.intake_limit} cannot hold a step of {episodes} episodes; raise it"
        )
    if config.actor.ppo_n_minibatches > groups:
        raise ConfigError(
            f"actor.ppo_n_minibatches={config.actor.ppo_n_minibatches} exceeds the groups of a step, "
            f"train_dataset.batch_size={groups}; lower it"
        )
    limit_s, episode_s = config.batcher.group_timeout_s, config.rollout.request_timeout
    if limit_s is not None and limit_s < episode_s:
        raise ConfigError(
            f"batcher.group_timeout_s={limit_s:g} is shorter than an episode may take, "
            f"rollout.request_timeout={episode_s:g}: slow episodes would be thrown away; raise it, or remove it"
        )
    if config.ref is not None and config.actor.kl_ctl > 0:
        raise ConfigError(f"actor.kl_ctl={config.actor.kl_ctl} with a ref model is not supported; set actor.kl_ctl=0")
    if config.actor.dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"actor.dtype={config.actor.dtype!r} must be float32, bfloat16 or float16")


def _check_rollout(config: PPOConfig) -> None:
    alloc = parse_allocation(config.rollout.backend, "rollout.backend")
    where = f"rollout.backend={config.rollout.backend}"
    if alloc.backend not in ("embedded", "sglang"):
        raise ConfigError(f"{where}: unknown backend {alloc.backend!r}; use embedded:dN or sglang:dNtM")
    if alloc.cp > 1 or alloc.ep > 1:
        raise ConfigError(f"{where}: only d, t and p are supported for rollout")
    _check_ports(config, alloc)
    _check_embedded(config, alloc)
    check_tlt(config, alloc)
    if alloc.backend == "embedded":
        if alloc.tp > 1 or alloc.pp > 1:
            raise ConfigError(f"{where}: the embedded server is one process; use embedded:d{alloc.dp}")
        return
    train = parse_allocation(config.actor.backend, "actor.backend")
    devices, needed = config.cluster.n_nodes * config.cluster.n_gpus_per_node, alloc.world_size + train.world_size
    if needed > devices:
        raise ConfigError(
            f"{where} and actor.backend={config.actor.backend} need {needed} devices; cluster.n_nodes x "
            f"cluster.n_gpus_per_node is {devices}; lower a backend's sizes or raise the cluster's"
        )


def _check_embedded(config: PPOConfig, alloc: Allocation) -> None:
    """Server settings that would have no effect, or make a run's own requests fail."""
    chosen, default = config.embedded, EmbeddedConfig()
    if alloc.backend != "embedded":
        for key in ("max_prefill_tokens", "max_waiting", "while_released", "reasoning_parser"):
            if getattr(chosen, key) != getattr(default, key):
                raise ConfigError(
                    f"embedded.{key}={getattr(chosen, key)} has no effect with rollout.backend="
                    f"{config.rollout.backend}; remove it, SGLang's own flags go under sglang"
                )
        return
    running = config.rollout.max_concurrent_rollouts
    if running is not None and chosen.max_waiting < running:
        raise ConfigError(
            f"embedded.max_waiting={chosen.max_waiting} is below rollout.max_concurrent_rollouts={running}, so that a "
            "server could refuse the run's own requests; raise the first or lower the second"
        )
    if chosen.while_released == "refuse" and alloc.dp < 2:
        raise ConfigError(
            f"embedded.while_released=refuse with rollout.backend={config.rollout.backend}: no other server could take "
            "the refused requests; use wait, or embedded:d2 and more"
        )


def _check_ports(config: PPOConfig, alloc: Allocation) -> None:
    ports = config.embedded.ports
    if ports and alloc.backend != "embedded":
        raise ConfigError(
            f"embedded.ports={list(ports)} has no effect with rollout.backend={config.rollout.backend}, whose servers "
            "take any free ports; remove it"
        )
    if ports and len(ports) != alloc.dp:
        raise ConfigError(
            f"embedded.ports={list(ports)} must list one port for each of {alloc.dp} servers, or be empty"
        )
    named = [("embedded.ports", p) for p in ports]
    named += [("batcher.port", config.batcher.port), ("runtime.router_port", config.runtime.router_port)]
    seen: dict[int, str] = {}
    for key, port in named:
        if not 0 <= port <= 65535:
            raise ConfigError(f"{key}={port} is not a port (0 to 65535; 0 picks a free one)")
        if port and port in seen:
            raise ConfigError(f"{key}={port} is also used by {seen[port]}; choose another")
        seen[port] = key

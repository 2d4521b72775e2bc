"""AReaL keys that have no effect here, or another one. A file that sets them loads, and a notice says what happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areal_dta.config_schema_check import Key, sections

__all__ = ["effect_notices"]

_ONE_PLACE = "metrics go to RUN/metrics.jsonl, read by `areal-dta dashboard` and `areal-dta report`"
_FREE_QUEUE = "the batcher bounds what is queued: batcher.intake_limit"
_OWN_TIMEOUT = "runtime.start_timeout_s bounds the start"
_FP32 = "gradients and optimizer state are float32"
# Key, values that say nothing else than what is done here, and what is done here.
_IGNORED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("saver.mode", ("auto", "sync"), "checkpoints are written while training waits"),
    ("recover.retries", (3,), "runtime.restart_limit bounds restarts"),
    ("stats_logger.wandb.mode", ("disabled",), _ONE_PLACE),
    ("stats_logger.swanlab.mode", ("disabled",), _ONE_PLACE),
    ("stats_logger.trackio.mode", ("disabled",), _ONE_PLACE),
    ("stats_logger.tensorboard.path", (None,), _ONE_PLACE),
    ("perf_tracer.enabled", (False,), "the time of every stage is in RUN/metrics.jsonl"),
    ("enable_offload", (False,), "nothing is offloaded: trainer and servers hold devices of their own"),
    ("actor.grad_reduce_dtype", ("float32",), _FP32),
    ("actor.optimizer_dtype", ("float32",), _FP32),
    ("rollout.queue_size", (None,), _FREE_QUEUE),
    ("rollout.pause_grace_period", (0.0,), "a weight update pauses the servers at once and keeps partial episodes"),
    ("rollout.setup_timeout", (300.0,), _OWN_TIMEOUT),
    ("rollout.enable_rollout_tracing", (False,), "episodes are told by metrics (rollout/*) and the workers' logs"),
    ("scheduler.type", (None, "local"), "processes are started on this machine by `areal-dta run`"),
    ("train_dataset.drop_last", (True,), "the short last batch of an epoch is dropped"),
)
_FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")


def effect_notices(raw: Mapping[str, Any]) -> list[str]:
    """One notice for each given AReaL key of a filled mapping that has no effect here, or not AReaL's."""
    notices = []
    for where, silent, instead in _IGNORED:
        value = _lookup(raw, where, silent[0])
        if value not in silent:
            notices.append(f"{where}={_shown(value)} has no effect: {instead}")
    notices += _checkpoints(raw)
    megatron = list(_differing(_lookup(raw, "actor.megatron", None), "MegatronEngineConfig", "actor.megatron"))
    if megatron:
        notices.append(f"{', '.join(megatron)} without effect: the engine sets Megatron-core up by itself")
    if raw.get("memory_profiler") is not None:
        notices.append("memory_profiler has no effect: there is no memory profiler here")
    specs = [spec for name in ("actor", "rollout") for spec in raw[name].get("scheduling_spec") or ()]
    if any(spec.get("env_vars") or spec.get("additional_bash_cmds") for spec in specs):
        notices.append(
            "scheduling_spec has no effect: processes inherit the environment of `areal-dta run`; set env_vars there"
        )
    return notices


def _checkpoints(raw: Mapping[str, Any]) -> Iterator[str]:
    saver, recover = raw["saver"], raw["recover"]
    if given := [f"saver.{key}={saver[key]}" for key in _FREQUENCIES if saver[key]]:
        yield (
            f"{', '.join(given)}: saver and recover write the same checkpoints here, whenever the shorter of their "
            "intervals is over; weights of the last versions are in RUN/weights"
        )
    given = [f"recover.{key}={recover[key]}" for key in _FREQUENCIES if recover[key]]
    if given and recover["mode"] in ("disabled", "off"):
        yield (
            f"recover.mode={recover['mode']}: {', '.join(given)} without effect, checkpoints are written as saver "
            "says and after the last step; set recover.mode=auto to resume from any point"
        )


def _differing(given: Any, section: str, path: str) -> Iterator[str]:
    """``path.key=value`` for each given value that is not AReaL's default."""
    keys: Mapping[str, Key] = sections()[section]
    for name, value in (given or {}).items():
        key = keys[name]
        if key.spelled.startswith("@") and isinstance(value, Mapping):
            yield from _differing(value, key.spelled.strip("@?"), f"{path}.{name}")
        elif value != key.default:
            yield f"{path}.{name}={_shown(value)}"


def _lookup(raw: Any, where: str, absent: Any) -> Any:
    for name in where.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return absent
        raw = raw[name]
    return raw


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The command line that starts one SGLang server. SGLang lives in an environment of its own, reached over HTTP.

Pure: it builds the command from the configuration. It is tested as text only; no SGLang server is started by the tests.
Flags as documented for SGLang's ``launch_server``; `sglang` keys of the configuration become flags of the same name.
SGLang takes its API key as a flag only, so whoever may list the processes of the machine can read it.
"""

from __future__ import annotations

from typing import Any

from areal_dta.config import Config

__all__ = ["build_command"]

# Set from the allocation or here, never from the `sglang` section.
_OWN = {"model_path", "dp_size", "random_seed"}
# Keys of AReaL's section that its own launcher consumes and that are no flags of the server.
_NOT_FLAGS = {
    "enable_ep_moe",
    "enable_nan_detection",
    "ep_size",
    "enable_return_routed_experts",
    "enable_multithread_load",
}


def build_command(config: Config, index: int, port: int, model_path: str | None = None) -> list[str]:
    """argv of server `index` on `port`, serving `model_path` (default: ``sglang.model_path``, then ``actor.path``).

    Each data-parallel replica is a server of its own, so only tensor and pipeline sizes reach SGLang. Sampling seeds
    differ between servers by their index. True switches are passed bare, false and null ones left out.
    """
    alloc = config.rollout_allocation
    argv = [
        config.runtime.sglang_python,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model_path or config.sglang.model_path or config.actor.path,
        "--host",
        config.runtime.host,
        "--port",
        str(port),
        "--tp-size",
        str(alloc.tp),
        "--pp-size",
        str(alloc.pp),
        "--random-seed",
        str(config.sglang.random_seed + index),
    ]
    if config.runtime.api_key:
        argv += ["--api-key", config.runtime.api_key]
    for key, value in config.raw["sglang"].items():
        if key not in _OWN and key not in _NOT_FLAGS:
            argv += _flag(key, value)
    return argv


def _flag(key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-")
    if value is None or value is False or value == "":
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [name, str(value)]

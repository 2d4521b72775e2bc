"""SGLang servers: the command line of one, and what happens before it starts.

SGLang lives in an environment of its own. A run starts ``python -m areal_dta.rollout.sglang COMMAND...``: it asks the
command's interpreter which SGLang it has, says what that release cannot do, and becomes the command, so that health,
log, signals and restarts are those of SGLang itself. With a drafter (``tlt.drafter``) the flags depend on the release,
so they are added then (`sglang_tlt`). The launcher waits for ``/health`` (``runtime.start_timeout_s``), keeps the
output in the process's log and starts a dead server again (``runtime.restart_limit``); the router then brings it to the
current weights. No torch.

Flags as documented for SGLang's ``launch_server``; `sglang` keys of the configuration become flags of the same name.
SGLang takes its API key as a flag only, so whoever may list the processes of the machine can read it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_dta.config import Config
from areal_dta.rollout.sglang_contract import PINNED, Contract, contract_of

__all__ = ["SGLangMissing", "TltPlan", "become", "build_command", "installed_version", "main"]

_PROBE = "import importlib.metadata as m; print(m.version('sglang'))"
_PROBE_TIMEOUT_S = 60.0
# Otherwise /health generates a token: a paused server, as during an update, would look dead to the router.
_PLAIN_HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
_PLAN = "--tlt"  # followed by a plan, before the command
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


@dataclass(frozen=True)
class TltPlan:
    """What a run's configuration asks of an SGLang server; goes to its start as one argument."""

    drafter: str
    arms: tuple[str, ...]
    max_regret: float
    max_batch: int | None
    seed: int

    @classmethod
    def of(cls, config: Config, index: int) -> TltPlan | None:
        """The plan of server ``index``; None without speculation or without a drafter."""
        tlt = config.tlt
        if not tlt.enabled or tlt.drafter is None:
            return None
        return cls(str(Path(tlt.drafter).absolute()), tlt.arms, tlt.max_regret, tlt.max_batch, config.seed + index)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TltPlan:
        fields = json.loads(text)
        return cls(**{**fields, "arms": tuple(fields["arms"])})


def build_command(config: Config, index: int, port: int, model_path: str | None = None) -> list[str]:
    """argv of server `index` on `port`, serving `model_path` (default: ``sglang.model_path``, then ``actor.path``).

    With a drafter it stands after ``--tlt`` and a plan, of which `main` makes flags. Each data-parallel replica is a
    server of its own, so only tensor and pipeline sizes reach SGLang. Sampling seeds differ between servers by their
    index. True switches are passed bare, false and null ones left out.
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
    plan = TltPlan.of(config, index)
    return argv if plan is None else [_PLAN, plan.to_json(), *argv]


def _flag(key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-")
    if value is None or value is False or value == "":
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [name, str(value)]


class SGLangMissing(RuntimeError):
    """The interpreter cannot be run or has no SGLang."""


def installed_version(python: str) -> str:
    """Release of the SGLang that ``python`` would run; raises SGLangMissing."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SGLangMissing(f"runtime.sglang_python={python} cannot be run: {error}") from error
    if done.returncode:
        raise SGLangMissing(
            f"runtime.sglang_python={python} has no sglang ({(done.stderr.splitlines() or ['no output'])[-1]:.200}); "
            f"name the interpreter of an environment that holds it, for example sglang=={PINNED}"
        )
    return done.stdout.strip()


def become(command: list[str], contract: Contract, messages: Sequence[str] = ()) -> int:
    """Say what the release cannot do and become ``command``; returns exit code 2 for a flag that it does not have."""
    removed = [flag for flag in contract.removed_flags if flag in command]
    if removed:
        key = removed[0].removeprefix("--").replace("-", "_")
        print(f"cannot serve: {contract.name} has no {removed[0]} any more; remove sglang.{key}", file=sys.stderr)
        return 2
    print(f"starting {contract.name}", flush=True)
    for limit in (*contract.limits(), *messages):
        print(f"{contract.name}: {limit}", flush=True)
    os.environ.setdefault(_PLAIN_HEALTH, "false")
    os.execvp(command[0], command)
    raise AssertionError("execvp returned")


def main(command: list[str]) -> int:
    """Announce what the release cannot do, then become ``command``; exit code 2 without SGLang or with a wrong flag."""
    if command[:1] == [_PLAN] and len(command) > 2:
        os.execv(sys.executable, [sys.executable, "-m", "areal_dta.rollout.sglang_tlt", *command[1:]])
    if not command:
        print("usage: python -m areal_dta.rollout.sglang PYTHON -m sglang.launch_server ...", file=sys.stderr)
        return 2
    try:
        contract = contract_of(installed_version(command[0]))
    except SGLangMissing as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 2
    return become(command, contract)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reading what a run directory says about its run: state, plan, resolved config, the batcher's counters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.rundir import RunDir

__all__ = ["RunFileError", "RunFiles", "read_run_files"]


class RunFileError(ValueError):
    """A run directory that cannot be read as one."""


@dataclass(frozen=True)
class RunFiles:
    """The small files of a run as plain maps; empty where a file does not exist (yet)."""

    run_dir: Path
    state: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    batcher: dict[str, Any] = field(default_factory=dict)

    def setting(self, key: str) -> Any:
        """A config value by dotted key, or None."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @property
    def name(self) -> str:
        """``experiment/trial``, or the directory's name where the config does not say."""
        parts = [self.setting("experiment_name"), self.setting("trial_name")]
        return "/".join(str(part) for part in parts if part) or self.run_dir.name

    @property
    def staleness_bound(self) -> int | None:
        value = self.setting("rollout.max_head_offpolicyness")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def num_dp_ranks(self) -> int | None:
        value = self.launch.get("dp")
        return value if isinstance(value, int) and value > 0 else None


def read_run_files(run_dir: Path) -> RunFiles:
    """Read the small files; raises RunFileError for a missing directory or a file that is there but unreadable."""
    if not run_dir.is_dir():
        raise RunFileError(f"no run directory at {run_dir}; give the directory that `areal-dta run` printed as run_dir")
    run = RunDir(run_dir)
    return RunFiles(
        run_dir=run_dir,
        state=_living_state(run, _read_map(run.state_file)),
        launch=_read_map(run.launch_file),
        config=_read_map(run.config_file),
        batcher=_read_map(run_dir / "batcher_status.json"),
    )


def _living_state(run: RunDir, state: dict[str, Any]) -> dict[str, Any]:
    """The state as it is, not as a launcher that was killed left it."""
    if state.get("status") in ("preparing", "running") and not run.is_locked():
        cause = f"the launcher (pid {state.get('pid')}) is gone; resume the run"
        return state | {"status": "failed", "cause": cause}
    return state


def _read_map(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RunFileError(f"{path} is damaged ({error}); remove it to read the rest of the run") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RunFileError(
            f"{path} holds {type(value).__name__}, expected a map; remove it to read the rest of the run"
        )
    return value

"""Reading what a run directory says about its run: state, plan, resolved config, the batcher's counters."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.rundir import RunDir, RunError

__all__ = ["RunFileError", "RunFiles", "living_state", "read_run_files"]


class RunFileError(RunError):
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

    @property
    def num_ranks(self) -> int:
        """Trainer ranks; 1 where the plan does not say."""
        return math.prod(n for key in ("dp", "tp", "pp") if isinstance(n := self.launch.get(key), int) and n > 0)


def read_run_files(run_dir: Path) -> RunFiles:
    """Read the small files; raises RunFileError for a missing directory or a file that is there but unreadable."""
    if not run_dir.is_dir():
        raise RunFileError(f"no run directory at {run_dir}; give the directory that `areal-dta run` printed as run_dir")
    run = RunDir(run_dir)
    locked = run.is_locked()  # before the state: a launcher that ends in between has written its last one
    return RunFiles(
        run_dir=run_dir,
        state=living_state(_read_map(run.state_file), locked),
        launch=_read_map(run.launch_file),
        config=_read_map(run.config_file),
        batcher=_read_map(run_dir / "batcher_status.json"),
    )


def living_state(state: dict[str, Any], locked: bool) -> dict[str, Any]:
    """The state as it is, not as a launcher that was killed left it; ``locked``: whether one is alive."""
    if state.get("status") in ("preparing", "running") and not locked:
        cause = f"the launcher (pid {state.get('pid')}) is gone; resume the run"
        return state | {"status": "failed", "cause": cause}
    return state


def _read_map(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFileError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    except (ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # YAML's errors have several lines
        raise RunFileError(f"{path} is damaged ({said}); remove it to read the rest of the run") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RunFileError(
            f"{path} holds {type(value).__name__}, expected a map; remove it to read the rest of the run"
        )
    return value

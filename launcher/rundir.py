"""The run directory: where each file lies, the state of the run, and whether a launcher is alive on it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.runlock import RunLock

__all__ = ["RunDir", "RunError", "RunState", "Status", "read_json_map", "write_json"]

Status = Literal["preparing", "running", "finished", "failed", "stopped"]


class RunError(RuntimeError):
    """A run that cannot be started, found, read or continued; the message names the cause and the remedy."""


@dataclass(frozen=True)
class RunState:
    """`state.json`. ``step`` counts finished training steps; times are unix seconds; ``pid`` is the launcher's."""

    status: Status
    pid: int
    epoch: int = 0
    step: int = 0
    total_steps: int = 0
    started_at: float = 0.0
    updated_at: float = 0.0
    cause: str | None = None


class RunDir:
    """Paths and small files of one run. Its ``lock`` is held by a living launcher and freed when it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = RunLock(path / "launcher.lock")

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def launch_file(self) -> Path:
        return self.path / "launch.json"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def processes_file(self) -> Path:
        return self.path / "processes.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def train_file(self) -> Path:
        return self.path / "dataset" / "train.jsonl"

    def log_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def exists(self) -> bool:
        return self.state_file.is_file()

    def require(self) -> RunDir:
        """Self, or RunError where this is no run directory."""
        if not self.exists():
            raise RunError(f"{self.path} is not a run directory (it has no state.json); give the folder `run` printed")
        return self

    def read_state(self) -> RunState:
        """RunError when ``state.json`` is damaged."""
        known = {f.name for f in dataclasses.fields(RunState)}
        try:
            return RunState(**{k: v for k, v in read_json_map(self.state_file).items() if k in known})
        except TypeError as error:  # a field without default is missing
            raise RunError(f"{self.state_file} is damaged ({error}); the run cannot be continued") from error

    def write_state(self, state: RunState) -> RunState:
        """Write atomically, stamping ``updated_at``; returns what was written."""
        stamped = dataclasses.replace(state, updated_at=time.time())
        write_json(self.state_file, dataclasses.asdict(stamped))
        return stamped

    def latest_checkpoint(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        latest = self.path / "checkpoints" / "latest.json"
        if not latest.is_file():
            return None
        try:
            step = read_json_map(latest).get("step")
        except RunError as error:
            raise RunError(f"{error}; delete it to resume from the start") from error
        if not isinstance(step, int) or isinstance(step, bool):
            raise RunError(f"{latest} names no checkpoint step; delete it to resume from the start")
        return step

    def acquire(self) -> None:
        """Take the launcher's lock for the life of this process; RunError while another launcher holds it."""
        if not self.lock.is_mine and not self.lock.acquire():
            raise RunError(f"{self.path} is running; stop it first: areal-dta stop {self.path}")

    def release(self) -> None:
        self.lock.release()

    def is_locked(self) -> bool:
        """Whether a launcher is alive on this run."""
        return self.lock.is_held()


def read_json_map(path: Path) -> dict[str, Any]:
    """The JSON object in a file; RunError when the file cannot be read or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error})") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged (it holds {type(value).__name__}, expected a map)")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON beside the target and rename it, so that a reader never sees half a file."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(value, indent=1))
    tmp.replace(path)

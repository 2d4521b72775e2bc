"""The run directory: where each file lies, the state of the run, and the lock that says whether a launcher is alive."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_dta.config import Config, ConfigError

__all__ = ["RunDir", "RunError", "RunState", "Status", "new_run", "run_path", "write_json"]

Status = Literal["preparing", "running", "finished", "failed", "stopped"]


class RunError(RuntimeError):
    """A run that cannot be started, found or continued; the message names the cause and the remedy."""


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
    """Paths and small files of one run. The lock is held by a living launcher and freed by the kernel when it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

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
        known = {f.name for f in dataclasses.fields(RunState)}
        try:
            raw = json.loads(self.state_file.read_text())
        except json.JSONDecodeError as error:
            raise RunError(f"{self.state_file} is not JSON ({error}); the run cannot be continued") from error
        return RunState(**{k: v for k, v in raw.items() if k in known})

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
        step = json.loads(latest.read_text()).get("step")
        if not isinstance(step, int):
            raise RunError(f"{latest} names no checkpoint step; delete it to resume from the start")
        return step

    def acquire(self) -> None:
        """Take the launcher's lock for the life of this process; RunError while another launcher holds it."""
        fd = os.open(self.path / "launcher.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise RunError(f"{self.path} is running; stop it first: areal-dta stop {self.path}") from None
        self._lock_fd = fd

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def is_locked(self) -> bool:
        """Whether a launcher is alive on this run."""
        lock = self.path / "launcher.lock"
        if not lock.exists():
            return False
        fd = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON beside the target and rename it, so that a reader never sees half a file."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(value, indent=1))
    tmp.replace(path)


def new_run(config: Config, where: Path | None, now: float) -> tuple[Config, RunDir]:
    """Create the folders of a new run and write its resolved config.

    `where` (``--run-dir``) wins; else ``fileroot/experiment_name/trial_name``; a trial without a name is a time stamp.
    Raises RunError when the folder already holds a run.
    """
    path = run_path(config, where, now)
    run = RunDir(path)
    if run.exists() or run.config_file.exists():
        raise RunError(
            f"{path} already holds a run; continue it with `areal-dta resume {path}`, "
            "or choose another trial_name or --run-dir"
        )
    try:
        for name in ("logs", "dataset", "weights", "checkpoints", "spool", "traces"):
            (path / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run directory {path}: {error.strerror}; set cluster.fileroot") from error
    if not config.trial_name:
        config = config.with_values(trial_name=trial_of(path))
    run.config_file.write_text(config.to_yaml())
    if config.runtime.api_key:
        run.config_file.chmod(0o600)
    return config, run


def run_path(config: Config, where: Path | None, now: float) -> Path:
    if where is not None:
        return where.resolve()
    trial = config.trial_name or time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return (Path(config.cluster.fileroot).expanduser() / config.experiment_name / trial).resolve()


def trial_of(path: Path) -> str:
    """A trial name made of a folder's name."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.name).lstrip("._-")
    return name or "trial"

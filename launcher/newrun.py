"""The folder of a new run: its name, and its making.

A run exists once it has a ``state.json``. A folder that a launcher was killed in before that holds a config and empty
folders only, and the next `run` takes it over.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from areal_dta.config import Config
from launcher.rundir import RunDir, RunError

__all__ = ["new_run", "run_path"]

FOLDERS = ("logs", "dataset", "weights", "checkpoints", "spool", "traces")
MAX_NAMESAKES = 1000  # runs of one second


def new_run(config: Config, where: Path | None, now: float) -> tuple[Config, RunDir]:
    """Create the folders of a new run, take its lock and write its resolved config.

    `where` (``--run-dir``) wins; else ``fileroot/experiment_name/trial_name``; a trial without a name is a time stamp,
    and a number where there is one already. Raises RunError when the folder holds anything, or cannot be made.
    """
    path = run_path(config, where, now)
    remedy = "choose another --run-dir" if where is not None else "set cluster.fileroot to a folder you can write to"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        run = _unused(path) if where is None and not config.trial_name else _empty(path)
        run.acquire()
        if run.exists():  # another launcher was here between the look and the lock
            run.release()
            raise _taken(run.path)
        for name in FOLDERS:
            (run.path / name).mkdir(exist_ok=True)
        if not config.trial_name:
            config = config.with_values(trial_name=_trial_of(run.path))
        _write_private(run.config_file, config.to_yaml())
    except OSError as error:
        raise RunError(f"cannot create the run directory {path}: {error.strerror}; {remedy}") from error
    return config, run


def run_path(config: Config, where: Path | None, now: float) -> Path:
    """Where a new run goes; with a time stamp for a name it may get a number in addition."""
    if where is not None:
        return where.resolve()
    trial = config.trial_name or time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return (Path(config.cluster.fileroot).expanduser() / config.experiment_name / trial).resolve()


def _unused(path: Path) -> RunDir:
    """A folder that this call has made: ``path``, else ``path-2`` and so on."""
    for number in range(1, MAX_NAMESAKES):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return RunDir(candidate)
    raise RunError(f"{path} and {MAX_NAMESAKES - 1} namesakes exist; choose a trial_name or --run-dir")


def _empty(path: Path) -> RunDir:
    """The folder itself, made here or found without content."""
    run = RunDir(path)
    try:
        path.mkdir()
    except FileExistsError:
        if run.exists():
            raise _taken(path) from None
        if path.is_dir() and (foreign := _foreign(run)):
            raise RunError(
                f"{path} is not empty (it holds {foreign}); choose another trial_name or --run-dir, or empty it"
            ) from None
        if not path.is_dir():
            raise
    return run


def _foreign(run: RunDir) -> str | None:
    """Something in a folder that a launcher killed at the start would not have left.

    The lock comes first: a config without one is a person's.
    """
    own = {run.lock.path.name, run.config_file.name} if run.lock.path.exists() else set()
    for entry in sorted(run.path.iterdir()):
        if entry.name in FOLDERS and entry.is_dir() and not any(entry.iterdir()):
            continue
        if entry.name not in own:
            return entry.name
    return None


def _taken(path: Path) -> RunError:
    return RunError(
        f"{path} already holds a run; continue it with `areal-dta resume {path}`, "
        "or choose another trial_name or --run-dir"
    )


def _write_private(path: Path, text: str) -> None:
    """Readable by the owner only: a config may hold keys."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _trial_of(path: Path) -> str:
    """A trial name made of a folder's name."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.name).lstrip("._-")
    return name or "trial"

"""The trainer's checkpoint folders: written whole or not at all, the newest named by ``latest.json``, old ones removed.

``checkpoints/step_000012/`` covers everything up to and including step 12; its ``trainer.json`` holds what the
distributed checkpoint does not. A folder counts only once ``latest.json`` names it; ``*.partial`` is the debris of a
crash. No torch, no AReaL.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["STATE", "CheckpointError", "CheckpointSchedule", "CheckpointStore", "TrainerState"]

KEEP = 2
STATE = "state"  # the distributed checkpoint inside a folder


class CheckpointError(RuntimeError):
    """A checkpoint that is missing or cannot be read; the message says where and what to do."""


@dataclass(frozen=True)
class TrainerState:
    """Position of a checkpoint: trained through ``step``; its weights are policy ``number`` of run ``epoch``."""

    step: int
    number: int
    epoch: int


class CheckpointStore:
    """The folder ``RUN/checkpoints``; only rank 0 calls what writes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def staging(self, step: int) -> Path:
        """Where all ranks write; `finish` moves it into place."""
        return self.root / f"step_{step:06d}.partial"

    def prepare(self, step: int) -> None:
        """Make an empty staging folder, whatever an earlier crash left there; all ranks then write `STATE` into it."""
        shutil.rmtree(self.staging(step), ignore_errors=True)
        self.staging(step).mkdir(parents=True)

    def finish(self, state: TrainerState) -> Path:
        """All files of ``state.step`` are written: move the folder into place and name it in ``latest.json``."""
        staging, folder = self.staging(state.step), self.folder(state.step)
        (staging / "trainer.json").write_text(json.dumps(asdict(state)))
        if folder.exists():  # of an earlier launch: a resumed run trains the step again
            old = self.root / f"{folder.name}.old.partial"
            shutil.rmtree(old, ignore_errors=True)  # of a crash right here, twice
            os.replace(folder, old)
        os.replace(staging, folder)
        tmp = self.root / "latest.json.partial"
        with tmp.open("w") as file:
            json.dump({"step": state.step, "path": folder.name}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, self.root / "latest.json")
        return folder

    def prune(self, keep: int = KEEP) -> None:
        """Remove all but the `keep` newest folders, never the one that ``latest.json`` names, and debris."""
        latest = self.latest()
        folders = sorted(p for p in self.root.glob("step_*") if p.is_dir() and not p.name.endswith(".partial"))
        for path in [*folders[: max(0, len(folders) - keep)], *self.root.glob("step_*.partial")]:
            if latest is None or path != self.folder(latest):
                shutil.rmtree(path, ignore_errors=True)

    def latest(self) -> int | None:
        """The step that ``latest.json`` names; None when there is no checkpoint yet."""
        try:
            return int(json.loads((self.root / "latest.json").read_text())["step"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.root / 'latest.json'} cannot be read ({error}); name a step by hand"
            ) from error

    def read_state(self, step: int) -> TrainerState:
        """``trainer.json`` of a complete checkpoint."""
        path = self.folder(step) / "trainer.json"
        try:
            return TrainerState(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"no usable checkpoint of step {step}: {path}: {error}; resume from another step"
            ) from error


class CheckpointSchedule:
    """When to write one: every ``freq_steps`` steps, or ``freq_secs`` seconds after the last."""

    def __init__(self, freq_steps: int | None, freq_secs: float | None) -> None:
        self.freq_steps, self.freq_secs = freq_steps, freq_secs
        self._last_s = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether 0-based `step`, just trained, should be followed by a checkpoint."""
        by_step = self.freq_steps is not None and (step + 1) % self.freq_steps == 0
        return by_step or (self.freq_secs is not None and time.monotonic() - self._last_s >= self.freq_secs)

    def written(self) -> None:
        self._last_s = time.monotonic()

"""Progress on standard error, one JSON object as the result, and what identifies the code that was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["UsageError", "commit", "progress", "write_json"]

_ROOT = Path(__file__).resolve().parents[2]
_BEGAN_S = time.perf_counter()


class UsageError(ValueError):
    """Arguments that cannot be run; the message says what to change."""


def progress(text: str) -> None:
    """One line on standard error with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGAN_S:7.1f} s] {text}", file=sys.stderr, flush=True)


def write_json(result: dict[str, Any], target: str) -> None:
    """Write ``result`` to a file, or to standard output for ``-``. Raises ValueError for NaN or infinity in it."""
    text = json.dumps(result, indent=1, allow_nan=False)
    if target == "-":
        print(text, flush=True)
    else:
        Path(target).write_text(text + "\n")


def commit() -> str | None:
    """Commit of the working tree, with ``+`` when files differ from it; None outside a clone."""
    answers = []
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"]):
        done = subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        answers.append(done.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")

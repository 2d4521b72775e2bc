"""What benchmarks share: types of options, traces, progress on standard error, one JSON object as the result, and what
identifies the code that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.rundir import RunError
from launcher.trace_rows import read_arrays

__all__ = [
    "UsageError",
    "at_least",
    "commit",
    "counts",
    "end",
    "finite",
    "free_port",
    "progress",
    "trace_arrays",
    "write_json",
]

_ROOT = Path(__file__).resolve().parents[2]
_BEGAN_S = time.perf_counter()


class UsageError(ValueError):
    """Arguments that cannot be run; the message says what to change."""


def finite(text: str) -> float:
    """The type of an option: a number that is one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number; give one such as 0.5")
    return value


def counts(text: str) -> tuple[int, ...]:
    """The type of an option: whole numbers above 0."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0; give some such as 2,4")
    return tuple(map(int, words))


def at_least(args: argparse.Namespace, least: float, *names: str) -> None:
    """Raises UsageError naming the first of these options that is given and smaller."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def trace_arrays(path: str | Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a trace of trajectories, these among them. Raises UsageError."""
    try:
        arrays = read_arrays(Path(path))
    except RunError as error:
        raise UsageError(f"--trace {error}") from error
    for name in names:
        if name not in arrays:
            raise UsageError(f"--trace {path} has no array {name!r}; a trace of turns has {', '.join(names)}")
    return arrays


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Ask a process to end; kill it when it does not in time."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)


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

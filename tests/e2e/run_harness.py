"""Drive a real run from outside: start the command, watch its run store, kill processes, read the outcome.

Everything goes through what a user has: the command line, the run directory and signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_dta.metrics import read_metrics

__all__ = ["REPO", "Outcome", "Run", "small_overrides"]

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "experiments" / "quickstart" / "quickstart.yaml"
POLL_S = 0.2


def small_overrides(model: Path, **extra: Any) -> list[str]:
    """The quickstart cut down to seconds: 2 prompts x 2 samples, a dozen tokens a turn, a ready policy."""
    values = {
        "actor.path": model,
        "experiment_name": "e2e",
        "total_train_steps": 8,
        "train_dataset.batch_size": 2,
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 12,
        "econfig.max_steps": 6,
        "rollout.max_concurrent_rollouts": 8,
        "recover.freq_steps": 2,
        "batcher.lease_timeout_s": 15,
        "runtime.step_timeout_s": 150,
        **extra,
    }
    return [f"{key}={value}" for key, value in values.items()]


class Outcome:
    """Exit code, the last JSON line of stdout and both streams."""

    def __init__(self, code: int, stdout: str, stderr: str, seconds: float) -> None:
        self.code, self.stdout, self.stderr, self.seconds = code, stdout, stderr, seconds
        lines = [line for line in stdout.splitlines() if line.startswith("{")]
        self.json: dict[str, Any] = json.loads(lines[-1]) if lines else {}

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.0f} s\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"


class Run:
    """One `areal-dta run` or `resume` in a process of its own."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self._out = (run_dir.parent / f"{run_dir.name}.{time.monotonic_ns()}.out").open("w+")
        self._err = (run_dir.parent / f"{run_dir.name}.{time.monotonic_ns()}.err").open("w+")
        self._started = time.monotonic()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", *arguments],
            cwd=REPO, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True,
        )  # fmt: skip

    @classmethod
    def start(cls, run_dir: Path, overrides: list[str]) -> Run:
        return cls(run_dir, "run", str(CONFIG), *overrides, "--run-dir", str(run_dir), "--json", "--no-progress")

    @classmethod
    def resume(cls, run_dir: Path) -> Run:
        return cls(run_dir, "resume", str(run_dir), "--json", "--no-progress")

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until the condition holds; AssertionError with the run's output when it ends or the time is up before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.popen.poll() is not None
            if ended or time.monotonic() > deadline:
                outcome = self.finish(timeout_s=1.0) if ended else self.abort()
                raise AssertionError(f"waited for {what}; {'the run ended' if ended else 'time is up'}: {outcome}")
            time.sleep(POLL_S)

    def steps_done(self) -> int:
        """Training steps reported so far, over all launches."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return 0
        steps = [r.step for r in read_metrics(path) if r.name == "train/row_tokens" and r.step is not None]
        return max(steps, default=-1) + 1

    def wait_for_step(self, count: int, timeout_s: float = 180.0) -> None:
        self.wait_for(f"{count} finished steps", lambda: self.steps_done() >= count, timeout_s)

    def process(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir / "processes.json").read_text())[name]

    def kill(self, name: str) -> int:
        """kill -9 of one process of the run; returns its pid."""
        pid = self.process(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for_restart(self, name: str, old_pid: int, timeout_s: float = 60.0) -> None:
        def restarted() -> bool:
            now = self.process(name)
            return now["pid"] != old_pid and now["status"] == "running"

        self.wait_for(f"the restart of {name}", restarted, timeout_s)

    def finish(self, timeout_s: float) -> Outcome:
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s:g} s: {self.abort()}") from None
        return self._outcome()

    def abort(self) -> Outcome:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(30)
        return self._outcome()

    def _outcome(self) -> Outcome:
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read())
        return Outcome(self.popen.returncode, texts[0], texts[1], time.monotonic() - self._started)


def no_process_left(run_dir: Path) -> bool:
    """Whether no process on this machine was started for this run."""
    needle = str(run_dir).encode()
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit() and int(proc.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (proc / "cmdline").read_bytes():
                    return False
    return True

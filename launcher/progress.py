"""What a person sees while a run is going: a line per finished step and, on a terminal, one line updated in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TextIO

from areal_dta.metrics import MetricRecord

__all__ = ["Progress"]

# Each span ends one phase of a trainer's step; the phase after it is the one now under way.
PHASES = ("time/wait_batch", "time/logprob", "time/advantages", "time/update", "time/publish", "time/checkpoint")
LABELS = ("waiting for a batch", "log-probs", "advantages", "update", "publish", "checkpoint")
STEP_DONE = "time/step"
REDRAW_S = 0.5
_STEP_VALUES = {
    "batch/reward_mean": "reward",
    "train/loss": "loss",
    "train/tokens_per_s": "tok/s",
    "batch/tree_ratio": "ratio",
    "batch/staleness_max": "staleness",
}


class Progress:
    """Turns records into text. ``step`` is the number of finished steps, ``phase`` what the trainer does now."""

    def __init__(
        self, out: TextIO, total_steps: int, live: bool, step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step = step
        self.phase = "starting"
        self.total_steps = total_steps
        self.last_activity = clock()
        self.last_record = "nothing yet"
        self._out = out
        self._live = live
        self._clock = clock
        self._values: dict[int, dict[str, float]] = {}
        self._drawn_at = 0.0
        self._width = 0

    def say(self, text: str) -> None:
        """A line of its own."""
        self._clear()
        print(text, file=self._out, flush=True)

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        self.last_activity = self._clock()
        self._draw(force=True)

    def take(self, records: Iterable[MetricRecord]) -> None:
        """Account for new records and show what changed."""
        for record in records:
            if record.proc.startswith("trainer.") or record.name == "rollout/reward":
                self.last_activity = self._clock()
                self.last_record = f"{record.name} of {record.proc}" + (
                    "" if record.step is None else f" in step {record.step}"
                )
            self._take_one(record)
        self._draw()

    def _take_one(self, record: MetricRecord) -> None:
        if record.name in _STEP_VALUES and record.step is not None and record.value is not None:
            if record.proc in ("batcher", "trainer.0"):
                self._values.setdefault(record.step, {})[_STEP_VALUES[record.name]] = record.value
        elif record.name == "eval/reward":
            value = "" if record.value is None else f"{record.value:.3f}"
            self.say(f"evaluation {record.labels.get('tag', '')}: mean reward {value}")
        elif record.proc == "trainer.0" and record.name in PHASES:
            after = PHASES.index(record.name) + 1
            self.phase = LABELS[after] if after < len(LABELS) else LABELS[0]
        elif record.proc == "trainer.0" and record.name == STEP_DONE and record.step is not None:
            self._step_done(record.step, record.value or 0.0)

    def _step_done(self, step: int, seconds: float) -> None:
        self.step = step + 1
        self.phase = LABELS[0]
        self.say(f"step {self.step}/{self.total_steps}  {self._shown(step)}  {seconds:.1f} s")
        self._values = {k: v for k, v in self._values.items() if k > step}

    def _shown(self, step: int) -> str:
        formats = {"reward": ".3f", "loss": "+.4f", "tok/s": ",.0f", "ratio": ".2f", "staleness": ".0f"}
        values = self._values.get(step, {})
        return "  ".join(
            f"{name} {values[name]:{spec}}" if name in values else f"{name} -" for name, spec in formats.items()
        )

    def _draw(self, force: bool = False) -> None:
        if not self._live or (not force and self._clock() - self._drawn_at < REDRAW_S):
            return
        self._drawn_at = self._clock()
        text = f"step {self.step + 1}/{self.total_steps}: {self.phase}"
        self._out.write("\r" + text.ljust(self._width))
        self._out.flush()
        self._width = len(text)

    def _clear(self) -> None:
        if self._live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0

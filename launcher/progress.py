"""What a person sees while a run is going: a line per finished step and, on a terminal, one line updated in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TextIO

from areal_dta.metrics import MetricRecord
from launcher.steps import StepRow, StepTable, tokens_per_s

__all__ = ["Progress"]

# Each span ends one phase of a trainer's step; the phase after it is the one now under way.
PHASES = ("time/wait_batch", "time/logprob", "time/advantages", "time/update", "time/publish", "time/checkpoint")
LABELS = ("waiting for a batch", "log-probs", "advantages", "update", "publish", "checkpoint")
FINISHING = "finishing"
STEP_DONE = "time/step"
REDRAW_S = 0.5


class Progress:
    """Turns records into text. ``step`` is the number of finished steps, ``phase`` what the trainer does now."""

    def __init__(
        self,
        out: TextIO,
        total_steps: int,
        live: bool,
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
        num_dp_ranks: int = 1,
    ) -> None:
        self.step = step
        self.phase = "starting"
        self.total_steps = total_steps
        self.last_activity = clock()
        self.last_record = "nothing yet"
        self._out = out
        self._live = live
        self._clock = clock
        self._num_ranks = num_ranks
        self._num_dp_ranks = num_dp_ranks
        self._table = StepTable()
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

    def close(self) -> None:
        """Say what is left to say; nothing is drawn in place any more."""
        self._say_steps(up_to=max(self._table.rows, default=-1))
        self._clear()
        self._live = False

    def _take_one(self, record: MetricRecord) -> None:
        row = self._table.add(record)
        if record.name == "eval/reward":
            value = "" if record.value is None else f"{record.value:.3f}"
            self.say(f"evaluation {record.labels.get('tag', '')}: mean reward {value}")
        elif record.proc == "trainer.0" and record.name in PHASES:
            after = PHASES.index(record.name) + 1
            self.phase = LABELS[after] if after < len(LABELS) else LABELS[0]
        elif record.name == STEP_DONE and row is not None:
            if record.proc == "trainer.0":
                self.step = row.step + 1
                self.phase = LABELS[0] if self.step < self.total_steps else FINISHING
            if complete := self._table.complete(self._num_ranks):  # ranks report within moments of each other
                self._say_steps(up_to=complete[-1].step)

    def _say_steps(self, up_to: int) -> None:
        """A line for each finished step up to this one that has none yet."""
        for row in self._table.ordered():
            seconds = row.largest(STEP_DONE)
            if row.step <= up_to and seconds is not None:
                self.say(f"step {row.step + 1}/{self.total_steps}  {self._shown(row)}  {seconds:.1f} s")
        self._table.rows = {step: row for step, row in self._table.rows.items() if step > up_to}

    def _shown(self, row: StepRow) -> str:
        values = (
            ("reward", row.any("batch/reward_mean"), ".3f"),
            ("loss", row.any("train/loss"), "+.4f"),
            ("tok/s", tokens_per_s([row], self._num_dp_ranks), ",.0f"),
            ("ratio", row.any("batch/tree_ratio"), ".2f"),
            ("staleness", row.any("batch/staleness_max"), ".0f"),
        )
        return "  ".join(f"{name} -" if value is None else f"{name} {value:{spec}}" for name, value, spec in values)

    def _draw(self, force: bool = False) -> None:
        if not self._live or (not force and self._clock() - self._drawn_at < REDRAW_S):
            return
        self._drawn_at = self._clock()
        text = f"step {min(self.step + 1, self.total_steps)}/{self.total_steps}: {self.phase}"
        self._out.write("\r" + text.ljust(self._width))
        self._out.flush()
        self._width = len(text)

    def _clear(self) -> None:
        if self._live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0

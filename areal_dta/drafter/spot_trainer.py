"""One worker's part in training the drafter: follows or leads, step by step, and leaves at once when told to.

Between two micro-steps it looks at its assignment, so leaving takes one micro-step at most. A step that is interrupted
is not lost: its gradients stay valid while the state they belong to is the current one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from areal_dta.drafter.averaging import Hub, Share
from areal_dta.drafter.checkpoint import AsyncCheckpoint, latest_step, resume
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.learner import Learner
from areal_dta.drafter.publish import DrafterPublisher, newest_drafter
from areal_dta.drafter.spot_follower import Follower
from areal_dta.drafter.spot_leader import Leader
from areal_dta.drafter.spot_state import PHASES, SpotSettings, TrainingState
from areal_dta.drafter.states import Assignment, WorkerState
from areal_dta.metrics import Publisher
from areal_dta.wire import ChannelError

__all__ = ["SpotTrainer"]

log = logging.getLogger(__name__)


class SpotTrainer:
    """Not thread-safe; `rest` and `train` are called in turn by the worker's main thread."""

    def __init__(
        self,
        control: ControlLink,
        hub: Hub,
        learner: Learner,
        settings: SpotSettings,
        metrics: Publisher,
        checkpoint: AsyncCheckpoint,
        drafters: DrafterPublisher,
    ) -> None:
        self._control, self._hub, self._learner, self._settings = control, hub, learner, settings
        self._metrics, self._checkpoint, self._drafters = metrics, checkpoint, drafters
        self._state = TrainingState(learner)
        self._leader = Leader(self._state, control, hub, settings)
        self._follower = Follower(self._state, control, settings)
        self._term = ""  # the round in which this worker leads
        self._refreshed_s = -1e9
        self._saved_step = self._published_step = 0
        self._published_s = time.monotonic()

    @property
    def counters(self) -> Counter[str]:
        return self._leader.counters + self._follower.counters + self._learner.counters + self._hub.counters

    def resume(self) -> None:
        """Continue from the newest whole checkpoint when it is further than this worker."""
        found = resume(self._checkpoint.folder)
        if found is None or found.step <= self._state.step:
            return
        try:
            self._state.load(found.state, found.step, str(found.meta.get("lineage", "")))
        except DrafterMismatch as error:
            log.warning("the checkpoint of step %d is another drafter's: %s", found.step, error)
            return
        self._saved_step = self._published_step = found.step
        log.info("resumed from step %d", found.step)

    def rest(self, timeout_s: float) -> Assignment:
        """Wait for an assignment; meanwhile say how much there is to learn."""
        self._refresh()
        return self._control.wait(timeout_s)

    def train(self) -> None:
        """Take part until the assignment ends."""
        start_s, first_step = time.monotonic(), self._state.step
        phases = self._state.phases
        phases.begin()
        assignment = self._control.current()
        self._metrics.event("drafter/training", leader=assignment.leader, round=assignment.round_id)
        while assignment.train:
            self._control.report(WorkerState.TRAINING, self._state.step, assignment=assignment)
            if assignment.leader == self._control.name:
                self._lead(assignment)
            else:
                self._follow(assignment)
            self._refresh()
            assignment = self._control.current()
        self._leave(assignment)
        elapsed_s, num_steps = time.monotonic() - start_s, self._state.step - first_step
        if num_steps > 0:
            self._metrics.emit("drafter/steps_per_s", num_steps / elapsed_s)
            phases.end()
            for phase in PHASES:
                self._metrics.emit("drafter/phase_s", phases.seconds[phase], phase=phase)
                self._metrics.emit("drafter/phase_cpu_s", phases.cpu_seconds[phase], phase=phase)

    def close(self, timeout_s: float) -> None:
        """Save, and wait for what is being written; raises TimeoutError."""
        self._save()
        self._checkpoint.wait(timeout_s)
        self._drafters.wait(timeout_s)

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._refreshed_s < self._settings.refresh_s:
            return
        self._refreshed_s = now_s
        num_samples, reader = self._learner.refresh(), self._learner.reader
        enough = num_samples >= self._settings.min_samples
        self._control.report(num_samples=num_samples if enough else 0, step=self._state.step)
        self._metrics.emit("drafter/buffer_samples", num_samples)
        self._metrics.emit("drafter/buffer_bytes", reader.num_bytes)
        self._metrics.emit("drafter/micro_step_s", self._learner.longest_micro_step_s)
        for name, count in (reader.counters + self.counters).items():
            self._metrics.emit("drafter/faults", count, kind=name)

    def _leave(self, assignment: Assignment) -> None:
        self._follower.leave()
        self._control.report(WorkerState.READY, self._state.step, assignment=assignment)
        if assignment.busy_s:
            self._metrics.emit("drafter/preempt_s", time.monotonic() - assignment.busy_s)
        self._metrics.event("drafter/resting", assignment.reason, step=self._state.step)
        if self._term:
            self._term = ""
            self._save()

    def _lead(self, assignment: Assignment) -> None:
        if self._term != assignment.round_id:
            self._follower.leave()
            self._leader.begin()
            self._term = assignment.round_id
            if latest_step(self._checkpoint.folder) > self._state.step:
                self.resume()  # a leader of before went further and is busy now
        taken = self._leader.step(assignment)
        if taken is None:
            return
        step = self._state.step
        self._control.report(step=step)
        self._emit(*taken)
        if step - self._saved_step >= self._settings.checkpoint_steps:
            self._save()
        late = time.monotonic() - self._published_s >= self._settings.publish_s
        if step - self._published_step >= self._settings.publish_steps or (late and step > self._published_step):
            self._publish()

    def _follow(self, assignment: Assignment) -> None:
        self._term = ""
        try:
            self._follower.step(assignment)
        except ChannelError as error:  # the leader's address cannot be used
            log.warning("%s", error)
            self._control.wait(self._settings.join_retry_s)

    def _emit(self, total: Share, members: int) -> None:
        rates, step = total.scores.rates(), self._state.step
        self._metrics.emit("drafter/loss", total.loss / max(1, total.num_rows), step=step)
        self._metrics.emit("drafter/top3", rates["top3"], step=step)
        self._metrics.emit("drafter/rows", total.num_rows, step=step)
        self._metrics.emit("drafter/members", members, step=step)

    def _save(self) -> None:
        step = self._state.step
        if step == self._saved_step:
            return
        start_s = time.perf_counter()
        state = self._learner.trainer.state_dict(copy=False)  # copied by the checkpoint
        if self._checkpoint.save(step, state, {"lineage": self._state.lineage}):
            self._saved_step = step
            self._metrics.emit("drafter/checkpoint_block_s", time.perf_counter() - start_s, step=step)

    def _publish(self) -> None:
        """Hand the drafter to the servers, unless it does worse than the one they have on the same held-out samples."""
        if self._drafters.busy:
            return
        step = self._published_step = self._state.step
        self._published_s = time.monotonic()
        batch = self._learner.held_out()
        if batch is None:
            self._metrics.event("drafter/not_published", "no held-out samples yet", step=step)
            return
        top3, served = self._learner.top3(batch), newest_drafter(self._drafters.root)
        self._metrics.emit("drafter/held_out_top3", top3, step=step)
        if served is not None:
            try:
                before = self._learner.top3(batch, served)
            except DrafterMismatch as error:
                log.warning("the published drafter cannot be compared with: %s", error)
                before = 0.0
            self._metrics.emit("drafter/held_out_top3_served", before, step=step)
            if top3 < before - self._settings.publish_tolerance:
                text = f"held-out top-3 accuracy {top3:.3f}, the published drafter has {before:.3f}"
                self._metrics.event("drafter/not_published", text, step=step)
                return
        self._learner.follow_latest()
        self._drafters.start(self._learner.trainer.weights(), step, self._state.lineage)

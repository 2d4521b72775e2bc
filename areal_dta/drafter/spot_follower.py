"""A follower's side of a step: take over the leader's state, send gradients, apply what the leader sends to all."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter

from areal_dta.drafter.averaging import Link, Message, decode_share, decode_state, encode_share
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.spot_state import SLICE_S, SpotSettings, TrainingState, accumulate
from areal_dta.drafter.states import Assignment
from areal_dta.drafter.trainer_step import NonFiniteGradient
from areal_dta.wire import ChannelError

__all__ = ["Follower"]

log = logging.getLogger(__name__)


class Follower:
    """``counters``: ``sync_timeouts``, ``missed_steps``, ``diverged``, ``refused_state``, ``malformed``."""

    def __init__(self, state: TrainingState, control: ControlLink, settings: SpotSettings) -> None:
        self._state, self._control, self._settings = state, control, settings
        self._link: Link | None = None
        self._joined = False
        self.sync_s = 0.0  # spent on waiting for the leader
        self.counters: Counter[str] = Counter()

    def step(self, assignment: Assignment) -> None:
        """One step under ``assignment.leader``, or less when interrupted."""
        link = self._connect(assignment)
        if not self._joined and not self._join(link, assignment):
            return
        lineage = self._state.lineage
        if not accumulate(
            self._state, self._control, assignment, self._settings.step_tokens, lambda: self._listen(link)
        ):
            return
        assert self._state.share is not None
        start_s = time.monotonic()
        body, values = encode_share(self._state.share)
        link.send("gradients", {**body, "lineage": lineage}, values)
        while self._joined and self._state.lineage == lineage and self._state.share is not None:
            if self._control.left(assignment):
                break
            if time.monotonic() - start_s > self._settings.sync_timeout_s:
                self._joined = False
                self.counters["sync_timeouts"] += 1
                break
            self._listen(link, SLICE_S)
        self.sync_s += time.monotonic() - start_s

    def leave(self) -> None:
        """Say goodbye to the leader, if there is one."""
        if self._link is not None:
            self._link.send("leave", {})
            self._link.close()
        self._link, self._joined = None, False

    def _connect(self, assignment: Assignment) -> Link:
        if self._link is None or self._link.address != assignment.leader_address:
            self.leave()
            self._link = Link(self._control.name, assignment.leader, assignment.leader_address)
        return self._link

    def _join(self, link: Link, assignment: Assignment) -> bool:
        """Come to the leader's state; False: interrupted, or no answer yet."""
        nonce = uuid.uuid4().hex[:8]
        link.send("join", {"nonce": nonce, "step": self._state.step, "lineage": self._state.lineage})
        deadline_s = time.monotonic() + self._settings.join_retry_s
        while time.monotonic() < deadline_s and not self._control.left(assignment):
            message = self._receive(link, SLICE_S)
            if message is None or message.body.get("nonce") != nonce:
                continue
            if message.kind == "state" and not self._take(message, assignment.leader):
                self._control.wait(self._settings.join_retry_s)
                return False
            self._joined = message.kind in ("same", "state")
            return self._joined
        return False

    def _take(self, message: Message, leader: str) -> bool:
        try:
            if message.values is None:
                raise ChannelError("a state without values")
            state = decode_state(message.body, message.values)
            self._state.load(state, int(message.body["step"]), str(message.body["lineage"]))
        except (DrafterMismatch, ChannelError, KeyError, TypeError, ValueError) as error:
            self.counters["refused_state"] += 1
            log.warning("the state of %s cannot be taken: %s", leader, error)
            return False
        return True

    def _receive(self, link: Link, wait_s: float) -> Message | None:
        try:
            return link.receive(wait_s)
        except ChannelError as error:
            self.counters["malformed"] += 1
            log.warning("a message of the leader is left out: %s", error)
            return None

    def _listen(self, link: Link, wait_s: float = 0.0) -> bool:
        """Do what the leader says; True: end the own part of the step with what there is."""
        message = self._receive(link, wait_s)
        if message is None:
            return False
        current = message.body.get("lineage") == self._state.lineage
        if message.kind == "close":
            return current and self._state.share is not None
        if message.kind == "skip" and current:
            self._state.drop_share()
        elif message.kind == "average":
            self._apply(message)
        elif message.kind == "rejoin":
            self._joined = False
        return not self._joined

    def _apply(self, message: Message) -> None:
        state = self._state
        if message.body.get("before") != state.lineage:
            if message.body.get("lineage") != state.lineage:  # else it came twice
                self._joined = False
                self.counters["missed_steps"] += 1
            return
        try:
            total = decode_share(message.body, message.values, state.learner.trainer.num_trained)
            state.apply(total, int(message.body["step"]), str(message.body["lineage"]))
        except (ChannelError, DrafterMismatch, NonFiniteGradient, KeyError, ValueError) as error:
            log.warning("an average cannot be applied, joining again: %s", error)
            self._joined, state.lineage = False, ""
            return
        self._control.report(step=state.step)
        expected = message.body.get("checksum")
        if expected is not None and expected != state.checksum():
            log.warning("the weights of step %d differ from the leader's, joining again", state.step)
            self.counters["diverged"] += 1
            self._joined, state.lineage = False, ""

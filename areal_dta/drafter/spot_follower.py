"""A follower's side of a step: take over the leader's state, send gradients, apply what the leader sends to all."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter

from areal_dta.drafter.averaging import Link, Message, decode_share, decode_state, encode_share
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle_config import DrafterMismatch
from areal_dta.drafter.spot_state import MOST_STEP_TOKENS, SLICE_S, SpotSettings, TrainingState, accumulate
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
        self._nonce, self._ask_again_s = "", 0.0
        self._closed: tuple[object, float] = None, 0.0  # the lineage whose step ends, and when
        self.counters: Counter[str] = Counter()

    def step(self, assignment: Assignment) -> None:
        """One step under ``assignment.leader``, or less when interrupted."""
        state = self._state
        link, lineage = self._connect(assignment), state.lineage
        most_tokens = MOST_STEP_TOKENS * self._settings.step_tokens
        if not accumulate(state, self._control, assignment, most_tokens, self):
            return
        assert state.share is not None
        with state.phases.of("exchange"):
            if not self._joined:  # nobody to send it to yet
                self._await(link)
                return
            start_s = time.monotonic()
            body, values = encode_share(state.share)
            link.send("gradients", {**body, "lineage": lineage}, values)
            while self._joined and state.lineage == lineage and state.share is not None:
                if self._control.left(assignment):
                    break
                if time.monotonic() - start_s > self._settings.sync_timeout_s:
                    self.counters["sync_timeouts"] += 1
                    self._lose()
                self._await(link)

    def _await(self, link: Link) -> None:
        with self._state.waiting():
            link.poll(SLICE_S)
        self.hear()

    def leave(self) -> None:
        """Say goodbye to the leader, if there is one."""
        if self._link is not None:
            self._link.send("leave", {})
            self._link.close()
        self._link, self._joined, self._ask_again_s = None, False, 0.0

    def _connect(self, assignment: Assignment) -> Link:
        if self._link is None or self._link.address != assignment.leader_address:
            self.leave()
            self._link = Link(self._control.name, assignment.leader, assignment.leader_address)
        return self._link

    def _lose(self) -> None:
        """The leader's state may be another: join again. Not while an answer is awaited: if every step that is missed
        meanwhile were a reason to ask anew, none would ever fit."""
        if self._joined:
            self._joined, self._ask_again_s = False, 0.0

    def _ask(self, link: Link) -> None:
        """Ask to join. Until the answer is there the own state may be the leader's, so learning goes on from it."""
        if time.monotonic() < self._ask_again_s:
            return
        self._nonce, self._ask_again_s = uuid.uuid4().hex[:8], time.monotonic() + self._settings.join_retry_s
        link.send("join", {"nonce": self._nonce, "step": self._state.step, "lineage": self._state.lineage})

    def hear(self) -> float:
        assert self._link is not None
        if not self._joined:
            self._ask(self._link)
        while (message := self._receive(self._link)) is not None:
            self._heed(message)
        lineage, at_s = self._closed
        return at_s - time.monotonic() if lineage == self._state.lineage else math.inf

    def pause(self, timeout_s: float) -> None:
        assert self._link is not None
        self._link.poll(timeout_s)

    def begin_last(self, micro_step_s: float) -> None:
        """Nobody waits for a follower to say so."""

    def _heed(self, message: Message) -> None:
        body, state = message.body, self._state
        is_current = body.get("lineage") == state.lineage
        if message.kind in ("same", "state") and body.get("nonce") == self._nonce:
            self._joined = message.kind == "same" or self._take(message)
        elif message.kind == "close":
            at_s = body.get("at_s")
            self._closed = body.get("lineage"), at_s if isinstance(at_s, float) else 0.0
        elif message.kind == "skip" and is_current:
            state.drop_share()
        elif message.kind == "average":
            self._apply(message)
        elif message.kind == "rejoin":
            self._lose()

    def _take(self, message: Message) -> bool:
        try:
            if message.values is None:
                raise ChannelError("a state without values")
            state = decode_state(message.body, message.values)
            self._state.load(state, int(message.body["step"]), str(message.body["lineage"]))
        except (DrafterMismatch, ChannelError, KeyError, TypeError, ValueError) as error:
            self.counters["refused_state"] += 1
            log.warning("the state of %s cannot be taken: %s", message.sender, error)
            return False
        return True

    def _receive(self, link: Link) -> Message | None:
        try:
            return link.receive()
        except ChannelError as error:
            self.counters["malformed"] += 1
            log.warning("a message of the leader is left out: %s", error)
            return None

    def _apply(self, message: Message) -> None:
        state = self._state
        if message.body.get("before") != state.lineage:
            if message.body.get("lineage") != state.lineage:  # else it came twice
                self.counters["missed_steps"] += self._joined
                self._lose()
            return
        try:
            total = decode_share(message.body, message.values, state.learner.trainer.num_trained)
            state.apply(total, int(message.body["step"]), str(message.body["lineage"]))
        except (ChannelError, DrafterMismatch, NonFiniteGradient, KeyError, ValueError) as error:
            log.warning("an average cannot be applied, joining again: %s", error)
            self._lose()
            state.lineage = ""
            return
        self._control.report(step=state.step)
        expected = message.body.get("checksum")
        if expected is not None and expected != state.checksum():
            log.warning("the weights of step %d differ from the leader's, joining again", state.step)
            self.counters["diverged"] += 1
            self._lose()
            state.lineage = ""

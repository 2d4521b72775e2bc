"""The leader's side of a step: answer those who join, collect gradients until all present sent theirs or time is up."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter

from areal_dta.drafter.averaging import Hub, Message, Share, decode_share, encode_share, encode_state
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.spot_state import SLICE_S, SpotSettings, TrainingState, accumulate
from areal_dta.drafter.states import Assignment
from areal_dta.drafter.trainer_step import NonFiniteGradient
from areal_dta.wire import ChannelError

__all__ = ["Leader"]

log = logging.getLogger(__name__)


class Leader:
    """``counters``: ``states_sent``, ``late`` (gradients of a state that is over), ``missed`` (not waited for any
    longer), ``refused``, ``non_finite``."""

    def __init__(self, state: TrainingState, control: ControlLink, hub: Hub, settings: SpotSettings) -> None:
        self._state, self._control, self._hub, self._settings = state, control, hub, settings
        self._peers: set[str] = set()
        self._shares: dict[str, Share] = {}
        self.counters: Counter[str] = Counter()

    def begin(self) -> None:
        """A new term: nobody has joined yet."""
        self._peers, self._shares = set(), {}

    def step(self, assignment: Assignment) -> tuple[Share, int] | None:
        """One step: what was learned from and by how many; None: interrupted, or the step was left out."""
        if not accumulate(self._state, self._control, assignment, self._settings.step_tokens, self):
            return None
        with self._state.phases.of("exchange"):
            return self._advance() if self._collect(assignment) else None

    def hear(self) -> float:
        for message in self._hub.receive():
            self._answer(message)
        return math.inf  # nobody waits for a leader's part but the leader

    def pause(self, timeout_s: float) -> None:
        self._hub.poll(timeout_s)

    def begin_last(self, micro_step_s: float) -> None:
        """The others are to be ready at the same time; where that is off, it is within the rest that all owe then."""
        self._close(time.monotonic() + micro_step_s)

    def _close(self, at_s: float) -> None:
        for peer in self._missing(self._peers):
            self._hub.send(peer, "close", {"lineage": self._state.lineage, "at_s": at_s})

    def _answer(self, message: Message) -> None:
        state = self._state
        if message.kind == "join":
            self._peers.add(message.sender)
            about = {"nonce": message.body.get("nonce"), "step": state.step, "lineage": state.lineage}
            if message.body.get("lineage") == state.lineage:
                self._hub.send(message.sender, "same", about)
                return
            body, values = encode_state(state.learner.trainer.state_dict(copy=False))
            self._hub.send(message.sender, "state", {**about, **body}, values)
            self.counters["states_sent"] += 1
        elif message.kind == "gradients":
            if message.body.get("lineage") != state.lineage:
                self.counters["late"] += 1
                if message.sender not in self._peers:
                    self._hub.send(message.sender, "rejoin", {})
                return
            self._peers.add(message.sender)
            try:
                share = decode_share(message.body, message.values, state.learner.trainer.num_trained)
            except ChannelError as error:
                self.counters["refused"] += 1
                log.warning("gradients of %s are left out: %s", message.sender, error)
                return
            self._shares[message.sender] = share
        elif message.kind == "leave":
            self._peers.discard(message.sender)

    def _missing(self, peers: set[str]) -> set[str]:
        return (peers & set(self._control.current().members)) - set(self._shares)

    def _collect(self, assignment: Assignment) -> bool:
        """Wait for the others' gradients, up to ``collect_s``; False: interrupted. Who joins now is not waited for."""
        self._close(time.monotonic())
        deadline_s, early = time.monotonic() + self._settings.collect_s, set(self._peers)
        while missing := self._missing(early & self._peers):
            if time.monotonic() >= deadline_s:
                self.counters["missed"] += len(missing)
                break
            with self._state.waiting():
                self._hub.poll(SLICE_S)
            self.hear()
            if self._control.left(assignment):
                return False
        return not self._control.left(assignment)

    def _advance(self) -> tuple[Share, int] | None:
        state, before = self._state, self._state.lineage
        total, members = state.share, 1 + len(self._shares)
        if total is None:
            return None
        for share in self._shares.values():
            total = total + share
        self._shares = {}
        try:
            state.apply(total, state.step + 1, uuid.uuid4().hex[:12])
        except NonFiniteGradient as error:
            self.counters["non_finite"] += 1
            log.warning("a step is left out: %s", error)
            for peer in self._peers:
                self._hub.send(peer, "skip", {"lineage": before})
            return None
        if self._peers:  # those too that this worker has not been told of yet: without it they would be left behind
            body, values = encode_share(total)
            body.update(before=before, lineage=state.lineage, step=state.step)
            if state.step % self._settings.check_steps == 0:
                body["checksum"] = state.checksum()
            for peer in self._peers:
                self._hub.send(peer, "average", body, values)
        return total, members

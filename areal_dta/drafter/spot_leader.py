"""The leader's side of a step: answer those who join, collect gradients until all present sent theirs or time is up."""

from __future__ import annotations

import logging
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
        self.sync_s = 0.0  # spent on waiting for others and sending to them
        self.counters: Counter[str] = Counter()

    def begin(self) -> None:
        """A new term: nobody has joined yet."""
        self._peers, self._shares = set(), {}

    def step(self, assignment: Assignment) -> tuple[Share, int] | None:
        """One step: what was learned from and by how many; None: interrupted, or the step was left out."""
        if not accumulate(self._state, self._control, assignment, self._settings.step_tokens, self._serve):
            return None
        start_s = time.monotonic()
        try:
            if not self._collect(assignment):
                return None
            return self._advance(assignment)
        finally:
            self.sync_s += time.monotonic() - start_s

    def _serve(self) -> bool:
        for message in self._hub.receive():
            self._answer(message)
        return False  # nobody tells a leader to end its part

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

    def _missing(self, assignment: Assignment) -> set[str]:
        return (self._peers & set(assignment.members)) - set(self._shares)

    def _collect(self, assignment: Assignment) -> bool:
        """Wait for the others' gradients, up to ``collect_s``; False: interrupted."""
        for peer in self._missing(assignment):
            self._hub.send(peer, "close", {"lineage": self._state.lineage})
        deadline_s = time.monotonic() + self._settings.collect_s
        while self._missing(self._control.current()):
            if time.monotonic() >= deadline_s:
                self.counters["missed"] += len(self._missing(self._control.current()))
                break
            for message in self._hub.receive(SLICE_S):
                self._answer(message)
            if self._control.left(assignment):
                return False
        return not self._control.left(assignment)

    def _advance(self, assignment: Assignment) -> tuple[Share, int] | None:
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
        present = self._peers & set(assignment.members)
        if present:
            body, values = encode_share(total)
            body.update(before=before, lineage=state.lineage, step=state.step)
            if state.step % self._settings.check_steps == 0:
                body["checksum"] = state.checksum()
            for peer in present:
                self._hub.send(peer, "average", body, values)
        return total, members

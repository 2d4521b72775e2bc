"""What speculative decoding and the training of its drafter did in a run, from their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_dta.metrics import MetricRecord

__all__ = ["SpeculationTotals", "speculation_text", "summarise_drafter", "summarise_speculation", "training_text"]

DRAFT_STEPS, ACCEPTED, SECONDS, LOSS = "tlt/draft_steps", "tlt/accepted_tokens", "tlt/seconds", "tlt/loss_to_plain"


@dataclass
class _Counters:
    """What one server, or all of them, counted."""

    draft_steps: float = 0.0
    accepted: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by arm
    lost_s: float = 0.0  # against plain decoding, by what one process measured; negative: gained

    def __add__(self, other: _Counters) -> _Counters:
        arms = {*self.seconds, *other.seconds}
        return _Counters(
            self.draft_steps + other.draft_steps,
            self.accepted + other.accepted,
            {arm: self.seconds.get(arm, 0.0) + other.seconds.get(arm, 0.0) for arm in arms},
            self.lost_s + other.lost_s,
        )


class _Server:
    """The last reports of one process."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self._loss = 0.0  # share of the time

    def take(self, record: MetricRecord, value: float) -> bool:
        """False, and nothing taken, when the counter fell: then another process reports by the same name."""
        if record.name == LOSS:
            self._loss = value
            return True
        key = record.name, str(record.labels.get("arm", ""))
        if value < self._last.get(key, 0.0):
            return False
        self._last[key] = value
        return True

    def counters(self) -> _Counters:
        seconds = {arm: value for (name, arm), value in self._last.items() if name == SECONDS}
        drafts, accepted = self._last.get((DRAFT_STEPS, ""), 0.0), self._last.get((ACCEPTED, ""), 0.0)
        return _Counters(drafts, accepted, seconds, self._loss * sum(seconds.values()))


class SpeculationTotals:
    """Sums over all servers, what they counted before they were restarted included; `add` in file order."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._past = _Counters()

    def add(self, record: MetricRecord) -> None:
        if record.value is None or record.name not in (DRAFT_STEPS, ACCEPTED, SECONDS, LOSS):
            return
        server = self._servers.setdefault(record.proc, _Server())
        if not server.take(record, record.value):
            self._past += server.counters()
            self._servers[record.proc] = server = _Server()
            server.take(record, record.value)

    def result(self) -> dict[str, Any] | None:
        """None where no server decoded with speculation switched on.

        ``accept_length``: tokens per sequence and step in which something was drafted for it, None if nothing ever was.
        ``arms``: share of the decoding time by arm. ``speedup``: time that plain decoding would have taken for the same
        tokens, by the speeds measured in the same run, over the time taken.
        """
        total = sum((server.counters() for server in self._servers.values()), self._past)
        spent = sum(total.seconds.values())
        if spent <= 0:
            return None
        arms = sorted(total.seconds.items(), key=lambda item: -item[1])
        return {
            "accept_length": 1 + total.accepted / total.draft_steps if total.draft_steps else None,
            "arms": {arm: value / spent for arm, value in arms},
            "speedup": (spent - total.lost_s) / spent,
            "decode_s": spent,
        }


def summarise_speculation(records: Iterable[MetricRecord]) -> dict[str, Any] | None:
    """`SpeculationTotals.result` of a whole run."""
    totals = SpeculationTotals()
    for record in records:
        totals.add(record)
    return totals.result()


def speculation_text(found: Mapping[str, Any] | None) -> str:
    """One line for the terminal."""
    if found is None:
        return "off"
    arms = ", ".join(f"{arm} {share:.0%}" for arm, share in found["arms"].items() if share >= 0.005)
    length = "nothing drafted" if found["accept_length"] is None else f"accept length {found['accept_length']:.2f}"
    return f"{length}, {found['speedup']:.2f} x plain decoding; time by arm: {arms}"


def summarise_drafter(records: Iterable[MetricRecord]) -> dict[str, Any] | None:
    """How the drafter was trained; None where no worker looked for something to learn.

    ``steps`` of training, ``published`` versions that at least one server took, ``version`` and held-out ``top3`` of
    the last of them, ``longest_preempt_s`` from the arrival of work until a worker had left.
    """
    found: dict[str, Any] = {"steps": 0, "published": 0, "version": None, "top3": None, "longest_preempt_s": None}
    seen, held_out = False, None
    for record in records:
        seen = seen or record.name == "drafter/buffer_samples"
        if record.name == "drafter/loss":
            found["steps"] = max(found["steps"], record.step or 0)
        elif record.name == "drafter/held_out_top3":
            held_out = record.value
        elif record.name == "drafter/published" and record.message:
            found |= {"published": found["published"] + 1, "version": record.labels.get("version"), "top3": held_out}
        elif record.name == "drafter/preempt_s" and record.value is not None:
            found["longest_preempt_s"] = max(found["longest_preempt_s"] or 0.0, record.value)
    return found if seen else None


def training_text(found: Mapping[str, Any] | None) -> str:
    """One line for the terminal."""
    if found is None:
        return "off"
    if not found["steps"]:
        return "no step: no server was idle with enough samples"
    accuracy = "" if found["top3"] is None else f", top-3 accuracy {found['top3']:.2f}"
    used = f"{found['version']} in use{accuracy}" if found["published"] else "nothing published"
    left = found["longest_preempt_s"]
    return f"{found['steps']} steps in idle time; {used}" + ("" if left is None else f"; left within {left:.2f} s")

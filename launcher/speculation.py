"""What speculative decoding did in a run, from the servers' counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_dta.metrics import MetricRecord

__all__ = ["speculation_text", "summarise_speculation"]


def summarise_speculation(records: Sequence[MetricRecord]) -> dict[str, Any] | None:
    """Of all servers together; None where none speculated or could have.

    ``accept_length``: tokens per sequence and step in which something was drafted for it, None if nothing ever was.
    ``arms``: share of the decoding time by arm. ``speedup``: time that plain decoding would have taken for the same
    tokens, by the speeds measured in the same run, over the time taken.
    """
    last: dict[tuple[str, str, str], float] = {}
    base: dict[tuple[str, str, str], float] = {}  # of counters that a restarted server began again
    for record in records:
        if record.value is None or not record.name.startswith("tlt/"):
            continue
        key = (record.proc, record.name, str(record.labels.get("arm", "")))
        if record.name != "tlt/loss_to_plain" and record.value < last.get(key, 0.0):
            base[key] = base.get(key, 0.0) + last[key]
        last[key] = record.value
    total = {key: value + base.get(key, 0.0) for key, value in last.items()}
    seconds = _by_arm(total, "tlt/seconds")
    if not seconds:
        return None
    draft_steps = sum(v for (_, name, _), v in total.items() if name == "tlt/draft_steps")
    accepted = sum(v for (_, name, _), v in total.items() if name == "tlt/accepted_tokens")
    spent = sum(seconds.values())
    lost = sum(
        loss * sum(v for (p, name, _), v in total.items() if p == proc and name == "tlt/seconds")
        for (proc, name, _), loss in total.items()
        if name == "tlt/loss_to_plain"
    )
    return {
        "accept_length": 1 + accepted / draft_steps if draft_steps else None,
        "arms": {arm: value / spent for arm, value in sorted(seconds.items(), key=lambda item: -item[1])},
        "speedup": (spent - lost) / spent,
        "decode_s": spent,
    }


def _by_arm(total: Mapping[tuple[str, str, str], float], wanted: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (_, name, arm), value in total.items():
        if name == wanted:
            sums[arm] = sums.get(arm, 0.0) + value
    return sums


def speculation_text(found: Mapping[str, Any] | None) -> str:
    """One line for the terminal."""
    if found is None:
        return "off"
    arms = ", ".join(f"{arm} {share:.0%}" for arm, share in found["arms"].items() if share >= 0.005)
    length = "nothing drafted" if found["accept_length"] is None else f"accept length {found['accept_length']:.2f}"
    return f"{length}, {found['speedup']:.2f} x plain decoding; time by arm: {arms}"

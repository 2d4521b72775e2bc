"""What ``/metrics`` of a server says: SGLang's names where it has one, ``areal_dta:`` for the rest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol, SupportsFloat

from areal_dta.metrics import NullPublisher
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.exposition import Sample, render
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.spec_control import SpecControl

__all__ = ["render_metrics"]

ABORT_CAUSES = ("client_gone", "pause", "request", "stuck", "timeout", "weight_update")


class TurnCounts(Protocol):
    """What the chat endpoint counts: prompts by where their tokens came from."""

    prompt_sources: dict[str, int]


def render_metrics(engine: Engine, front: Front, chat: TurnCounts, drafter_failures: int = 0) -> str:
    """Read while the model thread runs, so only approximately simultaneous. ``drafter_failures``: updates of the
    drafter that were not taken."""
    load, stats = engine.load(), engine.stats
    hit_share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    aborted = dict.fromkeys(ABORT_CAUSES, 0) | dict(stats.aborted)
    speculation = [] if engine.speculation is None else _speculation(engine.speculation, drafter_failures)
    return render(
        [
            _one("sglang:num_running_reqs", "gauge", "Sequences in the running batch.", load["num_running"]),
            _one("sglang:num_queue_reqs", "gauge", "Sequences waiting.", load["num_waiting"]),
            _one("sglang:token_usage", "gauge", "Share of the KV pool in use by running sequences.", load["kv_use"]),
            _one("sglang:max_total_num_tokens", "gauge", "Tokens of the KV pool.", load["max_total_tokens"]),
            _one("sglang:gen_throughput", "gauge", "Generated tokens per second.", load["tokens_per_s"]),
            _one("sglang:cache_hit_rate", "gauge", "Cached share of all prompt tokens so far.", hit_share),
            _one("sglang:prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            _one("sglang:cached_tokens_total", "counter", "Prompt tokens found in the cache.", stats.cached_tokens),
            _one("sglang:generation_tokens_total", "counter", "Generated tokens.", stats.generated_tokens),
            _one("sglang:num_requests_total", "counter", "Generations accepted.", front.num_requests),
            _one("areal_dta:refused_requests_total", "counter", "Generations refused as busy.", front.num_refused),
            _one("areal_dta:retractions_total", "counter", "Sequences sent back to the queue.", stats.retractions),
            _one("areal_dta:steps_total", "counter", "Forward passes.", stats.steps),
            _one("areal_dta:cached_tokens", "gauge", "Tokens in the prefix cache.", load["cached_tokens_in_tree"]),
            _one("areal_dta:kv_bytes", "gauge", "Bytes of the KV tensors, 0 while released.", load["kv_bytes"]),
            _one("areal_dta:paused", "gauge", "1 while generation is paused.", engine.paused),
            _one("areal_dta:memory_released", "gauge", "1 while the KV memory is given back.", bool(engine.released)),
            (
                "areal_dta:aborted_requests_total", "counter", "Generations aborted, by cause.",
                [({"cause": cause}, float(count)) for cause, count in sorted(aborted.items())],
            ),
            (
                "areal_dta:chat_prompts_total", "counter", "Chat prompts by where their token ids came from.",
                [({"source": source}, float(count)) for source, count in sorted(chat.prompt_sources.items())],
            ),
            (
                "areal_dta:weight_version_info", "gauge", "1 for the version that serves.",
                [({"weight_version": engine.version}, 1.0)],
            ),
            *speculation,
        ]
    )  # fmt: skip


def _one(name: str, kind: str, text: str, value: float) -> Sample:
    return name, kind, text, [({}, float(value))]


class _Reported(NullPublisher):
    """Keeps what is emitted: by name, and of names with an arm by that."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, float] = {}
        self.by_arm: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def emit(self, name: str, /, value: SupportsFloat, step: int | None = None, **labels: Any) -> None:
        if "arm" in labels:
            self.by_arm[name][labels["arm"]] = float(value)
        else:
            self.values[name] = float(value)


def _speculation(control: SpecControl, failures: int) -> list[Sample]:
    report, state = _Reported(), control.snapshot()
    control.report(report)
    values, version = report.values, state["drafter_version"]
    drafted, accepted = values["tlt/drafted_tokens"], values["tlt/accepted_tokens"]

    def by_arm(name: str, text: str, source: str) -> Sample:
        return name, "counter", text, [({"arm": arm}, value) for arm, value in sorted(report.by_arm[source].items())]

    return [
        _one("sglang:spec_accept_length", "gauge", "Tokens per verified sequence so far.", values["tlt/accept_length"]),
        _one("sglang:spec_accept_rate", "gauge", "Accepted share of all drafts so far.", accepted / max(drafted, 1.0)),
        _one("sglang:spec_verify_calls_total", "counter", "Verifications, per sequence.", values["tlt/draft_steps"]),
        _one("areal_dta:drafted_tokens_total", "counter", "Drafted tokens verified.", drafted),
        _one("areal_dta:accepted_tokens_total", "counter", "Drafted tokens accepted.", accepted),
        _one("areal_dta:draft_starved_total", "counter", "Drafts left out for want of KV pages.", state["starved"]),
        by_arm("areal_dta:decode_steps_total", "Decoding steps by strategy; off is plain.", "tlt/steps"),
        by_arm("areal_dta:decode_seconds_total", "Seconds of these steps.", "tlt/seconds"),
        by_arm("areal_dta:decode_tokens_total", "Tokens of these steps.", "tlt/tokens"),
        (
            "areal_dta:drafter_version_info", "gauge", "1 for the trained drafter in use; absent without one.",
            [] if version is None else [({"drafter_version": version}, 1.0)],
        ),
        _one("areal_dta:drafter_missing", "gauge", "1 while a drafter asked for is unused.", bool(state["problem"])),
        _one("areal_dta:drafter_update_failures_total", "counter", "Updates of the drafter not taken.", failures),
    ]  # fmt: skip

"""What ``/metrics`` of a server says: SGLang's names where it has one, ``areal_dta:`` for the rest."""

from __future__ import annotations

from typing import Protocol

from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.exposition import Sample, render
from areal_dta.rollout.server.front import Front

__all__ = ["render_metrics"]

ABORT_CAUSES = ("client_gone", "pause", "request", "stuck", "timeout", "weight_update")


class TurnCounts(Protocol):
    """What the chat endpoint counts: prompts by where their tokens came from."""

    prompt_sources: dict[str, int]


def render_metrics(engine: Engine, front: Front, chat: TurnCounts) -> str:
    """Read while the model thread runs, so only approximately simultaneous."""
    load, stats = engine.load(), engine.stats
    hit_share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    aborted = dict.fromkeys(ABORT_CAUSES, 0) | dict(stats.aborted)

    def one(name: str, kind: str, text: str, value: float) -> Sample:
        return name, kind, text, [({}, float(value))]

    return render(
        [
            one("sglang:num_running_reqs", "gauge", "Sequences in the running batch.", load["num_running"]),
            one("sglang:num_queue_reqs", "gauge", "Sequences waiting.", load["num_waiting"]),
            one("sglang:token_usage", "gauge", "Share of the KV pool in use by running sequences.", load["kv_use"]),
            one("sglang:max_total_num_tokens", "gauge", "Tokens of the KV pool.", load["max_total_tokens"]),
            one("sglang:gen_throughput", "gauge", "Generated tokens per second.", load["tokens_per_s"]),
            one("sglang:cache_hit_rate", "gauge", "Cached share of all prompt tokens so far.", hit_share),
            one("sglang:prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            one("sglang:cached_tokens_total", "counter", "Prompt tokens found in the cache.", stats.cached_tokens),
            one("sglang:generation_tokens_total", "counter", "Generated tokens.", stats.generated_tokens),
            one("sglang:num_requests_total", "counter", "Generations accepted.", front.num_requests),
            one("areal_dta:refused_requests_total", "counter", "Generations refused as busy.", front.num_refused),
            one("areal_dta:retractions_total", "counter", "Sequences sent back to the queue.", stats.retractions),
            one("areal_dta:steps_total", "counter", "Forward passes.", stats.steps),
            one("areal_dta:cached_tokens", "gauge", "Tokens in the prefix cache.", load["cached_tokens_in_tree"]),
            one("areal_dta:kv_bytes", "gauge", "Bytes of the KV tensors, 0 while released.", load["kv_bytes"]),
            one("areal_dta:paused", "gauge", "1 while generation is paused.", engine.paused),
            one("areal_dta:memory_released", "gauge", "1 while the KV memory is given back.", bool(engine.released)),
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
        ]
    )  # fmt: skip

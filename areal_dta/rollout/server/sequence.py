"""What is asked (`GenerationRequest`), what is answered (`Completion`), and a request under way (`Sequence`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_dta.rollout.server.kv_cache import Node
from areal_dta.rollout.server.sampler import SampleRow

__all__ = ["Completion", "FinishReason", "GenerationRequest", "SamplingParams", "Sequence", "VersionSpan"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings in SGLang's names. ``ignore_eos`` switches off every stop token, as SGLang does."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued. ``logprob_start`` None: no prompt log-probs; else from that prompt token on."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    logprob_start: int | None = None


@dataclass(frozen=True)
class FinishReason:
    """``kind``: stop (with what matched), length, abort (with why), or error: the server failed, not the request."""

    kind: str
    matched: int | str | None = None
    message: str | None = None

    def to_json(self, num_tokens: int) -> dict[str, Any]:
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": num_tokens}
        return {"type": "abort", "message": self.message or "Aborted"}


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens ``[start, end)`` were sampled by weights ``version``, their whole context computed by it too."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """The answer to one request. ``input_logprobs``: (log-prob, token) from ``logprob_start`` on; None for token 0."""

    request: GenerationRequest
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    input_logprobs: tuple[tuple[float | None, int], ...]
    finish: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: int
    weight_version: str
    latency_s: float
    ttft_s: float | None


@dataclass(eq=False)
class Sequence:
    """A request under way: mutable, touched by the model thread only."""

    request: GenerationRequest
    max_tokens: int  # prompt and output together
    stop_ids: frozenset[int]
    on_done: Callable[[Sequence, Completion], None]
    tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)  # cached prefix in use
    own_pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # pages of path, then own_pages
    num_computed: int = 0  # tokens whose KV is valid
    scheduled_end: int = 0  # tokens whose KV will be valid after the step being planned
    cached_tokens: int = 0
    scored: bool = False  # prompt log-probs complete
    counts: dict[int, int] = field(default_factory=dict)  # of output tokens, for the frequency penalty
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.request.input_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.input_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens still without KV; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def max_prefix_hit(self) -> int:
        """Cached tokens that may be skipped: the last is always computed, and what must be scored too."""
        if self.request.logprob_start is None or self.scored:
            return len(self.tokens) - 1
        return max(0, min(self.prompt_len - 1, self.request.logprob_start - 1))

    def sample_row(self) -> SampleRow:
        s = self.request.sampling
        return SampleRow(self.request.seed, len(self.tokens), s.temperature, s.top_p, s.top_k)

    def append(self, token: int, logprob: float, version: str) -> None:
        index = self.num_output
        self.tokens.append(token)
        self.output_logprobs.append(logprob)
        if self.request.sampling.frequency_penalty:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, index + 1)
        else:
            self.spans.append(VersionSpan(version, index, index + 1))
        if self.first_token is None:
            self.first_token = time.monotonic()

    def finish(self, reason: FinishReason, weight_version: str) -> None:
        """Hand the answer to whoever waits for it."""
        self.on_done(self, self._completion(reason, weight_version))

    def fail(self, message: str, weight_version: str) -> None:
        """Answer that the server broke; the request may be sent again elsewhere."""
        self.on_done(self, self._completion(FinishReason("error", message=message), weight_version))

    def _completion(self, reason: FinishReason, weight_version: str) -> Completion:
        start = self.request.logprob_start
        scored: list[tuple[float | None, int]] = []
        if start is not None and start < self.prompt_len:
            values: list[float | None] = [None, *self.input_logprobs] if start == 0 else list(self.input_logprobs)
            scored = list(zip(values, self.request.input_ids[start:], strict=False))
        return Completion(
            request=self.request,
            output_ids=tuple(self.tokens[self.prompt_len :]),
            output_logprobs=tuple(self.output_logprobs),
            input_logprobs=tuple(scored),
            finish=reason,
            spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            weight_version=weight_version,
            latency_s=time.monotonic() - self.arrived,
            ttft_s=None if self.first_token is None else self.first_token - self.arrived,
        )

"""What is asked (`GenerationRequest`), what is answered (`Completion`), and a request under way (`Sequence`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_dta.rollout.server.kv_cache import Node
from areal_dta.rollout.server.sampler import SampleRow

__all__ = [
    "Completion",
    "Constraint",
    "FinishReason",
    "GenerationRequest",
    "LogprobWants",
    "Progress",
    "SamplingParams",
    "Sequence",
    "Step",
    "TokenLogprobs",
    "VersionSpan",
]


class Constraint(Protocol):
    """What the output may look like, token by token."""

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow."""

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next; stop tokens are not asked about."""

    def accept(self, token: int) -> None:
        """``token`` was chosen."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings in SGLang's names. ``ignore_eos`` switches off every stop token, as SGLang does."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    stop: tuple[str, ...] = ()
    stop_after: tuple[str, ...] = ()  # end the output too, but stay in its text
    no_stop_trim: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class LogprobWants:
    """Log-probs beyond the usual ones (those of the tempered and penalised distribution before top-k/top-p/min-p cut):
    ``raw`` of the model itself, ``sampling`` after the cut, ``top`` alternatives per token."""

    raw: bool = False
    sampling: bool = False
    top: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """One output token with its log-probs; None or empty where not asked for."""

    token: int
    logprob: float
    raw: float | None = None
    sampling: float | None = None
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued. ``logprob_start`` None: no prompt log-probs; else from that prompt token on.

    ``constraint`` makes a fresh constraint on the output; a request that is recomputed keeps its own.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    logprob_start: int | None = None
    wants: LogprobWants = LogprobWants()
    constraint: Callable[[], Constraint] | None = None


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
    """Output tokens ``[start, end)`` were sampled by weights ``version``, and their whole context was computed by it
    too unless ``mixed``: then the request kept KV of an older version through an update."""

    version: str
    start: int
    end: int
    mixed: bool = False


@dataclass(frozen=True)
class Completion:
    """The answer to one request. ``input_logprobs``: (log-prob, token) from ``logprob_start`` on; None for token 0."""

    request: GenerationRequest
    output: tuple[TokenLogprobs, ...]
    input_logprobs: tuple[tuple[float | None, int], ...]
    input_top: tuple[tuple[tuple[float, int], ...] | None, ...]  # beside input_logprobs, with ``wants.top``
    finish: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: int
    weight_version: str
    latency_s: float
    ttft_s: float | None
    num_draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0  # drafted tokens that became output

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(t.token for t in self.output)

    @property
    def output_logprobs(self) -> tuple[float, ...]:
        return tuple(t.logprob for t in self.output)


@dataclass(frozen=True)
class Progress:
    """What a request has got since the last one; ``done`` comes with the last."""

    new: tuple[TokenLogprobs, ...]
    cached_tokens: int
    done: Completion | None = None


@dataclass(eq=False)
class Sequence:
    """A request under way: mutable, touched by the model thread only."""

    request: GenerationRequest
    max_tokens: int  # prompt and output together
    stop_ids: frozenset[int]
    on_done: Callable[[Sequence, Completion], None]
    tokens: list[int] = field(default_factory=list)
    output: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top: list[tuple[tuple[float, int], ...]] = field(default_factory=list)
    constraint: Constraint | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)  # cached prefix in use
    own_pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # pages of path, then own_pages
    num_computed: int = 0  # tokens whose KV is valid
    scheduled_end: int = 0  # tokens whose KV will be valid after the step being planned
    cached_tokens: int = 0
    scored: bool = False  # prompt log-probs complete
    counts: dict[int, int] = field(default_factory=dict)  # of output tokens, for the penalties
    num_draft_steps: int = 0  # steps in which something was drafted for it
    num_drafted: int = 0
    num_accepted: int = 0
    mixed: bool = False  # part of its KV is of an older weight version: never shared with others
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)
        if self.request.constraint is not None:
            self.constraint = self.request.constraint()

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

    def sample_row(self, ahead: int = 0) -> SampleRow:
        """How the next token is drawn, or the one ``ahead`` tokens after it."""
        s = self.request.sampling
        return SampleRow(self.request.seed, len(self.tokens) + ahead, s.temperature, s.top_p, s.top_k, s.min_p)

    def allows(self, token: int) -> bool:
        """Whether the constraint admits ``token`` next; a stop token once the constraint is complete."""
        assert self.constraint is not None
        return self.constraint.complete if token in self.stop_ids else self.constraint.allows(token)

    def append(self, entry: TokenLogprobs, version: str) -> None:
        index, token = self.num_output, entry.token
        self.tokens.append(token)
        self.output.append(entry)
        if self.constraint is not None and token not in self.stop_ids:
            self.constraint.accept(token)
        if self.request.sampling.penalised:
            self.counts[token] = self.counts.get(token, 0) + 1
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.mixed) == (version, self.mixed):
            self.spans[-1] = VersionSpan(version, last.start, index + 1, self.mixed)
        else:
            self.spans.append(VersionSpan(version, index, index + 1, self.mixed))
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
        tops: list[tuple[tuple[float, int], ...] | None] = []
        if start is not None and start < self.prompt_len:
            values: list[float | None] = [None, *self.input_logprobs] if start == 0 else list(self.input_logprobs)
            scored = list(zip(values, self.request.input_ids[start:], strict=False))
            tops = [None, *self.input_top] if start == 0 else list(self.input_top)
        return Completion(
            request=self.request,
            output=tuple(self.output),
            input_logprobs=tuple(scored),
            input_top=tuple(tops) if self.request.wants.top else (),
            finish=reason,
            spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            weight_version=weight_version,
            latency_s=time.monotonic() - self.arrived,
            ttft_s=None if self.first_token is None else self.first_token - self.arrived,
            num_draft_steps=self.num_draft_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )


@dataclass(frozen=True)
class Step:
    """What one forward pass computed of one sequence: the positions from ``start`` on, in its rows ``rows``."""

    seq: Sequence
    start: int
    rows: list[int]

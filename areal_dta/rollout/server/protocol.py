"""From JSON bodies to requests, and from completions to JSON: SGLang's names, strict about types and values."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields, integer, token_ids, typed
from areal_dta.rollout.server.sampling_fields import Limits, parse_sampling
from areal_dta.rollout.server.sequence import (
    Completion,
    GenerationRequest,
    LogprobWants,
    SamplingParams,
    TokenLogprobs,
    VersionSpan,
)

__all__ = ["GenerateBody", "make_requests", "parse_generate", "spans_json"]

MAX_TOP_LOGPROBS = 128
# Fields of /generate: those used, and those known to SGLang's clients that are accepted with a neutral value only.
_GENERATE = (
    "input_ids", "text", "sampling_params", "return_logprob", "logprob_start_len", "rid", "stream",
    "incremental_streaming_output", "top_logprobs_num", "return_text_in_logprobs", "return_raw_logprob",
    "return_sampling_logprob",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "image_data": (None, [], ""),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (None, False),
    "lora_path": (None, ""),
    "log_metrics": (None, True, False),
    "return_routed_experts": (None, False),
}


@dataclass(frozen=True)
class GenerateBody:
    """A /generate body, read. ``incremental``: a stream's events hold what is new instead of all so far."""

    requests: tuple[GenerationRequest, ...]
    as_list: bool
    stream: bool
    incremental: bool
    return_logprob: bool
    return_text: bool

    def answer(
        self, c: Completion, text: str, token_text: Callable[[int], str] | None, output: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """One answer, or with ``output`` in place of the whole one piece of a stream."""
        meta = self._meta(c.request, output, c.cached_tokens, token_text)
        meta |= {
            "finish_reason": c.finish.to_json(len(c.output)),
            "completion_tokens": len(c.output),
            "weight_version": c.weight_version,
            "weight_versions": spans_json(c.spans),
            "e2e_latency": c.latency_s,
            "time_to_first_token": c.ttft_s,
        }
        if c.num_draft_steps:
            meta |= {
                "spec_accept_length": 1 + c.num_accepted / c.num_draft_steps,
                "spec_accept_rate": c.num_accepted / c.num_drafted,
                "spec_verify_ct": c.num_draft_steps,
                "spec_draft_token_num": c.num_drafted,
            }
        if self.return_logprob:
            spell = token_text if self.return_text else None
            meta["input_token_logprobs"] = [[lp, token, _spell(token, spell)] for lp, token in c.input_logprobs]
            if c.request.wants.top:
                meta["input_top_logprobs"] = [None if top is None else _top(top, spell) for top in c.input_top]
        return {"text": text, "output_ids": [t.token for t in output], "meta_info": meta}

    def piece(
        self,
        request: GenerationRequest,
        text: str,
        token_text: Callable[[int], str] | None,
        output: Sequence[TokenLogprobs],
        num_output: int,
        cached_tokens: int,
    ) -> dict[str, Any]:
        """What a stream says before the end: no finish reason, no versions yet."""
        meta = self._meta(request, output, cached_tokens, token_text)
        meta |= {"finish_reason": None, "completion_tokens": num_output}
        return {"text": text, "output_ids": [t.token for t in output], "meta_info": meta}

    def _meta(
        self,
        request: GenerationRequest,
        output: Sequence[TokenLogprobs],
        cached_tokens: int,
        token_text: Callable[[int], str] | None,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "prompt_tokens": len(request.input_ids),
            "cached_tokens": cached_tokens,
            "sampling_seed": request.seed,
        }
        if not self.return_logprob:
            return meta
        spell = token_text if self.return_text else None
        meta["output_token_logprobs"] = [[t.logprob, t.token, _spell(t.token, spell)] for t in output]
        if request.wants.top:
            meta["output_top_logprobs"] = [_top(t.top, spell) for t in output]
        if request.wants.raw:
            meta["output_token_raw_logprobs"] = [t.raw for t in output]
        if request.wants.sampling:
            meta["output_token_sampling_logprobs"] = [t.sampling for t in output]
        return meta


def spans_json(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """SGLang's spans; ``mixed`` only where a context holds KV of an older version."""
    return [
        {"version": s.version, "start": s.start, "end": s.end, **({"mixed": True} if s.mixed else {})} for s in spans
    ]


def _spell(token: int, token_text: Callable[[int], str] | None) -> str | None:
    return None if token_text is None else token_text(token)


def _top(top: Sequence[tuple[float, int]], token_text: Callable[[int], str] | None) -> list[list[Any]]:
    return [[lp, token, _spell(token, token_text)] for lp, token in top if lp != float("-inf")]


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[tuple[SamplingParams, int]],
    rids: Sequence[str],
    limits: Limits,
    logprob_starts: Sequence[int | None],
    wants: Sequence[LogprobWants],
) -> list[GenerationRequest]:
    """One request per prompt and sample; sample i of a seeded prompt uses ``sampling_seed + i``."""
    requests: list[GenerationRequest] = []
    for prompt, (sampling, n), rid, start, want in zip(prompts, samplings, rids, logprob_starts, wants, strict=True):
        if not prompt:
            raise ApiError("the prompt has no tokens; send at least one")
        if (len(prompt) >= limits.max_tokens and sampling.max_new_tokens) or len(prompt) > limits.max_tokens:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens, this server takes {limits.max_tokens} for prompt and output "
                "together; shorten it or raise max_total_tokens or the model's max_position_embeddings"
            )
        for i in range(n):
            seed = limits.draw_seed() if sampling.sampling_seed is None else sampling.sampling_seed + i
            requests.append(GenerationRequest(rid, prompt, sampling, seed, start, want))
    if len(requests) > limits.max_prompts:
        raise ApiError(f"{len(requests)} generations in one body, at most {limits.max_prompts}; split it")
    return requests


def parse_generate(body: Any, limits: Limits, tokenize: Callable[[str], list[int]] | None) -> GenerateBody:
    """Read a /generate body. ``tokenize`` None: the model has no tokenizer."""
    typed(body, dict, "the body")
    check_fields(body, _GENERATE, _NEUTRAL, "body")
    prompts, is_batch = _prompts(body, limits, tokenize)
    count = len(prompts)
    raw_sampling = body.get("sampling_params")
    raw_list = raw_sampling if isinstance(raw_sampling, list) else [raw_sampling] * count
    if len(raw_list) != count:
        raise ApiError(f"{len(raw_list)} sampling_params for {count} prompts")
    samplings = [parse_sampling(s, limits, tokenize is not None) for s in raw_list]

    def switch(name: str) -> bool:
        return bool(typed(body.get(name) or False, bool, name))

    def each(name: str, default: int, low: int, high: int) -> list[int]:
        raw = body.get(name)
        values = raw if isinstance(raw, list) else [raw] * count
        if len(values) != count:
            raise ApiError(f"{len(values)} {name} for {count} prompts")
        return [default if v is None else integer(v, name, low, high) for v in values]

    return_logprob = switch("return_logprob")
    starts = each("logprob_start_len", -1, -1, 1 << 31)
    tops = each("top_logprobs_num", 0, 0, MAX_TOP_LOGPROBS)
    raw, sampling = switch("return_raw_logprob"), switch("return_sampling_logprob")
    if not return_logprob:
        for name, asked in (
            ("return_raw_logprob", raw), ("return_sampling_logprob", sampling), ("top_logprobs_num", any(tops)),
        ):  # fmt: skip
            if asked:
                raise ApiError(f"{name} needs return_logprob=true")
    return_text = switch("return_text_in_logprobs")
    if return_text and tokenize is None:
        raise ApiError("return_text_in_logprobs needs a tokenizer, and the model folder has none")
    requests = make_requests(
        prompts, samplings, _rids(body.get("rid"), count), limits,
        [s if return_logprob and s >= 0 else None for s in starts],
        [LogprobWants(raw, sampling, top) for top in tops],
    )  # fmt: skip
    as_list = is_batch or len(requests) > 1
    incremental = switch("incremental_streaming_output")
    return GenerateBody(tuple(requests), as_list, switch("stream"), incremental, return_logprob, return_text)


def _prompts(body: Mapping[str, Any], limits: Limits, tokenize: Any) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise ApiError("send exactly one of input_ids and text")
    if text is not None:
        if tokenize is None:
            raise ApiError("text needs a tokenizer, and the model folder has none; send input_ids")
        texts = text if isinstance(text, list) else [text]
        return [tuple(tokenize(typed(t, str, "text"))) for t in texts], isinstance(text, list)
    typed(ids, list, "input_ids")
    if ids and isinstance(ids[0], list):
        return [token_ids(p, f"input_ids[{i}]", limits.vocab_size) for i, p in enumerate(ids)], True
    return [token_ids(ids, "input_ids", limits.vocab_size)], False


def _rids(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, list):
        if len(rid) != count or not all(isinstance(r, str) for r in rid):
            raise ApiError(f"rid must be a string or {count} strings, got {rid!r:.60}")
        return rid
    return [typed(rid, str, "rid")] * count

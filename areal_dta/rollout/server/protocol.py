"""From JSON bodies to requests, and from completions to JSON: SGLang's names, strict about types and values."""

from __future__ import annotations

import difflib
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams

__all__ = ["ApiError", "Limits", "completion_json", "parse_generate", "parse_sampling"]

MAX_SEED = (1 << 63) - 1


class Limits:
    """What a server accepts: longest sequence, vocabulary, prompts per body, and where seeds come from."""

    def __init__(self, max_tokens: int, vocab_size: int, max_prompts: int = 1024, seed: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.max_prompts = max_prompts
        self._seeds = random.Random(seed)

    def draw_seed(self) -> int:
        """Seed of a request that brings none: the server's own sequence, reproducible for a fixed arrival order."""
        return self._seeds.getrandbits(63)


# Fields of /generate: those used, and those known to SGLang's clients that are accepted with a neutral value only.
_GENERATE = ("input_ids", "text", "sampling_params", "return_logprob", "logprob_start_len", "rid", "stream")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "image_data": (None, [], ""),
    "top_logprobs_num": (None, 0),
    "return_text_in_logprobs": (None, False),
    "return_hidden_states": (None, False),
    "lora_path": (None, ""),
    "log_metrics": (None, True, False),
    "stream": (None, False),
    "return_routed_experts": (None, False),
}
_SAMPLING = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "sampling_seed",
    "n",
)
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "spaces_between_special_tokens": (None, True),
    "no_stop_trim": (None, True, False),
}


def check_fields(
    body: Mapping[str, Any], known: Sequence[str], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Refuse unknown names and features that are known but not offered."""
    for name, value in body.items():
        if name in neutral:
            if not any(value is v or value == v for v in neutral[name]):
                raise ApiError(f"{where}.{name}={value!r:.60} is not supported by this server; leave it out")
        elif name not in known:
            close = difflib.get_close_matches(name, [*known, *neutral], 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
            raise ApiError(f"unknown field {where}.{name}{hint}")


def _typed(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise ApiError(f"{name} must be a number, got {value!r}")
    if not isinstance(value, kind):
        wanted = " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__
        raise ApiError(f"{name} must be {wanted}, got {value!r:.60} ({type(value).__name__})")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    number = float(_typed(value, (int, float), name))
    if not low <= number <= high:
        raise ApiError(f"{name}={number} is outside [{low}, {high}]")
    return number


def _integer(value: Any, name: str, low: int, high: int) -> int:
    number: int = _typed(value, int, name)
    if not low <= number <= high:
        raise ApiError(f"{name}={number} is outside [{low}, {high}]")
    return number


def _token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    _typed(value, list, name)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise ApiError(f"{name}[{i}] must be int, got {token!r:.60} ({type(token).__name__})")
        if not 0 <= token < vocab_size:
            raise ApiError(f"{name}[{i}]={token} is outside the vocabulary [0, {vocab_size})")
    return tuple(value)


def parse_sampling(raw: Mapping[str, Any] | None, limits: Limits, has_tokenizer: bool) -> tuple[SamplingParams, int]:
    """Validate ``sampling_params``; returns them and ``n``. None values mean the default."""
    body = {} if raw is None else _typed(raw, dict, "sampling_params")
    check_fields(body, _SAMPLING, _NEUTRAL_SAMPLING, "sampling_params")
    given = {k: v for k, v in body.items() if v is not None}
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(_typed(stop, list, "stop") if stop else ())
    if any(not isinstance(s, str) or not s for s in stop):
        raise ApiError(f"stop must hold non-empty strings, got {list(stop)!r:.60}")
    if stop and not has_tokenizer:
        raise ApiError("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
    big = 1 << 31
    top_k = _integer(given.get("top_k", -1), "top_k", -1, big)
    params = SamplingParams(
        max_new_tokens=_integer(given.get("max_new_tokens", 128), "max_new_tokens", 0, big),
        min_new_tokens=_integer(given.get("min_new_tokens", 0), "min_new_tokens", 0, big),
        temperature=_number(given.get("temperature", 1.0), "temperature", 0.0, 1e4),
        top_p=_number(given.get("top_p", 1.0), "top_p", 1e-9, 1.0),
        top_k=-1 if top_k >= limits.vocab_size else top_k,
        frequency_penalty=_number(given.get("frequency_penalty", 0.0), "frequency_penalty", -2.0, 2.0),
        stop=stop,
        stop_token_ids=frozenset(_token_ids(given.get("stop_token_ids", []), "stop_token_ids", 1 << 62)),
        ignore_eos=_typed(given.get("ignore_eos", False), bool, "ignore_eos"),
        skip_special_tokens=_typed(given.get("skip_special_tokens", True), bool, "skip_special_tokens"),
        sampling_seed=_integer(given["sampling_seed"], "sampling_seed", -MAX_SEED - 1, (1 << 64) - 1)
        if "sampling_seed" in given
        else None,
    )
    if params.min_new_tokens > params.max_new_tokens:
        raise ApiError(f"min_new_tokens={params.min_new_tokens} exceeds max_new_tokens={params.max_new_tokens}")
    return params, _integer(given.get("n", 1), "n", 1, limits.max_prompts)


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[tuple[SamplingParams, int]],
    rids: Sequence[str],
    limits: Limits,
    logprob_starts: Sequence[int | None],
) -> list[GenerationRequest]:
    """One request per prompt and sample; sample i of a seeded prompt uses ``sampling_seed + i``."""
    requests: list[GenerationRequest] = []
    for prompt, (sampling, n), rid, start in zip(prompts, samplings, rids, logprob_starts, strict=True):
        if not prompt:
            raise ApiError("the prompt has no tokens; send at least one")
        if (len(prompt) >= limits.max_tokens and sampling.max_new_tokens) or len(prompt) > limits.max_tokens:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens, this server takes {limits.max_tokens} for prompt and output "
                "together; shorten it or raise max_total_tokens or the model's max_position_embeddings"
            )
        for i in range(n):
            seed = limits.draw_seed() if sampling.sampling_seed is None else sampling.sampling_seed + i
            requests.append(GenerationRequest(rid, prompt, sampling, seed, start))
    if len(requests) > limits.max_prompts:
        raise ApiError(f"{len(requests)} generations in one body, at most {limits.max_prompts}; split it")
    return requests


def parse_generate(body: Any, limits: Limits, tokenize: Any) -> tuple[list[GenerationRequest], bool, bool]:
    """A /generate body: (requests, is the answer a list, return_logprob). ``tokenize`` None: no tokenizer."""
    _typed(body, dict, "the body")
    if body.get("stream"):
        raise ApiError("stream=true is not supported by this server; send stream=false")
    check_fields(body, _GENERATE, _NEUTRAL, "body")
    prompts, is_batch = _prompts(body, limits, tokenize)
    count = len(prompts)
    raw_sampling = body.get("sampling_params")
    raw_list = raw_sampling if isinstance(raw_sampling, list) else [raw_sampling] * count
    if len(raw_list) != count:
        raise ApiError(f"{len(raw_list)} sampling_params for {count} prompts")
    samplings = [parse_sampling(s, limits, tokenize is not None) for s in raw_list]
    return_logprob = body.get("return_logprob") or False
    _typed(return_logprob, bool, "return_logprob")
    start = body.get("logprob_start_len")
    starts = start if isinstance(start, list) else [start] * count
    if len(starts) != count:
        raise ApiError(f"{len(starts)} logprob_start_len for {count} prompts")
    starts = [-1 if s is None else _integer(s, "logprob_start_len", -1, 1 << 31) for s in starts]
    requests = make_requests(
        prompts, samplings, _rids(body.get("rid"), count), limits,
        [s if return_logprob and s >= 0 else None for s in starts],
    )  # fmt: skip
    return requests, is_batch or len(requests) > 1, return_logprob


def _prompts(body: Mapping[str, Any], limits: Limits, tokenize: Any) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise ApiError("send exactly one of input_ids and text")
    if text is not None:
        if tokenize is None:
            raise ApiError("text needs a tokenizer, and the model folder has none; send input_ids")
        texts = text if isinstance(text, list) else [text]
        return [tuple(tokenize(_typed(t, str, "text"))) for t in texts], isinstance(text, list)
    _typed(ids, list, "input_ids")
    if ids and isinstance(ids[0], list):
        return [_token_ids(p, f"input_ids[{i}]", limits.vocab_size) for i, p in enumerate(ids)], True
    return [_token_ids(ids, "input_ids", limits.vocab_size)], False


def _rids(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, list):
        if len(rid) != count or not all(isinstance(r, str) for r in rid):
            raise ApiError(f"rid must be a string or {count} strings, got {rid!r:.60}")
        return rid
    return [_typed(rid, str, "rid")] * count


def completion_json(completion: Completion, text: str, return_logprob: bool) -> dict[str, Any]:
    """One answer of /generate."""
    c = completion
    meta: dict[str, Any] = {
        "id": c.request.rid,
        "finish_reason": c.finish.to_json(len(c.output_ids)),
        "prompt_tokens": len(c.request.input_ids),
        "completion_tokens": len(c.output_ids),
        "cached_tokens": c.cached_tokens,
        "weight_version": c.weight_version,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in c.spans],
        "sampling_seed": c.request.seed,
        "e2e_latency": c.latency_s,
        "time_to_first_token": c.ttft_s,
    }
    if return_logprob:
        meta["output_token_logprobs"] = [
            [lp, token, None] for lp, token in zip(c.output_logprobs, c.output_ids, strict=True)
        ]
        meta["input_token_logprobs"] = [[lp, token, None] for lp, token in c.input_logprobs]
    return {"text": text, "output_ids": list(c.output_ids), "meta_info": meta}

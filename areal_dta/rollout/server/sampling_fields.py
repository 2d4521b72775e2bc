"""``sampling_params`` of a request: SGLang's names, strict about types and values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields, integer, number, token_ids, typed
from areal_dta.rollout.server.sequence import SamplingParams

__all__ = ["Limits", "parse_sampling"]

MAX_SEED = (1 << 63) - 1
MAX_BIASES = 4096
_SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "no_stop_trim", "ignore_eos",
    "skip_special_tokens", "sampling_seed", "n",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
}


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


def parse_sampling(raw: Mapping[str, Any] | None, limits: Limits, has_tokenizer: bool) -> tuple[SamplingParams, int]:
    """Validate ``sampling_params``; returns them and ``n``. None values mean the default."""
    body = {} if raw is None else typed(raw, dict, "sampling_params")
    check_fields(body, _SAMPLING, _NEUTRAL, "sampling_params")
    given = {k: v for k, v in body.items() if v is not None}
    big = 1 << 31
    top_k = integer(given.get("top_k", -1), "top_k", -1, big)
    seed = given.get("sampling_seed")
    params = SamplingParams(
        max_new_tokens=integer(given.get("max_new_tokens", 128), "max_new_tokens", 0, big),
        min_new_tokens=integer(given.get("min_new_tokens", 0), "min_new_tokens", 0, big),
        temperature=number(given.get("temperature", 1.0), "temperature", 0.0, 1e4),
        top_p=number(given.get("top_p", 1.0), "top_p", 1e-9, 1.0),
        top_k=-1 if top_k >= limits.vocab_size else top_k,
        min_p=number(given.get("min_p", 0.0), "min_p", 0.0, 1.0),
        frequency_penalty=number(given.get("frequency_penalty", 0.0), "frequency_penalty", -2.0, 2.0),
        presence_penalty=number(given.get("presence_penalty", 0.0), "presence_penalty", -2.0, 2.0),
        repetition_penalty=number(given.get("repetition_penalty", 1.0), "repetition_penalty", 1e-3, 10.0),
        logit_bias=_logit_bias(given.get("logit_bias", {}), limits.vocab_size),
        stop=_stops(given.get("stop", ()), has_tokenizer),
        no_stop_trim=typed(given.get("no_stop_trim", False), bool, "no_stop_trim"),
        stop_token_ids=frozenset(token_ids(given.get("stop_token_ids", []), "stop_token_ids", 1 << 62)),
        ignore_eos=typed(given.get("ignore_eos", False), bool, "ignore_eos"),
        skip_special_tokens=typed(given.get("skip_special_tokens", True), bool, "skip_special_tokens"),
        sampling_seed=None if seed is None else integer(seed, "sampling_seed", -MAX_SEED - 1, (1 << 64) - 1),
    )
    if params.min_new_tokens > params.max_new_tokens:
        raise ApiError(f"min_new_tokens={params.min_new_tokens} exceeds max_new_tokens={params.max_new_tokens}")
    return params, integer(given.get("n", 1), "n", 1, limits.max_prompts)


def _stops(raw: Any, has_tokenizer: bool) -> tuple[str, ...]:
    stop = (raw,) if isinstance(raw, str) else tuple(typed(raw, list, "stop") if raw else ())
    if any(not isinstance(s, str) or not s for s in stop):
        raise ApiError(f"stop must hold non-empty strings, got {list(stop)!r:.60}")
    if stop and not has_tokenizer:
        raise ApiError("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
    return stop


def _logit_bias(raw: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """{token id as text or number: what is added to its logit}."""
    bias: dict[int, float] = {}
    for key, value in typed(raw, dict, "logit_bias").items():
        if not str(key).isdecimal() or int(key) >= vocab_size:
            raise ApiError(f"logit_bias has the key {key!r:.40}; keys are token ids in [0, {vocab_size})")
        bias[int(key)] = number(value, f"logit_bias[{key}]", -100.0, 100.0)
    if len(bias) > MAX_BIASES:
        raise ApiError(f"logit_bias has {len(bias)} entries, at most {MAX_BIASES}")
    return tuple(bias.items())

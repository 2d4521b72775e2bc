"""AReaL's SGLang client for one router: exact policy versions per token, seeds, affinity, plain errors.

`RouterEngine` is a `RemoteSGLangEngine` whose generation call is replaced. AReaL's own call stamps every token with
the version the *client* believes in; here the version is the one the server reports for that token, so a completion
that spans a weight update is recorded as such. Everything else (executor, workflow resolution, health) stays AReaL's.

`EpisodeEngine` is what a workflow receives: the same engine bound to one lease, which fills in the sampling seed and
the affinity key, enforces greedy decoding for evaluation, and refuses calls of an episode that is over.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import requests
from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra import RemoteInfEngine, workflow_context
from areal.infra.remote_inf_engine import RemoteInfBackendProtocol

from areal_dta.records import Lease, RecordError, WeightVersion

__all__ = ["AFFINITY_HEADER", "EpisodeClosed", "EpisodeEngine", "GenerationError", "RouterEngine", "token_versions"]

log = logging.getLogger(__name__)

AFFINITY_HEADER = "X-Affinity"
SEED_KEY = "sampling_seed"
AFFINITY_KEY = "affinity_key"

_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0
_BUSY_STATUS = frozenset({429, 502, 503, 504})  # nobody serves right now: a restart or a weight update is under way
_FINAL = frozenset({"stop", "length", "tool_calls"})


class GenerationError(RuntimeError):
    """The server refused a generation request or could not be reached in time."""


class EpisodeClosed(RuntimeError):
    """A workflow asked for tokens after its episode had ended (time-out or cancellation)."""


class _Versions:
    """Reads version strings; one of another form counts as the engine's own version and is reported once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def number(self, text: Any, fallback: int) -> int:
        try:
            return WeightVersion.parse(str(text)).number
        except RecordError:
            if str(text) not in self._reported and len(self._reported) < 16:
                self._reported.add(str(text))
                log.warning("server reports weight version %r, not EPOCH:NUMBER; using the engine's %d", text, fallback)
            return fallback


def token_versions(
    meta: dict[str, Any], num_tokens: int, fallback: int, versions: _Versions | None = None
) -> list[int]:
    """Policy number of each of the ``num_tokens`` output tokens described by a ``/generate`` answer's ``meta_info``.

    ``weight_versions`` holds spans {version, start, end} over the output; without it the whole output has
    ``weight_version``, and without that ``fallback`` (the engine's own version). Raises GenerationError when spans
    leave a token uncovered.
    """
    versions = versions or _Versions()
    spans = meta.get("weight_versions")
    if not spans:
        text = meta.get("weight_version")
        return [fallback if text is None else versions.number(text, fallback)] * num_tokens
    numbers = [-1] * num_tokens
    for span in spans:
        start, end = int(span["start"]), min(int(span["end"]), num_tokens)
        number = versions.number(span["version"], fallback)
        numbers[start:end] = [number] * max(0, end - start)
    if -1 in numbers:
        raise GenerationError(
            f"weight_versions {spans} leave output token {numbers.index(-1)} of {num_tokens} without a version"
        )
    return numbers


class _Backend(SGLangBackend):
    """SGLang's wire format plus ``sampling_seed`` and a request id that starts with the affinity key."""

    def build_generation_request(self, req: ModelRequest, with_lora: bool, version: int) -> Any:
        http = super().build_generation_request(req, with_lora, version)
        seed = req.metadata.get(SEED_KEY)
        if seed is not None:
            http.payload["sampling_params"][SEED_KEY] = int(seed)
        # Servers refuse an id that is still in flight, so a request that is sent again gets a new one.
        http.payload["rid"] = f"{req.metadata.get(AFFINITY_KEY, 'none')}/{uuid.uuid4().hex}"
        return http


@dataclass
class _Output:
    """What one completion has gathered over its (possibly interrupted) requests."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class _Client(RemoteInfEngine):
    """AReaL's remote engine with the generation call written anew; see the module's text."""

    def __init__(
        self, config: InferenceEngineConfig, backend: RemoteInfBackendProtocol, api_key: str | None, patience_s: float
    ) -> None:
        super().__init__(config, backend)
        self._auth = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience_s = patience_s
        self._versions = _Versions()

    def check_health(self, base_url: str) -> bool:
        """Whether the router answers ``/health``; AReaL's version cannot send an API key."""
        try:
            return requests.get(f"{base_url}/health", headers=self._auth, timeout=30).status_code == 200
        except requests.exceptions.RequestException:
            return False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Complete ``req.input_ids``; an interrupted completion is continued with what it has until it is whole.

        Raises ValueError for a request that cannot be served, GenerationError when the server refuses or stays
        unreachable.
        """
        req = req.copy()
        prompt_len = len(req.input_ids)
        req.gconfig.max_new_tokens = budget = _token_budget(req)
        started, out, reason = time.perf_counter(), _Output(), "abort"
        while reason not in _FINAL and len(out.tokens) < budget:
            meta = await self._post(req)
            reason, num_new = self._append(meta, out)
            req.input_ids += out.tokens[len(out.tokens) - num_new :]
            req.gconfig.max_new_tokens = budget - len(out.tokens)
            if reason == "abort" and not num_new:
                await asyncio.sleep(_RETRY_FIRST_S)  # interrupted before its first token: do not spin
        latency_s = time.perf_counter() - started
        return ModelResponse(
            input_tokens=req.input_ids[:prompt_len],
            input_images=req.image_data,
            output_tokens=out.tokens,
            output_logprobs=out.logprobs,
            output_versions=out.versions,
            stop_reason="length" if reason == "abort" else reason,
            latency=latency_s,
            ttft=latency_s,
            tokenizer=req.tokenizer,
            processor=req.processor,
        )

    def _append(self, meta: dict[str, Any], out: _Output) -> tuple[str, int]:
        """Add one answer's tokens to ``out``; returns its finish reason and how many tokens it brought."""
        finish = meta["finish_reason"]
        reason, message = finish["type"], str(finish.get("message") or "")
        if reason == "abort" and int(finish.get("status_code") or 0) >= 400:
            raise GenerationError(f"server refused the request ({finish['status_code']}): {message}")
        if reason not in _FINAL and reason != "abort":
            raise GenerationError(f"unknown finish_reason {finish!r}")
        pairs = [] if message.startswith("Abort before prefill") else meta.get("output_token_logprobs") or []
        out.tokens += [int(pair[1]) for pair in pairs]
        out.logprobs += [float(pair[0]) for pair in pairs]
        out.versions += token_versions(meta, len(pairs), self.get_version(), self._versions)
        return reason, len(pairs)

    async def _post(self, req: ModelRequest) -> dict[str, Any]:
        """One ``/generate``; waits out restarts of the router for ``patience_s`` seconds. Returns ``meta_info``."""
        headers = {**self._auth, AFFINITY_HEADER: str(req.metadata.get(AFFINITY_KEY, ""))}
        session = await workflow_context.get_aiohttp_session()
        timeout = aiohttp.ClientTimeout(total=self.config.request_timeout, sock_connect=self._patience_s)
        give_up, delay_s, failures = time.monotonic() + self._patience_s, _RETRY_FIRST_S, 0
        while True:
            http = self.backend.build_generation_request(req, self.config.use_lora, self.get_version())
            url = f"http://{self.choose_server()}{http.endpoint}"
            try:
                async with session.post(url, json=http.payload, headers=headers, timeout=timeout) as answer:
                    if answer.status == 200:
                        return (await answer.json())["meta_info"]
                    text = f"{url} answered {answer.status}: {(await answer.text())[:500]}"
                    failures += answer.status not in _BUSY_STATUS
                    if answer.status < 500 and answer.status not in _BUSY_STATUS:
                        raise GenerationError(text)
            except aiohttp.ClientError as error:
                text = f"{url}: {type(error).__name__}: {error}"
            except TimeoutError as error:
                raise GenerationError(f"{url} did not answer within {self.config.request_timeout:g} s") from error
            if time.monotonic() >= give_up or failures >= max(1, self.config.request_retries):
                raise GenerationError(f"gave up after {self._patience_s:g} s or {failures} failures: {text}")
            await asyncio.sleep(delay_s)
            delay_s = min(_RETRY_MAX_S, delay_s * 2)


def _token_budget(req: ModelRequest) -> int:
    """New tokens this request may generate, under both of AReaL's limits; raises ValueError when there are none."""
    gconfig = req.gconfig
    if gconfig.n_samples != 1:
        raise ValueError(
            f"one completion per request, got n_samples={gconfig.n_samples}; call agenerate once per sample"
        )
    budget = min(gconfig.max_tokens - len(req.input_ids), gconfig.max_new_tokens)
    if budget <= 0:
        raise ValueError(
            f"prompt of {len(req.input_ids)} tokens leaves no room to generate: max_tokens={gconfig.max_tokens}, "
            f"max_new_tokens={gconfig.max_new_tokens}; raise gconfig.max_tokens or end the episode earlier"
        )
    return budget


class RouterEngine(RemoteSGLangEngine):
    """`RemoteSGLangEngine` on the calls above.

    ``api_key`` guards the router's endpoints; ``patience_s`` bounds how long one request waits for a router that is
    down.
    """

    def __init__(self, config: InferenceEngineConfig, api_key: str | None = None, patience_s: float = 60.0) -> None:
        super().__init__(config)
        self._engine = _Client(config, _Backend(), api_key, patience_s)


class EpisodeEngine:
    """AReaL's engine as one episode sees it. Attributes not defined here are the engine's own."""

    def __init__(self, engine: Any, lease: Lease) -> None:
        self._engine = engine
        self._lease = lease
        self._num_calls = 0
        self._closed = ""
        self.num_generations = 0
        self.num_output_tokens = 0
        self.num_row_tokens = 0  # of all completions, each with its prompt

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """As AReaL's; a request without ``metadata["sampling_seed"]`` gets one fixed by (lease seed, call number)."""
        if self._closed:
            raise EpisodeClosed(f"episode {self._lease.lease_id} is over ({self._closed}); no more tokens")
        req = req.copy()
        req.metadata.setdefault(SEED_KEY, call_seed(self._lease.seed, self._num_calls))
        # One key per prompt: its samples share the prompt, their turns share more, so they belong to one server.
        req.metadata.setdefault(AFFINITY_KEY, f"group-{self._lease.group_id}")
        self._num_calls += 1
        if self._lease.eval_tag is not None:
            req.gconfig.greedy = True
        response = await self._engine.agenerate(req)
        self.num_generations += 1
        self.num_output_tokens += len(response.output_tokens)
        self.num_row_tokens += len(req.input_ids) + len(response.output_tokens)
        return response

    def close(self, why: str) -> None:
        """Refuse further calls: a workflow in a thread of its own cannot be cancelled, but it can be starved."""
        self._closed = why

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def call_seed(lease_seed: int, call: int) -> int:
    """31-bit sampling seed of an episode's ``call``-th completion."""
    digest = hashlib.blake2b(f"{lease_seed}:{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1

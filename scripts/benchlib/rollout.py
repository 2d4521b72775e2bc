"""``bench.py rollout``: the embedded server's engine against static batches of ``transformers.generate``.

Same weights, prompts, output lengths, dtype and threads, in one process and one run; only tokens that were asked for
count. Weights are random (speed does not depend on them), so stop tokens are ignored and lengths are set:

- ``equal``: every request generates the same number of tokens, which is what static batches are best at;
- ``staggered``: lengths are log-normal with the median and 95th percentile of recorded agent turns (113 and 423), and
  prompts share a prefix whose KV the baseline computes once and copies into every batch;
- ``staggered_unshared``: the same with prompts of the same length that share nothing.

The engine keeps ``--concurrency`` requests in flight; a static batch has as many and lasts as long as its longest.
HTTP is left out on purpose. Not measured: a GPU, tensor parallelism.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from areal_dta import metrics
from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.scheduler import SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from scripts.benchlib.report import UsageError, at_least, commit, progress

__all__ = ["add_arguments", "run", "staggered_lengths"]

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 2048,
    },
    "smollm2": {
        "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49_152,
    },
}  # fmt: skip
MEDIAN, P95 = 113, 423  # tokens of an assistant turn in recorded trajectories
_P95_NORMAL = 1.6449
_MIB_PER_KIB = 1 / 1024


@dataclass(frozen=True)
class Load:
    """``prompts`` begin with the same ``num_shared`` tokens; ``lengths`` of the outputs."""

    prompts: list[list[int]]
    lengths: list[int]
    num_shared: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(SHAPES), default="tiny", help="a shape; the weights are random")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight, and size of a static batch")
    parser.add_argument("--shared-prefix", type=int, default=512, help="tokens that all staggered prompts begin with")
    parser.add_argument("--own-prompt", type=int, default=32, help="prompt tokens after the prefix")
    parser.add_argument("--equal-tokens", type=int, default=MEDIAN, help="output tokens of the equal part")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longer outputs of the staggered part are cut")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def staggered_lengths(count: int, max_tokens: int, rng: np.random.Generator) -> list[int]:
    """Log-normal output lengths with the recorded median and 95th percentile."""
    spread = math.log(P95 / MEDIAN) / _P95_NORMAL
    return np.clip(MEDIAN * np.exp(spread * rng.standard_normal(count)), 4, max_tokens).astype(int).tolist()


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "requests", "concurrency", "own_prompt", "equal_tokens", "max_tokens", "threads")
    if args.shared_prefix < 0:
        raise UsageError(f"--shared-prefix must not be negative, got {args.shared_prefix}")
    rng = np.random.default_rng(args.seed)
    vocab_size = SHAPES[args.model]["vocab_size"]
    longest = args.shared_prefix + args.own_prompt + max(args.max_tokens, args.equal_tokens)

    def prompts(length: int) -> list[list[int]]:
        return rng.integers(2, vocab_size, (args.requests, length)).tolist()

    whole = args.shared_prefix + args.own_prompt
    shared = rng.integers(2, vocab_size, args.shared_prefix).tolist()
    lengths = staggered_lengths(args.requests, args.max_tokens, rng)
    loads = {
        "equal": Load(prompts(args.own_prompt), [args.equal_tokens] * args.requests, 0),
        "staggered": Load([shared + own for own in prompts(args.own_prompt)], lengths, args.shared_prefix),
        "staggered_unshared": Load(prompts(whole), lengths, 0),
    }
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="areal-dta-bench-") as folder:
        model = _build(args.model, longest, args.seed)
        model.save_pretrained(folder)
        config = DecoderConfig.from_folder(Path(folder))
        weights = load_decoder(Path(folder), config, torch.float32)
    result: dict[str, Any] = {"commit": commit(), "model": args.model, "requests": args.requests}
    result |= {"concurrency": args.concurrency, "shared_prefix": args.shared_prefix, "threads": args.threads}
    limits = SchedulerLimits(args.concurrency, (args.concurrency + 2) * longest + whole * args.requests)
    for name, load in loads.items():
        progress(f"{name}: {len(load.prompts)} requests, {load.num_tokens} tokens")
        engine = Engine(weights, "bench", limits, metrics.init("bench", None), threads=args.threads)
        engine.start()
        try:
            part = asyncio.run(_drive(engine, load, args.concurrency))
        finally:
            engine.stop(60.0)
        baseline = _static_batches(model, load, args.concurrency)
        part |= {f"baseline_{key}": value for key, value in baseline.items()}
        part["speedup"] = part["tokens_per_s"] / baseline["tokens_per_s"]
        part["cpu_speedup"] = part["tokens_per_cpu_s"] / baseline["tokens_per_cpu_s"]
        progress(
            f"{name}: {part['tokens_per_s']:.0f} tokens/s, baseline {baseline['tokens_per_s']:.0f}: "
            f"{part['speedup']:.2f}x, by processor time {part['cpu_speedup']:.2f}x"
        )
        result[name] = part
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MIB_PER_KIB
    return result


def _build(name: str, max_positions: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[name],
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    return LlamaForCausalLM(config).eval()


class _Clock:
    """Wall and processor time from now on; the latter is what counts on a machine that others use, too."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def rates(self, num_tokens: int) -> dict[str, float]:
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        return {"tokens_per_s": num_tokens / wall_s, "tokens_per_cpu_s": num_tokens / cpu_s}


async def _drive(engine: Engine, load: Load, concurrency: int) -> dict[str, Any]:
    """Keep ``concurrency`` requests in flight until all are answered."""
    slots = asyncio.Semaphore(concurrency)

    async def ask(index: int) -> Completion:
        async with slots:
            sampling = SamplingParams(max_new_tokens=load.lengths[index], ignore_eos=True)
            request = GenerationRequest(str(index), tuple(load.prompts[index]), sampling, index)
            return await engine.submit(request).future

    clock = _Clock()
    done = await asyncio.gather(*(ask(i) for i in range(len(load.prompts))))
    rates = clock.rates(load.num_tokens)
    generated = sum(len(c.output) for c in done)
    if generated != load.num_tokens:
        raise RuntimeError(f"{generated} tokens generated, {load.num_tokens} were asked for")
    ttft_ms = np.array([c.ttft_s for c in done], dtype=float) * 1e3
    return {
        **rates,
        "hit_share": sum(c.cached_tokens for c in done) / sum(map(len, load.prompts)),
        "ttft_ms": {"p50": float(np.percentile(ttft_ms, 50)), "p95": float(np.percentile(ttft_ms, 95))},
    }


@torch.inference_mode()
def _static_batches(model: LlamaForCausalLM, load: Load, size: int) -> dict[str, float]:
    """Rates of ``transformers.generate`` on batches of ``size`` in order of arrival."""
    clock = _Clock()
    prefix = None
    if load.num_shared:
        prefix = DynamicCache(config=model.config)
        model(torch.tensor([load.prompts[0][: load.num_shared]]), past_key_values=prefix, use_cache=True)
    for lo in range(0, len(load.prompts), size):
        batch = load.prompts[lo : lo + size]
        _generate(model, batch, max(load.lengths[lo : lo + size]), prefix)
    return clock.rates(load.num_tokens)


def _generate(
    model: LlamaForCausalLM, prompts: Sequence[list[int]], num_tokens: int, prefix: DynamicCache | None
) -> None:
    ids = torch.tensor(prompts)
    cache = None
    if prefix is not None:
        cache = copy.deepcopy(prefix)
        cache.batch_repeat_interleave(len(prompts))
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )

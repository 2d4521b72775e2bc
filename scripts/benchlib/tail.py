"""``bench.py tail``: a rollout step whose last answers are long, by plain decoding, static speculation and TLT.

Two server processes per strategy, each pinned to a core; strategies take turns, round after round, on the same
requests with the same seeds. *plain* knows nothing of speculation, *static* uses one arm for every step, *tlt* is the
tuner over all arms, and its idle servers train the drafter until the step's last answer is there; its workers are
halted while others have their turn. Stop tokens are forbidden, so that lengths are set: log-normal ones whose longest
is ``--longest`` medians, or turns drawn from a recorded trace.

With ``--turns`` also an asynchronous pool: as many conversations in flight as staleness ``--eta`` allows.
``beside`` is the decoding speed of a plain server on core 1 while a worker trains on core 0, against the same alone.

``--update-noise`` moves the target's weights between the steps, as training would. ``cpu`` is the processor time of the
server that had most to do: what counts on a machine that others use; the goals are judged by it. Not measured: a
router, several machines, a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_dta.drafter.arms import OFF, Arm
from scripts.benchlib.report import UsageError, at_least, commit, finite, progress, trace_arrays
from scripts.benchlib.tail_load import Ask, Conversation, make_step, tail_lengths
from scripts.benchlib.tail_model import TailModel, folder_model, write_tiny
from scripts.benchlib.tail_play import Bench, Sizes
from scripts.benchlib.tail_result import summary

__all__ = ["STRATEGIES", "add_arguments", "run"]

STRATEGIES = ("plain", "static", "tlt")
PAGE_SLACK = 64  # tokens per request: its last page, and what is drafted
BESIDE_REQUESTS = 4


def _strategies(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(","))
    if "plain" not in found or not set(found) <= set(STRATEGIES):
        raise argparse.ArgumentTypeError(f"{text!r}: name plain and others of {', '.join(STRATEGIES)}")
    return found


def _arm(text: str) -> Arm:
    try:
        arm = Arm.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if arm == OFF:
        raise argparse.ArgumentTypeError("off is what plain does; name an arm that drafts")
    return arm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=["tiny", "folder", "smollm2"], default="tiny", help="tiny is taught here")
    parser.add_argument("--folder", type=Path, help="the model's Hugging Face folder (not for tiny)")
    parser.add_argument("--drafter", type=Path, help="its drafter's folder; without one, n-gram drafts")
    parser.add_argument("--domains", default="airline,retail", help="tau2 domains whose prompts a folder's model gets")
    parser.add_argument("--max-prompt", type=int, default=768, help="bound of the prompts' tokens; 0: whole prompts")
    parser.add_argument("--strategies", type=_strategies, default=STRATEGIES, help="plain and others of static, tlt")
    parser.add_argument(
        "--static-arm", type=_arm, help="default: ngram-d7-k1-v7, or eagle-d3-k1-v3 where there is a drafter"
    )
    parser.add_argument("--requests", type=int, default=64, help="of one step")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--rounds", type=int, default=6, help="steps on new prompts; the first is left out")
    parser.add_argument("--median", type=finite, default=64.0, help="tokens of an answer")
    parser.add_argument("--longest", type=finite, default=16.0, help="the longest answer, in medians")
    parser.add_argument("--trace", type=Path, help="draw lengths from the turns of a recorded trace instead")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longer answers are cut")
    parser.add_argument("--temperature", type=finite, default=0.8)
    parser.add_argument("--dtype", default="auto", help="float64 leaves no room for ties that rounding decides")
    parser.add_argument(
        "--update-noise", type=finite, default=0.0, help="change the target between steps, in standard deviations"
    )
    parser.add_argument("--turns", type=int, default=0, help="of a conversation of the asynchronous pool; 0: no pool")
    parser.add_argument("--eta", type=int, default=2, help="staleness that the pool is allowed")
    parser.add_argument("--batch", type=int, default=8, help="eta + 1 times as many conversations in flight")
    parser.add_argument("--pool-rounds", type=int, default=3)
    parser.add_argument("--observation", type=int, default=32, help="tokens between two turns")
    parser.add_argument("--beside-rounds", type=int, default=3, help="of decoding beside training; 0: not measured")
    parser.add_argument("--record-share", type=finite, default=0.25, help="of the answers recorded for training")
    parser.add_argument("--publish-steps", type=int, default=20, help="training steps between two drafters")
    parser.add_argument("--step-tokens", type=int, default=1024, help="what a worker contributes to a training step")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "requests", "samples", "rounds", "median", "longest", "max_tokens", "batch", "publish_steps")
    at_least(args, 1, "step_tokens", "pool_rounds", "observation")
    at_least(args, 0, "update_noise", "turns", "eta", "temperature", "beside_rounds")
    if not 0 <= args.record_share <= 1:
        raise UsageError(f"--record-share {args.record_share} is a share, between 0 and 1")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise UsageError("two cores are needed, one for each server")
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="areal-dta-tail-") as name:
        root = Path(name)
        num_groups = -(-args.requests // args.samples)
        model = _model(args, root, num_groups * args.rounds)
        rng = np.random.default_rng(args.seed)
        draw = _drawer(args, rng)
        steps = [
            make_step(model.prompts[i * num_groups :], args.samples, draw(args.requests), len(cores), _seed(args, i))
            for i in range(args.rounds)
        ]
        pools = [_pool(args, model, draw, len(cores), i) for i in range(args.pool_rounds if args.turns else 0)]
        arm = args.static_arm or (Arm("ngram", 7, 1, 7) if model.drafter is None else Arm("eagle", 3, 1, 3))
        sizes = _sizes(args, steps, pools)
        with Bench(args, model, root, cores, arm, sizes) as bench:
            for i, asks in enumerate(steps):
                if i and args.update_noise:
                    bench.update(i)
                bench.step(i, asks)
            for i, pool in enumerate(pools):
                bench.pool(i, pool, (args.eta + 1) * args.batch)
            beside_asks = [
                Ask(prompt, int(8 * args.median), _seed(args, 900) + i, 1)
                for i, prompt in enumerate((model.prompts * BESIDE_REQUESTS)[:BESIDE_REQUESTS])
            ]
            bench.beside(args.beside_rounds if "tlt" in args.strategies else 0, beside_asks)
            result = summary(bench, args.rounds > 1)
    lengths = [a.length for asks in steps for a in asks]
    return {
        "commit": commit(),
        "model": model.note,
        "drafter": model.drafter is not None,
        "load_average": [before, os.getloadavg()[0]],
        "static_arm": arm.name,
        "temperature": args.temperature,
        "update_noise": args.update_noise,
        "record_share": args.record_share,
        "lengths": {
            "source": "log-normal" if args.trace is None else args.trace.name,
            "requests": args.requests,
            "samples": args.samples,
            "median": statistics.median(lengths),
            "p95": float(np.percentile(lengths, 95)),
            "longest": max(lengths),
            "tokens": sum(lengths),
        },
        **result,
    }


def _seed(args: argparse.Namespace, part: int) -> int:
    return int(args.seed * 1_000_003 + part * 10_007)


def _model(args: argparse.Namespace, root: Path, num_prompts: int) -> TailModel:
    progress(f"preparing {num_prompts} prompts")
    if args.model == "tiny":
        return write_tiny(root, num_prompts, args.seed)
    if args.folder is None:
        raise UsageError(f"--model {args.model} needs --folder")
    domains = tuple(word.strip() for word in args.domains.split(","))
    return folder_model(root, args.folder, args.drafter, num_prompts, args.max_prompt, domains)


def _drawer(args: argparse.Namespace, rng: np.random.Generator) -> Callable[[int], list[int]]:
    if args.trace is None:
        return lambda count: [min(n, args.max_tokens) for n in tail_lengths(count, args.median, args.longest, rng)]
    arrays = trace_arrays(args.trace, ("turn_start", "turn_end"))
    turns = np.clip(arrays["turn_end"] - arrays["turn_start"], 1, args.max_tokens)
    return lambda count: [int(n) for n in rng.choice(turns, count)]


def _pool(
    args: argparse.Namespace, model: TailModel, draw: Callable[[int], list[int]], num_servers: int, part: int
) -> list[Conversation]:
    """Twice as many conversations as are in flight, so that the pool is full for half of the time at least."""
    count, prompts = 2 * (args.eta + 1) * args.batch, model.prompts
    lengths = iter(draw(count * args.turns))
    found = []
    for i in range(count):
        turns = tuple(next(lengths) for _ in range(args.turns))
        said = tuple(prompts[(i + turn + 1) % len(prompts)][-args.observation :] for turn in range(args.turns - 1))
        seed = _seed(args, 100 + part) + i * args.turns
        found.append(Conversation(prompts[i % len(prompts)], turns, said, seed, i % num_servers))
    return found


def _sizes(args: argparse.Namespace, steps: Sequence[list[Ask]], pools: Sequence[list[Conversation]]) -> Sizes:
    """Room for everything that one server has at a time."""
    tokens = requests = 0
    for server in (0, 1):
        for asks in steps:
            own = [len(a.prompt) + a.length + PAGE_SLACK for a in asks if a.server == server]
            tokens, requests = max(tokens, sum(own)), max(requests, len(own))
        for pool in pools:
            whole = sorted(len(c.prompt) + sum(c.lengths) + sum(map(len, c.observations)) + PAGE_SLACK for c in pool)
            in_flight = (args.eta + 1) * args.batch
            tokens, requests = max(tokens, sum(whole[-in_flight:])), max(requests, in_flight)
    return Sizes(max(requests, BESIDE_REQUESTS), max(tokens, BESIDE_REQUESTS * int(8 * args.median + 4096)))

"""Answers of a model to prompts with what it computed for them, by the embedded server's scheduler in this process.

Every sample holds a sequence's tokens, the outputs of three layers (what eagle3 reads) and the hidden states (what
eagle and hass read, and every kind's teacher), so one collection serves all kinds. A prefix that the server's cache had
is left out of a sample, as it was not computed again.

Collecting can be stopped at any time; a repeated call goes on with the first request that was not finished.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_dta.drafter.buffer import BufferWriter
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import Tuner
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.feature_recorder import FeatureRecorder, RecorderSettings
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import Speculator
from experiments.drafter.prompts import Prompt

__all__ = ["CollectSettings", "Collected", "collect"]

DONE_FILE = "requests.jsonl"
REPORT_EVERY_S = 20.0
WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CollectSettings:
    """``response_tokens`` in all, over rounds of alternating temperatures (greedy rounds use other variants of the
    prompts each time, since a greedy answer is always the same). ``seconds`` bounds one call."""

    response_tokens: int = 100_000
    batch: int = 32
    max_new_tokens: int = 256
    temperature: float = 1.0
    budget_bytes: int = 4 << 30
    seconds: float = 1e9
    seed: int = 0


@dataclass(frozen=True)
class Collected:
    """Of all calls together."""

    num_requests: int
    response_tokens: int
    complete: bool


def collect(
    target: DecoderWeights,
    version: str,
    folder: Path,
    prompts: Sequence[Sequence[Prompt]],
    settings: CollectSettings,
    report: Callable[[str], None] = print,
) -> Collected:
    """Fill ``folder``; ``prompts[variant]`` are those of one variant, used by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _finished(folder)
    longest = max(len(p.ids) for group in prompts for p in group) + settings.max_new_tokens
    limits = SchedulerLimits(max_batch=settings.batch, max_total_tokens=(settings.batch + 8) * longest)
    scheduler = Scheduler(target, version, limits)
    scheduler.rebuild((), EagleConfig.for_target(target.config, "eagle3", 0).hidden_layers)
    writer = BufferWriter(folder, settings.budget_bytes, queue_samples=4 * settings.batch)
    recorder = FeatureRecorder(writer, RecorderSettings(max_tokens=longest), version)
    plain = Tuner(StepCosts({1: 1.0}), ())  # no arm but off: never speculates
    scheduler.speculator = Speculator(scheduler.cache, plain, None, None, recorder)
    requests = (r for r in _requests(prompts, settings) if r.rid not in done)
    tokens_before = num_tokens = sum(done.values())
    began_s = told_s = time.monotonic()
    with (folder / DONE_FILE).open("a") as log:

        def finish(seq: ServerSequence, completion: Completion) -> None:
            nonlocal num_tokens
            done[seq.request.rid] = len(completion.output)
            num_tokens += len(completion.output)
            log.write(json.dumps({"rid": seq.request.rid, "tokens": len(completion.output)}) + "\n")
            log.flush()

        while num_tokens < settings.response_tokens and time.monotonic() - began_s < settings.seconds:
            while len(scheduler.running) + len(scheduler.waiting) < settings.batch:
                request = next(requests)
                limit = len(request.input_ids) + settings.max_new_tokens
                stop_ids = frozenset(target.config.eos_token_ids)
                scheduler.add(ServerSequence(request, limit, stop_ids, finish))
            scheduler.step()
            if time.monotonic() - told_s > REPORT_EVERY_S:
                told_s = time.monotonic()
                speed = (num_tokens - tokens_before) / (told_s - began_s)
                left_s = (settings.response_tokens - num_tokens) / max(speed, 1e-9)
                report(
                    f"collected {num_tokens} of {settings.response_tokens} response tokens in {len(done)} answers, "
                    f"{speed:.0f} tokens/s, {left_s:.0f} s left, writer {dict(writer.counters)}"
                )
    writer.flush(WRITE_TIMEOUT_S)
    writer.close()
    return Collected(len(done), num_tokens, num_tokens >= settings.response_tokens)


def _finished(folder: Path) -> dict[str, int]:
    """Requests of earlier calls and their lengths; a line that was cut short by a crash counts as not finished."""
    path = folder / DONE_FILE
    done: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        done[entry["rid"]] = int(entry["tokens"])
    return done


def _requests(prompts: Sequence[Sequence[Prompt]], settings: CollectSettings) -> Iterator[GenerationRequest]:
    """Without end; greedy rounds first alternate with sampled ones, and stop when every variant has been answered."""
    rounds = [(variant, temperature) for variant in range(len(prompts)) for temperature in (0.0, settings.temperature)]
    number = 0
    while True:
        for variant, temperature in rounds:
            for prompt in prompts[variant]:
                sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=temperature)
                seed = settings.seed * 1_000_003 + number
                yield GenerationRequest(str(number), prompt.ids, sampling, seed)
                number += 1
        rounds = [(variant, settings.temperature) for variant in range(len(prompts))]

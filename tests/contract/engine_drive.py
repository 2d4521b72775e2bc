"""Drive the serving engine in process, with pauses at chosen steps, and judge its tokens by transformers' logits.

Legend of shape suffixes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from areal_dta import metrics
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.scheduler import SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest

ANSWER_TIMEOUT_S = 120.0
CLOSE = 1e-4  # two logits nearer than this may change places in fp32

Score = Callable[[torch.Tensor, int], torch.Tensor]  # (logits_V, position) -> what the token maximises


@contextlib.contextmanager
def running_engine(weights: DecoderWeights, **limits: int) -> Iterator[Engine]:
    """An engine whose model thread runs; it must be alive at the end."""
    engine = Engine(weights, "v0", SchedulerLimits(**limits), metrics.init("test", None))
    engine.start()
    try:
        yield engine
        assert engine.alive, engine.error
        load = engine.load()
        assert (load["num_running"], load["num_waiting"], load["kv_use"]) == (0, 0, 0.0), "a slot or page leaked"
    finally:
        engine.stop(20)


@dataclass
class Pauses:
    """Pauses the engine in ``mode`` after every ``num_steps`` steps; ``affected`` tells how many requests each hit."""

    engine: Engine
    mode: str
    num_steps: int = 5
    affected: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler = self.engine._scheduler
        step, taken = scheduler.step, 0

        def step_and_pause() -> int:
            nonlocal taken
            num_sampled = step()
            taken += 1
            if taken % self.num_steps == 0:
                self.engine.pause(self.mode).add_done_callback(self._paused)  # takes effect before the next step
            return num_sampled

        scheduler.step = step_and_pause

    def _paused(self, done: Future[int]) -> None:
        self.affected.append(done.result())
        if self.mode != "abort":  # what was aborted has to be sent again first
            self.engine.resume()


@dataclass(frozen=True)
class Answer:
    """The tokens of one request, over all its resubmissions."""

    output_ids: tuple[int, ...]
    cached_tokens: int  # of the first submission
    num_submissions: int


def answer_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Answer]:
    """Send all requests at once and wait; one that is aborted is sent again with what it has got so far."""
    return asyncio.run(asyncio.wait_for(_answer_all(engine, requests), ANSWER_TIMEOUT_S))


async def _answer_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(requests)
    pending = list(range(len(requests)))
    while pending:
        await asyncio.wrap_future(engine.pause("in_place"))  # so that they start together
        tickets = [engine.submit(_continued(requests[i], answers[i])) for i in pending]
        await asyncio.wrap_future(engine.resume())
        completions = await asyncio.gather(*(ticket.future for ticket in tickets))
        for i, completion in zip(pending, completions, strict=True):
            assert completion.finish.kind in ("stop", "length", "abort"), completion.finish
            answers[i] = _extended(answers[i], completion)
        pending = [i for i, c in zip(pending, completions, strict=True) if c.finish.kind == "abort"]
    return [answer for answer in answers if answer is not None]


def _continued(request: GenerationRequest, so_far: Answer | None) -> GenerationRequest:
    if so_far is None:
        return request
    left = request.sampling.max_new_tokens - len(so_far.output_ids)
    return replace(
        request,
        input_ids=request.input_ids + so_far.output_ids,
        sampling=replace(request.sampling, max_new_tokens=left),
    )


def _extended(so_far: Answer | None, completion: Completion) -> Answer:
    if so_far is None:
        return Answer(completion.output_ids, completion.cached_tokens, 1)
    return replace(
        so_far,
        output_ids=so_far.output_ids + completion.output_ids,
        num_submissions=so_far.num_submissions + 1,
    )


def greedy_by_transformers(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Sequence[int]
) -> list[list[int]]:
    """``generate`` on all prompts at once, padded on the left; what follows an end token is cut off."""
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out_BT = model.generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(eos_ids)
        )[:, longest:]
    ends = [next((t + 1 for t, token in enumerate(row) if token in eos_ids), len(row)) for row in out_BT.tolist()]
    return [row[:end] for row, end in zip(out_BT.tolist(), ends, strict=True)]


def plain(logits_V: torch.Tensor, position: int) -> torch.Tensor:
    """The score of greedy decoding."""
    return logits_V


def count_near_ties(
    model: Any,
    prompt: Sequence[int],
    got: Sequence[int],
    expected: Sequence[int],
    score: Score,
    continue_from: Callable[[list[int]], list[int]],
) -> int:
    """How often ``got`` took the other of two tokens whose scores are within `CLOSE`.

    Every other difference fails. After such a place ``continue_from(ids)`` gives what is expected of ``ids`` so far.
    """
    got, expected, num_ties = list(got), list(expected), 0
    while got != expected:
        at = next((t for t, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        assert at is not None, f"{len(got)} tokens instead of {len(expected)}, the shorter is the start of the longer"
        before = [*prompt, *got[:at]]
        with torch.inference_mode():
            scores_V = score(model(torch.tensor([before])).logits[0, -1], len(before))
        gap = float(scores_V.max() - scores_V[got[at]])
        assert gap <= CLOSE, f"token {at}: {got[at]} instead of {expected[at]}, {gap:.2e} below the best"
        num_ties += 1
        kept = got[: at + 1]
        expected = kept + continue_from([*prompt, *kept])
    return num_ties

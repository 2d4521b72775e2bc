"""Schedulers that speculate, for tests: drafters that are right as often as the test wants, arms fixed or in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.draft_tree import ROOT, DraftTree
from areal_dta.rollout.server.scheduler import Scheduler
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams, Step
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import Speculator
from tests.unit.server_kit import make_scheduler
from tests.unit.tiny_models import EOS

ORACLE = Arm("eagle", 7, 3, 9)


class ScriptedTuner:
    """Plays the given arms in turn."""

    def __init__(self, arms: Iterable[Arm]) -> None:
        self._arms: Iterator[Arm] = itertools.cycle(arms)
        self.records: list[tuple[Arm, int, int]] = []

    def choose(self, batch: int, context_tokens: int) -> Arm:
        return next(self._arms)

    def beside_prefill(self, batch: int, context_tokens: int, num_rows: int) -> Arm:
        return next(self._arms)

    def least_chance(self, batch: int, context_tokens: int) -> float:
        return 0.0

    def on_paper(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        pass

    def remove(self, drafter: str) -> None:
        self._arms = itertools.repeat(OFF)

    def new_version(self) -> None:
        pass

    def record(self, arm: Arm, batch: int, context_tokens: int, num_tokens: int, *rest: object) -> None:
        self.records.append((arm, batch, num_tokens))


class Oracle:
    """Drafts random trees in which the true continuation, known from a plain run, is one path with probability
    ``truth`` per node."""

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], truth: float, vocab_size: int, seed: int) -> None:
        self._answers = answers
        self._truth = truth
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def slots_needed(self, arm: Arm) -> int:
        return arm.num_verify

    def observe(self, steps: Sequence[Step], features_TF: torch.Tensor) -> None:
        for step in steps:
            assert step.start + len(step.rows) == step.seq.num_computed

    def forget(self, seq: ServerSequence) -> None:
        pass

    def follow(self, target: object) -> None:
        pass

    def draft(self, seqs: Sequence[ServerSequence], arm: Arm) -> list[DraftTree]:
        return [self._tree(seq, arm) for seq in seqs]

    def _tree(self, seq: ServerSequence, arm: Arm) -> DraftTree:
        truth = iter(self._answers[seq.request.input_ids + (seq.request.seed,)][seq.num_output :])
        tokens: list[int] = []
        parents: list[int] = []
        tip: int | None = ROOT
        for _ in range(int(self._rng.integers(0, arm.num_verify + 1))):
            token = next(truth, None) if tip is not None and self._rng.random() < self._truth else None
            if token is None or tip is None:
                parents.append(int(self._rng.integers(ROOT, len(tokens))))
                tokens.append(int(self._rng.integers(self._vocab_size)))
                if self._rng.random() < 0.1:
                    tip = None
                continue
            parents.append(tip)
            tokens.append(int(token))
            tip = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents)).trimmed(arm.depth)


def dense_attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
    groups = q_TNH.shape[1] // k_TKH.shape[1]
    k, v = (t.repeat_interleave(groups, 1).transpose(0, 1) for t in (k_TKH, v_TKH))
    return F.scaled_dot_product_attention(q_TNH.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)


def mixed_requests(
    count: int, vocab_size: int, seed: int, num_prompts: int = 8, resumable: bool = False
) -> list[GenerationRequest]:
    """Greedy and sampled, with penalties, cuts, stop tokens and strings; prompts repeat and share prefixes. What is
    ``resumable`` can be continued as a new request with the same outcome: no penalties, no minimum length."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, vocab_size, 40).tolist()
    prompts = [trunk[: rng.integers(1, 40)] + rng.integers(2, vocab_size, rng.integers(1, 30)).tolist()
               for _ in range(num_prompts)]  # fmt: skip
    requests = []
    for i in range(count):
        sampling = SamplingParams(
            max_new_tokens=int(rng.integers(1, 40)),
            min_new_tokens=0 if resumable else int(rng.integers(0, 4)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            min_p=float(rng.choice([0.0, 0.05])),
            frequency_penalty=0.0 if resumable else float(rng.choice([0.0, 0.0, 0.5])),
            presence_penalty=0.0 if resumable else float(rng.choice([0.0, 0.0, 0.4])),
            repetition_penalty=1.0 if resumable else float(rng.choice([1.0, 1.0, 1.2])),
            stop=() if resumable or rng.random() < 0.7 else ("QB", "Z"),
            stop_token_ids=frozenset(rng.integers(2, vocab_size, 3).tolist()) if rng.random() < 0.5 else frozenset(),
        )
        noise = int(rng.integers(1 << 40))
        requests.append(GenerationRequest(str(i), tuple(prompts[i % num_prompts]), sampling, noise))
    return requests


def run_all(
    scheduler: Scheduler,
    requests: Sequence[GenerationRequest],
    at_once: int,
    between_steps: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Answers in the order of ``requests``, ``at_once`` of them under way at a time."""
    done: dict[str, Completion] = {}
    todo = list(reversed(requests))
    step = 0
    while todo or scheduler.has_work:
        while todo and len(scheduler.running) + len(scheduler.waiting) < at_once:
            request = todo.pop()
            stop_ids = request.sampling.stop_token_ids | {EOS}
            limit = len(request.input_ids) + request.sampling.max_new_tokens

            def finish(seq: ServerSequence, completion: Completion) -> None:
                done[seq.request.rid] = completion

            scheduler.add(ServerSequence(request, limit, stop_ids, finish))
        scheduler.step()
        if between_steps is not None:
            between_steps(step)
        step += 1
        assert step < 100_000, "the scheduler makes no progress"
    return [done[request.rid] for request in requests]


def answers_of(done: Sequence[Completion]) -> dict[tuple[int, ...], Sequence[int]]:
    """What `Oracle` knows: outputs by prompt and seed."""
    return {(*c.request.input_ids, c.request.seed): c.output_ids for c in done}


def spelling(scheduler: Scheduler) -> Scheduler:
    """Tokens are letters, so that stop strings work."""
    scheduler._decode_text = lambda ids: "".join(chr(65 + i % 26) for i in ids)
    return scheduler


def speculating(
    folder: Path, dtype: torch.dtype, drafter: Oracle, arms: Iterable[Arm] = (ORACLE,), **limits: int
) -> Scheduler:
    """A scheduler with ``drafter`` playing the eagle arms."""
    scheduler = spelling(make_scheduler(folder, dtype, **limits))
    scheduler.speculator = Speculator(scheduler.cache, ScriptedTuner(arms), None, drafter)
    return scheduler


def same(plain: Completion, other: Completion) -> bool:
    """Token for token, with the same log-probs and the same end."""
    if plain.output_ids != other.output_ids or plain.finish != other.finish:
        return False
    return bool(np.allclose(plain.output_logprobs, other.output_logprobs, rtol=0, atol=1e-9))

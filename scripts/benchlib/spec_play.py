"""One group of requests decoded by one strategy, and what every step of it was.

Prompts are computed before the clock starts: it runs over decoding steps only, until the group's last answer.
Strategies take turns on one scheduler, so they share weights, pages and cached prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.eagle import EagleWeights
from areal_dta.drafter.ngram import NgramIndex
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.ngram_drafter import NgramDrafter
from areal_dta.rollout.server.scheduler import Scheduler, SchedulerLimits
from areal_dta.rollout.server.sequence import Completion, GenerationRequest, SamplingParams
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import Speculator

__all__ = ["Chooser", "FixedArm", "Played", "Player", "StepNote", "Totals"]


class Chooser(Protocol):
    """What a `Speculator` asks of a tuner."""

    def choose(self, batch: int, context_tokens: int) -> Arm: ...

    def least_chance(self, batch: int, context_tokens: int) -> float: ...

    def on_paper(self, drafter: str, num_drafted: int, num_accepted: int) -> None: ...

    def record(
        self,
        arm: Arm,
        batch: int,
        context_tokens: int,
        num_tokens: int,
        seconds: float,
        accepted_by_depth: Sequence[int] | None = None,
        draft_seconds: float | None = None,
        num_rows: int | None = None,
    ) -> None: ...


class FixedArm:
    """Always the same arm."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm

    def choose(self, batch: int, context_tokens: int) -> Arm:
        return self._arm

    def least_chance(self, batch: int, context_tokens: int) -> float:
        return 0.0

    def on_paper(self, *guess: object) -> None:
        """Nothing is learnt."""

    def beside_prefill(self, batch: int, context_tokens: int, num_rows: int) -> Arm:
        return OFF

    def record(self, *step: object) -> None:
        """Nothing is learnt."""


@dataclass(frozen=True)
class StepNote:
    """One decoding step; seconds are processor time. ``num_rows`` were verified by the target."""

    arm: Arm
    batch: int
    context: int
    num_tokens: int
    seconds: float
    accepted_by_depth: tuple[int, ...]
    draft_seconds: float
    num_rows: int

    def replay(self, tuner: Chooser) -> None:
        """Tell ``tuner`` of this step."""
        tuner.record(
            self.arm,
            self.batch,
            self.context,
            self.num_tokens,
            self.seconds,
            self.accepted_by_depth,
            self.draft_seconds,
            self.num_rows,
        )


class _Noting:
    """A chooser that keeps notes."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner
        self.notes: list[StepNote] = []

    def choose(self, batch: int, context_tokens: int) -> Arm:
        return self._inner.choose(batch, context_tokens)

    def least_chance(self, batch: int, context_tokens: int) -> float:
        return self._inner.least_chance(batch, context_tokens)

    def on_paper(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        self._inner.on_paper(drafter, num_drafted, num_accepted)

    def beside_prefill(self, batch: int, context_tokens: int, num_rows: int) -> Arm:
        return OFF

    def record(
        self,
        arm: Arm,
        batch: int,
        context_tokens: int,
        num_tokens: int,
        seconds: float,
        accepted_by_depth: Sequence[int] | None = None,
        draft_seconds: float | None = None,
        num_rows: int | None = None,
    ) -> None:
        rows = num_rows or batch
        accepted = tuple(accepted_by_depth or ())
        seconds = max(seconds, 1e-6)  # the processor's clock is coarse
        note = StepNote(arm, batch, context_tokens, num_tokens, seconds, accepted, draft_seconds or 0.0, rows)
        self.notes.append(note)
        note.replay(self._inner)


@dataclass(frozen=True)
class Played:
    """``num_tokens`` were decoded while the clocks ran."""

    outputs: tuple[Completion, ...]
    num_tokens: int
    wall_s: float
    cpu_s: float
    notes: tuple[StepNote, ...]


@dataclass
class Totals:
    """Several plays of one strategy."""

    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    notes: list[StepNote] = field(default_factory=list)

    def add(self, played: Played) -> None:
        self.num_tokens += played.num_tokens
        self.wall_s += played.wall_s
        self.cpu_s += played.cpu_s
        self.notes += played.notes

    @property
    def tps(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_tps(self) -> float:
        return self.num_tokens / self.cpu_s

    @property
    def accept_length(self) -> float:
        """Tokens per sequence and step, steps without a draft included."""
        return sum(n.num_tokens for n in self.notes) / max(1, sum(n.batch for n in self.notes))

    @property
    def acceptance(self) -> list[float]:
        """Of the sequences that were stepped, the share that accepted at least d + 1 drafted tokens, by d."""
        steps = sum(n.batch for n in self.notes if n.arm != OFF)
        depth = max((len(n.accepted_by_depth) for n in self.notes), default=0)
        sums = [sum(n.accepted_by_depth[d] for n in self.notes if d < len(n.accepted_by_depth)) for d in range(depth)]
        return [s / max(1, steps) for s in sums]

    @property
    def mean_batch(self) -> float:
        return sum(n.batch for n in self.notes) / max(1, len(self.notes))


class Player:
    """A scheduler with room for ``max_batch`` sequences and all ``prompts``, whose KV (the drafter's too) is computed
    here, once."""

    def __init__(
        self,
        target: DecoderWeights,
        drafter: EagleWeights | None,
        prompts: Sequence[tuple[int, ...]],
        max_batch: int,
        max_new_tokens: int,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        longest = max(map(len, prompts))
        room = 4 * longest + sum(len(p) for p in set(prompts)) + max_batch * (max_new_tokens + 192)
        self.scheduler = Scheduler(target, "bench", SchedulerLimits(max_batch, room))
        self._clock, self._stop_ids = clock, frozenset(target.config.eos_token_ids)
        self._runtime: EagleRuntime | None = None
        if drafter is not None:
            config = drafter.config
            self.scheduler.rebuild(((config.num_kv_heads, config.head_dim),), config.hidden_layers)
            self._runtime = EagleRuntime(self.scheduler.runner, drafter, "bench")
        for prompt in prompts:
            self.play([GenerationRequest("warm-up", prompt, SamplingParams(max_new_tokens=1), 0)], FixedArm(OFF))

    @property
    def drafts(self) -> bool:
        """Whether there is a trained drafter."""
        return self._runtime is not None

    def play(self, requests: Sequence[GenerationRequest], chooser: Chooser | None) -> Played:
        """Decode ``requests`` at once; ``chooser`` None: by a scheduler that knows nothing of speculation."""
        done: dict[str, Completion] = {}

        def finish(seq: ServerSequence, completion: Completion) -> None:
            done[seq.request.rid] = completion

        scheduler = self.scheduler
        noting = _Noting(chooser) if chooser is not None else None
        scheduler.speculator = None
        if noting is not None:
            # A fresh index: it must not know the answers from another strategy's turn.
            scheduler.speculator = Speculator(
                scheduler.cache,
                noting,  # type: ignore[arg-type]
                NgramDrafter(NgramIndex()),
                self._runtime,
                clock=self._clock,
            )
        for request in requests:
            limit = len(request.input_ids) + request.sampling.max_new_tokens
            scheduler.add(ServerSequence(request, limit, self._stop_ids, finish))
        while scheduler.waiting or any(seq.num_remaining > 1 for seq in scheduler.running):
            scheduler.step()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        num_tokens = 0
        while scheduler.has_work:
            num_tokens += scheduler.step()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        outputs = tuple(done[request.rid] for request in requests)
        return Played(outputs, num_tokens, wall_s, cpu_s, tuple(noting.notes) if noting is not None else ())

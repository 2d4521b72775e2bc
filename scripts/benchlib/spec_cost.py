"""What a decoding step should cost: the forward pass by sequences and rows, drafting by level, drawing a token.

Measured on the scheduler's own pages behind cached prompts, by processor time, part by part and without the scheduler.
`StepTable.predict_s` adds the parts up for a step that was observed, so the ratio of the two says what the speculation
around them costs.

Legend of shape suffixes: T rows, D hidden, F features, V vocabulary.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.eagle import EagleWeights, draft_hidden, draft_inputs, draft_logits, packed
from areal_dta.rollout.server.paged_attention import Span, find_shared, plan_attention
from areal_dta.rollout.server.sampler import SampleRow, sample
from areal_dta.rollout.server.scheduler import Scheduler
from scripts.benchlib.spec_play import StepNote

__all__ = ["StepTable", "measure_table"]

CALLS = 3
MAX_ROWS = 256  # larger steps are taken to cost in proportion
Table = dict[int, dict[int, float]]  # sequences -> rows per sequence -> seconds


class StepTable:
    """``forward`` includes the vocabulary head; ``draw_s`` is per token, by temperature."""

    def __init__(self, forward: Table, level: Table, draw_s: Mapping[float, float]) -> None:
        self._forward, self._level, self._draw_s = forward, level, dict(draw_s)

    def forward_s(self, batch: float, rows: float) -> float:
        """A target step of ``batch`` sequences with ``rows`` each."""
        return _interpolate(self._forward, batch, rows)

    def draft_s(self, arm: Arm, batch: float) -> float:
        """All levels of one draft; n-gram drafts are not charged."""
        if arm.drafter != "eagle":
            return 0.0
        return _interpolate(self._level, batch, 1) + (arm.depth - 1) * _interpolate(self._level, batch, arm.top_k)

    def arm_s(self, arm: Arm, batch: float, num_tokens: float, temperature: float) -> float:
        """A step of ``arm`` in which ``num_tokens`` are drawn in all."""
        drafted_s = self.draft_s(arm, batch)
        return self.forward_s(batch, 1 + arm.num_verify) + drafted_s + num_tokens * self._draw_s[temperature]

    def predict_s(self, note: StepNote, temperature: float) -> float:
        """What a step that happened should have cost."""
        drafted_s = self.draft_s(note.arm, note.batch) if note.num_rows > note.batch else 0.0
        forward_s = self.forward_s(note.batch, note.num_rows / note.batch)
        return forward_s + drafted_s + note.num_tokens * self._draw_s[temperature]

    def points(self) -> dict[int, float]:
        """Seconds by rows of a whole batch, for a tuner's calibration."""
        found: dict[int, float] = {}
        for batch, cells in self._forward.items():
            for rows, seconds in cells.items():
                found[batch * rows] = min(seconds, found.get(batch * rows, math.inf))
        return found

    def to_json(self) -> dict[str, Any]:
        def in_ms(table: Table) -> dict[str, dict[str, float]]:
            return {str(b): {str(r): round(1e3 * s, 3) for r, s in cells.items()} for b, cells in table.items()}

        draw_ms = {str(t): round(1e3 * s, 4) for t, s in self._draw_s.items()}
        return {"step_ms": in_ms(self._forward), "draft_level_ms": in_ms(self._level), "draw_ms": draw_ms}


def _interpolate(table: Table, batch: float, rows: float) -> float:
    return _between({b: _between(cells, rows) for b, cells in table.items()}, batch)


def _between(points: Mapping[int, float], at: float) -> float:
    """On logarithmic axes; beyond the last point in proportion."""
    known = sorted(points)
    if at >= known[-1]:
        return points[known[-1]] * at / known[-1]
    hi = bisect_left(known, at)
    if hi == 0 or known[hi] == at:
        return points[known[hi]]
    share = math.log(at / known[hi - 1]) / math.log(known[hi] / known[hi - 1])
    return points[known[hi - 1]] ** (1 - share) * points[known[hi]] ** share


@torch.inference_mode()
def measure_table(
    scheduler: Scheduler,
    drafter: EagleWeights | None,
    prompts: Sequence[tuple[int, ...]],
    batches: Sequence[int],
    arms: Sequence[Arm],
    temperatures: Sequence[float],
    repeats: int,
) -> StepTable:
    """Seconds of every part; ``prompts`` have been computed (at least as many as the largest batch)."""
    rows = sorted({1, *(1 + arm.num_verify for arm in arms)})
    widths = sorted({1, *(arm.top_k for arm in arms if arm.drafter == "eagle")})
    forward: Table = {}
    level: Table = {}
    fast = None if drafter is None else packed(drafter)
    for batch in sorted({1 << i for i in range(max(batches).bit_length())} | set(batches)):
        with _tables(scheduler, prompts[:batch], max(rows[-1], widths[-1])) as tables:
            steps = {r: _step(scheduler, tables, r) for r in rows if batch * r <= MAX_ROWS}
            forward[batch] = {r: _median_s(step, repeats) for r, step in steps.items()}
            if fast is not None:
                levels = {k: _level(scheduler, fast, tables, k) for k in widths}
                level[batch] = {k: _median_s(call, repeats, steps[1]) for k, call in levels.items()}
    vocab_size = scheduler.runner.weights.config.vocab_size
    draw_s = {t: _median_s(_draw(vocab_size, t), 5) for t in temperatures}
    return StepTable(forward, level, draw_s)


def _median_s(call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> float:
    """Processor time of one of three calls in a row. ``before`` each row something runs that empties the caches, as the
    target's weights do between two drafts."""
    call()
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        began_s = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - began_s) / CALLS)
    return statistics.median(times)


@contextmanager
def _tables(
    scheduler: Scheduler, prompts: Sequence[tuple[int, ...]], rows: int
) -> Iterator[list[tuple[list[int], int]]]:
    """Page tables behind the cached prompts with room for ``rows`` more, and the slots in use."""
    cache, size = scheduler.cache, scheduler.limits.page_size
    paths = [cache.match(prompt, len(prompt) - 1) for prompt in prompts]
    for path in paths:
        cache.lock(path)
    pages = [cache.allocate(-(-rows // size)) for _ in prompts]
    try:
        yield [([n.page for n in path] + own, len(path) * size) for path, own in zip(paths, pages, strict=True)]
    finally:
        for path, own in zip(paths, pages, strict=True):
            cache.give_back(own)
            cache.unlock(path)


def _spans(tables: Sequence[tuple[list[int], int]], rows: int) -> list[Span]:
    if rows == 1:
        return [Span(table, used, used + 1) for table, used in tables]
    seen = np.tril(np.ones((rows, rows), dtype=bool))
    return [
        Span(table, used, used + rows, context=used, visible=seen, depths=tuple(range(used, used + rows)))
        for table, used in tables
    ]


def _step(scheduler: Scheduler, tables: Sequence[tuple[list[int], int]], rows: int) -> Callable[[], object]:
    runner, spans = scheduler.runner, _spans(tables, rows)
    shared, total = find_shared(spans, runner.page_size), len(tables) * rows
    ids = [7] * total

    def call() -> torch.Tensor:
        hidden_TD, _ = runner.forward_features(spans, ids, shared)
        return runner.logits(hidden_TD, range(total)).argmax(-1)

    return call


def _level(
    scheduler: Scheduler, drafter: EagleWeights, tables: Sequence[tuple[list[int], int]], width: int
) -> Callable[[], object]:
    runner, spans = scheduler.runner, _spans(tables, width)
    total, layer = len(tables) * width, runner.weights.config.num_layers
    features_TD = torch.zeros(total, drafter.config.hidden_size, dtype=drafter.dtype)
    ids_T = torch.full((total,), 7)

    def call() -> torch.Tensor:
        plan = plan_attention(spans, runner.page_size, runner.weights.device)
        cos_sin = runner.rotary(plan.positions_T, plan.max_position)
        x_TX = draft_inputs(drafter, runner.weights.embed_VD, ids_T, features_TD)
        f_TD = draft_hidden(
            drafter, x_TX, cos_sin, lambda index, q, k, v: runner.kv.attend(plan, index, q, k, v), layer
        )
        logits_TV = draft_logits(drafter, f_TD, runner.weights)
        return (logits_TV - logits_TV.logsumexp(-1, keepdim=True)).topk(width).indices

    return call


def _draw(vocab_size: int, temperature: float) -> Callable[[], object]:
    logits_TV = torch.randn(1, vocab_size)
    return lambda: sample(logits_TV.clone(), [SampleRow(1, 2, temperature)])

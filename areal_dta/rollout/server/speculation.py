"""Speculative decoding on the paged cache: which trees are drafted, what of them is kept, what is learnt from it.

The walk that draws the tokens is the scheduler's own sampling, node after node, so whatever a drafter proposes, the
tokens and log-probs are those of plain decoding (DESIGN: verification by position-keyed noise).

Legend of shape suffixes: T rows of the forward pass, F features.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.draft_tree import EMPTY, ROOT, DraftTree
from areal_dta.drafter.tuner import Tuner
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.feature_recorder import FeatureRecorder, Outcome
from areal_dta.rollout.server.kv_cache import CacheFull, KVCache
from areal_dta.rollout.server.logits import draw_tokens
from areal_dta.rollout.server.ngram_drafter import NgramDrafter
from areal_dta.rollout.server.paged_attention import Span
from areal_dta.rollout.server.sequence import FinishReason, Step, TokenLogprobs
from areal_dta.rollout.server.sequence import Sequence as Request

__all__ = ["FeatureDrafter", "SpecStats", "Speculator", "kv_moves", "tree_span", "walk"]

log = logging.getLogger(__name__)
Trees = dict[Request, DraftTree]
# A call that draws costs as much as about 20,000 more logits in it; most drafted rows are reached.
AHEAD_LOGITS, AHEAD_PER_SEQUENCE = 1 << 16, 1 << 13


class FeatureDrafter(Protocol):
    """A drafter that reads the target's hidden states."""

    def slots_needed(self, arm: Arm) -> int:
        """KV slots behind the pending token that drafting with ``arm`` writes to."""

    def observe(self, steps: Sequence[Step], features_TF: torch.Tensor) -> None:
        """Features of computed positions, pages and tables as they are after the step."""

    def draft(self, seqs: Sequence[Request], arm: Arm) -> list[DraftTree]:
        """One tree per sequence, all in their pages."""

    def forget(self, seq: Request) -> None:
        """``seq`` gives its pages back."""

    def follow(self, target: DecoderWeights) -> None:
        """The target's weights were replaced."""


@dataclass
class SpecStats:
    """Cumulative counters. A draft step is one in which something was drafted for at least one sequence."""

    steps_by_arm: Counter[str] = field(default_factory=Counter)
    seconds_by_arm: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens_by_arm: Counter[str] = field(default_factory=Counter)
    sequence_steps: int = 0  # sequences with a draft, summed over draft steps
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    starved: int = 0  # sequences that went without a draft for want of KV pages

    @property
    def accept_length(self) -> float:
        """Tokens per sequence and draft step, the target's own one included."""
        return 1.0 + self.accepted_tokens / self.sequence_steps if self.sequence_steps else 1.0


class Speculator:
    """Chooses an arm per decoding step, drafts, and reports what came of it to the tuner."""

    def __init__(
        self,
        cache: KVCache,
        tuner: Tuner,
        ngram: NgramDrafter | None,
        drafter: FeatureDrafter | None = None,
        recorder: FeatureRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = SpecStats()
        self.tuner = tuner
        self._cache = cache
        self._ngram = ngram
        self.drafter = drafter
        self.problem: str | None = None  # why the drafter that was asked for is not in use
        self.recorder = recorder
        self._clock = clock
        self._arm = OFF
        self._context = 0
        self._started = self._drafted = 0.0

    def draft(self, work: Sequence[Request], prefill_rows: int) -> Trees:
        """Start a step of the decoding sequences ``work``: a tree for each that gets one, with room in its page table.
        ``prefill_rows`` of prompts are computed beside them."""
        self._started = self._drafted = self._clock()
        self._context = sum(len(seq.tokens) for seq in work) // len(work)
        if prefill_rows:
            arm = self.tuner.beside_prefill(len(work), self._context, prefill_rows)
        else:
            arm = self.tuner.choose(len(work), self._context)
        self._arm = arm
        if arm == OFF:
            if self._ngram is not None and not prefill_rows:
                self._ngram.try_on_paper(work, self.tuner, self.tuner.least_chance(len(work), self._context))
            return {}
        drafter = self.drafter if arm.drafter == "eagle" else None
        slots = arm.num_verify if drafter is None else max(arm.num_verify, drafter.slots_needed(arm))
        ready = [seq for seq in work if _room(seq) > 0 and self._reserve(seq, slots)]
        if not ready:
            self._arm = OFF  # nobody has room: a plain step
            return {}
        if drafter is not None:
            try:
                trees = drafter.draft(ready, arm)
            except RuntimeError as error:
                self._give_up(error)
                return {}
        elif self._ngram is not None:
            trees = self._ngram.draft(ready, arm, self.tuner.least_chance(len(work), self._context))
        else:
            trees = [EMPTY] * len(ready)
        found = {seq: tree.trimmed(_room(seq)) for seq, tree in zip(ready, trees, strict=True) if tree.tokens}
        self._drafted = self._clock()
        return found

    def _give_up(self, error: RuntimeError) -> None:
        """The drafter failed, for want of memory as a rule: decoding goes on without it."""
        self.problem = f"the drafter failed and is off: {error}"
        log.error("decoding goes on without the drafter: %s", error)
        self.drafter, self._arm = None, OFF
        self.tuner.remove("eagle")

    def _reserve(self, seq: Request, slots: int) -> bool:
        """Pages for ``slots`` tokens after the pending one; drafts never push another sequence out."""
        size = self._cache.page_size
        missing = -(-(len(seq.tokens) + slots) // size) - len(seq.table)
        if missing > 0:
            try:
                pages = self._cache.allocate(missing)
            except CacheFull:
                self.stats.starved += 1
                return False
            seq.own_pages.extend(pages)
            seq.table.extend(pages)
        return True

    def observe(self, steps: Sequence[Step], hidden_TD: torch.Tensor, features_TF: torch.Tensor) -> None:
        """What a forward pass has computed, after the accepted KV was moved to its place."""
        if self.drafter is not None:
            self.drafter.observe(steps, features_TF)
        if self.recorder is not None:
            self.recorder.observe(steps, hidden_TD, features_TF)

    def end_step(
        self, work: Sequence[Request], trees: Trees, accepted: dict[Request, list[int]], drawn: int, alone: bool
    ) -> None:
        """A step of the decoding sequences ``work`` is over, in which ``drawn`` tokens came and ``accepted`` had been
        drafted. Unless they were ``alone`` it does not show what decoding costs."""
        seconds = self._clock() - self._started
        by_depth = [0] * self._arm.depth
        for seq, tree in trees.items():
            num_accepted = len(accepted.get(seq, ()))
            for depth in range(num_accepted):
                by_depth[depth] += 1
            seq.num_draft_steps += 1
            seq.num_drafted += len(tree)
            seq.num_accepted += num_accepted
            self.stats.drafted_tokens += len(tree)
            self.stats.accepted_tokens += num_accepted
        self.stats.sequence_steps += len(trees)
        if not alone:
            return
        self.stats.steps_by_arm[self._arm.name] += 1
        self.stats.seconds_by_arm[self._arm.name] += seconds
        self.stats.tokens_by_arm[self._arm.name] += drawn
        rows = len(work) + sum(len(tree) for tree in trees.values())
        drafting_s = self._drafted - self._started
        if drawn < len(work):
            return  # a prompt was only scored: the step does not show what decoding yields
        self.tuner.record(self._arm, len(work), self._context, drawn, seconds, by_depth, drafting_s, rows)

    def new_target(self, weights: DecoderWeights, version: str) -> None:
        """The target was updated: what was learnt of acceptance is aged, copied head rows are copied again."""
        self.tuner.new_version()
        if self.drafter is not None:
            self.drafter.follow(weights)
        if self.recorder is not None:
            self.recorder.new_target(version)

    def release(self, seq: Request, outcome: Outcome) -> None:
        """``seq`` gives its pages back."""
        if self.drafter is not None:
            self.drafter.forget(seq)
        if self.recorder is not None:
            self.recorder.release(seq, outcome)

    def finish(self, seq: Request) -> None:
        """``seq`` is answered; what it said helps its siblings."""
        if self._ngram is not None:
            self._ngram.finish(seq)


def walk(
    first: dict[Request, int],
    logits_RV: torch.Tensor,
    trees: Trees,
    take: Callable[[Request, TokenLogprobs | None], FinishReason | None],
) -> tuple[dict[Request, list[int]], list[tuple[Request, FinishReason]]]:
    """Draw the next token of every sequence (``first``: its first row of logits), and go on below it as long as it had
    been drafted. ``take`` appends a token and says whether it was the last. Returns accepted nodes, and who is done."""
    accepted: dict[Request, list[int]] = {}
    finished: list[tuple[Request, FinishReason]] = []
    live, node = list(first), dict.fromkeys(first, ROOT)
    drawn: dict[int, TokenLogprobs | None] = {}  # by row
    while live:
        if any(first[seq] + 1 + node[seq] not in drawn for seq in live):
            drawn |= _draw(live, node, first, logits_RV, trees)
        going: list[Request] = []
        for seq in live:
            entry = drawn[first[seq] + 1 + node[seq]]
            reason = take(seq, entry)
            if reason is not None:
                finished.append((seq, reason))
                continue
            child = trees[seq].child(node[seq], entry.token) if entry is not None and seq in trees else None
            if child is not None:
                node[seq] = child
                accepted.setdefault(seq, []).append(child)
                going.append(seq)
        live = going
    return accepted, finished


def _draw(
    live: Sequence[Request],
    node: dict[Request, int],
    first: dict[Request, int],
    logits_RV: torch.Tensor,
    trees: Trees,
) -> dict[int, TokenLogprobs | None]:
    """Draw at the node where every sequence is. Where that is cheaper than another call for the next level, and a token
    depends on its position only and not on those before it, also at all nodes below."""
    places = [(seq, 0, first[seq] + 1 + node[seq]) for seq in live]
    below: list[tuple[Request, int, int]] = []
    for seq in live:
        tree = trees.get(seq)
        if tree is not None and seq.constraint is None and not seq.request.sampling.penalised:
            depth = tree.depths[node[seq]] if node[seq] != ROOT else 0
            below += [(seq, tree.depths[n] - depth, first[seq] + 1 + n) for n in tree.below(node[seq])]
    if len(below) * logits_RV.shape[-1] <= AHEAD_LOGITS + AHEAD_PER_SEQUENCE * len(live):
        places += below
    seqs, ahead, rows = zip(*places, strict=True)
    # A copy, unless it is everything: drawing overwrites its logits.
    whole = len(rows) == len(logits_RV) and not below
    chosen_RV = logits_RV if whole else logits_RV[torch.tensor(rows, device=logits_RV.device)]
    return dict(zip(rows, draw_tokens(seqs, chosen_RV, ahead), strict=True))


def _room(seq: Request) -> int:
    """Drafted tokens that could still be accepted before the sequence has its last token."""
    left = min(seq.max_tokens - len(seq.tokens), seq.request.sampling.max_new_tokens - seq.num_output)
    return left - 1


def tree_span(seq: Request, tree: DraftTree | None) -> Span:
    """The new tokens of a step: those scheduled, and below the pending one its tree."""
    if tree is None:
        return Span(seq.table, seq.num_computed, seq.scheduled_end)
    start = seq.num_computed
    if tree.is_chain:
        return Span(seq.table, start, start + 1 + len(tree))
    depths = (start, *(start + depth for depth in tree.depths))
    return Span(seq.table, start, start + 1 + len(tree), context=start, visible=tree.visible(), depths=depths)


def kv_moves(seq: Request, start: int, accepted: Sequence[int], page_size: int) -> list[tuple[int, int]]:
    """(source, target) slots that make the accepted path contiguous behind the pending token at ``start``."""

    def slot(position: int) -> int:
        return seq.table[position // page_size] * page_size + position % page_size

    return [(slot(start + 1 + node), slot(start + 1 + i)) for i, node in enumerate(accepted) if node != i]

"""What runs in each step: continuous batching of decoded tokens, prefill chunks and newly admitted requests.

Runs on the model thread only and knows nothing of HTTP. Requests wait in arrival order; when KV pages run out, cached
prefixes are evicted, then the youngest running sequence is retracted (its tokens are kept and recomputed later).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from areal_dta.drafter.draft_tree import DraftTree
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.feature_recorder import Outcome
from areal_dta.rollout.server.kv_cache import CacheFull, KVCache
from areal_dta.rollout.server.paged_attention import SharedPrefix, Span, find_shared
from areal_dta.rollout.server.runner import ModelRunner
from areal_dta.rollout.server.sequence import FinishReason, Sequence, Step, TokenLogprobs
from areal_dta.rollout.server.speculation import Speculator, kv_moves, tree_span, walk

__all__ = ["Scheduler", "SchedulerLimits", "StepStats"]


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes: sequences running at once, KV tokens in all, new prompt tokens per step, tokens per KV page."""

    max_batch: int = 128
    max_total_tokens: int = 65536
    max_prefill_tokens: int = 2048
    page_size: int = 16


@dataclass
class StepStats:
    """Cumulative counters."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    aborted: Counter[str] = field(default_factory=Counter)  # by cause


class Scheduler:
    """``decode_text(ids) -> str`` is needed for stop strings only."""

    def __init__(
        self,
        weights: DecoderWeights,
        version: str,
        limits: SchedulerLimits,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        num_pages = limits.max_total_tokens // limits.page_size + 1
        self.limits = limits
        self.version = version
        self.runner = ModelRunner(weights, num_pages, limits.page_size)
        self.cache = KVCache(num_pages, limits.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = StepStats()
        self.speculator: Speculator | None = None
        self._decode_text = decode_text
        self._shared: tuple[list[Sequence], list[SharedPrefix]] = ([], [])

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits the KV pool."""
        return self.cache.num_pages * self.limits.page_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort(self, seqs: Iterable[Sequence], message: str, cause: str) -> int:
        """Answer ``seqs`` with what they have so far; returns how many there were. ``cause`` is for counting."""
        chosen = list(seqs)
        for seq in chosen:
            if seq in self.running:
                self.running.remove(seq)
                self._release(seq, "aborted")
            else:
                self.waiting.remove(seq)
            self.stats.aborted[cause] += 1
            self._finish(seq, FinishReason("abort", message=message))
        return len(chosen)

    def retract_all(self) -> int:
        """Send every running sequence back to the front of the queue, KV released; returns how many."""
        count = len(self.running)
        while self.running:
            self._retract(self.running[-1])
        return count

    def swap_weights(self, weights: DecoderWeights, version: str, keep_kv: bool = False) -> None:
        """Change the policy; cached KV of the old version is found no more.

        Running sequences are recomputed, or with ``keep_kv`` go on with the KV they have: tokens after the swap are
        then the new version's on a context that the old one computed.
        """
        if keep_kv:
            for seq in self.running:
                seq.mixed = True
            self.cache.forget()
            self._shared = ([], [])
        else:
            self.retract_all()
            self.cache.reset_tree()
        self.runner.weights = weights
        self.version = version
        if self.speculator is not None:
            self.speculator.new_target(weights, version)

    def rebuild(self, extra_layers: Iterable[tuple[int, int]], hidden_layers: Iterable[int]) -> None:
        """Make room for a drafter's KV and take its features from now on; running sequences are computed again."""
        self.retract_all()
        self.cache.reset_tree()
        runner = self.runner
        had_memory = runner.kv.release() > 0
        self.runner = ModelRunner(
            runner.weights, runner.num_pages, runner.page_size, tuple(extra_layers), tuple(hidden_layers)
        )
        if not had_memory:
            self.runner.kv.release()

    def release_memory(self) -> int:
        """Give the KV tensors back to the system, with every cached prefix; returns the bytes. Nothing may run."""
        if self.running:
            raise RuntimeError(f"{len(self.running)} sequences are running; retract or abort them first")
        self.cache.reset_tree()
        return self.runner.kv.release()

    def resume_memory(self) -> int:
        """Take the KV tensors again; returns the bytes."""
        return self.runner.kv.restore()

    @torch.inference_mode()
    def step(self) -> int:
        """Run one forward pass over whatever can run; returns the number of tokens sampled. No work: 0."""
        work = self._plan_step()
        if not work:
            return 0
        trees: dict[Sequence, DraftTree] = {}
        decoding = [seq for seq in work if seq.num_remaining == 1] if self.speculator is not None else []
        if self.speculator is not None and decoding:
            prefill_rows = sum(seq.scheduled_end - seq.num_computed for seq in work) - len(decoding)
            trees = self.speculator.draft(decoding, prefill_rows)
        spans = [tree_span(seq, trees.get(seq)) for seq in work]
        ids = [t for seq, s in zip(work, spans, strict=True) for t in _span_ids(seq, s, trees.get(seq))]
        hidden_TD, features_TF = self.runner.forward_features(spans, ids, self._shared_prefixes(work, spans))
        rows: list[int] = []  # of hidden_TD, whose logits are needed
        first: dict[Sequence, int] = {}  # ready sequences and which of `rows` is their first
        steps: list[Step] = []
        row = 0
        for seq, span in zip(work, spans, strict=True):
            size = span.end - span.start
            self._score(seq, span, hidden_TD[row : row + size])
            tree = trees.get(seq)
            seq.num_computed = span.end if tree is None else span.start + 1
            if self.speculator is not None:
                steps.append(Step(seq, span.start, list(range(row, row + seq.num_computed - span.start))))
            if seq.num_computed == len(seq.tokens):
                first[seq] = len(rows)
                rows.extend(range(row + seq.num_computed - span.start - 1, row + size))
            row += size
        before = self.stats.generated_tokens
        accepted, finished = walk(first, self.runner.logits(hidden_TD, rows), trees, self._take) if first else ({}, [])
        drawn = self.stats.generated_tokens - before
        if trees:
            self._keep_accepted(steps, accepted)
        if self.speculator is not None:
            self.speculator.observe(steps, hidden_TD, features_TF)
            if decoding:
                self.speculator.end_step(decoding, trees, accepted, drawn, alone=len(decoding) == len(work))
        for seq, reason in finished:
            self.running.remove(seq)
            self._release(seq, "finished")
            self._finish(seq, reason)
        self.stats.steps += 1
        return drawn

    def _keep_accepted(self, steps: list[Step], accepted: dict[Sequence, list[int]]) -> None:
        """The accepted nodes of the trees become computed tokens, their KV contiguous."""
        moves: list[tuple[int, int]] = []
        for step in steps:
            nodes = accepted.get(step.seq)
            if nodes:
                moves += kv_moves(step.seq, step.start, nodes, self.limits.page_size)
                step.seq.num_computed += len(nodes)
                step.rows.extend(step.rows[0] + 1 + node for node in nodes)
        if moves:
            sources, targets = torch.tensor(moves, device=self.runner.weights.device).unbind(1)
            self.runner.kv.move(sources, targets)

    def _shared_prefixes(self, work: list[Sequence], spans: list[Span]) -> list[SharedPrefix]:
        """While the same sequences decode, what they share stays as it was found."""
        if all(len(seq.tokens) - s.start == 1 for seq, s in zip(work, spans, strict=True)):
            if self._shared[0] != work:
                self._shared = (work, find_shared(spans, self.limits.page_size))
            return self._shared[1]
        return find_shared(spans, self.limits.page_size)

    def _plan_step(self) -> list[Sequence]:
        work: list[Sequence] = []
        for seq in list(self.running):
            if seq.num_remaining == 1 and seq in self.running and self._grow(seq):
                seq.scheduled_end = len(seq.tokens)
                work.append(seq)
        budget = self.limits.max_prefill_tokens
        for seq in self.running:
            if seq.num_remaining > 1 and budget > 0:
                budget -= self._schedule_chunk(seq, budget)
                work.append(seq)
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_batch:
            seq = self.waiting[0]
            if not self._admit(seq):
                break
            self.waiting.popleft()
            self.running.append(seq)
            budget -= self._schedule_chunk(seq, budget)
            work.append(seq)
        return work

    def _grow(self, seq: Sequence) -> bool:
        """Make room for one more token's KV, retracting younger sequences if need be; False: ``seq`` itself went."""
        while len(seq.table) * self.limits.page_size < len(seq.tokens):
            try:
                page = self.cache.allocate(1)[0]
            except CacheFull:
                if self._take_back():
                    continue
                youngest = self.running[-1]
                self._retract(youngest)
                if youngest is seq:
                    return False
                continue
            seq.own_pages.append(page)
            seq.table.append(page)
        return True

    def _take_back(self) -> bool:
        """Free the pages that were reserved for drafts: they push nobody out; whether there were any."""
        before = self.cache.num_available
        for seq in self.running:
            keep = max(-(-len(seq.tokens) // self.limits.page_size), len(seq.path))
            self.cache.give_back(seq.table[keep:])
            del seq.table[keep:], seq.own_pages[keep - len(seq.path) :]
        return self.cache.num_available > before

    def _schedule_chunk(self, seq: Sequence, budget: int) -> int:
        """Plan the next prefill chunk; its full pages enter the tree now, so that this very step can share them."""
        size = self.limits.page_size
        end = min(len(seq.tokens), seq.num_computed + budget)
        if end < len(seq.tokens) and end - end % size > seq.num_computed:
            end -= end % size
        seq.scheduled_end = end
        while not seq.mixed and seq.own_pages and (len(seq.path) + 1) * size <= end:
            key = self.cache.block_key(seq.tokens, len(seq.path))
            if self.cache.child(seq.path, key) is not None:
                break  # the same page exists (the last page of a repeated prompt is recomputed): keep ours private
            parent = seq.path[-1] if seq.path else None
            seq.path.append(self.cache.adopt(parent, key, seq.own_pages.pop(0), locked=True))
        return end - seq.num_computed

    def _admit(self, seq: Sequence) -> bool:
        """Give ``seq`` its cached prefix and pages for the rest; False: it has to wait."""
        size = self.limits.page_size
        path = self.cache.match(seq.tokens, seq.max_prefix_hit)
        if self._computed_soon(seq, len(path)):
            return False
        self.cache.lock(path)
        need = -(-(len(seq.tokens) + 1) // size) - len(path)
        need = min(need, self.cache.num_pages - len(path))
        if need + len(self.running) > self.cache.num_available:
            self._take_back()
        if need + len(self.running) > self.cache.num_available and (self.running or need > self.cache.num_available):
            self.cache.unlock(path)
            return False
        seq.path = path
        seq.own_pages = self.cache.allocate(need)
        seq.table = [node.page for node in path] + seq.own_pages
        seq.num_computed = len(path) * size
        if not seq.num_output:
            seq.cached_tokens = seq.num_computed
            self.stats.prompt_tokens += seq.prompt_len
            self.stats.cached_tokens += seq.cached_tokens
        return True

    def _computed_soon(self, seq: Sequence, num_matched: int) -> bool:
        """Whether a running prefill will compute the next page ``seq`` needs: waiting is cheaper than repeating it."""
        size = self.limits.page_size
        hi = (num_matched + 1) * size
        if hi > seq.max_prefix_hit:
            return False
        return any(
            not other.mixed and other.scheduled_end < hi <= len(other.tokens) and other.tokens[:hi] == seq.tokens[:hi]
            for other in self.running
        )

    def _retract(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq, "retracted")
        if not seq.scored:
            seq.input_logprobs.clear()
            seq.input_top.clear()
        self.waiting.appendleft(seq)
        self.stats.retractions += 1

    def _release(self, seq: Sequence, outcome: Outcome) -> None:
        if self.speculator is not None:
            self.speculator.release(seq, outcome)
        self.cache.store(seq.tokens, seq.path, seq.own_pages, 0 if seq.mixed else seq.num_computed)
        seq.mixed = False
        seq.path, seq.own_pages, seq.table, seq.num_computed, seq.scheduled_end = [], [], [], 0, 0
        self._shared = ([], [])

    def _score(self, seq: Sequence, span: Span, hidden_TD: torch.Tensor) -> None:
        if seq.request.logprob_start is None or seq.scored:
            return
        first = max(span.start, seq.request.logprob_start - 1)
        last = min(span.end, seq.prompt_len - 1)
        if first < last:
            rows = hidden_TD[first - span.start : last - span.start]
            values, tops = self.runner.score(rows, seq.tokens[first + 1 : last + 1], seq.request.wants.top)
            seq.input_logprobs.extend(values)
            seq.input_top.extend(tops)
        seq.scored = span.end >= seq.prompt_len

    def _take(self, seq: Sequence, entry: TokenLogprobs | None) -> FinishReason | None:
        """Append a drawn token; why the sequence ends with it, if it does."""
        if seq.request.sampling.max_new_tokens == 0:  # scoring only
            return FinishReason("length")
        if entry is None:
            self.stats.aborted["stuck"] += 1
            return FinishReason("abort", message="No token of the vocabulary continues the forced tool call")
        seq.append(entry, self.version)
        self.stats.generated_tokens += 1
        return self._finish_reason(seq, entry.token)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if self.speculator is not None:
            self.speculator.finish(seq)
        seq.finish(reason, self.version)

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.stop_ids and seq.num_output > seq.request.sampling.min_new_tokens:
            return FinishReason("stop", matched=token)
        if seq.constraint is not None and seq.constraint.complete and not seq.stop_ids:
            return FinishReason("stop")
        stops = (*seq.request.sampling.stop, *seq.request.sampling.stop_after)
        if stops and self._decode_text is not None:
            # A token is at least a byte, so this many tokens cover a stop string that the last one completed.
            size = max(len(s.encode()) for s in stops) + 4
            text = self._decode_text(seq.tokens[max(seq.prompt_len, len(seq.tokens) - size) :])
            matched = next((s for s in stops if s in text), None)
            if matched is not None:
                return FinishReason("stop", matched=matched)
        if len(seq.tokens) >= seq.max_tokens or seq.num_output >= seq.request.sampling.max_new_tokens:
            return FinishReason("length")
        return None


def _span_ids(seq: Sequence, span: Span, tree: DraftTree | None) -> Iterable[int]:
    return seq.tokens[span.start : span.end] if tree is None else (seq.tokens[span.start], *tree.tokens)

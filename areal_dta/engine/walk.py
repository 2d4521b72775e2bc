"""The tree engine: the linearised training step over a prefix tree.

Forward-only walk (log-probs, entropies; a critic's values), then, with the loss's coefficients dL/dlogp and dL/dentropy
(dL/dvalue) on rows, one depth-first walk that computes the exact gradient by a plan of blocks
(`areal_dta.tree.planner`).

Legend: U trie tokens, T row tokens, S rows of a block, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from areal_dta.engine.attention import BlockContext
from areal_dta.engine.block_heads import BlockGradient, BlockSink, Coefficients, LogprobGradient, LogprobSink, reads
from areal_dta.engine.block_runner import BlockRunner
from areal_dta.engine.block_values import ValueGradient, ValueSink
from areal_dta.engine.fused_loss import FusedGradient, FusedOutcome, TokenLoss
from areal_dta.engine.kernels import AttentionKernel, kernel_for, wide_dtype
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.pipeline_walk import PipelineWalk
from areal_dta.engine.rows import GradientSync, Rows, RowValues, WalkStats
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import Block, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.stage_memory import path_reach, stage_peak, tasks_within_budget
from areal_dta.tree.stage_time import pipeline_seconds
from areal_dta.tree.timing import TimeModel

__all__ = ["TreeEngine"]

Job = TypeVar("Job", bound=BlockGradient)


@dataclass(frozen=True)
class _Pushed:
    """A pushed block that waits for its POP: its graph's root, or None when it will be computed again."""

    context: BlockContext
    root: torch.Tensor | None


class TreeEngine:
    """Forward and backward of rows over their prefix tree on one rank of ``policy``'s grid.

    All ranks of a model-parallel group must be given the same rows; data-parallel ranks have their own, possibly none.
    ``memory`` predicts bytes (None: an analytic estimate), ``timing`` seconds; ``stats`` describes the last call.
    """

    def __init__(
        self, policy: MegatronPolicy, settings: PlanSettings | None = None, kernel: AttentionKernel | None = None,
        memory: MemoryModel | None = None, timing: TimeModel | None = None,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.settings = settings or PlanSettings()
        self.memory = memory or policy.memory_model()
        self.timing = timing
        self.stats = WalkStats()
        self._kernel = kernel or kernel_for(policy.device, policy.dtype, policy.shape.head_dim)
        self._wide = wide_dtype(policy.dtype)
        self._last_batch: TreeBatch | None = None

    def batch(self, rows: Rows) -> TreeBatch:
        """The trie of ``rows``; the last one is remembered, since forward and backward of a step share it."""
        if self._last_batch is None or self._last_batch.rows is not rows or not self._last_batch.suits(self.settings):
            rows.check_vocabulary(self.policy.shape.vocab)
            self._last_batch = TreeBatch.of(rows, self.settings)
        return self._last_batch

    # ---- part 1: values ----

    @torch.no_grad()
    def forward(
        self, rows: Rows, temperature: float = 1.0, want_entropy: bool = False, need_T: np.ndarray | None = None
    ) -> RowValues:
        """Log-probs (and entropies) of rows, each distinct token computed once. Layout: `areal_dta.engine.rows`.

        ``need_T`` (bool, row layout) limits the work to positions that matter; the others hold 0. Raises ValueError for
        ids outside the vocabulary.
        """
        began = time.perf_counter()
        batch = self.batch(rows)
        sink = LogprobSink(
            batch, self.policy.vocab_head(), temperature, want_entropy, need_T, self._wide, self.policy.device
        )
        self._walk_forward(batch, sink, began)
        return sink.row_values()

    @torch.no_grad()
    def forward_values(self, rows: Rows, need_T: np.ndarray | None = None) -> torch.Tensor:
        """A critic's value at every row position ``[T]``, a row's last one included; those without need hold 0."""
        began = time.perf_counter()
        batch = self.batch(rows)
        sink = ValueSink(batch, self.policy.value_head(), need_T, self._wide, self.policy.device)
        self._walk_forward(batch, sink, began)
        return sink.row_values()

    def _walk_forward(self, batch: TreeBatch, sink: BlockSink, began: float) -> None:
        """Hand the hidden states of every needed block to ``sink``. The published walk has no forward of its own."""
        settings = PlanSettings(max_block_tokens=self.settings.max_block_tokens)
        settings = settings if self.settings.kind in ("auto", "classic") else self.settings
        plan = plan_walk(batch.trie, settings, None, sink.needed_U)
        planned = time.perf_counter()
        self.policy.check_same_program(lambda: _program(batch, plan, sink))
        runner = BlockRunner(self.policy, self._kernel, batch, plan.stack_rows, with_grad=False)
        link = self.policy.stage_link()
        if link is None:
            self._forward_blocks(plan, runner, sink)
        else:
            PipelineWalk(self.policy, runner, link).forward(plan, sink)
        self._finish(batch, plan, runner, began, planned, self._seconds(plan, sink.needed_U, backward=False))
        self.stats = replace(self.stats, predicted_peak_bytes=int(self.memory.forward_peak(plan)))

    def _forward_blocks(self, plan: WalkPlan, runner: BlockRunner, sink: BlockSink) -> None:
        for op in plan.ops:
            block = plan.blocks[op.block]
            if op.kind is OpKind.POP:
                runner.pop(block)
                continue
            context = runner.push(block) if op.kind is OpKind.PUSH else runner.visit(block, op.absorbs)
            if reads(sink, block):
                sink.take(block, runner.hidden(block, context))
            else:
                runner.keys_only(block, context)

    # ---- part 3: gradient ----

    def backward(
        self, rows: Rows, dlogp_T: torch.Tensor, dentropy_T: torch.Tensor | None = None, temperature: float = 1.0, *,
        mask_T: np.ndarray | torch.Tensor | None = None, sync: GradientSync = "sharded",
    ) -> None:  # fmt: skip
        """Add the gradient of ``sum(dlogp * logp + dentropy * entropy)`` to the policy's buffers, then sum over ranks.

        Where ``mask_T`` is false, coefficients count as 0 whatever they hold (NaN included). Subtrees without a
        coefficient are not walked. ``sync='none'`` when more backwards of the same optimizer step follow. A rank
        without rows (or with zero coefficients only) walks one token with zero weight and joins the reduction.
        """
        self._add_gradients(
            rows,
            lambda batch: LogprobGradient(
                batch,
                self.policy.vocab_head(),
                temperature,
                Coefficients.of_rows(batch, dlogp_T, dentropy_T, mask_T),
                self._wide,
            ),
            sync,
        )

    def backward_fused(
        self, rows: Rows, token_loss: TokenLoss, temperature: float = 1.0, want_entropy: bool = False, *,
        sync: GradientSync = "sharded",
    ) -> FusedOutcome:  # fmt: skip
        """Add the gradient of a token-level loss, without a forward pass before; otherwise as `backward`.

        Subtrees without a position of ``token_loss.needed_T`` are not walked. Entropies are a statistic here.
        """
        policy, wide = self.policy, self._wide
        job = self._add_gradients(
            rows,
            lambda batch: FusedGradient(
                batch, policy.vocab_head(), temperature, token_loss, want_entropy, wide, policy.device
            ),
            sync,
        )
        return job.outcome()

    def backward_values(
        self, rows: Rows, dvalue_T: torch.Tensor, *, mask_T: np.ndarray | torch.Tensor | None = None,
        sync: GradientSync = "sharded",
    ) -> None:  # fmt: skip
        """Add the gradient of ``sum(dvalue * value)`` to a critic's buffers; otherwise as `backward`."""
        self._add_gradients(
            rows, lambda batch: ValueGradient(batch, self.policy.value_head(), dvalue_T, mask_T, self._wide), sync
        )

    def _add_gradients(self, rows: Rows, job_of: Callable[[TreeBatch], Job], sync: GradientSync) -> Job:
        """Walk back with the job made for the rows' tree, then reduce."""
        began = time.perf_counter()
        self.policy.check_accumulating()
        batch = self.batch(rows)
        job = job_of(batch)
        self._walk_backward(batch, job, began)
        self.policy.finish_gradients(sync)
        self.stats = replace(self.stats, seconds=time.perf_counter() - began)
        return job

    def _walk_backward(self, batch: TreeBatch, job: BlockGradient, began: float) -> None:
        """Gradients of all needed blocks into the policy's buffers, not reduced over ranks."""
        plan = plan_walk(batch.trie, self.settings, self.memory, job.needed_U)
        planned = time.perf_counter()
        self.policy.check_same_program(lambda: _program(batch, plan, job))
        self.policy.begin_gradients()
        runner = BlockRunner(self.policy, self._kernel, batch, plan.stack_rows, with_grad=True)
        link = self.policy.stage_link()
        if link is None:
            self._backward_blocks(plan, runner, job)
            self._finish(batch, plan, runner, began, planned, self._seconds(plan, job.needed_U, backward=True))
            return
        stages = tasks_within_budget(plan, link.num_stages, self.memory, self.settings)
        PipelineWalk(self.policy, runner, link).backward(plan, job, stages)
        seconds = 0.0 if self.timing is None else pipeline_seconds(self.timing, plan, stages, job.needed_U)
        self._finish(batch, plan, runner, began, planned, seconds)
        peak_bytes = stage_peak(self.memory, plan, stages[link.stage])
        self.stats = replace(self.stats, predicted_peak_bytes=int(peak_bytes))

    def _backward_blocks(self, plan: WalkPlan, runner: BlockRunner, job: BlockGradient) -> None:
        pushed: list[_Pushed] = []
        reach = path_reach(plan)
        for op in plan.ops:
            block = plan.blocks[op.block]
            if op.kind is OpKind.PUSH:
                pushed.append(self._push(runner, job, block, plan.keep_B[op.block], reach[op.block]))
            elif op.kind is OpKind.VISIT:
                context = runner.visit(block, op.absorbs)
                self._differentiate(runner, job, block, context, self._compute(runner, job, block, context))
            else:
                self._pop(runner, job, block, pushed.pop())
        if not plan.ops:
            self._walk_nothing(runner)

    def _push(self, runner: BlockRunner, job: BlockGradient, block: Block, keep: bool, reach: int) -> _Pushed:
        context = runner.push(block, reach)
        if keep:
            return _Pushed(context, self._compute(runner, job, block, context))
        with torch.no_grad():
            runner.keys_only(block, context)
        return _Pushed(context, None)

    def _pop(self, runner: BlockRunner, job: BlockGradient, block: Block, pushed: _Pushed) -> None:
        context, root = pushed.context, pushed.root
        if root is None:
            context = runner.again(context)
            root = self._compute(runner, job, block, context)
        self._differentiate(runner, job, block, context, root)

    def _compute(self, runner: BlockRunner, job: BlockGradient, block: Block, context: BlockContext) -> torch.Tensor:
        """Forward with graph: hidden states [S, D], or a zero where no output is read."""
        return runner.hidden(block, context) if reads(job, block) else runner.keys_only(block, context)

    def _differentiate(
        self, runner: BlockRunner, job: BlockGradient, block: Block, context: BlockContext, root: torch.Tensor
    ) -> None:
        root.backward(job.gradient(block, root.detach()) if root.dim() else None)
        runner.release(context)

    def _walk_nothing(self, runner: BlockRunner) -> None:
        """One token with zero weight: every parameter is touched, as on ranks that have rows."""
        hidden_SD = runner.nothing()
        hidden_SD.backward(torch.zeros_like(hidden_SD))

    def _seconds(self, plan: WalkPlan, needed_U: np.ndarray, backward: bool) -> float:
        return 0.0 if self.timing is None else self.timing.seconds(plan, needed_U, backward=backward)

    def _finish(
        self, batch: TreeBatch, plan: WalkPlan, runner: BlockRunner, began: float, planned: float, predicted_s: float
    ) -> None:
        self.stats = WalkStats(
            row_tokens=batch.rows.num_tokens,
            tree_tokens=batch.num_tokens,
            num_blocks=len(plan.blocks),
            num_tiles=runner.num_tiles,
            recomputed_tokens=plan.recomputed_tokens,
            plan_s=planned - began,
            predicted_s=predicted_s,
            predicted_peak_bytes=int(self.memory.peak(plan)),
            seconds=time.perf_counter() - began,
        )


def _program(batch: TreeBatch, plan: WalkPlan, head: BlockSink | BlockGradient) -> tuple[bytes, ...]:
    """Ranks of one model must agree on tokens, blocks and projections, or they hang or add up unlike gradients."""
    return plan.digest().encode(), batch.trie.ids_U.tobytes(), np.packbits(head.needed_U).tobytes(), head.signature

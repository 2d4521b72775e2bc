"""A walk over the stages of a pipeline, executed by one of them.

Every stage walks the same plan. In the backward walk each follows its own list of forwards and backwards
(`areal_dta.tree.schedule`), in which forwards run ahead of backwards; the path stack keeps what is still in use. A
block pushed without graph keeps the input of its stage, so that it is computed again without asking anyone.

Legend: S rows of a block, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from areal_dta.engine.attention import BlockContext
from areal_dta.engine.block_heads import BlockGradient, BlockSink, reads
from areal_dta.engine.block_runner import BlockRunner
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.pipeline import StageLink
from areal_dta.tree.plan import Block, OpKind, WalkPlan
from areal_dta.tree.schedule import Task, TaskKind, most_unread
from areal_dta.tree.stage_memory import path_reach

__all__ = ["PipelineWalk"]

_OPEN_SENDS = 4  # of a forward-only walk, so that stages need not keep pace block by block


@dataclass(frozen=True)
class _InFlight:
    """A block between its forward and its backward on this stage; ``output`` is None if it is computed again."""

    context: BlockContext
    stage_input: torch.Tensor | None
    output: torch.Tensor | None


class PipelineWalk:
    """One walk of this stage; ``runner`` is new and ``link`` too."""

    def __init__(self, policy: MegatronPolicy, runner: BlockRunner, link: StageLink) -> None:
        self._policy, self._runner, self._link = policy, runner, link
        link.allow_open(_OPEN_SENDS, 1)

    # ---- forward only ----

    def forward(self, plan: WalkPlan, sink: BlockSink) -> None:
        """Hand the hidden states of every needed block to ``sink`` on the last stage, and its results to all stages."""
        for op in plan.ops:
            block = plan.blocks[op.block]
            if op.kind is OpKind.POP:
                self._runner.pop(block)
                continue
            context = self._runner.push(block) if op.kind is OpKind.PUSH else self._runner.visit(block, op.absorbs)
            is_read = reads(sink, block)
            output = self._compute(block, context, self._receive(block.num_tokens), is_read)
            if not self._link.is_last:
                self._link.send_forward(output)
            elif is_read:
                sink.take(block, output)
        self._finish(sink)

    # ---- backward ----

    def backward(self, plan: WalkPlan, job: BlockGradient, stages: Sequence[Sequence[Task]]) -> None:
        """Add the gradients of all needed blocks to the policy's buffers, not reduced over ranks. ``stages`` are the
        lists of all stages, the same everywhere.
        """
        tasks = stages[self._link.stage]
        self._allow_open(stages)
        with_backward = {task.block for task in tasks if task.kind is TaskKind.BACKWARD}
        in_flight: dict[int, _InFlight] = {}
        reach = path_reach(plan)
        for task in tasks:
            if task.kind is TaskKind.BACKWARD:
                self._backward(plan.blocks[task.block], in_flight.pop(task.block), job)
                continue
            started = self._forward(plan, task, job, reach[task.block])
            if task.block in with_backward:  # a push that a visit absorbs has none
                in_flight[task.block] = started
        if not plan.ops:
            self._nothing()
        self._finish(job)

    def _allow_open(self, stages: Sequence[Sequence[Task]]) -> None:
        """As many open sends as this stage's list and its neighbours' ask for."""
        link, own = self._link, stages[self._link.stage]
        ahead = 1 if link.is_last else most_unread(own, stages[link.stage + 1], TaskKind.FORWARD)
        back = 1 if link.is_first else most_unread(own, stages[link.stage - 1], TaskKind.BACKWARD)
        link.allow_open(ahead, back)

    def _forward(self, plan: WalkPlan, task: Task, job: BlockGradient, reach: int) -> _InFlight:
        block, is_push = plan.blocks[task.block], task.op.kind is OpKind.PUSH
        context = self._runner.push(block, reach) if is_push else self._runner.visit(block, task.op.absorbs)
        stage_input = self._receive(block.num_tokens)
        keep = not is_push or plan.keep_B[task.block]
        with torch.set_grad_enabled(keep):
            output = self._compute(block, context, stage_input, keep and reads(job, block))
        if not self._link.is_last:
            self._link.send_forward(output)
        return _InFlight(context, stage_input, output if keep else None)

    def _backward(self, block: Block, started: _InFlight, job: BlockGradient) -> None:
        context, output = started.context, started.output
        if output is None:
            context = self._runner.again(context)
            output = self._compute(block, context, started.stage_input, reads(job, block))
        if not self._link.is_last:
            output.backward(self._link.recv_backward(tuple(output.shape)))
        else:
            output.backward(job.gradient(block, output.detach()) if output.dim() else None)
        self._runner.release(context)
        self._return(started.stage_input)

    def _finish(self, head: BlockSink | BlockGradient) -> None:
        """Wait for what was sent; what the last stage collected goes to all."""
        self._link.finish()
        for values in head.results():
            self._link.broadcast_from_last(values)

    def _nothing(self) -> None:
        """One token with zero weight through all stages: every parameter is touched, as on ranks that have rows."""
        stage_input = self._receive(1)
        output = self._runner.nothing(stage_input)
        if self._link.is_last:
            output.backward(torch.zeros_like(output))
        else:
            self._link.send_forward(output)
            output.backward(self._link.recv_backward(tuple(output.shape)))
        self._return(stage_input)

    # ---- one block ----

    def _compute(
        self, block: Block, context: BlockContext, stage_input: torch.Tensor | None, is_read: bool
    ) -> torch.Tensor:
        """Output of this stage: what the next one needs; on the last hidden states [S, D], or a zero nobody reads."""
        if is_read or not self._link.is_last:
            return self._runner.hidden(block, context, stage_input)
        return self._runner.keys_only(block, context, stage_input)

    def _receive(self, num_rows: int) -> torch.Tensor | None:
        return None if self._link.is_first else self._link.recv_forward(self._policy.stage_shape(num_rows))

    def _return(self, stage_input: torch.Tensor | None) -> None:
        if stage_input is not None:
            assert stage_input.grad is not None
            self._link.send_backward(stage_input.grad)

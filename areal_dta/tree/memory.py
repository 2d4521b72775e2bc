"""Bytes a walk needs, predicted from its plan, and the budget it is given by default; pure, numpy only.

Counted are tensors of the walk: autograd graphs, what a backward or a forward without graph needs on top while it runs,
rows of the stack and their gradient accumulators. Weights, gradient buffers and optimizer state are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_dta.tree.plan import OpKind, WalkPlan

__all__ = ["MemoryModel", "default_budget", "head_chunk_rows"]

_HEAD_CHUNK_ELEMENTS = 1 << 21  # logits at once: 8 MiB in fp32, so that the elementwise passes stay near the cache
_MIN_HEAD_CHUNK_ROWS = 128  # fewer rows would read the weight more often than it is worth


def head_chunk_rows(local_vocab: int) -> int:
    """Positions that the vocabulary head projects at once."""
    return max(_MIN_HEAD_CHUNK_ROWS, _HEAD_CHUNK_ELEMENTS // local_vocab)


@dataclass(frozen=True)
class MemoryModel:
    """Per-token costs in bytes.

    ``bytes_per_kept_token``: graph of a block, all layers. ``bytes_per_working_token``: graph plus transients at the
    worst moment of its backward. ``bytes_per_forward_token``: transients of a forward without graph.
    ``bytes_per_stack_row`` and ``bytes_per_grad_row``: keys and values of one path position, and the accumulators of
    their gradients. ``bytes_per_checkpoint_token``: layer inputs that dense training with full recomputation keeps.
    ``bytes_fixed``: whatever does not grow (a chunk of logits, weight gradients on their way).
    """

    bytes_per_kept_token: float
    bytes_per_working_token: float
    bytes_per_forward_token: float
    bytes_per_stack_row: float
    bytes_per_grad_row: float
    bytes_per_checkpoint_token: float
    bytes_fixed: float

    @classmethod
    def of_shape(
        cls, *, hidden: int, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, ffn: int, vocab: int,
        element_bytes: int = 4, tp: int = 1,
    ) -> MemoryModel:  # fmt: skip
        """Analytic estimate for a gated-FFN decoder of `areal_dta.engine`; calibration replaces it by measurements.

        ``num_layers`` are those of this pipeline stage; sizes are of the whole model, divided by ``tp`` where sharded.
        """
        query, kv, ffn, vocab = num_heads * head_dim // tp, num_kv_heads * head_dim // tp, ffn // tp, vocab // tp
        # Two norms (input and output each), the fused projection, rotated queries and keys, the output twice (by head
        # and by token), gate and up, their product.
        layer = element_bytes * (4 * hidden + 4 * query + 3 * kv + 3 * ffn)
        transient = element_bytes * (4 * ffn + 2 * hidden)
        wide_bytes = max(4, element_bytes)
        rows = head_chunk_rows(vocab)
        head = max(rows * (vocab * wide_bytes - transient), 0)  # logits are gone before the layers' backward begins
        kept = num_layers * layer + 2 * element_bytes * hidden
        return cls(
            bytes_per_kept_token=kept,
            bytes_per_working_token=kept + transient,
            bytes_per_forward_token=element_bytes * (3 * ffn + 4 * hidden),
            # keys and values of all layers, and their gradients on the way from a tile, one layer at a time
            bytes_per_stack_row=2 * num_layers * kv * element_bytes + 2 * kv * wide_bytes,
            bytes_per_grad_row=2 * num_layers * kv * wide_bytes,
            bytes_per_checkpoint_token=num_layers * hidden * element_bytes + layer,
            bytes_fixed=head + 2 * hidden * ffn * element_bytes,
        )

    def dense_peak(self, num_tokens: int) -> float:
        """Training one row of ``num_tokens`` alone, every graph kept."""
        return self.bytes_per_working_token * num_tokens + self.bytes_fixed

    def checkpointed_peak(self, num_tokens: int) -> float:
        """The same with full recomputation, layer by layer."""
        transient = self.bytes_per_working_token - self.bytes_per_kept_token
        return (self.bytes_per_checkpoint_token + transient) * num_tokens + self.bytes_fixed

    def row_bytes(self) -> float:
        return self.bytes_per_stack_row + self.bytes_per_grad_row

    def forward_peak(self, plan: WalkPlan) -> float:
        """Predicted peak bytes of a forward-only walk."""
        largest = max((block.num_tokens for block in plan.blocks), default=0)
        return self.bytes_per_stack_row * plan.stack_rows + self.bytes_per_forward_token * largest + self.bytes_fixed

    def peak(self, plan: WalkPlan) -> float:
        """Predicted peak bytes of a backward walk."""
        live = peak = self.bytes_per_stack_row * plan.stack_rows
        frames: list[tuple[int, int, float, float]] = []  # of pushed blocks: first position, rows, graph, accumulators
        for op in plan.ops:
            block = plan.blocks[op.block]
            num_tokens = block.num_tokens
            if op.kind is OpKind.PUSH:
                graph = self.bytes_per_kept_token * num_tokens if plan.keep_B[op.block] else 0.0
                live += self.bytes_per_grad_row * num_tokens
                peak = max(peak, live + (graph or self.bytes_per_forward_token * num_tokens))
                live += graph
                frames.append((block.depth, num_tokens, graph, self.bytes_per_grad_row * num_tokens))
                continue
            is_pop = op.kind is OpKind.POP
            kept = frames[-1][2] if is_pop else 0.0
            peak = max(peak, live + self.bytes_per_working_token * num_tokens - kept)
            while frames and (is_pop or op.absorbs) and frames[-1][0] + frames[-1][1] > block.depth:
                depth, _, graph, accumulators = frames.pop()
                left = max(block.depth - depth, 0)  # rows that an absorbing visit leaves on the path
                live -= graph
                if left:
                    frames.append((depth, left, 0.0, accumulators))  # freed as a whole, later
                    break
                live -= accumulators
        return peak + self.bytes_fixed


def default_budget(memory: MemoryModel, longest_row: int, max_block_tokens: int) -> int:
    """Bytes for ``activation_budget=0``: what dense training with full recomputation of the longest row needs, plus one
    block, but for rows of several blocks no more than 0.45 of what dense training needs; in any case enough for the
    stack and half a block.
    """
    block = memory.bytes_per_working_token * max_block_tokens
    generous = memory.checkpointed_peak(longest_row) + block
    modest = max(0.45 * memory.dense_peak(longest_row), 1.5 * block + memory.bytes_fixed)
    least = (memory.bytes_fixed + memory.row_bytes() * longest_row + block / 2) / 0.9
    return math.ceil(max(min(generous, modest), least + memory.bytes_per_working_token))

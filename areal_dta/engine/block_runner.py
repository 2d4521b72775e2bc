"""Runs one block on this rank: builds its context (path, tiles, rotary angles) and calls the model.

Legend: S rows of a block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from areal_dta.engine.attention import BlockContext
from areal_dta.engine.kernels import AttentionKernel
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.stack import Frame, PathStack
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.tree.plan import Block
from areal_dta.tree.tiles import Tile, TileKind, block_tiles, euler_mask

__all__ = ["BlockRunner"]


class BlockRunner:
    """Blocks of one walk, in the order of its program. ``num_tiles`` counts attention tiles per layer."""

    def __init__(
        self, policy: MegatronPolicy, kernel: AttentionKernel, batch: TreeBatch, stack_rows: int, with_grad: bool
    ) -> None:
        self._policy, self._kernel, self._batch = policy, kernel, batch
        self._stack = PathStack(
            policy.num_local_layers, policy.num_local_kv_heads, policy.shape.head_dim, stack_rows, policy.dtype,
            policy.device, with_grad,
        )  # fmt: skip
        self.num_tiles = 0

    def push(self, block: Block, reach: int = 0) -> BlockContext:
        """Context of a block whose keys and values become rows of the path; its frame is ``context.frames[0]``.

        ``reach``: rows of the longest path pushed below it (`areal_dta.tree.stage_memory.path_reach`), 0 if unknown.
        """
        frame = self._stack.push(block.depth, block.num_tokens, reach)
        return self._context(block, writes=True, frames=(frame,))

    def visit(self, block: Block, absorbs: bool) -> BlockContext:
        """Context of a terminal block; with ``absorbs`` it takes over the path's rows from its first position on."""
        frames = self._stack.frames_from(block.depth) if absorbs else ()
        return self._context(block, writes=False, frames=frames)

    def again(self, pushed: BlockContext) -> BlockContext:
        """Context of a pushed block that is computed a second time, with its graph; it sees the path it saw then."""
        above = tuple(frame for frame in pushed.path.frames if frame.depth < pushed.depth)
        return replace(pushed, path=replace(pushed.path, frames=above), writes=False)

    def pop(self, block: Block) -> None:
        """Take the block pushed last off the path of a forward-only walk."""
        self._stack.release(self._stack.frames_from(block.depth), block.depth)

    def nothing(self, stage_input: torch.Tensor | None = None) -> torch.Tensor:
        """Output of this stage for one token alone, for a rank that has no rows."""
        ids = torch.zeros(1, dtype=torch.int64, device=self._policy.device)
        context = self._context(Block.chain(np.zeros(1, np.int64), 0), False, ())
        return self._policy.block_hidden(ids, context, stage_input)

    def release(self, context: BlockContext) -> None:
        """The block's backward is done: the path's rows from its first position on that it held are free."""
        if context.frames:
            self._stack.release(context.frames, context.depth)

    def hidden(self, block: Block, context: BlockContext, stage_input: torch.Tensor | None = None) -> torch.Tensor:
        """Output of this stage for a block: final hidden states ``[S, D]`` on the last one."""
        return self._policy.block_hidden(self._ids(block), context, stage_input)

    def keys_only(self, block: Block, context: BlockContext, stage_input: torch.Tensor | None = None) -> torch.Tensor:
        """The block without the end of the last layer (last stage only), for rows whose output nobody reads.

        Returns the root of its graph, a zero.
        """
        return self._policy.block_keys(self._ids(block), context, stage_input)

    def _ids(self, block: Block) -> torch.Tensor:
        return torch.from_numpy(self._batch.trie.ids_U[block.tokens_S].astype(np.int64)).to(self._policy.device)

    def _context(self, block: Block, writes: bool, frames: tuple[Frame, ...]) -> BlockContext:
        policy = self._policy
        position_S = block.position_S
        freqs = policy.rope_freqs(int(position_S.max()) + 1)
        angle_S1J = freqs[torch.from_numpy(position_S).to(policy.device), 0, :, : freqs.shape[-1] // 2]
        tiles = tuple((tile, self._mask(block, tile)) for tile in block_tiles(block))
        self.num_tiles += len(tiles)
        return BlockContext(
            path=self._stack.view(block.depth if not writes else block.depth + block.num_tokens),
            kernel=self._kernel,
            depth=block.depth,
            num_rows=block.num_tokens,
            cos_S1J=angle_S1J.cos().to(policy.dtype),
            sin_S1J=angle_S1J.sin().to(policy.dtype),
            tiles=tiles,
            writes=writes,
            frames=frames,
        )

    def _mask(self, block: Block, tile: Tile) -> torch.Tensor | None:
        if tile.kind is not TileKind.MASKED:
            return None
        visible = torch.from_numpy(euler_mask(block.tokens_S, self._batch.subtree_end_U, tile.q_start, tile.q_end))
        mask = torch.zeros(visible.shape, dtype=self._policy.dtype).masked_fill_(~visible, float("-inf"))
        return mask.to(self._policy.device)

"""The tree engine: the linearised training step over a prefix tree.

Forward-only walk (log-probs, entropies), then, with the loss's coefficients dL/dlogp and dL/dentropy on rows, one
depth-first walk that computes the exact gradient: a pushed block keeps its autograd graph until its descendants are
done, so nothing is computed twice, and memory grows with the current path, not with the tree.

Legend: U trie tokens, E predicting pairs (source token, target token) sorted by source, S tokens of a block, M
projected positions of a block, T row tokens, D hidden.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from areal_dta.engine.attention import BlockContext, chain_mask, forest_mask
from areal_dta.engine.head import HeadPairs, VocabHead
from areal_dta.engine.kernels import AttentionKernel, kernel_for
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.rows import GradientSync, Rows, RowValues, WalkStats, checked_coefficients, predicting_positions
from areal_dta.engine.stack import KVStack
from areal_dta.tree.plan import Block, OpKind, PlanSettings, WalkPlan, plan_walk, prune, subtree_ends
from areal_dta.tree.trie import Trie, build_trie

__all__ = ["TreeEngine"]


@dataclass(frozen=True)
class _Tree:
    """A batch of rows as a trie with its plan and its predicting pairs."""

    rows: Rows
    trie: Trie
    plan: WalkPlan

    @cached_property
    def subtree_end_U(self) -> np.ndarray:
        return subtree_ends(self.trie)

    @cached_property
    def target_E(self) -> np.ndarray:
        """Target token of every pair, sorted by its source (``parent_U[target_E]``)."""
        targets = np.flatnonzero(self.trie.parent_U >= 0)
        return targets[np.argsort(self.trie.parent_U[targets], kind="stable")]

    @cached_property
    def pair_start_U1(self) -> np.ndarray:
        """Pairs of source u are ``pair_start_U1[u] .. pair_start_U1[u+1]-1``: one per child of u."""
        return np.searchsorted(self.trie.parent_U[self.target_E], np.arange(self.trie.num_tokens + 1))

    @cached_property
    def position_t(self) -> np.ndarray:
        return predicting_positions(self.rows)

    @cached_property
    def source_t(self) -> np.ndarray:
        """Trie token at each predicting position of the rows."""
        return self.trie.token_index_T[self.position_t]

    @cached_property
    def target_t(self) -> np.ndarray:
        """Trie token predicted there."""
        return self.trie.token_index_T[self.position_t + 1]

    def sum_to(self, index_t: np.ndarray, values_T: np.ndarray) -> np.ndarray:
        """Scatter-add row values of predicting positions onto trie tokens [U], float64."""
        return np.bincount(index_t, weights=values_T[self.position_t], minlength=self.trie.num_tokens)


@dataclass(frozen=True)
class _Coefficients:
    """dL/dlogp by target token and dL/dentropy by source token (None: not wanted), [U], float64."""

    logp_U: np.ndarray
    entropy_U: np.ndarray | None


class TreeEngine:
    """Forward and backward of rows over their prefix tree on one rank of ``policy``'s grid.

    All ranks of a tensor-parallel group must be given the same rows; data-parallel ranks have their own, possibly none.
    ``stats`` describes the last call.
    """

    def __init__(
        self, policy: MegatronPolicy, settings: PlanSettings | None = None, kernel: AttentionKernel | None = None
    ) -> None:
        self.policy = policy
        self.settings = settings or PlanSettings()
        self.stats = WalkStats()
        self._kernel = kernel or kernel_for(policy.device)
        self._wide = torch.float64 if policy.dtype == torch.float64 else torch.float32
        self._last_tree: _Tree | None = None

    def tree(self, rows: Rows) -> _Tree:
        """The trie and plan of ``rows``; the last one is remembered, since forward and backward of a step share it."""
        if self._last_tree is None or self._last_tree.rows is not rows:
            rows.check_vocabulary(self.policy.shape.vocab)
            trie = build_trie(rows.ids_T, rows.offsets_S1)
            self._last_tree = _Tree(rows, trie, plan_walk(trie, self.settings))
        return self._last_tree

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
        tree = self.tree(rows)
        needed_U = np.zeros(tree.trie.num_tokens, bool)
        keep_t = slice(None) if need_T is None else np.asarray(need_T, bool)[tree.position_t]
        needed_U[tree.source_t[keep_t]] = True
        plan = prune(tree.plan, needed_U)
        self.policy.check_same_program(plan.digest())
        logp_U = torch.zeros(tree.trie.num_tokens, dtype=self._wide, device=self.policy.device)
        entropy_U = torch.zeros_like(logp_U) if want_entropy else None
        stack, head = self._stack(plan, with_grad=False), self.policy.vocab_head()
        for op in plan.ops:
            if op.kind is not OpKind.POP:
                block = plan.blocks[op.block]
                hidden_SD = self._run(tree, block, stack)
                self._block_values(tree, block, hidden_SD, head, needed_U, temperature, logp_U, entropy_U)
        values = self._to_rows(tree, keep_t, logp_U, entropy_U)
        self.stats = self._stats(tree, plan, began)
        return values

    def _block_values(
        self, tree: _Tree, block: Block, hidden_SD: torch.Tensor, head: VocabHead, needed_U: np.ndarray,
        temperature: float, logp_U: torch.Tensor, entropy_U: torch.Tensor | None,
    ) -> None:  # fmt: skip
        targets = tree.target_E[tree.pair_start_U1[block.start] : tree.pair_start_U1[block.end]]
        sources = tree.trie.parent_U[targets]
        targets, sources = targets[needed_U[sources]], sources[needed_U[sources]]
        if not len(targets):
            return
        source_M, row_E = np.unique(sources, return_inverse=True)
        pairs = HeadPairs(row_E, tree.trie.ids_U[targets])
        selected = _select(hidden_SD, source_M - block.start)
        logp_E, entropy_M = head.values(selected, pairs, temperature, entropy_U is not None)
        logp_U[torch.from_numpy(targets).to(logp_U.device)] = logp_E
        if entropy_U is not None and entropy_M is not None:
            entropy_U[torch.from_numpy(source_M).to(logp_U.device)] = entropy_M

    def _to_rows(
        self, tree: _Tree, keep_t: slice | np.ndarray, logp_U: torch.Tensor, entropy_U: torch.Tensor | None
    ) -> RowValues:
        position_t, source_t, target_t = (
            torch.from_numpy(index[keep_t]).to(logp_U.device)
            for index in (tree.position_t, tree.source_t, tree.target_t)
        )
        logprobs_T = torch.zeros(tree.rows.num_tokens, dtype=self._wide, device=logp_U.device)
        logprobs_T[position_t] = logp_U[target_t]
        if entropy_U is None:
            return RowValues(logprobs_T, None)
        entropy_T = torch.zeros_like(logprobs_T)
        entropy_T[position_t] = entropy_U[source_t]
        return RowValues(logprobs_T, entropy_T)

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
        began = time.perf_counter()
        self.policy.check_accumulating()
        tree = self.tree(rows)
        coef = self._coefficients(tree, dlogp_T, dentropy_T, mask_T)
        active_U = np.zeros(tree.trie.num_tokens, bool)
        weighted = np.flatnonzero(coef.logp_U)
        active_U[tree.trie.parent_U[weighted]] = True
        if coef.entropy_U is not None:
            active_U |= coef.entropy_U != 0
        plan = prune(tree.plan, active_U)
        self.policy.check_same_program(plan.digest())
        if plan.ops:
            self._walk_back(tree, plan, coef, temperature)
        else:
            self._walk_nothing()
        self.policy.finish_gradients(sync)
        self.stats = self._stats(tree, plan, began)

    def _coefficients(
        self,
        tree: _Tree,
        dlogp_T: torch.Tensor,
        dentropy_T: torch.Tensor | None,
        mask_T: np.ndarray | torch.Tensor | None,
    ) -> _Coefficients:
        dlogp = checked_coefficients("dlogp_T", dlogp_T, tree.rows, mask_T)
        dentropy = checked_coefficients("dentropy_T", dentropy_T, tree.rows, mask_T)
        assert dlogp is not None
        entropy_U = tree.sum_to(tree.source_t, dentropy) if dentropy is not None and dentropy.any() else None
        return _Coefficients(tree.sum_to(tree.target_t, dlogp), entropy_U)

    def _walk_back(self, tree: _Tree, plan: WalkPlan, coef: _Coefficients, temperature: float) -> None:
        stack, head = self._stack(plan, with_grad=True), self.policy.vocab_head()
        kept: list[torch.Tensor] = []
        for op in plan.ops:
            block = plan.blocks[op.block]
            if op.kind is OpKind.PUSH:
                kept.append(self._run(tree, block, stack))
                continue
            hidden_SD = kept.pop() if op.kind is OpKind.POP else self._run(tree, block, stack)
            hidden_SD.backward(self._hidden_gradient(tree, block, hidden_SD.detach(), head, coef, temperature))

    def _hidden_gradient(
        self,
        tree: _Tree,
        block: Block,
        hidden_SD: torch.Tensor,
        head: VocabHead,
        coef: _Coefficients,
        temperature: float,
    ) -> torch.Tensor:
        """dL/dhidden [S, D] of a block's own predictions; zero where no coefficient is."""
        targets = tree.target_E[tree.pair_start_U1[block.start] : tree.pair_start_U1[block.end]]
        targets = targets[coef.logp_U[targets] != 0]
        sources = tree.trie.parent_U[targets]
        entropy_S = None if coef.entropy_U is None else coef.entropy_U[block.start : block.end]
        if entropy_S is None:
            source_M = np.unique(sources)
        else:
            source_M = np.union1d(sources, block.start + np.flatnonzero(entropy_S))
        grad_SD = torch.zeros_like(hidden_SD)
        if not len(source_M):
            return grad_SD
        pairs = HeadPairs(np.searchsorted(source_M, sources), tree.trie.ids_U[targets])
        coef_E = torch.from_numpy(coef.logp_U[targets]).to(hidden_SD.device, self._wide)
        entropy_M = None
        if entropy_S is not None and entropy_S.any():
            entropy_M = torch.from_numpy(entropy_S[source_M - block.start]).to(hidden_SD.device, self._wide)
        selected = _select(hidden_SD, source_M - block.start)
        grad_MD = head.gradient(selected, pairs, coef_E, entropy_M, temperature)
        return grad_SD.index_copy_(0, torch.from_numpy(source_M - block.start).to(grad_SD.device), grad_MD)

    def _walk_nothing(self) -> None:
        """One token with zero weight: every parameter is touched, as on ranks that have rows."""
        stack = self._stack_of(1, with_grad=True)
        ids = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
        hidden_SD = self.policy.block_hidden(ids, self._context(stack, 0, np.zeros(1, np.int64), None))
        hidden_SD.backward(torch.zeros_like(hidden_SD))

    # ---- blocks ----

    def _run(self, tree: _Tree, block: Block, stack: KVStack) -> torch.Tensor:
        """Hidden states [S, D] of a block; its keys and values become rows of the stack."""
        span = slice(block.start, block.end)
        ids = torch.from_numpy(tree.trie.ids_U[span].astype(np.int64)).to(self.policy.device)
        end_S = None if block.is_chain else tree.subtree_end_U[span] - block.start
        return self.policy.block_hidden(ids, self._context(stack, block.depth, tree.trie.depth_U[span], end_S))

    def _context(
        self, stack: KVStack, depth: int, position_S: np.ndarray, subtree_end_S: np.ndarray | None
    ) -> BlockContext:
        device, dtype = self.policy.device, self.policy.dtype
        freqs = self.policy.rope_freqs(int(position_S.max()) + 1)
        angle_S1J = freqs[torch.from_numpy(position_S).to(device), 0, :, : freqs.shape[-1] // 2]
        if subtree_end_S is None:
            mask = chain_mask(len(position_S), depth, dtype, device)
        else:
            mask = forest_mask(torch.from_numpy(subtree_end_S), depth, dtype, device)
        return BlockContext(
            stack=stack,
            kernel=self._kernel,
            depth=depth,
            num_rows=len(position_S),
            cos_S1J=angle_S1J.cos().to(dtype),
            sin_S1J=angle_S1J.sin().to(dtype),
            mask_SK=mask,
        )

    def _stack(self, plan: WalkPlan, with_grad: bool) -> KVStack:
        return self._stack_of(plan.stack_rows, with_grad)

    def _stack_of(self, num_rows: int, with_grad: bool) -> KVStack:
        policy = self.policy
        return KVStack(
            policy.shape.num_layers, policy.num_local_kv_heads, policy.shape.head_dim, num_rows, policy.dtype,
            policy.device, with_grad,
        )  # fmt: skip

    def _stats(self, tree: _Tree, plan: WalkPlan, began: float) -> WalkStats:
        return WalkStats(
            row_tokens=tree.rows.num_tokens,
            tree_tokens=tree.trie.num_tokens,
            num_blocks=len(plan.blocks),
            recomputed_tokens=0,
            seconds=time.perf_counter() - began,
        )


def _select(hidden_SD: torch.Tensor, index_M: np.ndarray) -> torch.Tensor:
    """Rows ``index_M`` (increasing) of the hidden states; no copy when all are wanted."""
    if len(index_M) == len(hidden_SD):
        return hidden_SD
    return hidden_SD[torch.from_numpy(index_M).to(hidden_SD.device)]

"""What a walk does with a block's hidden states: collect log-probs (part 1), or turn coefficients into gradients
(part 3).

Legend: U trie tokens, E predicting pairs, S rows of a block, M projected rows of it, D hidden, T row tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from areal_dta.engine.head import HeadPairs, VocabHead
from areal_dta.engine.rows import RowValues, checked_coefficients
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.tree.plan import Block

__all__ = ["BlockGradient", "BlockSink", "Coefficients", "LogprobGradient", "LogprobSink", "reads"]


class BlockSink(Protocol):
    """Takes the hidden states of each block of a forward-only walk."""

    needed_U: np.ndarray  # bool: tokens whose hidden state is read
    signature: bytes  # what all ranks of a model must agree on, beside the plan and ``needed_U``

    def take(self, block: Block, hidden_SD: torch.Tensor) -> None: ...

    def results(self) -> Sequence[torch.Tensor]:
        """What the last pipeline stage collected and the others need."""
        ...


class BlockGradient(Protocol):
    """Gives dL/dhidden of each block of a backward walk, and adds the head's own gradient to its buffer."""

    needed_U: np.ndarray  # bool: tokens whose hidden state has a gradient of its own
    signature: bytes

    def gradient(self, block: Block, hidden_SD: torch.Tensor) -> torch.Tensor: ...

    def results(self) -> Sequence[torch.Tensor]:
        """What the last pipeline stage collected on the way and the others need."""
        ...


def reads(head: BlockSink | BlockGradient, block: Block) -> bool:
    """Whether any hidden state of the block is wanted."""
    return bool(head.needed_U[block.tokens_S].any())


def _rows(hidden_SD: torch.Tensor, index_M: np.ndarray) -> torch.Tensor:
    """Rows ``index_M`` (increasing) of the hidden states; no copy when all are wanted."""
    if len(index_M) == len(hidden_SD):
        return hidden_SD
    return hidden_SD[torch.from_numpy(index_M).to(hidden_SD.device)]


class LogprobSink:
    """Log-prob of every target token and, if wanted, entropy of every source token, in trie layout."""

    def __init__(
        self, batch: TreeBatch, head: VocabHead | None, temperature: float, want_entropy: bool,
        need_T: np.ndarray | None, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._batch, self._head, self._temperature = batch, head, temperature
        self._keep_t = slice(None) if need_T is None else np.asarray(need_T, bool)[batch.position_t]
        self.needed_U = np.zeros(batch.num_tokens, bool)
        self.needed_U[batch.source_t[self._keep_t]] = True
        self.signature = repr(("logprobs", temperature, want_entropy)).encode()
        self.logp_U = torch.zeros(batch.num_tokens, dtype=dtype, device=device)
        self.entropy_U = torch.zeros_like(self.logp_U) if want_entropy else None

    def take(self, block: Block, hidden_SD: torch.Tensor) -> None:
        assert self._head is not None, "only the last pipeline stage projects hidden states"
        row_E, target_E = self._batch.block_pairs(block)
        wanted_E = self.needed_U[block.tokens_S[row_E]]
        row_E, target_E = row_E[wanted_E], target_E[wanted_E]
        if not len(row_E):
            return
        row_M, index_E = np.unique(row_E, return_inverse=True)
        pairs = HeadPairs(index_E, self._batch.trie.ids_U[target_E])
        logp_E, entropy_M = self._head.values(
            _rows(hidden_SD, row_M), pairs, self._temperature, self.entropy_U is not None
        )
        device = self.logp_U.device
        self.logp_U[torch.from_numpy(target_E).to(device)] = logp_E
        if self.entropy_U is not None and entropy_M is not None:
            self.entropy_U[torch.from_numpy(block.tokens_S[row_M]).to(device)] = entropy_M

    def results(self) -> list[torch.Tensor]:
        """What the last pipeline stage collected and the others need."""
        return [self.logp_U] if self.entropy_U is None else [self.logp_U, self.entropy_U]

    def row_values(self) -> RowValues:
        """The collected values in row layout; positions that were not needed hold 0."""
        batch, device = self._batch, self.logp_U.device
        position_t, source_t, target_t = (
            torch.from_numpy(index[self._keep_t]).to(device)
            for index in (batch.position_t, batch.source_t, batch.target_t)
        )
        logprobs_T = torch.zeros(batch.rows.num_tokens, dtype=self.logp_U.dtype, device=device)
        logprobs_T[position_t] = self.logp_U[target_t]
        if self.entropy_U is None:
            return RowValues(logprobs_T, None)
        entropy_T = torch.zeros_like(logprobs_T)
        entropy_T[position_t] = self.entropy_U[source_t]
        return RowValues(logprobs_T, entropy_T)


@dataclass(frozen=True)
class Coefficients:
    """dL/dlogp by target token and dL/dentropy by source token (None: not wanted), [U], float64."""

    logp_U: np.ndarray
    entropy_U: np.ndarray | None

    @classmethod
    def of_rows(
        cls, batch: TreeBatch, dlogp_T: torch.Tensor, dentropy_T: torch.Tensor | None,
        mask_T: np.ndarray | torch.Tensor | None,
    ) -> Coefficients:  # fmt: skip
        """Sum the coefficients of all row positions that share a trie token; checks them (`checked_coefficients`)."""
        dlogp = checked_coefficients("dlogp_T", dlogp_T, batch.rows, mask_T)
        dentropy = checked_coefficients("dentropy_T", dentropy_T, batch.rows, mask_T)
        assert dlogp is not None
        entropy_U = batch.sum_to(batch.source_t, dentropy) if dentropy is not None and dentropy.any() else None
        return cls(batch.sum_to(batch.target_t, dlogp), entropy_U)


class LogprobGradient:
    """Gradient of ``sum(coef * logp) + sum(coef * entropy)``."""

    def __init__(
        self, batch: TreeBatch, head: VocabHead | None, temperature: float, coef: Coefficients, dtype: torch.dtype
    ) -> None:
        self._batch, self._head, self._temperature, self._coef, self._dtype = batch, head, temperature, coef, dtype
        self.needed_U = np.zeros(batch.num_tokens, bool)
        self.needed_U[batch.trie.parent_U[np.flatnonzero(coef.logp_U)]] = True
        if coef.entropy_U is not None:
            self.needed_U |= coef.entropy_U != 0
        pattern = (coef.logp_U != 0, np.zeros(0, bool) if coef.entropy_U is None else coef.entropy_U != 0)
        self.signature = repr(("gradient", temperature)).encode() + b"".join(np.packbits(x).tobytes() for x in pattern)

    def gradient(self, block: Block, hidden_SD: torch.Tensor) -> torch.Tensor:
        """dL/dhidden [S, D] of a block's own predictions; zero where no coefficient is."""
        assert self._head is not None, "only the last pipeline stage projects hidden states"
        row_E, target_E = self._batch.block_pairs(block)
        weighted_E = self._coef.logp_U[target_E] != 0
        row_E, target_E = row_E[weighted_E], target_E[weighted_E]
        row_M = np.unique(row_E)
        entropy_M = None
        if self._coef.entropy_U is not None:
            entropy_S = self._coef.entropy_U[block.tokens_S]
            row_M = np.union1d(row_M, np.flatnonzero(entropy_S))
            entropy_M = self._tensor(entropy_S[row_M], hidden_SD.device) if entropy_S.any() else None
        if not len(row_M):
            return torch.zeros_like(hidden_SD)
        pairs = HeadPairs(np.searchsorted(row_M, row_E), self._batch.trie.ids_U[target_E])
        coef_E = self._tensor(self._coef.logp_U[target_E], hidden_SD.device)
        grad_MD = self._head.gradient(_rows(hidden_SD, row_M), pairs, coef_E, entropy_M, self._temperature)
        if len(row_M) == block.num_tokens:
            return grad_MD
        return torch.zeros_like(hidden_SD).index_copy_(0, torch.from_numpy(row_M).to(grad_MD.device), grad_MD)

    def results(self) -> Sequence[torch.Tensor]:
        return ()

    def _tensor(self, values: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(values).to(device, self._dtype)

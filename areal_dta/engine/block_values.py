"""What a walk does with a block's hidden states for a critic: collect values (part 1), or turn dL/dvalue into gradients
(part 3). The twin of `areal_dta.engine.block_heads`.

Legend: U trie tokens, S rows of a block, D hidden, T row tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areal_dta.engine.rows import checked_coefficients
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.engine.value_head import ValueHead
from areal_dta.tree.plan import Block

__all__ = ["ValueGradient", "ValueSink"]


class ValueSink:
    """The value of every trie token that a row position with ``need_T`` (all, if None) lies on."""

    def __init__(
        self, batch: TreeBatch, head: ValueHead | None, need_T: np.ndarray | None, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._batch, self._head = batch, head
        self._need_T = np.ones(batch.rows.num_tokens, bool) if need_T is None else np.asarray(need_T, bool)
        self.needed_U = np.zeros(batch.num_tokens, bool)
        self.needed_U[batch.trie.token_index_T[self._need_T]] = True
        self.signature = b"values"
        self.value_U = torch.zeros(batch.num_tokens, dtype=dtype, device=device)

    def take(self, block: Block, hidden_SD: torch.Tensor) -> None:
        assert self._head is not None, "only the last pipeline stage projects hidden states"
        self.value_U[torch.from_numpy(block.tokens_S).to(self.value_U.device)] = self._head.values(hidden_SD)

    def results(self) -> list[torch.Tensor]:
        """What the last pipeline stage collected and the others need."""
        return [self.value_U]

    def row_values(self) -> torch.Tensor:
        """The collected values in row layout ``[T]``; positions that were not needed hold 0."""
        device = self.value_U.device
        values_T = self.value_U[torch.from_numpy(self._batch.trie.token_index_T).to(device)]
        return values_T.masked_fill_(torch.from_numpy(~self._need_T).to(device), 0)


class ValueGradient:
    """Gradient of ``sum(dvalue * value)``: coefficients of row positions that share a trie token are summed."""

    def __init__(
        self, batch: TreeBatch, head: ValueHead | None, dvalue_T: torch.Tensor,
        mask_T: np.ndarray | torch.Tensor | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._head, self._dtype = head, dtype
        dvalue = checked_coefficients("dvalue_T", dvalue_T, batch.rows, mask_T, with_last=True)
        self._coef_U = np.bincount(batch.trie.token_index_T, weights=dvalue, minlength=batch.num_tokens)
        self.needed_U = self._coef_U != 0
        self.signature = b"value gradient"

    def gradient(self, block: Block, hidden_SD: torch.Tensor) -> torch.Tensor:
        """dL/dhidden [S, D] of a block's own values; zero where no coefficient is."""
        assert self._head is not None, "only the last pipeline stage projects hidden states"
        coef_S = torch.from_numpy(self._coef_U[block.tokens_S]).to(hidden_SD.device, self._dtype)
        return self._head.gradient(hidden_SD, coef_S)

    def results(self) -> Sequence[torch.Tensor]:
        return ()

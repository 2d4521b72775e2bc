"""The dense engine: every row alone, forward and backward. The slow twin of the tree walk, and
``tree_training_mode=disabled``.

It shares the policy with the tree engine and nothing else: Megatron's own rotary embedding, PyTorch's causal
attention, log-softmax under autograd.

Legend: S tokens of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch.utils.checkpoint import checkpoint

from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.rows import Engine, GradientSync, Rows, RowValues, WalkStats, checked_coefficients
from areal_dta.engine.walk import TreeEngine
from areal_dta.tree.plan import PlanSettings

__all__ = ["DenseEngine", "make_engine"]

_CHUNK_POSITIONS = 1024


class DenseEngine:
    """Same interface as `areal_dta.engine.walk.TreeEngine`, one row at a time."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self.stats = WalkStats()
        self._wide = torch.float64 if policy.dtype == torch.float64 else torch.float32

    @torch.no_grad()
    def forward(
        self, rows: Rows, temperature: float = 1.0, want_entropy: bool = False, need_T: np.ndarray | None = None
    ) -> RowValues:
        """Log-probs (and entropies) of rows; positions with ``need_T`` false hold 0."""
        began = time.perf_counter()
        rows.check_vocabulary(self.policy.shape.vocab)
        logprobs_T = torch.zeros(rows.num_tokens, dtype=self._wide, device=self.policy.device)
        entropy_T = torch.zeros_like(logprobs_T) if want_entropy else None
        for lo, hi, ids_S in self._rows(rows):
            if hi - lo < 2:
                continue
            logp, entropy = self._values(self.policy.row_hidden(ids_S)[:-1], ids_S[1:], temperature, want_entropy)
            logprobs_T[lo : hi - 1] = logp
            if entropy_T is not None:
                entropy_T[lo : hi - 1] = entropy
        if need_T is not None:
            hidden = torch.from_numpy(~np.asarray(need_T, bool)).to(self.policy.device)
            logprobs_T[hidden] = 0
            if entropy_T is not None:
                entropy_T[hidden] = 0
        self.stats = self._stats(rows, began)
        return RowValues(logprobs_T, entropy_T)

    def backward(
        self, rows: Rows, dlogp_T: torch.Tensor, dentropy_T: torch.Tensor | None = None, temperature: float = 1.0, *,
        mask_T: np.ndarray | torch.Tensor | None = None, sync: GradientSync = "sharded",
    ) -> None:  # fmt: skip
        """As `TreeEngine.backward`; a rank without rows runs one token with zero weight."""
        began = time.perf_counter()
        self.policy.check_accumulating()
        rows.check_vocabulary(self.policy.shape.vocab)
        dlogp = checked_coefficients("dlogp_T", dlogp_T, rows, mask_T)
        dentropy = checked_coefficients("dentropy_T", dentropy_T, rows, mask_T)
        assert dlogp is not None
        for lo, hi, ids_S in self._rows(rows):
            if hi - lo > 1:
                coef_S = self._tensor(dlogp[lo : hi - 1])
                entropy_coef_S = None if dentropy is None else self._tensor(dentropy[lo : hi - 1])
                hidden = self.policy.row_hidden(ids_S)[:-1]
                logp, entropy = self._values(hidden, ids_S[1:], temperature, entropy_coef_S is not None)
                loss = (logp * coef_S).sum()
                if entropy is not None and entropy_coef_S is not None:
                    loss = loss + (entropy * entropy_coef_S).sum()
                loss.backward()
        if not rows.num_rows:
            hidden = self.policy.row_hidden(torch.zeros(1, dtype=torch.int64, device=self.policy.device))
            hidden.backward(torch.zeros_like(hidden))
        self.policy.finish_gradients(sync)
        self.stats = self._stats(rows, began)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.policy.device, self._wide)

    def _rows(self, rows: Rows) -> Iterator[tuple[int, int, torch.Tensor]]:
        for row in range(rows.num_rows):
            lo, hi = int(rows.offsets_S1[row]), int(rows.offsets_S1[row + 1])
            yield lo, hi, torch.from_numpy(rows.ids_T[lo:hi].astype(np.int64)).to(self.policy.device)

    def _values(
        self, hidden_SD: torch.Tensor, label_S: torch.Tensor, temperature: float, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies [S] in chunks; the logits of a chunk are recomputed in backward."""
        logps, entropies = [], []
        for lo in range(0, len(label_S), _CHUNK_POSITIONS):
            span = slice(lo, lo + _CHUNK_POSITIONS)
            logp, entropy = checkpoint(
                self._chunk, hidden_SD[span], label_S[span], temperature, want_entropy, use_reentrant=False
            )
            logps.append(logp)
            entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies) if want_entropy else None

    def _chunk(
        self, hidden_SD: torch.Tensor, label_S: torch.Tensor, temperature: float, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        replicated = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_SD)
        local = torch.nn.functional.linear(replicated, self.policy.head_weight())
        logits_SV = tensor_parallel.gather_from_tensor_model_parallel_region(local).to(self._wide)
        log_p_SV = torch.log_softmax(logits_SV / temperature, -1)
        logp_S = log_p_SV.gather(-1, label_S[:, None])[:, 0]
        return logp_S, -(log_p_SV.exp() * log_p_SV).sum(-1) if want_entropy else None

    def _stats(self, rows: Rows, began: float) -> WalkStats:
        return WalkStats(rows.num_tokens, rows.num_tokens, rows.num_rows, 0, time.perf_counter() - began)


def make_engine(mode: str, policy: MegatronPolicy, settings: PlanSettings | None = None) -> Engine:
    """The engine for ``tree_training_mode``.

    ``dta`` walks by ``settings``, ``sparse`` visits the whole tree at once, ``disabled`` is dense.
    Raises ValueError for another mode.
    """
    if mode == "disabled":
        return DenseEngine(policy)
    if mode == "dta":
        return TreeEngine(policy, settings)
    if mode == "sparse":
        return TreeEngine(policy, PlanSettings(kind="sparse"))
    raise ValueError(f"tree_training_mode={mode!r} is not one of disabled, sparse, dta")

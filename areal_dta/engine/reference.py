"""The dense engine: every row alone, forward and backward. The slow twin of the tree walk, and
``tree_training_mode=disabled``.

It shares the policy with the tree engine and nothing else: Megatron's own rotary embedding, PyTorch's causal
attention, log-softmax under autograd. In a pipeline one row is under way at a time.

Legend: S tokens of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch.utils.checkpoint import checkpoint

from areal_dta.engine.kernels import wide_dtype
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.pipeline import StageLink
from areal_dta.engine.rows import Engine, GradientSync, Rows, RowValues, WalkStats, checked_coefficients
from areal_dta.engine.walk import TreeEngine
from areal_dta.tree.calibration import Calibration
from areal_dta.tree.plan import PlanSettings

__all__ = ["DenseEngine", "make_engine"]

_CHUNK_POSITIONS = 1024


class DenseEngine:
    """Same interface as `areal_dta.engine.walk.TreeEngine`, one row at a time.

    ``recompute`` keeps only the inputs of layers for the backward pass, which computes every layer again.
    """

    def __init__(self, policy: MegatronPolicy, recompute: bool = False) -> None:
        self.policy = policy
        self.recompute = recompute
        self.stats = WalkStats()
        self._wide = wide_dtype(policy.dtype)

    @torch.no_grad()
    def forward(
        self, rows: Rows, temperature: float = 1.0, want_entropy: bool = False, need_T: np.ndarray | None = None
    ) -> RowValues:
        """Log-probs (and entropies) of rows; positions with ``need_T`` false hold 0."""
        began = time.perf_counter()
        rows.check_vocabulary(self.policy.shape.vocab)
        self._check_same_rows(rows)
        logprobs_T = torch.zeros(rows.num_tokens, dtype=self._wide, device=self.policy.device)
        entropy_T = torch.zeros_like(logprobs_T) if want_entropy else None
        link = self.policy.stage_link()
        for lo, hi, ids_S in self._rows(rows):
            if hi - lo < 2:
                continue
            hidden = self._row_forward(link, ids_S)[1]
            if not self.policy.is_last_stage:
                continue
            logp, entropy = self._values(hidden[:-1], ids_S[1:], temperature, want_entropy)
            logprobs_T[lo : hi - 1] = logp
            if entropy_T is not None:
                entropy_T[lo : hi - 1] = entropy
        if link is not None:
            link.finish()
            for values_T in (logprobs_T, entropy_T):
                if values_T is not None:
                    link.broadcast_from_last(values_T)
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
        self._check_same_rows(rows)
        self.policy.begin_gradients()
        link = self.policy.stage_link()
        for lo, hi, ids_S in self._rows(rows):
            if hi - lo > 1:
                stage_input, hidden = self._row_forward(link, ids_S)
                if self.policy.is_last_stage:
                    coef_S = self._tensor(dlogp[lo : hi - 1])
                    entropy_coef_S = None if dentropy is None else self._tensor(dentropy[lo : hi - 1])
                    logp, entropy = self._values(hidden[:-1], ids_S[1:], temperature, entropy_coef_S is not None)
                    loss = (logp * coef_S).sum()
                    if entropy is not None and entropy_coef_S is not None:
                        loss = loss + (entropy * entropy_coef_S).sum()
                    self._row_backward(link, stage_input, loss, None)
                else:
                    self._row_backward(link, stage_input, hidden, None)
        if not rows.num_rows:
            ids_S = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
            stage_input, hidden = self._row_forward(link, ids_S)
            self._row_backward(link, stage_input, hidden, torch.zeros_like(hidden))
        if link is not None:
            link.finish()
        self.policy.finish_gradients(sync)
        self.stats = self._stats(rows, began)

    def _check_same_rows(self, rows: Rows) -> None:
        self.policy.check_same_program(lambda: (rows.offsets_S1.tobytes(), rows.ids_T.tobytes()))

    def _row_forward(self, link: StageLink | None, ids_S: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(input of this stage, its output), the output sent on; on the last stage hidden states ``[S, D]``."""
        if link is None:
            return None, self._row_hidden(ids_S)
        stage_input = None if link.is_first else link.recv_forward(self.policy.stage_shape(len(ids_S)))
        output = self._row_hidden(ids_S, stage_input)
        if not link.is_last:
            link.send_forward(output)
        return stage_input, output

    def _row_hidden(self, ids_S: torch.Tensor, stage_input: torch.Tensor | None = None) -> torch.Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return self.policy.row_hidden(ids_S, stage_input)
        config = self.policy.model.decoder.config  # shared, and read at every forward
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
        try:
            return self.policy.row_hidden(ids_S, stage_input)
        finally:
            config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None

    def _row_backward(
        self,
        link: StageLink | None,
        stage_input: torch.Tensor | None,
        output: torch.Tensor,
        grad: torch.Tensor | None,
    ) -> None:
        """Backward of this stage from ``output`` (the loss on the last one), with the next stage's gradient."""
        if link is not None and not link.is_last:
            grad = link.recv_backward(tuple(output.shape))
        output.backward(grad)
        if link is not None and stage_input is not None:
            assert stage_input.grad is not None
            link.send_backward(stage_input.grad)

    @torch.no_grad()
    def forward_values(self, rows: Rows, need_T: np.ndarray | None = None) -> torch.Tensor:
        """A critic's value at every position ``[T]``; those with ``need_T`` false hold 0."""
        began = time.perf_counter()
        rows.check_vocabulary(self.policy.shape.vocab)
        self._check_same_rows(rows)
        values_T = torch.zeros(rows.num_tokens, dtype=self._wide, device=self.policy.device)
        link = self.policy.stage_link()
        for lo, hi, ids_S in self._rows(rows):
            hidden = self._row_forward(link, ids_S)[1]
            if self.policy.is_last_stage:
                values_T[lo:hi] = self._position_values(hidden)
        if link is not None:
            link.finish()
            link.broadcast_from_last(values_T)
        if need_T is not None:
            values_T[torch.from_numpy(~np.asarray(need_T, bool)).to(self.policy.device)] = 0
        self.stats = self._stats(rows, began)
        return values_T

    def backward_values(
        self, rows: Rows, dvalue_T: torch.Tensor, *, mask_T: np.ndarray | torch.Tensor | None = None,
        sync: GradientSync = "sharded",
    ) -> None:  # fmt: skip
        """As `TreeEngine.backward_values`; a rank without rows runs one token with zero weight."""
        began = time.perf_counter()
        self.policy.check_accumulating()
        rows.check_vocabulary(self.policy.shape.vocab)
        dvalue = checked_coefficients("dvalue_T", dvalue_T, rows, mask_T, with_last=True)
        assert dvalue is not None
        self._check_same_rows(rows)
        self.policy.begin_gradients()
        link = self.policy.stage_link()
        for lo, hi, ids_S in self._rows(rows):
            stage_input, output = self._row_forward(link, ids_S)
            if self.policy.is_last_stage:
                output = (self._position_values(output) * self._tensor(dvalue[lo:hi])).sum()
            self._row_backward(link, stage_input, output, None)
        if not rows.num_rows:
            stage_input, output = self._row_forward(link, torch.zeros(1, dtype=torch.int64, device=self.policy.device))
            self._row_backward(link, stage_input, output, torch.zeros_like(output))
        if link is not None:
            link.finish()
        self.policy.finish_gradients(sync)
        self.stats = self._stats(rows, began)

    def _position_values(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        layer = self.policy.value_layer()
        wide = (hidden_SD.to(self._wide), layer.weight.to(self._wide), layer.bias.to(self._wide))
        return torch.nn.functional.linear(*wide)[:, 0]

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
        recomputed = rows.num_tokens if self.recompute and torch.is_grad_enabled() else 0
        return WalkStats(
            row_tokens=rows.num_tokens,
            tree_tokens=rows.num_tokens,
            num_blocks=rows.num_rows,
            recomputed_tokens=recomputed,
            seconds=time.perf_counter() - began,
        )


def make_engine(
    mode: str, policy: MegatronPolicy, settings: PlanSettings | None = None, costs: Calibration | None = None
) -> Engine:
    """The engine for ``tree_training_mode``.

    ``dta`` walks by ``settings`` (with measured ``costs``, if given), ``sparse`` visits the whole tree at once,
    ``disabled`` is dense. Raises ValueError for another mode.
    """
    if mode == "disabled":
        return DenseEngine(policy)
    memory, timing = (None, None) if costs is None else (costs.memory, costs.time)
    if mode == "dta":
        return TreeEngine(policy, settings, memory=memory, timing=timing)
    if mode == "sparse":
        whole = replace(settings or PlanSettings(), kind="sparse", leaf_merge=True, cut_tail=True)
        return TreeEngine(policy, whole, memory=memory, timing=timing)
    raise ValueError(f"tree_training_mode={mode!r} is not one of disabled, sparse, dta")

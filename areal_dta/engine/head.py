"""Vocabulary head on selected positions: log-probs, entropies and their gradient, chunked and vocab-parallel, with
temperature.

A walk knows its coefficients before it projects a position, and the objective sum(c * logp) + sum(e * entropy) is
linear in them. So the gradient needs no autograd graph: each chunk of logits is made once, turned into dL/dlogits in
place, used for the two products and dropped. Nothing of vocabulary size survives a chunk, and the weight's gradient
goes straight into its accumulation buffer.

Legend: M positions, E (position, label) pairs, sorted by position (a branching position has several), D hidden, V
vocabulary of this rank. With p = softmax(z), z = logits / temperature:  d logp_l / dz = onehot(l) - p,  d entropy /
dz = -p * (log p + entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from areal_dta.tree.memory import head_chunk_rows

__all__ = ["CoefficientsOf", "HeadPairs", "VocabHead"]

CoefficientsOf = Callable[[torch.Tensor, int, int], torch.Tensor]


@dataclass(frozen=True)
class HeadPairs:
    """Pairs of one block: ``row_E`` (non-decreasing) indexes the M projected positions, ``label_E`` are token ids."""

    row_E: np.ndarray
    label_E: np.ndarray


class _Chunk:
    """Probabilities of some positions with their global log-sum-exp and the pairs that fall on them.

    ``with_logits`` keeps the scaled logits beside the probabilities (entropies need both), otherwise these take their
    place.
    """

    def __init__(
        self, head: VocabHead, hidden_MD: torch.Tensor, pairs: HeadPairs, lo: int, hi: int, temperature: float,
        with_logits: bool,
    ):  # fmt: skip
        self.lo, self.hi = lo, hi
        self.hidden_MD = hidden_MD[lo:hi]
        device = hidden_MD.device
        self.pair_lo, self.pair_hi = (int(x) for x in np.searchsorted(pairs.row_E, (lo, hi)))
        self.row_E = torch.from_numpy(pairs.row_E[self.pair_lo : self.pair_hi] - lo).to(device)
        label_E = torch.from_numpy(pairs.label_E[self.pair_lo : self.pair_hi].astype(np.int64)).to(device)
        local_E = label_E - head.vocab_start
        self.own_E = (local_E >= 0) & (local_E < head.weight_VD.shape[0])
        self.label_E = local_E.clamp_(0, head.weight_VD.shape[0] - 1)

        logits = torch.nn.functional.linear(self.hidden_MD, head.weight_VD)
        z_MV = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if temperature != 1.0:
            z_MV.div_(temperature)
        self.z_MV = z_MV if with_logits else None
        self.z_E = z_MV[self.row_E, self.label_E] * self.own_E
        peak_M1 = head.reduce(z_MV.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        self.p_MV = (z_MV - peak_M1 if with_logits else z_MV.sub_(peak_M1)).exp_()
        total_M1 = head.reduce(self.p_MV.sum(-1, keepdim=True), dist.ReduceOp.SUM)
        self.p_MV.div_(total_M1)
        self.lse_M1 = total_M1.log_().add_(peak_M1)

    def logprobs_E(self, head: VocabHead) -> torch.Tensor:
        return head.reduce(self.z_E, dist.ReduceOp.SUM) - self.lse_M1[self.row_E, 0]

    def entropy_M(self, head: VocabHead) -> torch.Tensor:
        assert self.z_MV is not None
        mean_z_M1 = head.reduce((self.p_MV * self.z_MV).sum(-1, keepdim=True), dist.ReduceOp.SUM)
        return (self.lse_M1 - mean_z_M1)[:, 0]


class VocabHead:
    """The output projection of this tensor-parallel rank: rows ``vocab_start ..`` of the vocabulary.

    ``grad_VD`` is the buffer the weight's gradient is added to (None for a forward-only policy).
    """

    def __init__(
        self, weight_VD: torch.Tensor, grad_VD: torch.Tensor | None, vocab_start: int, group: dist.ProcessGroup | None
    ) -> None:
        self.weight_VD = weight_VD.detach()
        self.grad_VD = grad_VD
        self.vocab_start = vocab_start
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce over the tensor-parallel group (in place); the identity without one."""
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def _chunks(
        self, hidden_MD: torch.Tensor, pairs: HeadPairs, temperature: float, with_logits: bool
    ) -> Iterator[_Chunk]:
        size = head_chunk_rows(self.weight_VD.shape[0])
        for lo in range(0, len(hidden_MD), size):
            yield _Chunk(self, hidden_MD, pairs, lo, min(lo + size, len(hidden_MD)), temperature, with_logits)

    @torch.no_grad()
    def values(
        self, hidden_MD: torch.Tensor, pairs: HeadPairs, temperature: float, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-prob of every pair [E], entropy of every position [M] or None), fp32 or wider."""
        logprobs, entropies = [], []
        for chunk in self._chunks(hidden_MD, pairs, temperature, want_entropy):
            logprobs.append(chunk.logprobs_E(self))
            if want_entropy:
                entropies.append(chunk.entropy_M(self))
            del chunk  # before the next one is made
        return torch.cat(logprobs), torch.cat(entropies) if want_entropy else None

    @torch.no_grad()
    def gradient(
        self, hidden_MD: torch.Tensor, pairs: HeadPairs, coef_E: torch.Tensor | CoefficientsOf,
        entropy_coef_M: torch.Tensor | None, temperature: float, entropy_out_M: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """dL/dhidden [M, D] of sum(coef * logp) + sum(entropy_coef * entropy); adds dL/dweight to the buffer.

        ``coef_E`` [E] and ``entropy_coef_M`` [M] are fp32 or wider; the sum over tensor-parallel ranks is taken here.
        A function as ``coef_E`` gets the log-probs of pairs lo .. hi-1, lo and hi, and gives their coefficients.
        ``entropy_out_M`` receives the entropies.
        """
        assert self.grad_VD is not None, "a forward-only policy has no gradients; build it with trainable=True"
        grad_MD = torch.empty_like(hidden_MD)
        with_logits = entropy_coef_M is not None or entropy_out_M is not None
        for chunk in self._chunks(hidden_MD, pairs, temperature, with_logits):
            if entropy_out_M is not None:
                entropy_out_M[chunk.lo : chunk.hi] = chunk.entropy_M(self)
            grad_MV = self._logits_gradient(chunk, coef_E, entropy_coef_M, temperature).to(hidden_MD.dtype)
            torch.mm(grad_MV, self.weight_VD, out=grad_MD[chunk.lo : chunk.hi])
            if self.grad_VD.dtype == hidden_MD.dtype:
                self.grad_VD.addmm_(grad_MV.t(), chunk.hidden_MD)
            else:
                self.grad_VD.add_(grad_MV.t() @ chunk.hidden_MD)
            del chunk, grad_MV  # before the next one is made
        return self.reduce(grad_MD, dist.ReduceOp.SUM)

    def _logits_gradient(
        self, chunk: _Chunk, coef_E: torch.Tensor | CoefficientsOf, entropy_coef_M: torch.Tensor | None,
        temperature: float,
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(coef_E, torch.Tensor):
            coef = coef_E[chunk.pair_lo : chunk.pair_hi]
        else:
            coef = coef_E(chunk.logprobs_E(self), chunk.pair_lo, chunk.pair_hi)
        weight_M1 = torch.zeros_like(chunk.lse_M1)
        weight_M1[:, 0].index_add_(0, chunk.row_E, coef)
        if entropy_coef_M is None:
            grad_MV = chunk.p_MV.mul_(-weight_M1)
        else:
            assert chunk.z_MV is not None
            coef_M1 = entropy_coef_M[chunk.lo : chunk.hi, None]
            surprise_MV = chunk.z_MV.sub_(chunk.lse_M1 - chunk.entropy_M(self)[:, None])
            grad_MV = chunk.p_MV.mul_(surprise_MV.mul_(coef_M1).add_(weight_M1)).neg_()
        grad_MV.index_put_((chunk.row_E, chunk.label_E), coef * chunk.own_E, accumulate=True)
        return grad_MV.div_(temperature) if temperature != 1.0 else grad_MV

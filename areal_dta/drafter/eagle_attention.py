"""Attention of unrolled drafter training: what the drafter will see when it drafts several tokens ahead.

In step j (from 1) the query at position t stands for the j-th drafted position, so its context is what decoding will
have there: the target's features up to t-j+1 (keys of step 1), then the drafter's own, one position per step: at
t-j+i the key of step i, for i = 2..j. Step 1 is plain causal attention. Samples never see each other.

Legend of shape suffixes: T tokens end to end, N query heads, K key/value heads, H head dim; B samples of equal length,
L their length, C queries of a chunk, G query heads per key/value head, S keys of step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["PlainUnrolledAttention", "UnrolledAttention"]

CHUNK_QUERIES = 256  # scores of this many queries exist at a time; longer samples are recomputed in the backward pass


class UnrolledAttention:
    """An `Attend` for one batch: call number j is step j."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._groups = _equal_lengths(bounds)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        self._keys.append(k_TKH)
        self._values.append(v_TKH)
        return torch.cat([self._group(q_TNH, *group) for group in self._groups])

    def _group(self, q_TNH: torch.Tensor, lo: int, num_samples: int, length: int) -> torch.Tensor:
        """Samples of equal length from row ``lo``."""
        rows = slice(lo, lo + num_samples * length)

        def heads_first(tensor: torch.Tensor) -> torch.Tensor:  # (B, heads, L, H)
            return tensor[rows].unflatten(0, (num_samples, length)).transpose(1, 2)

        q = heads_first(q_TNH)
        keys, values = [heads_first(k) for k in self._keys], [heads_first(v) for v in self._values]
        if len(keys) == 1:
            o = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, enable_gqa=True)
        elif length <= CHUNK_QUERIES:
            o = _chunk(q, 0, *keys, *values)
        else:
            parts = [
                checkpoint(_chunk, q[:, :, at : at + CHUNK_QUERIES], at, *keys, *values, use_reentrant=False)
                for at in range(0, length, CHUNK_QUERIES)
            ]
            o = torch.cat(parts, 2)
        return o.transpose(1, 2).flatten(0, 1)


def _equal_lengths(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring samples of equal length: (first row, samples, length)."""
    groups: list[tuple[int, int, int]] = []
    for lo, hi in pairwise(bounds):
        if groups and groups[-1][2] == hi - lo:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1, hi - lo)
        else:
            groups.append((lo, 1, hi - lo))
    return groups


def _chunk(q: torch.Tensor, at: int, *keys_values: torch.Tensor) -> torch.Tensor:
    """Outputs (B, N, C, H) of the queries from position ``at``, given keys, then values (B, K, L, H), of all steps."""
    step = len(keys_values) // 2
    keys, values = keys_values[:step], keys_values[step:]
    B, N, C, H = q.shape
    K = keys[0].shape[1]
    num_keys = max(1, at + C - step + 1)
    q = q.reshape(B, K, N // K, C, H) * H**-0.5
    positions_C = torch.arange(at, at + C, device=q.device)
    base = q.flatten(2, 3) @ keys[0][:, :, :num_keys].transpose(2, 3)
    base = base.view(B, K, N // K, C, num_keys)
    hidden_CS = torch.arange(num_keys, device=q.device) > (positions_C - step + 1)[:, None]
    scores = [base.masked_fill(hidden_CS, -torch.inf)]
    shifted = [_back(values[i], at, C, step - 1 - i) for i in range(1, step)]
    for i in range(1, step):
        k = _back(keys[i], at, C, step - 1 - i)
        score = (q * k.unsqueeze(2)).sum(-1, keepdim=True)
        scores.append(score.masked_fill((positions_C < step - 1 - i)[:, None], -torch.inf))
    weights = torch.cat(scores, -1).softmax(-1)
    o = (weights[..., :num_keys].flatten(2, 3) @ values[0][:, :, :num_keys]).view(B, K, N // K, C, H)
    for i, v in enumerate(shifted):
        o = o + weights[..., num_keys + i, None] * v.unsqueeze(2)
    return o.reshape(B, N, C, H)


def _back(tensor: torch.Tensor, at: int, num_rows: int, distance: int) -> torch.Tensor:
    """Rows ``distance`` before positions at..at + num_rows - 1 of (B, K, L, H); zeros before the sample begins."""
    missing = max(0, distance - at)
    rows = tensor[:, :, max(0, at - distance) : max(0, at + num_rows - distance)]
    return F.pad(rows, (0, 0, min(missing, num_rows), 0)) if missing else rows


class PlainUnrolledAttention:
    """Slow twin of `UnrolledAttention`: a loop over positions that gathers each one's context by definition."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = tuple(bounds)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        self._steps.append((k_TKH, v_TKH))
        outputs: list[torch.Tensor] = []
        for lo, hi in pairwise(self._bounds):
            outputs.extend(self._one(q_TNH[t], lo, t) for t in range(lo, hi))
        return torch.stack(outputs)

    def _one(self, q_NH: torch.Tensor, lo: int, t: int) -> torch.Tensor:
        step = len(self._steps)
        source = [(0, s) for s in range(lo, t - step + 2)]  # (step - 1, row)
        source += [(i - 1, t - step + i) for i in range(2, step + 1) if t - step + i >= lo]
        repeats = len(q_NH) // self._steps[0][0].shape[1]
        k_SNH = torch.stack([self._steps[i][0][s] for i, s in source]).repeat_interleave(repeats, 1)
        v_SNH = torch.stack([self._steps[i][1][s] for i, s in source]).repeat_interleave(repeats, 1)
        weights_SN = ((k_SNH * q_NH).sum(-1) * q_NH.shape[-1] ** -0.5).softmax(0)
        return (weights_SN.unsqueeze(-1) * v_SNH).sum(0)

"""Training samples laid end to end without padding, isolated from each other.

Every sample keeps its own positions from 0, its own attention and its own targets, so a packed batch has the gradients
of its samples computed one by one.

Legend of shape suffixes: T tokens of the batch, F target feature (D or 3D), D hidden, S samples, R rows with a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

__all__ = ["DraftSample", "PackedBatch", "PackingSpeed", "measure_packing", "pack", "padded"]


@dataclass(frozen=True)
class DraftSample:
    """One sequence seen by the target.

    ``features_TF[t]`` and ``hidden_TD[t]`` are what the target computed at token t; the loss is taken at positions
    ``loss_start <= t < loss_end`` whose next token is in the sample. ``hidden_TD`` is needed for eagle3 only.
    """

    ids_T: torch.Tensor
    features_TF: torch.Tensor  # hidden states before the final norm, or three layers' outputs
    loss_start: int
    loss_end: int
    hidden_TD: torch.Tensor | None = None  # hidden states before the final norm, where the features are not these

    def __post_init__(self) -> None:
        lengths = [len(t) for t in (self.ids_T, self.features_TF, self.hidden_TD) if t is not None]
        if len(set(lengths)) != 1 or not 0 <= self.loss_start <= self.loss_end <= lengths[0]:
            raise ValueError(
                f"sample with ids, features, hidden states of lengths {lengths} and loss span "
                f"[{self.loss_start}, {self.loss_end}); lengths must be equal and hold the span"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)


@dataclass(frozen=True)
class PackedBatch:
    """Samples end to end; sample s is rows ``bounds[s]:bounds[s + 1]``."""

    ids_T: torch.Tensor
    features_TF: torch.Tensor
    hidden_TD: torch.Tensor
    bounds: tuple[int, ...]
    positions_T: torch.Tensor
    next_ids_T: torch.Tensor  # -1 at the last token of a sample
    loss_T: torch.Tensor  # bool: whether f_t has a target

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def max_length(self) -> int:
        return max(hi - lo for lo, hi in zip(self.bounds, self.bounds[1:]))

    @classmethod
    def of(cls, samples: Sequence[DraftSample]) -> PackedBatch:
        """The samples in the order given."""
        if not samples:
            raise ValueError("no samples to pack")
        device = samples[0].features_TF.device
        bounds = [0]
        for sample in samples:
            bounds.append(bounds[-1] + sample.num_tokens)
        ids_T = torch.cat([s.ids_T.to(device=device, dtype=torch.int64) for s in samples])
        features_TF = torch.cat([s.features_TF for s in samples])
        has_hidden = samples[0].hidden_TD is not None
        next_ids_T = torch.cat((ids_T[1:], ids_T.new_full((1,), -1)))
        next_ids_T[torch.tensor(bounds[1:], device=device) - 1] = -1
        loss_T = torch.zeros(len(ids_T), dtype=torch.bool, device=device)
        for lo, sample in zip(bounds, samples):
            loss_T[lo + sample.loss_start : lo + sample.loss_end] = True
        return cls(
            ids_T=ids_T,
            features_TF=features_TF,
            hidden_TD=torch.cat([s.hidden_TD for s in samples if s.hidden_TD is not None])
            if has_hidden
            else features_TF,
            bounds=tuple(bounds),
            positions_T=torch.cat([torch.arange(s.num_tokens, device=device) for s in samples]),
            next_ids_T=next_ids_T,
            loss_T=loss_T & (next_ids_T >= 0),
        )


def pack(samples: Sequence[DraftSample], max_tokens: int) -> list[PackedBatch]:
    """Batches of at most ``max_tokens`` tokens, first-fit decreasing; a longer sample is a batch of its own."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; a batch needs at least one token")
    groups: list[list[DraftSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: -s.num_tokens):  # equal lengths end up side by side
        chosen = next((i for i, left in enumerate(room) if left >= sample.num_tokens), None)
        if chosen is None:
            groups.append([])
            room.append(max_tokens)
            chosen = len(groups) - 1
        groups[chosen].append(sample)
        room[chosen] -= sample.num_tokens
    return [PackedBatch.of(group) for group in groups]


def padded(samples: Sequence[DraftSample]) -> list[DraftSample]:
    """Every sample filled up to the longest one's length: what packing saves, kept as the baseline."""
    length = max(s.num_tokens for s in samples)

    def fill(tensor: torch.Tensor, num_missing: int) -> torch.Tensor:
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, num_missing))

    return [
        replace(
            s,
            ids_T=fill(s.ids_T, length - s.num_tokens),
            features_TF=fill(s.features_TF, length - s.num_tokens),
            hidden_TD=None if s.hidden_TD is None else fill(s.hidden_TD, length - s.num_tokens),
            loss_start=min(s.loss_start, s.num_tokens - 1),
            loss_end=min(s.loss_end, s.num_tokens - 1),  # the last token's next one is padding
        )
        for s in samples
    ]


@dataclass(frozen=True)
class PackingSpeed:
    """Training throughput on the same samples."""

    packed_samples_per_s: float
    padded_samples_per_s: float
    token_ratio: float  # padded tokens per real token

    @property
    def speedup(self) -> float:
        return self.packed_samples_per_s / self.padded_samples_per_s


def measure_packing(
    samples: Sequence[DraftSample],
    train: Callable[[PackedBatch], object],
    max_tokens: int,
    batch_size: int,
    repeats: int = 3,
) -> PackingSpeed:
    """Time ``train`` (forward and backward of a batch) over ``samples``, packed against padded to the longest sample of
    each ``batch_size`` in the order given; the two are interleaved, the best of ``repeats`` counts."""
    packed = pack(samples, max_tokens)
    groups = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
    even = [PackedBatch.of(padded(group)) for group in groups]
    best = {"packed": float("inf"), "padded": float("inf")}
    train(packed[-1])
    for _ in range(repeats):
        for name, batches in (("packed", packed), ("padded", even)):
            start_s = time.perf_counter()
            for batch in batches:
                train(batch)
            best[name] = min(best[name], time.perf_counter() - start_s)
    return PackingSpeed(
        packed_samples_per_s=len(samples) / best["packed"],
        padded_samples_per_s=len(samples) / best["padded"],
        token_ratio=sum(b.num_tokens for b in even) / sum(s.num_tokens for s in samples),
    )

"""Keeps what the target computed for a share of the sequences, as training data for its drafter.

Legend of shape suffixes: T rows of a forward pass, F features, D hidden.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from areal_dta.drafter.buffer import BufferWriter
from areal_dta.drafter.buffer_files import Sample
from areal_dta.rollout.server.sequence import Sequence as Request
from areal_dta.rollout.server.sequence import Step

__all__ = ["FeatureRecorder", "Outcome", "RecorderSettings"]

Outcome = Literal["finished", "aborted", "retracted"]


VIEWS_KEPT = 64


@dataclass(frozen=True)
class RecorderSettings:
    """``share`` of the sequences, chosen by their seeds, is recorded, in pieces of at most ``max_tokens``."""

    share: float = 1.0
    max_tokens: int = 4096
    min_response_tokens: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.max_tokens < 16:
            raise ValueError(f"share={self.share} must lie in [0, 1], max_tokens={self.max_tokens} be at least 16")


@dataclass
class _Record:
    """Consecutive positions from ``start`` on, all computed by one policy version."""

    start: int
    rows: list[torch.Tensor] = field(default_factory=list)
    hidden_rows: list[torch.Tensor] = field(default_factory=list)  # where the features are something else
    num_tokens: int = 0

    def add(self, part: torch.Tensor, hidden_part: torch.Tensor | None) -> None:
        self.rows.append(part)
        if hidden_part is not None:
            self.hidden_rows.append(hidden_part)
        self.num_tokens += len(part)
        if len(self.rows) >= VIEWS_KEPT:  # each keeps the rows of its whole step alive
            self.rows = [torch.cat(self.rows)]
            self.hidden_rows = [torch.cat(self.hidden_rows)] if self.hidden_rows else []


class FeatureRecorder:
    """On the model thread; the writer's own thread does the writing. Features are kept as float16 on the host."""

    def __init__(self, writer: BufferWriter, settings: RecorderSettings, version: str) -> None:
        self.writer = writer
        self._settings = settings
        self._version = version
        self._records: dict[Request, _Record] = {}
        self._num_updates = 0

    def new_target(self, version: str) -> None:
        """Features of one sample are of one version: what is under way is written as far as it got."""
        for seq in list(self._records):
            self._write(seq, finished=False)
        self._records.clear()
        self._version = version
        self._num_updates += 1

    def observe(self, steps: Sequence[Step], hidden_TD: torch.Tensor, features_TF: torch.Tensor) -> None:
        chosen = [step for step in steps if self._chosen(step.seq)]
        if not chosen:
            return
        rows = [row for step in chosen for row in step.rows]
        sizes = [len(step.rows) for step in chosen]
        parts = _on_host(features_TF, rows).split(sizes)
        hidden_parts = _on_host(hidden_TD, rows).split(sizes) if features_TF is not hidden_TD else [None] * len(sizes)
        for step, part, hidden_part in zip(chosen, parts, hidden_parts, strict=True):
            record = self._records.get(step.seq)
            if record is None:
                record = self._records[step.seq] = _Record(step.start)
            record.add(part, hidden_part)
            if record.num_tokens >= self._settings.max_tokens:
                self._write(step.seq, finished=False)
                del self._records[step.seq]

    def release(self, seq: Request, outcome: Outcome) -> None:
        """Nothing is kept of a sequence that is computed again from its start later."""
        if outcome != "retracted":
            self._write(seq, finished=outcome == "finished")
        self._records.pop(seq, None)

    def _chosen(self, seq: Request) -> bool:
        return (seq.request.seed * 0x9E3779B97F4A7C15 >> 11 & 0xFFFFF) < self._settings.share * 0x100000

    def _write(self, seq: Request, finished: bool) -> None:
        record = self._records.get(seq)
        if record is None:
            return
        # A prefill chunk may overshoot the limit: the latest tokens are kept.
        record.start += max(0, record.num_tokens - self._settings.max_tokens)
        record.num_tokens = min(record.num_tokens, self._settings.max_tokens)
        end = record.start + record.num_tokens
        first = max(seq.prompt_len - 1, record.start)  # the position that predicts the first output token
        if end - first < self._settings.min_response_tokens:
            return
        self.writer.append(
            Sample(
                ids_T=torch.tensor(seq.tokens[record.start : end], dtype=torch.int32),
                features_TF=torch.cat(record.rows)[-self._settings.max_tokens :],
                hidden_TD=torch.cat(record.hidden_rows)[-self._settings.max_tokens :] if record.hidden_rows else None,
                loss_start=first - record.start,
                loss_end=record.num_tokens,
                policy_version=self._version,
                prompt_tokens=seq.prompt_len,
                response_tokens=seq.num_output,
                finished=finished,
                step=self._step(),
            )
        )

    def _step(self) -> int:
        """A run names its versions EPOCH:NUMBER; elsewhere updates are counted."""
        match = re.fullmatch(r".*:(\d+)", self._version)
        return int(match[1]) if match else self._num_updates


def _on_host(values_TF: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """One transfer for all sequences of a step; never a view of what came in."""
    return values_TF[rows].to("cpu", torch.float16)

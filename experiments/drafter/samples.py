"""Collected answers as training samples of one kind of drafter.

A server computes a prefix that requests share once, so most recorded sequences begin in the middle of their prompt. The
prompts say what came before, and the features of that are taken from whoever computed them.

Legend of shape suffixes: T tokens, F features (three layers' outputs, or the hidden states), D hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from areal_dta.drafter.buffer_files import Sample, list_entries, read_sample
from areal_dta.drafter.packing import DraftSample
from experiments.drafter.prompts import Prompt

__all__ = ["NoSamples", "load_samples"]


class NoSamples(ValueError):
    """There is nothing to train on."""


@dataclass(frozen=True)
class _Whole:
    """A prompt with what was computed for all its tokens."""

    ids_T: torch.Tensor
    features_TF: torch.Tensor
    hidden_TD: torch.Tensor | None


def load_samples(
    folder: Path, kind: str, prompts: Iterable[Prompt], context: int, learn_prompts: bool = False
) -> list[DraftSample]:
    """What `collect` left in ``folder``, each answer after ``context`` tokens of its prompt. Raises NoSamples.

    With ``learn_prompts`` the loss covers the prompt's tokens too where they were recorded, that is, once per shared
    prefix: the teacher is the target's distribution, which is known there as well.
    """
    by_length: dict[int, list[torch.Tensor]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt.ids)].append(torch.tensor(prompt.ids, dtype=torch.int32))
    wholes: dict[bytes, _Whole] = {}
    found = []
    samples = [_of_kind(read_sample(entry), kind) for entry in list_entries(folder)]
    for sample in sorted(samples, key=_missing):  # whoever lacks less was the first to compute the rest
        missing = _missing(sample)
        if missing > 0:
            sample = _completed(sample, missing, by_length[sample.prompt_tokens], list(wholes.values()))
        if _missing(sample) == 0:
            ids_T = sample.ids_T[: sample.prompt_tokens]
            hidden_TD = None if sample.hidden_TD is None else sample.hidden_TD[: sample.prompt_tokens]
            whole = _Whole(ids_T, sample.features_TF[: sample.prompt_tokens], hidden_TD)
            wholes.setdefault(ids_T.numpy().tobytes(), whole)
        first = max(1, missing + 1) if learn_prompts and _missing(sample) == 0 else sample.loss_start
        found.append(_cut(sample, min(first, sample.loss_start), context))
    if not found:
        raise NoSamples(f"{folder} holds no samples; collect some first")
    return found


def _missing(sample: Sample) -> int:
    """Prompt tokens before the sample's first."""
    return sample.prompt_tokens - 1 - sample.loss_start


def _of_kind(sample: Sample, kind: str) -> Sample:
    """eagle3 needs all that was recorded, the others the hidden states."""
    if kind == "eagle3" or sample.hidden_TD is None:
        return sample
    return replace(sample, features_TF=sample.hidden_TD, hidden_TD=None)


def _completed(sample: Sample, missing: int, prompts: list[torch.Tensor], wholes: list[_Whole]) -> Sample:
    """With the first ``missing`` tokens of its prompt; as it is when nobody is known to have computed them."""
    known_T = sample.ids_T[: sample.loss_start + 1]
    prompt_T = next((p for p in prompts if torch.equal(p[missing:], known_T)), None)
    if prompt_T is None:
        return sample
    start_T = prompt_T[:missing]
    whole = next((w for w in wholes if len(w.ids_T) >= missing and torch.equal(w.ids_T[:missing], start_T)), None)
    if whole is None:
        return sample
    return replace(
        sample,
        ids_T=torch.cat((start_T, sample.ids_T)),
        features_TF=torch.cat((whole.features_TF[:missing], sample.features_TF)),
        hidden_TD=None
        if whole.hidden_TD is None or sample.hidden_TD is None
        else torch.cat((whole.hidden_TD[:missing], sample.hidden_TD)),
        loss_start=sample.loss_start + missing,
        loss_end=sample.loss_end + missing,
    )


def _cut(sample: Sample, first: int, context: int) -> DraftSample:
    start = max(0, min(sample.loss_start - context, first - 1))
    # Copies: views would keep whole prompts in memory.
    return DraftSample(
        ids_T=sample.ids_T[start:].clone(),
        features_TF=sample.features_TF[start:].clone(),
        loss_start=first - start,
        loss_end=sample.loss_end - start,
        hidden_TD=None if sample.hidden_TD is None else sample.hidden_TD[start:].clone(),
    )

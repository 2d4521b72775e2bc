"""Whether two strategies said the same, and whether a difference is a rounding one.

Legend of shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from areal_dta.nn import DecoderWeights
from areal_dta.nn.decoder import sequence_logits
from areal_dta.rollout.server.sampler import MIN_TEMPERATURE, gumbel_noise
from areal_dta.rollout.server.sequence import Completion

__all__ = ["Differences", "compare"]

NEAR = 1e-3  # of scores of two tokens, in fp32 over batches of other shapes


@dataclass(frozen=True)
class Differences:
    """Answers compared token for token. ``near_ties`` differ first where two tokens score within 1e-3 of each other."""

    answers: int = 0
    same: int = 0
    near_ties: int = 0
    different: int = 0

    def __add__(self, other: Differences) -> Differences:
        return Differences(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def compare(target: DecoderWeights, plain: Sequence[Completion], other: Sequence[Completion]) -> Differences:
    total = Differences()
    for expected, found in zip(plain, other, strict=True):
        if expected.output_ids == found.output_ids:
            total += Differences(answers=1, same=1)
        else:
            near = _score_gap(target, expected, found) < NEAR
            total += Differences(answers=1, near_ties=int(near), different=int(not near))
    return total


@torch.inference_mode()
def _score_gap(target: DecoderWeights, expected: Completion, found: Completion) -> float:
    """How far apart the two tokens score where the answers part, by a dense pass over what they share."""
    pairs = list(zip(expected.output_ids, found.output_ids, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return float("inf")  # one ended where the other went on
    request = expected.request
    tokens = [*request.input_ids, *expected.output_ids[:at]]
    score_V = sequence_logits(target, tokens)[-1]
    if request.sampling.temperature >= MIN_TEMPERATURE:
        noise_V = gumbel_noise([(request.seed, len(tokens))], len(score_V))[0]
        score_V = score_V / request.sampling.temperature + noise_V
    first, second = pairs[at]
    return abs(float(score_V[first] - score_V[second]))

"""Packing: isolated samples, the gradients of unpacked ones, and its gain. Not covered: CUDA.

Legend of shape suffixes: T tokens.
"""

from __future__ import annotations

import pytest
import torch

from areal_dta.drafter.eagle import init_weights
from areal_dta.drafter.eagle_config import KINDS, EagleConfig
from areal_dta.drafter.packing import DraftSample, PackedBatch, measure_packing, pack, padded
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn.decoder import DecoderWeights
from tests.unit.eagle_kit import random_samples, random_target

LENGTHS = (12, 5, 1, 5, 2, 7)


def trainer(target: DecoderWeights, kind: str) -> DrafterTrainer:
    config = EagleConfig.for_target(target.config, kind, 20)
    weights = init_weights(config, target, torch.Generator().manual_seed(0), torch.arange(0, 60, 3))
    return DrafterTrainer(weights, target)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_gradients_equal_those_of_samples_one_by_one(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    target = random_target("qwen3", dtype=dtype)
    draft = trainer(target, kind)
    samples = random_samples(target, LENGTHS, hidden_layers=(0, 1, 2) if kind == "eagle3" else ())
    packed = draft.gradients(pack(samples, 20))
    apart = draft.gradients([PackedBatch.of([s]) for s in samples])
    even = draft.gradients([PackedBatch.of(padded(samples))])
    scale = apart.mean_P.abs().max()
    assert scale > 1e-3
    for other in (packed, even):
        assert other.num_rows == apart.num_rows
        assert float((other.mean_P - apart.mean_P).abs().max() / scale) < tolerance
        assert other.loss == pytest.approx(apart.loss, rel=1e-5)
    assert packed.scores.rates() == pytest.approx(apart.scores.rates(), rel=1e-4)


def test_no_sample_sees_its_neighbour() -> None:
    target = random_target()
    draft = trainer(target, "hass")
    first, second, third = random_samples(target, (6, 7, 5))
    changed = random_samples(target, (7,), seed=9)[0]

    def scores_without_middle(middle: DraftSample) -> float:
        silent = DraftSample(middle.ids_T, middle.features_TF, 0, 0)
        return draft.gradients([PackedBatch.of([first, silent, third])]).loss

    assert scores_without_middle(second) == pytest.approx(scores_without_middle(changed), rel=1e-12)


def test_targets_stop_at_a_samples_end_and_positions_restart() -> None:
    target = random_target()
    batch = PackedBatch.of(random_samples(target, (4, 3)))
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.next_ids_T.tolist() == [*batch.ids_T[1:4].tolist(), -1, *batch.ids_T[5:7].tolist(), -1]
    assert batch.loss_T.tolist() == [False, True, True, False, False, True, False]
    assert (batch.num_samples, batch.num_tokens, batch.max_length) == (2, 7, 4)


def test_packing_fills_batches_and_keeps_every_sample() -> None:
    samples = random_samples(random_target(), (9, 30, 3, 4, 8, 2))
    batches = pack(samples, 12)
    lengths = [[b - a for a, b in zip(batch.bounds, batch.bounds[1:])] for batch in batches]
    assert lengths == [[30], [9, 3], [8, 4], [2]]
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack(samples, 0)
    with pytest.raises(ValueError, match="no samples"):
        PackedBatch.of([])
    with pytest.raises(ValueError, match="lengths must be equal"):
        DraftSample(samples[0].ids_T, samples[1].features_TF, 0, 5)


def test_packing_beats_padding_on_a_long_tail() -> None:
    """The gain at this size; the benchmark measures real ones. Half of the token ratio is asked for, as timers vary."""
    target = random_target(dtype=torch.float32)
    draft = trainer(target, "eagle")
    lengths = (40, 25, 60, 30, 480, 35, 50, 20, 45, 30, 55, 390, 25, 40, 30, 70)
    speed = measure_packing(random_samples(target, lengths), lambda b: draft.gradients([b]), 512, batch_size=8)
    assert speed.token_ratio > 3
    assert speed.speedup > speed.token_ratio / 2

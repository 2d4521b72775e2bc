"""Training a drafter: it learns, its steps add up over workers, it resumes. Not covered: long training, real text.

Legend of shape suffixes: P elements of all trained tensors.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from areal_dta.drafter.draft_vocab import count_tokens, frequent_tokens
from areal_dta.drafter.eagle import EagleWeights, init_weights, trained_tensors
from areal_dta.drafter.eagle_config import KINDS, DrafterMismatch, EagleConfig
from areal_dta.drafter.packing import PackedBatch, pack
from areal_dta.drafter.trainer_step import DrafterTrainer, NonFiniteGradient
from areal_dta.nn.decoder import DecoderWeights
from tests.unit.eagle_kit import phrase_samples, phrases, random_samples, random_target, taught_target

MAX_TOKENS = 4096


def untrained(target: DecoderWeights, kind: str, draft_vocab: int = 0) -> EagleWeights:
    config = EagleConfig.for_target(target.config, kind, draft_vocab)
    counts_V = count_tokens([row.numpy() for row in phrases(32, 48, seed=0)], target.config.vocab_size)
    ids_Vd = torch.from_numpy(frequent_tokens(counts_V, draft_vocab)) if draft_vocab else None
    return init_weights(config, target, torch.Generator().manual_seed(0), ids_Vd)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_a_predictable_target(kind: str) -> None:
    """The target itself is right on 0.77 of the tokens of held-out sequences: phrases begin at random."""
    target = taught_target()
    weights = untrained(target, kind, draft_vocab=32)
    layers = weights.config.hidden_layers
    held_out = pack(phrase_samples(target, 16, 48, seed=99, hidden_layers=layers), MAX_TOKENS)
    draft = DrafterTrainer(weights, target, learning_rate=3e-3, warmup_steps=5)
    start = draft.evaluate(held_out).rates()
    for step in range(45):
        draft.step(pack(phrase_samples(target, 8, 48, seed=step, hidden_layers=layers), MAX_TOKENS))
    end = draft.evaluate(held_out).rates()
    assert start["top1"] < 0.15
    assert end["top1"] > 0.5
    assert end["top3"] > end["top1"]
    assert end["accept_length"] > start["accept_length"] + 0.5
    assert end["token_loss"] < start["token_loss"]


def test_an_update_of_the_target_is_learnt_again_and_keeps_the_trained_tensors() -> None:
    old, new = random_target(seed=0, dtype=torch.float32), random_target(seed=1, dtype=torch.float32)
    draft = DrafterTrainer(untrained(old, "eagle", draft_vocab=32), old)
    before = draft.weights()
    draft.set_target(new)
    after = draft.weights()
    assert after.head is not None
    assert before.head is not None
    assert after.draft_ids_Vd is not None
    assert torch.equal(after.head, new.head_VD[after.draft_ids_Vd])
    assert all(torch.equal(t, trained_tensors(after)[n]) for n, t in trained_tensors(before).items())


def test_two_workers_gradients_averaged_by_rows_equal_one_workers() -> None:
    target = random_target()
    samples = random_samples(target, (9, 6, 12))
    draft = DrafterTrainer(untrained(target, "hass"), target)
    whole = draft.gradients(pack(samples, 64))
    parts = [draft.gradients([PackedBatch.of(samples[:1])]), draft.gradients([PackedBatch.of(samples[1:])])]
    mean_P = sum(p.mean_P * p.num_rows for p in parts) / sum(p.num_rows for p in parts)
    assert torch.allclose(mean_P, whole.mean_P, atol=1e-12)
    assert sum(p.loss * p.num_rows for p in parts) / whole.num_rows == pytest.approx(whole.loss)


def test_a_restart_continues_as_if_nothing_had_happened() -> None:
    target = random_target()
    batches = [pack(random_samples(target, (8, 5), seed=i), 64) for i in range(4)]
    whole, first = (DrafterTrainer(untrained(target, "eagle"), target) for _ in range(2))
    for batch in batches:
        whole.step(batch)
    for batch in batches[:2]:
        first.step(batch)
    second = DrafterTrainer(untrained(target, "eagle"), target)
    second.load_state_dict(first.state_dict())
    first.step(batches[0])  # the copy is not tied to it
    for batch in batches[2:]:
        second.step(batch)
    assert second.num_steps == 4
    assert torch.equal(second.state_dict()["trained_P"], whole.state_dict()["trained_P"])


def test_a_checkpoint_of_another_drafter_is_refused() -> None:
    target = random_target()
    state = DrafterTrainer(untrained(target, "eagle3"), target).state_dict()
    draft = DrafterTrainer(untrained(target, "eagle"), target)
    for wrong in (state, {}, {**draft.state_dict(), "first_moment_P": torch.zeros(3)}):
        with pytest.raises(DrafterMismatch, match="this drafter trains"):
            draft.load_state_dict(wrong)


def test_only_the_drafters_own_tensors_change_and_snapshots_stay() -> None:
    target = random_target()
    embed_VD, head_VD = target.embed_VD.clone(), target.head_VD.clone()
    weights = untrained(target, "eagle", draft_vocab=32)
    draft = DrafterTrainer(weights, target)
    snapshot = draft.weights()
    fc = snapshot.fc.clone()
    draft.step(pack(random_samples(target, (9,)), 64))
    after = draft.weights()
    assert torch.equal(target.embed_VD, embed_VD)
    assert torch.equal(target.head_VD, head_VD)
    assert torch.equal(snapshot.fc, fc)
    assert not torch.equal(after.fc, fc)
    assert not after.fc.requires_grad
    assert after.head is not None
    assert torch.equal(after.head, head_VD[after.draft_ids_Vd])


def test_a_gradient_that_is_not_finite_changes_nothing_and_a_large_one_is_clipped() -> None:
    target = random_target()
    draft = DrafterTrainer(untrained(target, "eagle"), target, max_gradient_norm=0.5, warmup_steps=4)
    before = draft.state_dict()
    with pytest.raises(NonFiniteGradient, match="step 0"):
        draft.apply(torch.full((draft.num_trained,), torch.nan))
    assert all(torch.equal(t, draft.state_dict()[n]) for n, t in before.items())
    with pytest.raises(DrafterMismatch, match="same drafter"):
        draft.apply(torch.zeros(3))
    report = draft.apply(torch.ones(draft.num_trained))
    assert report.gradient_norm == pytest.approx(draft.num_trained**0.5)
    assert report.learning_rate == pytest.approx(1e-3 / 4)
    moment_P = draft.state_dict()["first_moment_P"]
    assert float(moment_P.norm()) == pytest.approx(0.1 * 0.5)


def test_batches_without_anything_to_learn_from_are_an_error() -> None:
    target = random_target()
    draft = DrafterTrainer(untrained(target, "eagle"), target)
    with pytest.raises(ValueError, match="collect more samples"):
        draft.gradients([])
    with pytest.raises(ValueError, match="collect more samples"):
        draft.gradients(pack(random_samples(target, (1,)), 8))


def test_half_precision_samples_train_a_full_precision_drafter() -> None:
    target = random_target(dtype=torch.float32)
    (sample,) = random_samples(target, (16,))
    half = dataclasses.replace(sample, ids_T=sample.ids_T.int(), features_TF=sample.features_TF.half())
    draft = DrafterTrainer(untrained(target, "eagle"), target)
    exact, rounded = (draft.gradients([PackedBatch.of([s])]) for s in (sample, half))
    assert rounded.mean_P.dtype == torch.float32
    assert rounded.loss == pytest.approx(exact.loss, rel=1e-2)

"""Unrolled training: attention and losses against their definitions. Not covered: CUDA, half precision.

Legend of shape suffixes: T tokens, N query heads, K key/value heads, H head dim, D hidden, V vocabulary, Vd draft
vocabulary, R rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from areal_dta.drafter import eagle_attention, losses
from areal_dta.drafter.eagle import (
    EagleWeights,
    draft_hidden,
    draft_inputs,
    draft_logits,
    init_weights,
    target_features,
    trained_tensors,
    with_tensors,
)
from areal_dta.drafter.eagle_attention import PlainUnrolledAttention, UnrolledAttention
from areal_dta.drafter.eagle_config import KINDS, EagleConfig
from areal_dta.drafter.losses import DraftLoss, DraftScores, LossSettings, draft_loss
from areal_dta.drafter.packing import PackedBatch
from areal_dta.nn.decoder import DecoderWeights, Rotary
from tests.unit.eagle_kit import random_samples, random_target

IDS_VD = torch.arange(0, 64, 3)


def drafter(target: DecoderWeights, kind: str, reduced: bool = True) -> EagleWeights:
    config = EagleConfig.for_target(target.config, kind, len(IDS_VD) if reduced else 0)
    return init_weights(config, target, torch.Generator().manual_seed(2), IDS_VD)


def with_gradients(weights: EagleWeights) -> EagleWeights:
    leaves = {n: t.clone().requires_grad_() for n, t in trained_tensors(weights).items()}
    return with_tensors(weights, leaves)


def loss_of(
    weights: EagleWeights, target: DecoderWeights, batch: PackedBatch, settings: LossSettings, attend: Any = None
) -> DraftLoss:
    cos_sin = Rotary(target.config, target.dtype, target.device)(batch.positions_T, batch.max_length)
    return draft_loss(weights, target, batch, settings, cos_sin, attend)


def gradients_of(weights: EagleWeights, result: DraftLoss) -> dict[str, torch.Tensor]:
    named = trained_tensors(weights)
    return dict(zip(named, torch.autograd.grad(result.loss, list(named.values()))))


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("bounds", [(0, 1, 2, 4), (0, 7), (0, 6, 12, 13, 22)])
def test_unrolled_attention_equals_a_loop_over_positions(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, ...], chunk: int
) -> None:
    monkeypatch.setattr(eagle_attention, "CHUNK_QUERIES", chunk)
    generator = torch.Generator().manual_seed(0)
    fast, slow = UnrolledAttention(bounds), PlainUnrolledAttention(bounds)
    total = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    leaves = []
    for _ in range(4):
        q_TNH = torch.randn(bounds[-1], 4, 8, generator=generator, dtype=torch.float64).requires_grad_()
        k_TKH, v_TKH = torch.randn(2, bounds[-1], 2, 8, generator=generator, dtype=torch.float64)
        leaves += [q_TNH, k_TKH.requires_grad_(), v_TKH.requires_grad_()]
        outputs = [attend(0, q_TNH, k_TKH, v_TKH) for attend in (fast, slow)]
        assert torch.allclose(*outputs, atol=1e-12)
        mix = torch.randn(outputs[0].shape, generator=generator, dtype=torch.float64)
        total = [t + (o * mix).sum() for t, o in zip(total, outputs)]
    for a, b in zip(torch.autograd.grad(total[0], leaves), torch.autograd.grad(total[1], leaves)):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_which_attention_computes_them(kind: str) -> None:
    target = random_target("qwen3")
    weights = with_gradients(drafter(target, kind))
    batch = PackedBatch.of(random_samples(target, (9, 4, 1), hidden_layers=weights.config.hidden_layers))
    settings = LossSettings(3, 1.0, 0.5)
    fast = gradients_of(weights, loss_of(weights, target, batch, settings))
    slow = gradients_of(weights, loss_of(weights, target, batch, settings, PlainUnrolledAttention(batch.bounds)))
    for name, gradient in fast.items():
        assert torch.allclose(gradient, slow[name], atol=1e-11), name


def test_one_step_equals_the_published_loss_written_out() -> None:
    """Smooth-L1 to the target's normed hidden state plus cross-entropy to the target's distribution, position by
    position, with the token after a sample's last one left out and tokens outside the draft vocabulary skipped."""
    target = random_target("llama")
    weights = drafter(target, "eagle")
    samples = random_samples(target, (8, 5))
    batch = PackedBatch.of(samples)
    result = loss_of(weights, target, batch, LossSettings(1, 1.0, 0.1))
    expected = torch.zeros((), dtype=torch.float64)
    num_rows = 0
    for sample in samples:
        length = sample.num_tokens
        goal_TD = target_features(weights, target, sample.features_TF)
        shifted_TD = torch.cat((torch.zeros(1, 48, dtype=torch.float64), goal_TD[:-1]))
        x_TX = draft_inputs(weights, target.embed_VD, sample.ids_T, shifted_TD)
        cos_sin = Rotary(target.config, torch.float64, target.device)(torch.arange(length), length)
        f_TD = draft_hidden(weights, x_TX, cos_sin, UnrolledAttention((0, length)))
        p_TVd = (goal_TD @ target.head_VD[IDS_VD].T).softmax(-1)
        log_q_TVd = draft_logits(weights, f_TD, target).log_softmax(-1)
        for t in range(1, length - 1):
            expected += F.smooth_l1_loss(f_TD[t], goal_TD[t])
            if int(sample.ids_T[t + 1]) in IDS_VD.tolist():
                expected -= 0.1 * (p_TVd[t] * log_q_TVd[t]).sum()
            num_rows += 1
    assert result.num_rows == num_rows
    assert torch.allclose(result.loss, expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["hass", "eagle3"])
def test_later_steps_see_what_decoding_will_see(kind: str) -> None:
    """Step 3 at position t, computed as decoding does: a cache of the target's features up to t-2, then two drafted
    positions made from the drafter's own features."""
    target = random_target("qwen3")
    weights = drafter(target, kind)
    (sample,) = random_samples(target, (10,), hidden_layers=weights.config.hidden_layers)
    recorded: list[torch.Tensor] = []

    class Recorder(UnrolledAttention):
        def __call__(self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            recorded.append(super().__call__(layer, q_TNH, k_TKH, v_TKH))
            return recorded[-1]

    batch = PackedBatch.of([sample])
    loss_of(weights, target, batch, LossSettings(3, 1.0, 1.0), Recorder(batch.bounds))
    rotary = Rotary(target.config, torch.float64, target.device)
    features_TD = target_features(weights, target, sample.features_TF)
    root = 5
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def attend(layer: int, q_1NH: torch.Tensor, k_1KH: torch.Tensor, v_1KH: torch.Tensor) -> torch.Tensor:
        keys.append(k_1KH)
        values.append(v_1KH)
        k, v = (torch.cat(rows).repeat_interleave(2, 1) for rows in (keys, values))
        scores_NT = (torch.einsum("qnh,tnh->nt", q_1NH, k) * 16**-0.5).softmax(-1)
        outputs.append(torch.einsum("nt,tnh->nh", scores_NT, v)[None])
        return outputs[-1]

    feature_1D = torch.zeros(1, 48, dtype=torch.float64)
    for t in range(root + 3):
        x_1X = draft_inputs(weights, target.embed_VD, sample.ids_T[t : t + 1], feature_1D)
        f_1D = draft_hidden(weights, x_1X, rotary(torch.tensor([t]), 10), attend)
        feature_1D = features_TD[t : t + 1] if t < root else f_1D
    for step in range(3):
        assert torch.allclose(recorded[step][root + step], outputs[root + step][0], atol=1e-11), step


def test_the_chunked_cross_entropy_has_the_gradients_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    h_RD = torch.randn(10, 6, generator=generator, dtype=torch.float64).requires_grad_()
    head_VD = torch.randn(7, 6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher_RV = torch.randn(10, 7, generator=generator, dtype=torch.float64).softmax(-1)
    weight_R = (torch.arange(10) % 3 > 0).double()
    loss, top_RK = losses._SoftCrossEntropy.apply(h_RD, head_VD, teacher_RV, weight_R)
    logits_RV = h_RD @ head_VD.T
    plain = -((teacher_RV * logits_RV.log_softmax(-1)).sum(-1) * weight_R).sum()
    assert torch.allclose(loss, plain)
    assert torch.equal(top_RK, logits_RV.topk(3).indices)
    ours, theirs = (torch.autograd.grad(2 * x, (h_RD, head_VD)) for x in (loss, plain))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs))


def test_frozen_tensors_get_no_gradient_and_later_steps_count_less() -> None:
    target = random_target()
    weights = with_gradients(drafter(target, "hass"))
    batch = PackedBatch.of(random_samples(target, (8,)))
    result = loss_of(weights, target, batch, LossSettings(3, 1.0, 0.1, step_decay=0.5))
    scores = result.scores
    steps = [f + 0.1 * t for f, t in zip(scores.feature_loss, scores.token_loss)]
    assert float(result.loss) == pytest.approx(steps[0] + 0.5 * steps[1] + 0.25 * steps[2])
    result.loss.backward()
    assert weights.head is not None
    assert weights.head.grad is None
    assert all(t.grad is not None for t in trained_tensors(weights).values())


def test_simulated_accept_length_counts_chains_that_lie_in_the_loss_span() -> None:
    target = random_target()
    samples = random_samples(target, (6, 5))
    batch = PackedBatch.of(samples)
    rows_R = batch.loss_T.nonzero().squeeze(1)
    assert rows_R.tolist() == [1, 2, 3, 4, 7, 8, 9]
    first = torch.tensor([True, True, False, True, True, True, True])
    second = torch.tensor([False, True, True, False, False, True, True])
    # Roots with room for two steps: 1, 2, 3 and 7, 8. Accepted: 1 -> 2, 2 -> 1 + step 2 at 3, 3 -> 0, 7 -> 2, 8 -> 2.
    roots, accepted = losses._simulated_chains(batch, rows_R, [first, second])
    assert (roots, accepted) == (5, 2 + 2 + 0 + 2 + 2)


def test_scores_add_up_and_travel_as_plain_values() -> None:
    target = random_target()
    weights = drafter(target, "hass")
    samples = random_samples(target, (8, 6))
    settings = LossSettings.for_kind("hass")
    apart = [loss_of(weights, target, PackedBatch.of([s]), settings).scores for s in samples]
    together = loss_of(weights, target, PackedBatch.of(samples), settings).scores
    total = apart[0] + apart[1] + DraftScores()
    assert total.rates() == pytest.approx(together.rates())
    assert DraftScores.from_dict(together.to_dict()) == together
    assert set(together.rates()) >= {"top1", "top3", "top1_step3", "accept_length", "token_loss"}


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    target = random_target()
    weights = drafter(target, "eagle")
    (sample,) = random_samples(target, (12,))
    outside = int((~torch.isin(sample.ids_T[2:], IDS_VD)).sum())
    scores = loss_of(weights, target, PackedBatch.of([sample]), LossSettings(1, 1.0, 0.1)).scores
    assert outside > 0
    assert scores.num_rows == (10,)
    assert scores.num_top3[0] <= 10 - outside

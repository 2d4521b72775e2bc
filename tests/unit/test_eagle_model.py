"""The drafter as functions: shapes, its cache, its bindings to the target. Not covered: bf16, CUDA, real checkpoints.

Legend of shape suffixes: T tokens, N query heads, K key/value heads, H head dim, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_dta.drafter.draft_vocab import count_tokens, covered_share, frequent_tokens
from areal_dta.drafter.eagle import (
    EagleWeights,
    draft_hidden,
    draft_inputs,
    draft_keys_values,
    draft_logits,
    follow_target,
    init_weights,
    target_features,
    to_target_ids,
    trained_tensors,
    with_tensors,
)
from areal_dta.drafter.eagle_attention import UnrolledAttention
from areal_dta.drafter.eagle_config import KINDS, DrafterMismatch, EagleConfig
from areal_dta.nn.decoder import DecoderWeights, Rotary
from areal_dta.nn.model_config import RopeSpec
from tests.unit.eagle_kit import random_target, run_target, tiny_config

FAMILIES = ("qwen3", "qwen2", "llama")
IDS_VD = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34, 55, 60])


def drafter(target: DecoderWeights, kind: str, reduced: bool = False) -> EagleWeights:
    """A drafter of random weights, so that nothing is near zero or the identity by its start."""
    config = EagleConfig.for_target(target.config, kind, len(IDS_VD) if reduced else 0)
    generator = torch.Generator().manual_seed(3)
    weights = init_weights(config, target, generator, IDS_VD if reduced else None)
    noise = {n: 0.2 * torch.randn(t.shape, generator=generator) for n, t in trained_tensors(weights).items()}
    return with_tensors(weights, {n: t + noise[n].to(t.dtype) for n, t in trained_tensors(weights).items()})


def prompt(target: DecoderWeights, weights: EagleWeights, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and the features of the positions before them."""
    ids_T = torch.randint(64, (length,), generator=torch.Generator().manual_seed(1))
    _, raw_TF = run_target(target, ids_T[None], weights.config.hidden_layers)
    features_TD = target_features(weights, target, raw_TF)
    return ids_T, torch.cat((torch.zeros_like(features_TD[:1]), features_TD[:-1]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_filling_keys_and_values_equals_what_attention_receives(kind: str, family: str) -> None:
    target = random_target(family)
    weights = drafter(target, kind)
    ids_T, features_TD = prompt(target, weights)
    x_TX = draft_inputs(weights, target.embed_VD, ids_T, features_TD)
    cos_sin = Rotary(target.config, torch.float64, target.device)(torch.arange(len(ids_T)), len(ids_T))
    received = []

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        received.append((layer, k_TKH, v_TKH))
        return torch.zeros_like(q_TNH)

    f_TD = draft_hidden(weights, x_TX, cos_sin, attend, layer_index=target.config.num_layers)
    k_TKH, v_TKH = draft_keys_values(weights, x_TX, cos_sin)
    ((layer, k_attend_TKH, v_attend_TKH),) = received
    assert layer == 3
    assert f_TD.shape == (9, 48)
    assert torch.allclose(k_TKH, k_attend_TKH, atol=1e-12)
    assert torch.allclose(v_TKH, v_attend_TKH, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_token_by_token_over_a_cache_equals_one_causal_pass(kind: str) -> None:
    target = random_target("qwen3")
    weights = drafter(target, kind, reduced=True)
    ids_T, features_TD = prompt(target, weights)
    rotary = Rotary(target.config, torch.float64, target.device)
    x_TX = draft_inputs(weights, target.embed_VD, ids_T, features_TD)
    whole_TD = draft_hidden(weights, x_TX, rotary(torch.arange(9), 9), UnrolledAttention((0, 9)))
    k_TKH, v_TKH = draft_keys_values(weights, x_TX[:8], rotary(torch.arange(8), 9))

    def attend(layer: int, q_1NH: torch.Tensor, k_1KH: torch.Tensor, v_1KH: torch.Tensor) -> torch.Tensor:
        k, v = (torch.cat(pair).repeat_interleave(2, 1) for pair in ((k_TKH, k_1KH), (v_TKH, v_1KH)))
        weights_NT = (torch.einsum("qnh,tnh->nt", q_1NH, k) * 16**-0.5).softmax(-1)
        return torch.einsum("nt,tnh->nh", weights_NT, v)[None]

    last_1D = draft_hidden(weights, x_TX[8:], rotary(torch.tensor([8]), 9), attend)
    assert torch.allclose(last_1D, whole_TD[8:], atol=1e-12)
    assert draft_logits(weights, last_1D, target).shape == (1, len(IDS_VD))


def test_the_input_pairs_a_token_with_the_feature_before_it() -> None:
    """By definition, written out: fc([embedding of token t ; normed hidden state of t-1])."""
    target = random_target()
    weights = drafter(target, "eagle")
    ids_T, features_TD = prompt(target, weights)
    hidden_TD, _ = run_target(target, ids_T[None])
    before_D = hidden_TD[3] * (hidden_TD[3].square().mean() + 1e-6).rsqrt() * target.final_norm_D
    expected_D = weights.fc @ torch.cat((target.embed_VD[ids_T[4]], before_D)) + weights.fc_bias_D
    assert torch.allclose(draft_inputs(weights, target.embed_VD, ids_T, features_TD)[4], expected_D, atol=1e-12)
    first_D = weights.fc[:, :48] @ target.embed_VD[ids_T[0]] + weights.fc_bias_D
    assert torch.allclose(draft_inputs(weights, target.embed_VD, ids_T, features_TD)[0], first_D, atol=1e-12)


def test_a_feature_equal_to_the_targets_gives_the_targets_own_logits() -> None:
    target = random_target("qwen2")
    weights = drafter(target, "eagle", reduced=True)
    hidden_TD, _ = run_target(target, torch.arange(6)[None])
    features_TD = target_features(weights, target, hidden_TD)
    assert torch.allclose(draft_logits(weights, features_TD, target), features_TD @ target.head_VD[IDS_VD].T)
    assert to_target_ids(weights, torch.tensor([[0, 9]])).tolist() == [[1, 60]]


def test_copied_head_rows_follow_the_target_and_trained_ones_stay() -> None:
    old, new = random_target(seed=0), random_target(seed=1)
    copied, trained = drafter(old, "eagle", reduced=True), drafter(old, "eagle3", reduced=True)
    followed = follow_target(copied, new)
    assert followed.head is not None
    assert torch.equal(followed.head, new.head_VD[IDS_VD])
    assert torch.equal(followed.fc, copied.fc)
    assert follow_target(trained, new) is trained
    assert "head" in trained_tensors(trained)
    assert "head" not in trained_tensors(copied)


def test_logits_are_fp32_for_half_precision_weights_and_fp64_for_fp64() -> None:
    target = random_target()
    weights = drafter(target, "eagle3")
    f_TD = torch.randn(2, 48, dtype=torch.float64)
    assert draft_logits(weights, f_TD, target).dtype == torch.float64
    half = weights.to(torch.bfloat16, "cpu")
    target_half = replace(target, head_VD=target.head_VD.bfloat16())
    assert half.dtype == torch.bfloat16
    assert draft_logits(half, f_TD.bfloat16(), target_half).dtype == torch.float32


def test_a_drafter_of_another_model_is_refused() -> None:
    config = EagleConfig.for_target(tiny_config(), "eagle")
    config.check_target(replace(tiny_config(), dtype="bfloat16", eos_token_ids=()))
    for other in (
        tiny_config("qwen2"),
        tiny_config(num_layers=4),
        tiny_config(vocab_size=65),
        replace(tiny_config(), rope=RopeSpec(20_000.0)),
    ):
        with pytest.raises(DrafterMismatch, match="train a drafter for this target"):
            config.check_target(other)
    target = random_target()
    three_layers = drafter(target, "eagle3")
    with pytest.raises(DrafterMismatch, match="width 48"):
        target_features(three_layers, target, torch.zeros(1, 48, dtype=torch.float64))


def test_the_config_survives_its_dictionary_and_refuses_damage() -> None:
    config = EagleConfig.for_target(tiny_config("qwen3"), "eagle3", 10, portable=True)
    assert EagleConfig.from_dict(config.to_dict()) == config
    assert (config.qk_norm, config.feature_size, config.layer_input_size) == (False, 144, 96)
    for damage in (
        {"kind": "medusa"},
        {"hidden_layers": [0, 1]},
        {"hidden_layers": [0, 1, 3]},
        {"draft_vocab_size": 65},
        {"surprise": 1},
        {"rope": 3},
    ):
        with pytest.raises(DrafterMismatch):
            EagleConfig.from_dict({**config.to_dict(), **damage})


def test_eagle3_takes_the_published_layers_of_a_deep_target() -> None:
    assert EagleConfig.for_target(tiny_config(num_layers=32), "eagle3").hidden_layers == (1, 15, 28)
    assert EagleConfig.for_target(tiny_config(num_layers=3), "eagle3").hidden_layers == (0, 1, 2)


def test_the_draft_vocabulary_holds_the_frequent_tokens_in_ascending_order() -> None:
    counts_V = count_tokens([np.array([5, 5, 5, 3, 3, 9]), np.array([9, 0])], 12)
    assert counts_V.tolist() == [1, 0, 0, 2, 0, 3, 0, 0, 0, 2, 0, 0]
    ids_Vd = frequent_tokens(counts_V, 4, always=(11,))
    assert ids_Vd.tolist() == [3, 5, 9, 11]
    assert covered_share(counts_V, ids_Vd) == pytest.approx(7 / 8)
    assert frequent_tokens(counts_V, 6).tolist() == [0, 1, 2, 3, 5, 9]
    with pytest.raises(ValueError, match="choose a size"):
        frequent_tokens(counts_V, 13)


@pytest.mark.parametrize("ids", [None, [1, 2], [3, 2, 1], [1, 1, 2], [1, 2, 64], [-1, 2, 3]])
def test_draft_ids_that_do_not_fit_are_refused(ids: list[int] | None) -> None:
    target = random_target()
    config = EagleConfig.for_target(target.config, "eagle", 3)
    with pytest.raises(DrafterMismatch, match="ids"):
        init_weights(config, target, torch.Generator(), None if ids is None else torch.tensor(ids))

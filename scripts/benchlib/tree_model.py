"""The benchmark's model: a small Qwen3 with random weights on one Megatron rank, and what its work costs in FLOP.

Legend: S rows, T tokens of all rows, U trie tokens.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_dta.engine import MegatronPolicy, init_process_group
from areal_dta.tree.cost import flop_model
from areal_dta.tree.trie import build_trie, sort_rows
from scripts.benchlib.report import free_port
from scripts.benchlib.workloads import Workload

__all__ = ["SHAPE", "bench_policy", "dense_flops", "tree_flops"]

SHAPE = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "ffn_size": 768}


@contextlib.contextmanager
def bench_policy(vocab_size: int, max_len: int, seed: int) -> Iterator[MegatronPolicy]:
    """A trainable fp32 policy without optimizer; the process group ends with the block."""
    with tempfile.TemporaryDirectory(prefix="areal-dta-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_hf_config(vocab_size, max_len)))
        init_process_group(0, 1, "127.0.0.1", free_port())
        try:
            yield MegatronPolicy(folder, seed=seed, random_init=True)
        finally:
            torch.distributed.destroy_process_group()


def _hf_config(vocab_size: int, max_len: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": SHAPE["hidden_size"],
        "intermediate_size": SHAPE["ffn_size"],
        "num_hidden_layers": SHAPE["num_layers"],
        "num_attention_heads": SHAPE["num_heads"],
        "num_key_value_heads": SHAPE["num_kv_heads"],
        "head_dim": SHAPE["head_dim"],
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def dense_flops(workload: Workload, coefficient_T: np.ndarray, loss: str) -> float:
    """FLOP of forward and backward of every row alone. With ``loss='spans'`` the vocabulary head counts only where a
    coefficient is not 0, otherwise at every token.
    """
    body, head = _costs(workload.vocab_size)
    num_heads = workload.num_tokens if loss == "all" else np.count_nonzero(coefficient_T)
    return float(body.span(0, workload.lens_S).sum()) + head * float(num_heads)


def tree_flops(workload: Workload, coefficient_T: np.ndarray, loss: str) -> float:
    """The same of the rows as one trie, each distinct token once."""
    body, head = _costs(workload.vocab_size)
    rows = sort_rows(workload.ids_T, workload.offsets_S1)
    num_heads = rows.tree_tokens
    if loss == "spans":
        trie = build_trie(workload.ids_T, workload.offsets_S1)
        num_heads = len(np.unique(trie.token_index_T[coefficient_T != 0]))
    return body.tree(rows) + head * float(num_heads)


def _costs(vocab_size: int) -> tuple[Any, float]:
    """(cost model of the layers, FLOP of the head per projected position)."""
    body = flop_model(**SHAPE, vocab_size=0)
    return body, flop_model(**SHAPE, vocab_size=vocab_size).per_token - body.per_token

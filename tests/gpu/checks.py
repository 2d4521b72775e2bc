"""What the GPU tests and ``scripts/gpu_check`` measure, as functions of a device, so that a CPU can rehearse them.

Each returns numbers; the bounds are the callers'. Attention is measured against plain products in fp64 on the same
(rounded) inputs, a step against the dense engine.

Legend: G key/value heads, S query rows, R query heads per key/value head, K key rows, H head dim.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_dta.engine import DenseEngine, Engine, MegatronPolicy, ParallelSizes, PlanSettings, Rows, TreeEngine
from areal_dta.engine.fused_loss import SFTTokenLoss
from areal_dta.engine.kernels import AttentionKernel, ProductKernel, merge_tile
from areal_dta.engine.kernels_cuda import cuda_kernel
from areal_dta.tree.tiles import TileKind

__all__ = [
    "CASES",
    "TileCase",
    "agent_rows",
    "backward",
    "bf16_errors",
    "error",
    "fused_error",
    "gradients",
    "milliseconds",
    "peak_bytes",
    "policy",
    "seconds",
    "tile_errors",
    "tree_engine",
    "tree_errors",
    "write_model",
]

VOCAB = 512
Gradients = dict[str, torch.Tensor]


# ---- tiles ----


@dataclass(frozen=True)
class TileCase:
    """A block of ``rows`` rows below ``depth`` rows of path; its own tile is causal or tree-masked."""

    rows: int
    depth: int
    heads_per_group: int
    head_dim: int
    masked: bool
    groups: int = 2


CASES = (
    TileCase(64, 128, 4, 128, masked=False),
    TileCase(77, 333, 4, 128, masked=False),  # no power of two, no multiple of 8
    TileCase(257, 0, 1, 64, masked=False),
    TileCase(1, 40, 8, 64, masked=False),
    TileCase(512, 2048, 2, 128, masked=False),
    TileCase(96, 160, 4, 128, masked=True),
    TileCase(61, 0, 2, 64, masked=True),
    TileCase(300, 77, 8, 64, masked=True),
)


def tree_mask(num_rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Additive mask of a random forest of ``num_rows`` rows in depth-first order."""
    rng = np.random.default_rng(seed)
    visible = np.zeros((num_rows, num_rows), bool)
    path: list[int] = []
    for row in range(num_rows):
        path = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.1 else path
        path = [*path, row]
        visible[row, path] = True
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), -math.inf)
    return mask.to(device)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@dataclass(frozen=True)
class _Inputs:
    q_GSRH: torch.Tensor
    k_GKH: torch.Tensor
    v_GKH: torch.Tensor
    grad_GSRH: torch.Tensor
    tiles: tuple[tuple[TileKind, slice, torch.Tensor | None], ...]  # kind, keys, mask

    def to(self, dtype: torch.dtype) -> _Inputs:
        tiles = tuple((kind, keys, None if mask is None else mask.to(dtype)) for kind, keys, mask in self.tiles)
        return _Inputs(*(x.to(dtype) for x in (self.q_GSRH, self.k_GKH, self.v_GKH, self.grad_GSRH)), tiles)


def _inputs(case: TileCase, dtype: torch.dtype, device: torch.device) -> _Inputs:
    generator = torch.Generator().manual_seed(case.rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    keys = case.depth + case.rows
    q_shape = (case.groups, case.rows, case.heads_per_group, case.head_dim)
    own = slice(case.depth, keys)
    if case.masked:
        tiles = [(TileKind.MASKED, own, tree_mask(case.rows, dtype, device, case.rows))]
    else:
        tiles = [(TileKind.CAUSAL, own, None)]
    if case.depth:
        tiles.append((TileKind.FULL, slice(0, case.depth), None))
    # keys and values lie in a longer buffer, as on the path
    k, v = (random(case.groups, keys + 8, case.head_dim)[:, :keys] for _ in range(2))
    return _Inputs(random(*q_shape), k, v, random(*q_shape), tuple(tiles))


def _run(kernel: AttentionKernel, x: _Inputs, scale: float) -> dict[str, torch.Tensor]:
    """Forward of all tiles merged, then each tile's backward."""
    out = lse = None
    for kind, keys, mask in x.tiles:
        tile_out, tile_lse = kernel.forward(kind, x.q_GSRH, x.k_GKH[:, keys], x.v_GKH[:, keys], mask, scale)
        if out is None or lse is None:
            out, lse = tile_out.to(tile_lse.dtype, copy=True), tile_lse.clone()
        else:
            merge_tile(out, lse, tile_out, tile_lse)
    assert out is not None and lse is not None
    wide = lse.dtype
    got = {"out": out, "lse": lse, "dq": torch.zeros_like(out)}
    got |= {name: torch.zeros(x.k_GKH.shape, dtype=wide, device=out.device) for name in ("dk", "dv")}
    merged = out.to(x.q_GSRH.dtype)
    for kind, keys, mask in x.tiles:
        grads = kernel.backward(
            kind, x.grad_GSRH, x.q_GSRH, x.k_GKH[:, keys], x.v_GKH[:, keys], merged, lse, mask, scale
        )
        got["dq"] += grads[0]
        got["dk"][:, keys] += grads[1]
        got["dv"][:, keys] += grads[2]
    return got


def tile_errors(kernel: AttentionKernel, case: TileCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative errors of merged output, log-sum-exp and gradients against plain products in fp64."""
    x, scale = _inputs(case, dtype, device), case.head_dim**-0.5
    want = _run(ProductKernel(), x.to(torch.float64), scale)
    return {name: error(value, want[name]) for name, value in _run(kernel, x, scale).items()}


def milliseconds(kernel: AttentionKernel, case: TileCase, dtype: torch.dtype, device: torch.device) -> float:
    """Forward and backward of all tiles of a case, mean of five after two for warming up."""
    x = _inputs(case, dtype, device)
    return 1e3 * seconds(lambda: _run(kernel, x, case.head_dim**-0.5), device)


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Mean wall time of a call, the device drained before and after."""
    drain = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(2):
        call()
    drain()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    drain()
    return (time.perf_counter() - began) / repeats


# ---- steps ----


def write_model(folder: Path, hidden: int = 256, layers: int = 4, ffn: int = 512, vocab: int = VOCAB) -> Path:
    """A Hugging Face folder of a small Qwen3 with head dim 64 and four query heads to two key/value heads per 256."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return folder


def policy(folder: Path, dtype: torch.dtype) -> MegatronPolicy:
    """A policy with gradient buffers and no optimizer; the default process group must exist."""
    return MegatronPolicy(folder, ParallelSizes(), None, dtype, seed=1, timeout_s=60)


def agent_rows(prompt: int, samples: int, turns: int, turn: int, vocab: int = VOCAB, seed: int = 0) -> Rows:
    """``samples`` conversations below one prompt, a row per turn (each row contains the turns before it)."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, vocab, prompt).tolist()
    rows = []
    for _ in range(samples):
        row = list(start)
        for _ in range(turns):
            row = row + rng.integers(0, vocab, turn).tolist()
            rows.append(list(row))
    return Rows.from_lists(rows)


def coefficients(rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(rows.num_tokens, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return values.to(device, dtype) / rows.num_tokens


def backward(policy: MegatronPolicy, engine: Engine, rows: Rows) -> None:
    """Gradient of a fixed random objective, left in the policy's buffers."""
    policy.zero_grad()
    wide = torch.float64 if policy.dtype == torch.float64 else torch.float32
    engine.backward(rows, coefficients(rows, policy.device, wide), temperature=0.8, sync="full")


def gradients(policy: MegatronPolicy, engine: Engine, rows: Rows) -> Gradients:
    """What `backward` leaves, of all parameters, on the CPU in fp64."""
    backward(policy, engine, rows)
    return {name: grad.to("cpu", torch.float64, copy=True) for name, grad in policy.gradients().items()}


def _total_error(got: Gradients, want: Gradients) -> float:
    """Relative error of all parameters as one vector."""
    squares = sum(float((got[name] - want[name]).norm()) ** 2 for name in want)
    return (squares / sum(float(grad.norm()) ** 2 for grad in want.values())) ** 0.5


def tree_engine(policy: MegatronPolicy, plan: PlanSettings, kernel: AttentionKernel | None = None) -> TreeEngine:
    """A tree engine with ``kernel``, or the device's own."""
    if kernel is None and policy.device.type == "cuda":
        kernel = cuda_kernel(policy.dtype, policy.shape.head_dim, policy.device)
    return TreeEngine(policy, plan, kernel)


def tree_errors(policy: MegatronPolicy, rows: Rows, kernel: AttentionKernel | None = None) -> dict[str, float]:
    """Whole step, per plan: largest relative error of a parameter's gradient against the dense engine."""
    want = gradients(policy, DenseEngine(policy), rows)
    errors = {}
    for plan in (PlanSettings("auto", 128), PlanSettings("classic"), PlanSettings("sparse")):
        got = gradients(policy, tree_engine(policy, plan, kernel), rows)
        errors[plan.kind] = max(error(got[name], want[name]) for name in want)
    return errors


def bf16_errors(exact: MegatronPolicy, low: MegatronPolicy, rows: Rows) -> dict[str, float]:
    """Error of the tree's and of the dense engine's low-precision gradient against the exact policy's."""
    want = gradients(exact, DenseEngine(exact), rows)
    engines: dict[str, Engine] = {"tree": tree_engine(low, PlanSettings("auto", 128)), "dense": DenseEngine(low)}
    return {name: _total_error(gradients(low, engine, rows), want) for name, engine in engines.items()}


def fused_error(policy: MegatronPolicy, rows: Rows) -> float:
    """A fused loss against given coefficients: error of all gradients as one vector."""
    mask_T = torch.ones(rows.num_tokens, dtype=torch.bool, device=policy.device)
    engine = tree_engine(policy, PlanSettings("auto", 128))
    policy.zero_grad()
    engine.backward(rows, -0.01 * mask_T.float(), sync="full")
    want = {name: grad.to("cpu", torch.float64, copy=True) for name, grad in policy.gradients().items()}
    policy.zero_grad()
    engine.backward_fused(rows, SFTTokenLoss(mask_T, 0.01), sync="full")
    return _total_error({name: grad.to("cpu", torch.float64) for name, grad in policy.gradients().items()}, want)


def peak_bytes(policy: MegatronPolicy, rows: Rows, plan: PlanSettings) -> int:
    """Bytes that a backward walk allocates on top of what was there (CUDA only)."""
    engine = tree_engine(policy, plan)
    backward(policy, engine, rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(policy, engine, rows)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

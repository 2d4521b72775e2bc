"""What the CUDA kernels' wrappers do, checked on the CPU: layouts, padding, masks, and the merging algebra in fp64.

PyTorch's CUDA operators are replaced by plain products that take the same arguments and enforce what the real ones
check (layout, alignment, log-sum-exp padding). Not covered: the operators themselves (``tests/gpu``).
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from areal_dta.engine.kernels_cuda import (
    CudaKernel,
    EfficientTiles,
    FlashTiles,
    aligned_bias,
    choose_cuda,
    cuda_kernel,
    padded_lse,
)
from areal_dta.engine.kernels_flex import FlexMasked, RowIntervals, bucket, tile_gradients
from areal_dta.tree.tiles import TileKind
from tests.gpu.checks import CASES, TileCase, tile_errors
from tests.gpu.stand_ins import EfficientStandIn, FlashStandIn

H, R, G = 16, 3, 2
SCALE = 0.3
AMPERE = (8, 0)


def test_stand_ins_refuse_what_the_installed_schemas_do_not_take() -> None:
    q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 1, 8)
    arguments = (q, k, k, None, None, 2, 2, 0.0, False, False)
    FlashStandIn()._flash_attention_forward(*arguments, scale=1.0)
    for args, kwargs in ((arguments[:-1], {}), (arguments, {"scaling": 1.0}), ((*arguments, 1.0), {})):
        with pytest.raises(TypeError, match="_flash_attention_forward"):
            FlashStandIn()._flash_attention_forward(*args, **kwargs)


# ---- the tiles of a block, merged, against plain attention over all keys ----


@dataclass(frozen=True)
class Problem:
    """A block of rows below a path: full tile on the path, causal or masked tile on the block itself."""

    q_GSRH: torch.Tensor
    k_GKH: torch.Tensor
    v_GKH: torch.Tensor
    grad_GSRH: torch.Tensor
    depth: int
    mask_SS: torch.Tensor | None  # None: causal


def _subtree_ends(num_rows: int, seed: int) -> torch.Tensor:
    """A random forest in depth-first order: one past the last row of each row's subtree."""
    rng = np.random.default_rng(seed)
    parents, path = [], []
    for row in range(num_rows):
        path = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.3 else path
        parents.append(path[-1] if path else -1)
        path = [*path, row]
    ends = np.arange(1, num_rows + 1)
    for row in reversed(range(num_rows)):
        if parents[row] >= 0:
            ends[parents[row]] = max(ends[parents[row]], ends[row])
    return torch.from_numpy(ends)


def _dense_mask(intervals: RowIntervals, dtype: torch.dtype) -> torch.Tensor:
    visible = intervals.visible_SK()
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)


def _problem(rows: int, depth: int, masked: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = _dense_mask(RowIntervals.of_subtrees(_subtree_ends(rows, seed), 0), dtype) if masked else None
    keys = depth + rows
    # queries and keys as they come from the engine: slices of longer buffers
    q, grad = random(G, rows + 5, R, H)[:, 2 : 2 + rows], random(G, rows, R, H)
    k, v = random(G, keys + 7, H)[:, :keys], random(G, keys + 7, H)[:, :keys]
    return Problem(q, k, v, grad, depth, mask)


def _reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(out, lse, gradients of q, k, v) of attention over all keys at once, by autograd in fp64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (problem.q_GSRH, problem.k_GKH, problem.v_GKH))
    s = q.shape[1]
    own = problem.mask_SS
    own = torch.full((s, s), -math.inf, dtype=torch.float64).triu(1) if own is None else own.double()
    mask_SK = torch.cat((torch.zeros(s, problem.depth, dtype=torch.float64), own), 1)
    scores = torch.einsum("gsrh,gkh->gsrk", q, k) * SCALE + mask_SK[None, :, None]
    out = torch.einsum("gsrk,gkh->gsrh", scores.softmax(-1), v)
    out.backward(problem.grad_GSRH.double())
    return out.detach(), scores.logsumexp(-1).detach(), (q.grad, k.grad, v.grad)


def _by_tiles(kernel: CudaKernel, p: Problem) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    path = (TileKind.FULL, p.k_GKH[:, : p.depth], p.v_GKH[:, : p.depth], None)
    kind = TileKind.CAUSAL if p.mask_SS is None else TileKind.MASKED
    own = (kind, p.k_GKH[:, p.depth :], p.v_GKH[:, p.depth :], p.mask_SS)
    tiles = [path, own] if p.depth else [own]
    parts = [kernel.forward(kind, p.q_GSRH, k, v, mask, SCALE) for kind, k, v, mask in tiles]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum(part[0] * (part[1] - lse).exp().unsqueeze(-1).to(part[0].dtype) for part in parts)
    grad_q, grads_k, grads_v = torch.zeros_like(p.q_GSRH), [], []
    for kind, k, v, mask in tiles:
        d_q, d_k, d_v = kernel.backward(kind, p.grad_GSRH, p.q_GSRH, k, v, out, lse, mask, SCALE)
        grad_q += d_q
        grads_k.append(d_k)
        grads_v.append(d_v)
    return out, lse, (grad_q, torch.cat(grads_k, 1), torch.cat(grads_v, 1))


def _plain_attend(q_GSRH, k_GKH, v_GKH, intervals, scale):
    """Autograd twin of FlexAttention (which has no backward on the CPU)."""
    scores = torch.einsum("gsrh,gkh->gsrk", q_GSRH, k_GKH) * scale
    scores = scores.masked_fill(~intervals.visible_SK()[None, :, None], -math.inf)
    return torch.einsum("gsrk,gkh->gsrh", scores.softmax(-1), v_GKH), scores.logsumexp(-1)


def _kernels() -> dict[str, CudaKernel]:
    flash, efficient = FlashTiles(FlashStandIn()), EfficientTiles(EfficientStandIn())
    return {
        "flash and bias": CudaKernel(flash, efficient),
        "efficient": CudaKernel(efficient, efficient),
        "flash and flex": CudaKernel(flash, FlexMasked(_plain_attend)),
    }


SHAPES = [(1, 0), (7, 5), (33, 1), (40, 64)]


@pytest.mark.parametrize("name", list(_kernels()))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_merged_tiles_equal_attention_over_all_keys_in_fp64(name: str, masked: bool, rows: int, depth: int) -> None:
    problem = _problem(rows, depth, masked, seed=rows)
    want_out, want_lse, want_grads = _reference(problem)
    out, lse, grads = _by_tiles(_kernels()[name], problem)
    assert float((out - want_out).abs().max()) <= 1e-12
    assert float((lse - want_lse).abs().max()) <= 1e-12
    for got, want in zip(grads, want_grads, strict=True):
        assert float((got - want).abs().max()) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_wrappers_keep_the_models_dtype(dtype: torch.dtype, masked: bool) -> None:
    problem = _problem(19, 23, masked, dtype)
    want_out, _, want_grads = _reference(problem)
    for name, kernel in _kernels().items():
        if "flex" in name and dtype == torch.bfloat16:
            continue
        out, lse, grads = _by_tiles(kernel, problem)
        assert out.dtype == dtype and grads[0].dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        assert float((out.double() - want_out).norm() / want_out.norm()) < bound
        for got, want in zip(grads, want_grads, strict=True):
            assert float((got.double() - want).norm() / want.norm()) < bound


def test_rows_that_see_no_key_of_a_tile_give_zero_and_minus_infinity() -> None:
    problem = _problem(6, 0, masked=False)
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[2:4] = -math.inf
    for kernel in (_kernels()["efficient"], CudaKernel(FlashTiles(FlashStandIn()), EfficientTiles(EfficientStandIn()))):
        out, lse = kernel.forward(TileKind.MASKED, problem.q_GSRH, problem.k_GKH, problem.v_GKH, mask, SCALE)
        assert not out[:, 2:4].any()
        assert (lse[:, 2:4] == -math.inf).all()
        assert torch.isfinite(lse[:, :2]).all()


def test_folding_and_grouping_do_not_copy_what_lies_together() -> None:
    seen: list[torch.Tensor] = []

    class Spy(FlashStandIn):
        def _flash_attention_forward(self, *args, **kwargs):
            seen.extend(args[:3])
            return super()._flash_attention_forward(*args, **kwargs)

    problem = _problem(9, 4, masked=False)
    _by_tiles(CudaKernel(FlashTiles(Spy()), EfficientTiles(EfficientStandIn())), problem)
    owned = {x.untyped_storage().data_ptr() for x in (problem.q_GSRH, problem.k_GKH, problem.v_GKH)}
    assert all(x.untyped_storage().data_ptr() in owned for x in seen)
    assert seen[0].shape == (G, 9 * R, 1, H) and seen[3].shape == (G, 9, R, H)


@pytest.mark.parametrize("case", [case for case in CASES if case.rows * case.depth < 1 << 16], ids=str)
def test_the_gpu_checks_run_on_the_cpu(case: TileCase) -> None:
    for kernel in _kernels().values():
        errors = tile_errors(kernel, case, torch.float32, torch.device("cpu"))
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("kind", [TileKind.FULL, TileKind.CAUSAL])
def test_the_real_operators_take_the_calls_on_meta_tensors(kind: TileKind) -> None:
    """Shapes and dtypes by PyTorch's own shape functions (that of the memory-efficient backward is broken in 2.13)."""
    q = torch.empty(G, 33, R, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(G, 33, 64, dtype=torch.bfloat16, device="meta")
    for tiles in (FlashTiles(), EfficientTiles()):
        out, lse = tiles.forward(kind, q, k, k, None, SCALE)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    mask = torch.empty(33, 33, dtype=torch.bfloat16, device="meta")
    assert EfficientTiles().forward(TileKind.MASKED, q, k, k, mask, SCALE)[0].shape == q.shape
    grads = FlashTiles().backward(kind, out, q, k, k, out, lse, None, SCALE)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


# ---- padding ----


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_rows_start_at_vector_boundaries(keys: int, dtype: torch.dtype) -> None:
    mask = torch.zeros(5, keys).masked_fill_(torch.rand(5, keys) < 0.5, -math.inf)
    bias = aligned_bias(mask, dtype)
    assert bias.dtype == dtype and bias.shape == mask.shape
    assert bias.stride(0) % 16 == 0 and bias.stride(1) == 1
    assert torch.equal(bias.float(), mask)
    assert aligned_bias(bias, dtype) is bias


def test_a_masks_bias_is_made_once_and_freed_with_it() -> None:
    ops = EfficientStandIn()
    kernel = EfficientTiles(ops)
    for keys in (5, 16):  # padded, and already aligned
        ops.biases.clear()
        q, k, v = torch.randn(G, 5, R, H), torch.randn(G, keys, H), torch.randn(G, keys, H)
        mask = torch.zeros(5, keys)
        for _ in range(2):
            kernel.forward(TileKind.MASKED, q, k, v, mask, SCALE)
        assert ops.biases[0].data_ptr() == ops.biases[1].data_ptr()
        alive = weakref.ref(mask)
        ops.biases.clear()
        del mask
        gc.collect()
        assert alive() is None
    assert not len(kernel._biases)


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_log_sum_exps_are_padded_with_infinity(rows: int) -> None:
    lse = torch.randn(G, rows, R)
    padded = padded_lse(lse)
    assert padded.shape == (G, R, math.ceil(rows / 32) * 32) and padded.is_contiguous()
    assert torch.equal(padded[..., :rows], lse.transpose(1, 2))
    assert (padded[..., rows:] == math.inf).all()


# ---- FlexAttention's masks ----


@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (5, 3), (130, 0), (200, 300)])
def test_block_mask_of_the_tour_equals_the_dense_mask(rows: int, depth: int) -> None:
    intervals = RowIntervals.of_subtrees(_subtree_ends(rows, rows + depth) + 2, depth)
    dense = intervals.visible_SK()
    ends = _subtree_ends(rows, rows + depth)
    row = torch.arange(rows)
    own = (row[None, :] <= row[:, None]) & (row[:, None] < (ends + 2).clamp(max=rows)[None, :])
    assert torch.equal(dense, torch.cat((torch.ones(rows, depth, dtype=torch.bool), own), 1))
    size_q, size_k = bucket(rows), bucket(rows + depth)
    got = intervals.block_mask
    want = create_block_mask(got.mask_mod, None, None, size_q, size_k, device="cpu")
    assert torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    index = torch.arange(size_q)[:, None], torch.arange(size_k)[None, :]
    padded = torch.zeros(size_q, size_k, dtype=torch.bool)
    padded[:rows, : rows + depth] = dense
    assert torch.equal(got.mask_mod(None, None, *index), padded)


def test_intervals_of_a_mask_are_those_of_its_tour() -> None:
    want = RowIntervals.of_subtrees(_subtree_ends(50, 3), 20)
    got = RowIntervals.of_mask(_dense_mask(want, torch.float32))
    assert torch.equal(got.first_K, want.first_K) and torch.equal(got.end_K, want.end_K)


def test_a_mask_with_scattered_rows_is_refused() -> None:
    mask = torch.zeros(4, 4)
    mask[1, 0] = -math.inf
    with pytest.raises(ValueError, match="not consecutive"):
        RowIntervals.of_mask(mask)


@pytest.mark.parametrize(("rows", "depth", "dtype"), [(37, 20, torch.float32), (140, 0, torch.float64)])
def test_flex_attention_forward_equals_plain_attention(rows: int, depth: int, dtype: torch.dtype) -> None:
    """The real FlexAttention, which the CPU runs forward only."""
    p = _problem(rows, depth, masked=True, dtype=dtype)
    intervals = RowIntervals.of_subtrees(_subtree_ends(rows, 0), depth)
    mask = _dense_mask(intervals, dtype)
    out, lse = FlexMasked().forward(TileKind.MASKED, p.q_GSRH, p.k_GKH, p.v_GKH, mask, SCALE)
    want_out, want_lse = _plain_attend(p.q_GSRH, p.k_GKH, p.v_GKH, intervals, SCALE)
    bound = 1e-12 if dtype == torch.float64 else 2e-6
    assert float((out - want_out).abs().max()) <= bound
    assert float((lse - want_lse).abs().max()) <= bound


def test_tile_gradients_of_a_row_without_weight_are_zero() -> None:
    out_t, lse_t = torch.zeros(2, H), torch.full((2,), -math.inf)
    grads = tile_gradients(out_t, lse_t, torch.randn(2, H), torch.randn(2, H), torch.randn(2))
    assert all(not grad.any() for grad in grads)


def test_buckets_are_powers_of_two_from_128() -> None:
    assert [bucket(n) for n in (1, 128, 129, 256, 2000)] == [128, 128, 256, 256, 2048]


# ---- choice ----


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "dense"),
    [
        (torch.bfloat16, 128, AMPERE, "flash"),
        (torch.float16, 64, (9, 0), "flash"),
        (torch.bfloat16, 320, (9, 0), "efficient"),
        (torch.float16, 64, (7, 5), "efficient"),
        (torch.float32, 68, AMPERE, "efficient"),
        (torch.bfloat16, 64, (7, 5), "product"),
        (torch.bfloat16, 60, AMPERE, "product"),
        (torch.float32, 66, AMPERE, "product"),
        (torch.float64, 64, (9, 0), "product"),
    ],
)
def test_choice_follows_what_the_operators_support(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], dense: str
) -> None:
    choice = choose_cuda(dtype, head_dim, capability)
    assert choice.dense == dense
    assert (choice.masked == "product") == (dense == "product")
    assert choice.reason


def test_the_log_says_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: messages.append(text % values))
    monkeypatch.setattr("areal_dta.engine.kernels_cuda.log", log)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert isinstance(cuda_kernel(torch.bfloat16, 128), CudaKernel)
    assert isinstance(cuda_kernel(torch.bfloat16, 128, masked="flex"), CudaKernel)
    assert cuda_kernel(torch.float64, 128) is None
    for message, part in zip(messages, ("tiles flash", "tiles flex", "no fused kernel"), strict=True):
        assert part in message

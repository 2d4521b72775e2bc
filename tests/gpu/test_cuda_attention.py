"""PyTorch's CUDA attention operators behind the engine's kernels, against plain products in fp64.

Never run in CI: they need a CUDA device. Bounds: twice the error that plain products in the same dtype have, and an
absolute floor.
"""

from __future__ import annotations

import pytest
import torch

from areal_dta.engine.kernels import ProductKernel
from areal_dta.engine.kernels_cuda import CudaKernel, EfficientTiles, FlashTiles, cuda_kernel
from areal_dta.engine.kernels_flex import FlexMasked
from areal_dta.tree.tiles import TileKind
from tests.gpu.checks import CASES, TileCase, tile_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLOOR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
KERNELS = {
    "flash, bias": (lambda: CudaKernel(FlashTiles(), EfficientTiles()), (torch.bfloat16, torch.float16)),
    "efficient": (lambda: CudaKernel(EfficientTiles(), EfficientTiles()), tuple(FLOOR)),
    "flash, flex": (lambda: CudaKernel(FlashTiles(), FlexMasked()), (torch.bfloat16, torch.float16)),
}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _compiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test session disables dynamo; FlexAttention is nothing without it."""
    monkeypatch.setattr(torch._dynamo.config, "disable", False)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in KERNELS.items() for dtype in dtypes]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_merged_tiles_are_as_exact_as_plain_products(
    device: torch.device, name: str, dtype: torch.dtype, case: TileCase
) -> None:
    got = tile_errors(KERNELS[name][0](), case, dtype, device)
    plain = tile_errors(ProductKernel(), case, dtype, device)
    for quantity, value in got.items():
        assert value <= max(2 * plain[quantity], FLOOR[dtype]), f"{quantity}: {value:.2e}, plain {plain[quantity]:.2e}"


@pytest.mark.parametrize("dense", [FlashTiles, EfficientTiles])
def test_a_merged_log_sum_exp_is_taken_as_it_is(device: torch.device, dense: type) -> None:
    """The backward must use the given output and log-sum-exp, not its own: twice the weight, twice the gradient."""
    kernel = CudaKernel(dense(), EfficientTiles())
    q = torch.randn(1, 32, 2, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 48, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, lse = kernel.forward(TileKind.FULL, q, k, v, None, 0.125)
    grad, zero = torch.randn_like(out), torch.zeros_like(out)
    _, _, once = kernel.backward(TileKind.FULL, grad, q, k, v, zero, lse, None, 0.125)
    _, _, twice = kernel.backward(TileKind.FULL, grad, q, k, v, zero, lse - torch.log(torch.tensor(2.0)), None, 0.125)
    torch.testing.assert_close(twice.float(), 2 * once.float(), rtol=2e-2, atol=1e-3)


def test_rows_without_keys_weigh_nothing(device: torch.device) -> None:
    q = torch.randn(2, 40, 2, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 40, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.zeros(40, 40, device=device, dtype=torch.bfloat16)
    mask[7:9] = -torch.inf
    out, lse = EfficientTiles().forward(TileKind.MASKED, q, k, v, mask, 0.125)
    assert not out[:, 7:9].any()
    assert (lse[:, 7:9] == -torch.inf).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", list(FLOOR))
def test_the_chosen_kernel_runs(device: torch.device, dtype: torch.dtype) -> None:
    kernel = cuda_kernel(dtype, 128, device)
    assert kernel is not None
    assert tile_errors(kernel, CASES[1], dtype, device)["dq"] < 10 * FLOOR[dtype]

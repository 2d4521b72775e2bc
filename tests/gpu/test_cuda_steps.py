"""Whole steps on one GPU: Transformer Engine layers, the tree against dense rows, memory. Not several GPUs."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
import torch

from areal_dta.engine import MegatronPolicy, PlanSettings, init_process_group
from areal_dta.engine.kernels import ProductKernel
from tests.gpu.checks import agent_rows, bf16_errors, fused_error, peak_bytes, policy, tree_errors, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs transformer-engine[pytorch]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    init_process_group(0, 1, "127.0.0.1", port, timeout_s=60)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> MegatronPolicy:
    return policy(folder, torch.float32)


@pytest.fixture(scope="module")
def low(folder: Path) -> MegatronPolicy:
    return policy(folder, torch.bfloat16)


ROWS = agent_rows(prompt=150, samples=4, turns=3, turn=37)


def test_fp32_gradients_equal_the_dense_engine(exact: MegatronPolicy) -> None:
    for plan, value in tree_errors(exact, ROWS).items():
        assert value <= 1e-5, f"plan {plan}: {value:.2e}"


def test_plain_products_give_the_same_gradients(exact: MegatronPolicy) -> None:
    assert max(tree_errors(exact, ROWS, ProductKernel()).values()) <= 1e-5


def test_fp64_gradients_equal_the_dense_engine(folder: Path) -> None:
    assert max(tree_errors(policy(folder, torch.float64), ROWS).values()) <= 1e-10


def test_bf16_error_is_no_larger_than_dense_bf16(exact: MegatronPolicy, low: MegatronPolicy) -> None:
    errors = bf16_errors(exact, low, ROWS)
    assert errors["tree"] <= 1.1 * errors["dense"], errors


def test_fused_loss_equals_given_coefficients(exact: MegatronPolicy) -> None:
    assert fused_error(exact, ROWS) <= 1e-5


def test_memory_follows_the_path_not_the_tree(low: MegatronPolicy) -> None:
    plan = PlanSettings("classic")
    few, many = (agent_rows(prompt=1024, samples=n, turns=1, turn=256) for n in (4, 32))
    assert peak_bytes(low, many, plan) <= 1.1 * peak_bytes(low, few, plan)


@needs_te
def test_bf16_layers_are_transformer_engines(low: MegatronPolicy) -> None:
    names = {type(module).__name__ for module in low.model.modules()}
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TreeAttention"} <= names
    parameters = dict(low.model.named_parameters())
    assert any(name.endswith("linear_qkv.layer_norm_weight") for name in parameters)
    assert all(param.main_grad.dtype == torch.float32 for param in parameters.values())


@needs_te
def test_transformer_engine_layers_keep_hugging_face_weights(low: MegatronPolicy, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    low.save_hf(tmp_path / "saved")
    want, got = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name].bfloat16(), got[name]) for name in want)

"""Captured steps on one GPU: replays equal eager runs, padded or not, and share one pool. Not the server's steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from areal_dta.drafter.arms import DEFAULT_ARMS
from areal_dta.drafter.graph_capture import GraphPool, record_cuda
from areal_dta.drafter.graphs import GraphKey, GraphSizes, plan_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, FFN, VOCABULARY, MAX_BATCH = 256, 1024, 4096, 8
SIZES = GraphSizes.of_model(2, HIDDEN, FFN, VOCABULARY, VOCABULARY, element_bytes=4)


class TwoLayers:
    """Embedding, two residual feed-forward layers and a head: enough kernels to capture."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5

        self.embed_VD = weight(VOCABULARY, HIDDEN)
        self.layers = [(weight(FFN, HIDDEN), weight(HIDDEN, FFN)) for _ in range(2)]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed_VD[inputs["ids"]] + inputs["bias"][:, None, None]
        for up, down in self.layers:
            x = x + torch.nn.functional.silu(x @ up.T) @ down.T
        return x @ self.embed_VD.T


def inputs_of(key: GraphKey) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.zeros(key.batch, key.num_rows, dtype=torch.int64, device="cuda"),
        "bias": torch.zeros(key.batch, device="cuda"),
    }


def test_replays_equal_eager_runs_at_every_size() -> None:
    step, plan = TwoLayers(), plan_graphs(DEFAULT_ARMS, MAX_BATCH, SIZES, 1 << 32)
    pool = GraphPool(plan, record_cuda())
    assert pool.capture("target", step, inputs_of) + pool.capture("draft", step, inputs_of) == len(plan.graphs)
    generator = torch.Generator("cuda").manual_seed(1)
    for key in [g.key for g in plan.graphs] * 2 + [GraphKey("target", 3, 6), GraphKey("target", 5, 1)]:
        inputs = {
            "ids": torch.randint(0, VOCABULARY, (key.batch, key.num_rows), generator=generator, device="cuda"),
            "bias": torch.randn(key.batch, generator=generator, device="cuda"),
        }
        replayed = pool.run(key.kind, step, inputs, key.batch, key.num_rows)
        torch.testing.assert_close(replayed, step(inputs), rtol=1e-4, atol=1e-4)


def test_captures_take_no_more_than_planned() -> None:
    step, plan = TwoLayers(), plan_graphs(DEFAULT_ARMS, MAX_BATCH, SIZES, 1 << 32)
    step(inputs_of(GraphKey("target", 1, 1)))  # workspaces of the libraries are not the graphs'
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    pool = GraphPool(plan, record_cuda())
    pool.capture("target", step, inputs_of)
    pool.capture("draft", step, inputs_of)
    torch.cuda.synchronize()
    used = free_before - torch.cuda.mem_get_info()[0]
    assert used <= 1.5 * plan.num_bytes + (64 << 20)

"""The plan of CUDA graphs, and the pool around them with a stand-in recorder.

Not covered here: capturing on a device (`tests/gpu/test_cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.graph_capture import GraphPool, Recording, record_cuda
from areal_dta.drafter.graphs import GraphKey, GraphPlan, GraphSizes, batch_buckets, plan_graphs

SIZES = GraphSizes.of_model(num_layers=30, hidden=576, ffn=1536, vocabulary=49_152, draft_vocabulary=8_192)
PLENTY = 1 << 40


def keys(plan: GraphPlan) -> set[GraphKey]:
    return {g.key for g in plan.graphs}


def test_buckets_are_powers_of_two_and_the_largest_batch() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(8) == (1, 2, 4, 8)
    assert batch_buckets(24) == (1, 2, 4, 8, 16, 24)
    with pytest.raises(ValueError, match="max_batch=0"):
        batch_buckets(0)


def test_arms_share_target_graphs_by_rows_and_drafter_graphs_by_width() -> None:
    arms = (OFF, Arm("ngram", 7, 1, 7), Arm("eagle", 3, 2, 7), Arm("eagle", 5, 2, 7), Arm("eagle", 1, 1, 1))
    plan = plan_graphs(arms, 2, SIZES, PLENTY)
    assert keys(plan) == {
        GraphKey(kind, batch, rows) for batch in (1, 2) for kind, rows in
        (("target", 1), ("target", 8), ("target", 2), ("draft", 1), ("draft", 2))
    }  # fmt: skip
    shared = {g.key: g.arms for g in plan.graphs}
    assert shared[GraphKey("target", 2, 8)] == ("ngram-d7-k1-v7", "eagle-d3-k2-v7", "eagle-d5-k2-v7")
    assert shared[GraphKey("draft", 2, 1)] == ("eagle-d3-k2-v7", "eagle-d5-k2-v7", "eagle-d1-k1-v1")
    assert "arms share 10 captures for 20 uses" in plan.describe()[0]
    assert len(plan.describe()) == 1


def test_activations_are_counted_once_and_the_rest_per_graph() -> None:
    plan = plan_graphs((OFF,), 4, SIZES, PLENTY)
    assert plan.pool_bytes == SIZES.pool_bytes(GraphKey("target", 4, 1))
    assert plan.num_bytes == plan.pool_bytes + sum(SIZES.own_bytes(GraphKey("target", b, 1)) for b in (1, 2, 4))
    assert SIZES.own_bytes(GraphKey("draft", 4, 1)) < SIZES.own_bytes(GraphKey("target", 4, 1)) / 5


@given(st.integers(0, 300), st.sampled_from([1, 6, 32]))
def test_the_budget_holds_and_what_is_left_out_is_named(budget_mib: int, max_batch: int) -> None:
    plan = plan_graphs(DEFAULT_ARMS, max_batch, SIZES, budget_mib << 20)
    assert not plan.graphs or plan.num_bytes <= budget_mib << 20
    wanted = keys(plan_graphs(DEFAULT_ARMS, max_batch, SIZES, PLENTY))
    left_out = {g.key for g in plan.eager}
    assert keys(plan) | left_out == wanted and not keys(plan) & left_out
    for key in left_out:
        assert str(key) in plan.describe()[1]


def test_plain_decoding_is_captured_before_speculation_and_small_batches_before_large() -> None:
    full = plan_graphs(DEFAULT_ARMS, 32, SIZES, PLENTY)
    order = [g.key for g in full.graphs]
    assert order[:6] == [GraphKey("target", b, 1) for b in (1, 2, 4, 8, 16, 32)]
    assert [k.batch for k in order[6:]] == sorted(k.batch for k in order[6:])
    tight = plan_graphs(DEFAULT_ARMS, 32, SIZES, full.num_bytes // 4)
    assert keys(tight) >= set(order[:6])


def test_large_batches_that_never_speculate_get_no_graphs_for_it() -> None:
    plan = plan_graphs(DEFAULT_ARMS, 32, SIZES, PLENTY, max_spec_batch=4)
    assert {k for k in keys(plan) if k.batch > 4} == {GraphKey("target", b, 1) for b in (8, 16, 32)}


def test_the_smallest_fitting_graph_is_found() -> None:
    plan = plan_graphs((OFF, Arm("ngram", 3, 1, 3), Arm("ngram", 7, 1, 7)), 8, SIZES, PLENTY)
    assert plan.find("target", 3, 3) == GraphKey("target", 4, 4)
    assert plan.find("target", 8, 8) == GraphKey("target", 8, 8)
    assert plan.find("target", 9, 1) is None
    assert plan.find("target", 1, 9) is None
    assert plan.find("draft", 1, 1) is None


class Recorder:
    """Records as a capture does: later runs see the buffers only, and write into the first output."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.num_replays = 0

    def __call__(self, step, inputs: Mapping[str, torch.Tensor]) -> Recording:
        output = step(inputs).clone()
        self.shapes.append(tuple(inputs["ids"].shape))

        def replay() -> None:
            self.num_replays += 1
            output.copy_(step(inputs))

        return Recording(replay, output)


def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["ids"] * 10 + inputs["lens"][:, None]).unsqueeze(-1).float()


def inputs_of(key: GraphKey) -> dict[str, torch.Tensor]:
    return {"ids": torch.full((key.batch, key.num_rows), -1), "lens": torch.zeros(key.batch, dtype=torch.int64)}


def test_a_padded_replay_equals_the_eager_step() -> None:
    plan = plan_graphs((OFF, Arm("ngram", 3, 1, 3)), 4, SIZES, PLENTY)
    recorder = Recorder()
    pool = GraphPool(plan, recorder)
    assert pool.capture("target", step, inputs_of) == 6
    assert recorder.shapes[0] == (4, 4)  # the largest first
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 4), (1, 1), (3, 2), (4, 4), (2, 4), (3, 3)]
    for batch, rows in sizes:
        inputs = {
            "ids": torch.randint(0, 100, (batch, rows), generator=generator),
            "lens": torch.randint(0, 100, (batch,), generator=generator),
        }
        assert torch.equal(pool.run("target", step, inputs, batch, rows), step(inputs))
    assert recorder.num_replays == len(sizes)


def test_padding_returns_to_its_harmless_values_after_a_larger_step() -> None:
    plan = plan_graphs((Arm("ngram", 3, 1, 3),), 4, SIZES, PLENTY)
    seen: list[torch.Tensor] = []

    def spy(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        seen.append(inputs["ids"].clone())
        return step(inputs)

    pool = GraphPool(plan, Recorder())
    pool.capture("target", spy, inputs_of)
    pool.run("target", spy, {"ids": torch.full((4, 4), 7), "lens": torch.ones(4, dtype=torch.int64)}, 4, 4)
    pool.run("target", spy, {"ids": torch.full((3, 2), 7), "lens": torch.ones(3, dtype=torch.int64)}, 3, 2)
    expected = torch.full((4, 4), -1)
    expected[:3, :2] = 7
    assert torch.equal(seen[-1], expected)


def test_a_step_without_a_graph_runs_eagerly() -> None:
    pool = GraphPool(plan_graphs((OFF,), 2, SIZES, 0), Recorder())
    assert pool.capture("target", step, inputs_of) == 0
    inputs = {"ids": torch.ones(2, 1, dtype=torch.int64), "lens": torch.ones(2, dtype=torch.int64)}
    assert torch.equal(pool.run("target", step, inputs, 2, 1), step(inputs))


def test_other_inputs_than_captured_are_refused() -> None:
    pool = GraphPool(plan_graphs((OFF,), 1, SIZES, PLENTY), Recorder())
    pool.capture("target", step, inputs_of)
    with pytest.raises(ValueError, match=r"target 1x1 was captured with inputs \['ids', 'lens'\]"):
        pool.run("target", step, {"ids": torch.ones(1, 1)}, 1, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_capturing_without_a_device_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="run without a graph pool"):
        record_cuda()

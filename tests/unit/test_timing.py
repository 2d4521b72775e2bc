"""Predicted seconds: the non-negative fit, the features of blocks and what a plan adds up to. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.calibration import Calibration, CalibrationError
from areal_dta.tree.plan import Block, Op, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.timing import FEATURES, Sample, TimeModel, block_features, fit_times, nnls
from areal_dta.tree.trie import Trie, build_trie

SIZES = ModelSizes(64, 4, 4, 2, 16, 128, 1000)
MODEL = TimeModel(
    (1e-3, 1e-5, 1e-9, 2e-9, 3e-9, 1e-5), (2e-3, 2e-5, 2e-9, 4e-9, 6e-9, 2e-5), (1e-4, 1e-6), (2e-4, 3e-6), 0.8
)


def trie_of(*rows: list[int]) -> Trie:
    offsets = np.cumsum([0, *map(len, rows)])
    return build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets)


def chain(num_tokens: int, depth: int = 0, first: int = 0) -> Block:
    return Block.chain(np.arange(first, first + num_tokens), depth)


# ---- the fit ----


@st.composite
def systems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    a = rng.standard_normal((rows, columns)) if draw(st.booleans()) else rng.random((rows, columns))
    a *= 10.0 ** rng.integers(-6, 7, columns)
    if columns > 1 and draw(st.booleans()):
        a[:, 1] = 3 * a[:, 0]  # dependent columns
    if draw(st.booleans()):
        a[:, -1] = 0
    b = a @ np.maximum(rng.standard_normal(columns), 0) if draw(st.booleans()) else rng.standard_normal(rows)
    return a, b


@given(systems())
@settings(max_examples=400, deadline=None)
def test_the_fit_fulfils_the_karush_kuhn_tucker_conditions(system: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = system
    x = nnls(a, b)
    assert x.shape == (a.shape[1],) and (x >= 0).all()
    scale = np.linalg.norm(a, axis=0) * np.linalg.norm(b)
    gradient = (a.T @ (a @ x - b)) / np.where(scale > 0, scale, 1)
    assert gradient.min() >= -1e-9, "a coefficient at its bound would still lower the error"
    assert np.abs(gradient[x > 0]).max(initial=0) <= 1e-9
    assert (x[np.linalg.norm(a, axis=0) == 0] == 0).all()


def test_nothing_to_fit_gives_zeros() -> None:
    assert nnls(np.zeros((3, 0)), np.ones(3)).tolist() == []
    assert nnls(np.ones((2, 2)), np.zeros(2)).tolist() == [0, 0]
    assert nnls(np.eye(2), np.asarray([-1.0, 2.0])).tolist() == [0, 2]


def samples_of(model: TimeModel, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for tokens, full, causal, masked, tiles in (
        (64, 0, 64 * 65 / 2, 0, 1), (512, 0, 512 * 513 / 2, 0, 1), (2048, 0, 2048 * 2049 / 2, 0, 1),
        (64, 64 * 4000, 64 * 65 / 2, 0, 2), (512, 512 * 2000, 512 * 513 / 2, 0, 2), (512, 0, 0, 512 * 512, 1),
        (800, 4e5, 4e3, 0, 180), (300, 9e4, 0, 9e4, 40), (2048, 2048 * 4000, 2048 * 2049 / 2, 0, 2),
    ):  # fmt: skip
        features = np.asarray([1, tokens, full, causal, masked, tiles], np.float64)
        factors = 1 + noise * rng.standard_normal(4)
        times = np.asarray([
            features @ np.asarray(model.forward_F), features @ np.asarray(model.backward_F),
            *(np.asarray([1, tokens]) @ np.asarray(head) for head in (model.head_forward_H, model.head_backward_H)),
        ])  # fmt: skip
        times *= factors
        samples.append(Sample(features, tokens, *times.tolist(), keys_s=float(times[0] * model.keys_share)))
    return samples


def test_exact_times_are_fitted_exactly() -> None:
    fit = fit_times(samples_of(MODEL))
    assert np.allclose(fit.model.forward_F, MODEL.forward_F, rtol=1e-6)
    assert np.allclose(fit.model.backward_F, MODEL.backward_F, rtol=1e-6)
    assert fit.model.head_forward_H == pytest.approx(MODEL.head_forward_H, rel=1e-6)
    assert fit.model.head_backward_H == pytest.approx(MODEL.head_backward_H, rel=1e-6)
    assert fit.model.keys_share == pytest.approx(0.8)
    assert fit.model.measured and fit.max_error < 1e-9


def test_noise_in_the_times_is_reported_and_small_blocks_count_as_much_as_large_ones() -> None:
    fit = fit_times(samples_of(MODEL, noise=0.05))
    assert 0.005 < fit.rms_error < 0.08 and fit.max_error < 0.2
    for sample in samples_of(MODEL):
        assert sample.features_F @ np.asarray(fit.model.forward_F) == pytest.approx(sample.forward_s, rel=0.15)


def test_one_disturbed_measurement_does_not_spoil_the_others() -> None:
    samples = samples_of(MODEL, noise=0.01)
    samples[4] = replace(samples[4], forward_s=3 * samples[4].forward_s)
    fit = fit_times(samples)
    assert fit.max_error > 0.5
    for sample in samples_of(MODEL):
        assert sample.features_F @ np.asarray(fit.model.forward_F) == pytest.approx(sample.forward_s, rel=0.1)


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit_times([])
    with pytest.raises(ValueError, match="forward_s of a measured block is 0"):
        fit_times([replace(samples_of(MODEL)[0], forward_s=0.0)])
    with pytest.raises(ValueError, match="not negative"):
        replace(MODEL, head_forward_H=(0, -1e-9))
    with pytest.raises(ValueError, match=f"there are {len(FEATURES)}"):
        replace(MODEL, forward_F=(1.0,))


# ---- blocks and plans ----


def test_features_count_the_pairs_that_kernels_compute() -> None:
    features = dict(zip(FEATURES, block_features(chain(10, depth=7)), strict=True))
    assert features == {
        "blocks": 1, "tokens": 10, "full_pairs": 70, "causal_pairs": 100, "masked_pairs": 0, "tiles": 2,
    }  # fmt: skip


def test_of_a_long_triangle_only_the_diagonal_is_computed_in_vain() -> None:
    pairs = [block_features(chain(n))[FEATURES.index("causal_pairs")] for n in (512, 1024, 4096)]
    assert pairs == [512 * 512, 1024 * (1024 + 512) / 2, 4096 * (4096 + 512) / 2]


def test_a_recomputed_push_costs_one_more_forward() -> None:
    blocks = (chain(100), chain(40, depth=100, first=100))
    ops = (Op(OpKind.PUSH, 0), Op(OpKind.VISIT, 1), Op(OpKind.POP, 0))
    kept, again = (WalkPlan(blocks, ops, (keep, False)) for keep in (True, False))
    extra = MODEL.seconds(again) - MODEL.seconds(kept)
    forward_s = float(block_features(blocks[0]) @ np.asarray(MODEL.forward_F))
    assert extra == pytest.approx(MODEL.keys_share * forward_s)  # the first one stops at the last layer's keys
    assert MODEL.seconds(again, backward=False) == MODEL.seconds(kept, backward=False)


def test_only_projected_positions_pay_the_head() -> None:
    plan = WalkPlan((chain(50),), (Op(OpKind.VISIT, 0),), (False,))
    need_U = np.zeros(50, bool)
    need_U[10:15] = True
    assert MODEL.seconds(plan) - MODEL.seconds(plan, need_U) == pytest.approx(45 * MODEL.head_backward_H[1])
    saved = MODEL.seconds(plan, backward=False) - MODEL.seconds(plan, need_U, backward=False)
    assert saved == pytest.approx(45 * MODEL.head_forward_H[1])


def test_a_block_whose_output_nobody_reads_stops_early() -> None:
    plan = WalkPlan(
        (chain(100), chain(40, 100, 100)), (Op(OpKind.PUSH, 0), Op(OpKind.VISIT, 1), Op(OpKind.POP, 0)), (True, False)
    )
    need_U = np.arange(140) >= 100
    all_read = MODEL.seconds(plan) - MODEL.head_backward_H[0] - 100 * MODEL.head_backward_H[1]
    passes = sum(float(block_features(plan.blocks[0]) @ np.asarray(c)) for c in (MODEL.forward_F, MODEL.backward_F))
    assert all_read - MODEL.seconds(plan, need_U) == pytest.approx((1 - MODEL.keys_share) * passes)


def test_ranks_can_be_balanced_by_measured_seconds() -> None:
    cost = MODEL.cost_model()
    assert cost.per_token == pytest.approx(1e-5 + 2e-5 + 3e-6)
    assert cost.per_pair == pytest.approx(1e-9 + 2e-9)


def test_an_empty_plan_takes_no_time() -> None:
    assert MODEL.seconds(WalkPlan((), (), ())) == 0


@pytest.mark.parametrize("kind", ["auto", "classic", "sparse"])
def test_a_plan_costs_the_sum_of_its_operations(kind: str) -> None:
    rng = np.random.default_rng(3)
    trunk = rng.integers(0, 50, 300).tolist()
    trie = trie_of(*(trunk[:cut] + rng.integers(50, 99, 40).tolist() for cut in (300, 300, 250, 100)))
    plan = plan_walk(trie, PlanSettings(kind=kind, max_block_tokens=128))  # type: ignore[arg-type]
    total = 0.0
    for op in plan.ops:
        features = block_features(plan.blocks[op.block])
        if op.kind is not OpKind.POP or not plan.keep_B[op.block]:
            share = MODEL.keys_share if op.kind is OpKind.PUSH and not plan.keep_B[op.block] else 1.0
            total += share * float(features @ np.asarray(MODEL.forward_F))
        if op.kind is not OpKind.PUSH:
            total += float(features @ np.asarray(MODEL.backward_F))
            total += MODEL.head_backward_H[0] + plan.blocks[op.block].num_tokens * MODEL.head_backward_H[1]
    assert MODEL.seconds(plan) == pytest.approx(total)


def test_the_analytic_model_prefers_sharing_and_tensor_parallel_ranks_share_the_work() -> None:
    rows = [[7] * 200 + [i] * 20 for i in range(8)]
    shared = plan_walk(trie_of(*rows), PlanSettings("auto"))
    alone = plan_walk(trie_of(*([i] + row for i, row in enumerate(rows))), PlanSettings("auto"))
    model = TimeModel.of_shape(SIZES)
    assert model.seconds(shared) < model.seconds(alone)
    assert TimeModel.of_shape(SIZES, tp=2).seconds(alone) < model.seconds(alone)
    assert not model.measured


# ---- the file ----


def calibration() -> Calibration:
    return Calibration(
        {"device": "cpu", "dtype": "float32", "tp": "1"}, MODEL, SIZES.memory("float32"), {"rms_error": 0.04}
    )


def test_a_calibration_reads_back_equal(tmp_path: Path) -> None:
    calibration().write(tmp_path / "calibration.json")
    assert Calibration.read(tmp_path / "calibration.json") == calibration()
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


def test_a_mismatch_names_what_changed() -> None:
    assert calibration().mismatch({"device": "cpu", "dtype": "float32", "tp": "1"}) is None
    assert calibration().mismatch({"device": "cpu", "dtype": "bfloat16", "tp": "1"}) == "dtype was float32, is bfloat16"
    assert calibration().mismatch({"device": "cpu", "dtype": "float32"}) == "tp was 1, is not recorded"


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 2}', '{"format": 1, "fingerprint": {}}'])
def test_a_damaged_file_is_named_with_its_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(damage)
    with pytest.raises(CalibrationError, match="calibration.json: .*a run with dta.calibrate=true writes a new one"):
        Calibration.read(path)


def test_coefficients_that_cannot_be_are_refused_on_reading(tmp_path: Path) -> None:
    raw = calibration().to_dict()
    raw["time"]["keys_share"] = -1.0
    (tmp_path / "c.json").write_text(json.dumps(raw))
    with pytest.raises(CalibrationError, match="not negative"):
        Calibration.read(tmp_path / "c.json")


# ---- model sizes ----


def test_sizes_come_from_the_hugging_face_file(tmp_path: Path) -> None:
    raw = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelSizes.from_folder(tmp_path) == replace(SIZES, dtype="bfloat16")
    assert SIZES.layer_weights == 64 * 16 * (8 + 4) + 3 * 64 * 128
    del raw["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"config\.json has no vocab_size"):
        ModelSizes.from_folder(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        ModelSizes.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype 'int8' is not one of"):
        SIZES.memory("int8")

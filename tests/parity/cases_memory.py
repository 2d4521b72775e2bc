"""Peak bytes of live tensors: what bounds them, what a budget does, how well they are predicted, what a long row needs.

Measured with the meter of `areal_dta.engine.memory_meter`. Not covered: CUDA, bf16.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.engine import DenseEngine, Engine, MegatronPolicy, PlanSettings, Rows, TreeEngine
from areal_dta.engine.memory_meter import MemoryMeter
from areal_dta.tree.memory import default_budget
from tests.parity.support import SEED, Context, assert_close, gradients

VOCAB = 512
BLOCK = 256
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
THIN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


def _policy(context: Context, name: str, shape: dict[str, int]) -> MegatronPolicy:
    folder = Path(context.folder) / f"memory_{name}_{context.rank}"
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 32_768, "tie_word_embeddings": False, "initializer_range": 0.05,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **shape}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return MegatronPolicy(folder, context.sizes, None, torch.float32, SEED, random_init=True, timeout_s=60)


def _below(prefix_len: int, num_branches: int, branch_len: int, seed: int = 0) -> Rows:
    """Branches of random tokens at the end of one prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB, prefix_len)
    rows = [np.concatenate([prefix, [b], rng.integers(0, VOCAB, branch_len - 1)]) for b in range(num_branches)]
    return Rows.from_lists([row.tolist() for row in rows])


def _comb(trunk_len: int, every: int, branch_len: int) -> Rows:
    """A trunk with a branch at every so many tokens, as stripped thinking leaves."""
    rng = np.random.default_rng(1)
    trunk = rng.integers(0, VOCAB, trunk_len)
    rows = [
        np.concatenate([trunk[:cut], [(trunk[cut] + 1) % VOCAB], rng.integers(0, VOCAB, branch_len - 1)])
        for cut in range(every, trunk_len, every)
    ]
    return Rows.from_lists([row.tolist() for row in (*rows, trunk)])


def _peak(policy: MegatronPolicy, engine: Engine, rows: Rows) -> int:
    dlogp_T = torch.randn(rows.num_tokens, generator=torch.Generator().manual_seed(3))
    policy.zero_grad()
    policy.rope_freqs(int(np.diff(rows.offsets_S1).max()))  # a table that stays with the model
    with MemoryMeter(policy.device) as meter:
        engine.backward(rows, dlogp_T, sync="none")
    return meter.peak_bytes


def peak_grows_with_the_longest_path_not_with_the_leaves(context: Context) -> None:
    policy = _policy(context, "wide", SHAPE)
    engine = TreeEngine(policy, PlanSettings(max_block_tokens=BLOCK))
    peaks = [_peak(policy, engine, _below(1200, leaves, 250)) for leaves in (6, 12)]
    assert peaks[1] <= 1.05 * peaks[0], peaks
    assert _peak(policy, engine, _below(2600, 6, 250)) > 1.2 * peaks[0]


def half_the_budget_lowers_the_peak_and_not_the_gradient(context: Context) -> None:
    policy = _policy(context, "wide", SHAPE)
    rows = _comb(1500, 150, 60)
    dlogp_T = torch.randn(rows.num_tokens, generator=torch.Generator().manual_seed(3))
    roomy = TreeEngine(policy, PlanSettings(max_block_tokens=BLOCK, activation_budget=1 << 40))
    want, peak = gradients(policy, roomy, rows, dlogp_T), _peak(policy, roomy, rows)
    assert roomy.stats.recomputed_tokens == 0
    budget = peak
    for _ in range(2):
        budget //= 2
        engine = TreeEngine(policy, PlanSettings(max_block_tokens=BLOCK, activation_budget=budget))
        lower = _peak(policy, engine, rows)
        assert lower < 0.8 * peak and lower <= 1.1 * budget, (lower, peak, budget)
        assert_close(gradients(policy, engine, rows, dlogp_T), want, 1e-5, f"budget {budget}")
        peak = lower


def predicted_peak_is_within_a_fifth_of_the_real_one(context: Context) -> None:
    policy = _policy(context, "wide", SHAPE)
    shapes = {"grpo": _below(600, 16, 150), "comb": _comb(1500, 100, 80), "one row": _below(10, 1, 3000)}
    for name, rows in shapes.items():
        for settings in (
            PlanSettings(max_block_tokens=BLOCK), PlanSettings(max_block_tokens=1024),
            PlanSettings(max_block_tokens=BLOCK, activation_budget=24_000_000), PlanSettings("classic", BLOCK),
            PlanSettings("dense", BLOCK),
        ):  # fmt: skip
            engine = TreeEngine(policy, settings)
            real = _peak(policy, engine, rows)
            predicted = engine.stats.predicted_peak_bytes
            assert 0.8 * real <= predicted <= 1.2 * real, f"{name}, {settings}: {predicted} predicted, {real} measured"


def default_budget_needs_less_than_checkpointed_rows_plus_a_block(context: Context) -> None:
    policy = _policy(context, "wide", SHAPE)
    for prefix_len, branch_len, is_long in ((600, 150, False), (3276, 820, True)):
        rows = _below(prefix_len, 6, branch_len)
        auto = _peak(policy, TreeEngine(policy, PlanSettings(max_block_tokens=BLOCK)), rows)
        row = _below(prefix_len, 1, branch_len)
        block = _peak(policy, TreeEngine(policy, PlanSettings("dense")), _below(BLOCK - 10, 1, 10))
        checkpointed = _peak(policy, DenseEngine(policy, recompute=True), row)
        assert auto <= checkpointed + block, (auto, checkpointed, block)
        if is_long:
            assert 2 * auto <= _peak(policy, DenseEngine(policy), row)


def a_row_of_30000_tokens_with_16_branches_trains_where_dense_does_not_fit(context: Context) -> None:
    policy = _policy(context, "thin", THIN)
    rows = _below(29_800, 16, 200)
    assert int(np.diff(rows.offsets_S1).max()) == 30_000
    engine = TreeEngine(policy, PlanSettings(max_block_tokens=2048))
    memory = engine.memory
    budget = default_budget(memory, 30_000, 2048)
    assert budget < 0.5 * memory.dense_peak(30_000)
    with pytest.raises(ValueError, match=r"dta.plan=dense needs about \d+ bytes.*set dta.plan=auto"):
        _peak(policy, TreeEngine(policy, PlanSettings("dense", activation_budget=budget)), rows)
    engine = TreeEngine(policy, PlanSettings(max_block_tokens=2048, activation_budget=budget))
    peak = _peak(policy, engine, rows)
    assert peak <= budget, (peak, budget, engine.stats)
    assert engine.stats.tree_tokens == 29_800 + 16 * 200
    assert all(bool(torch.isfinite(grad).all()) and bool(grad.any()) for grad in policy.gradients().values())


def each_pipeline_stage_keeps_to_its_prediction_and_to_an_explicit_budget(context: Context) -> None:
    """Blocks in flight included: the first stage runs ahead."""
    policy, rows = _policy(context, "wide", SHAPE), _comb(1500, 100, 80)
    budget = 24_000_000
    for settings in (
        PlanSettings(max_block_tokens=BLOCK), PlanSettings("classic", BLOCK),
        PlanSettings(max_block_tokens=BLOCK, activation_budget=budget),
    ):  # fmt: skip
        engine = TreeEngine(policy, settings)
        real, predicted = _peak(policy, engine, rows), engine.stats.predicted_peak_bytes
        assert 0.8 * real <= predicted <= 1.2 * real, f"stage {policy.stage}, {settings}: {predicted}, {real} measured"
    assert real <= 1.1 * budget, (real, budget)


STAGES = (each_pipeline_stage_keeps_to_its_prediction_and_to_an_explicit_budget,)
LONG_ROW = (a_row_of_30000_tokens_with_16_branches_trains_where_dense_does_not_fit,)
CASES = (
    peak_grows_with_the_longest_path_not_with_the_leaves,
    half_the_budget_lowers_the_peak_and_not_the_gradient,
    predicted_peak_is_within_a_fifth_of_the_real_one,
    default_budget_needs_less_than_checkpointed_rows_plus_a_block,
    *LONG_ROW,
)

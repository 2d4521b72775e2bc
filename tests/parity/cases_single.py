"""World 1: tree gradients and log-probs against the dense rows and transformers; weights and checkpoints in and out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_dta.engine import (
    CheckpointError,
    DenseEngine,
    MegatronPolicy,
    OptimizerSettings,
    ParallelSizes,
    PlanSettings,
    Rows,
    TreeEngine,
    make_engine,
)
from areal_dta.engine.kernels import ProductKernel
from tests.parity.plans import rotated, tree_engine
from tests.parity.support import (
    FAMILIES,
    Context,
    assert_close,
    assert_low_no_worse_than_dense,
    coefficients,
    gradients,
)
from tests.parity.tries import SHAPES, VOCAB, random_rows

ADAM = OptimizerSettings(lr=1e-3, weight_decay=0.01, gradient_clipping=1.0)
# Adam divides by the gradient's size: with its usual eps an element whose gradient is rounding noise moves by the whole
# learning rate, this way or that, and trained weights could not be compared as closely as gradients.
STEADY = replace(ADAM, eps=1e-5)


def _tree_against_dense(context: Context, dtype: torch.dtype, bound: float, seeds: range) -> None:
    policy = context.policy(dtype)
    dense, plans = DenseEngine(policy), rotated(3)
    for seed, shape in itertools.product(seeds, SHAPES):
        rows = random_rows(shape.__name__, seed)
        temperature = (1.0, 0.6)[seed % 2]
        dlogp, dentropy = coefficients(rows, seed, dtype), coefficients(rows, seed + 1, dtype, zero_share=0.6)
        for entropy in (None, dentropy):
            if not dlogp[:-1].any():
                continue
            want = gradients(policy, dense, rows, dlogp, entropy, temperature)
            for plan in next(plans):
                got = gradients(policy, tree_engine(policy, plan), rows, dlogp, entropy, temperature)
                assert_close(got, want, bound, f"{shape.__name__} seed {seed} plan {plan}")


def gradient_equals_dense_fp32(context: Context) -> None:
    _tree_against_dense(context, torch.float32, 1e-5, range(2))


def gradient_equals_dense_fp64(context: Context) -> None:
    _tree_against_dense(context, torch.float64, 1e-10, range(2, 4))


def gradient_equals_dense_for_other_families(context: Context) -> None:
    for family in ("qwen2", "llama"):
        policy = context.policy(torch.float64, family=family)
        rows = random_rows("three_levels", 1)
        dlogp = coefficients(rows, 1, torch.float64)
        want = gradients(policy, DenseEngine(policy), rows, dlogp, None, 0.6)
        assert_close(gradients(policy, TreeEngine(policy), rows, dlogp, None, 0.6), want, 1e-10, family)


def product_kernel_equals_flash_kernel(context: Context) -> None:
    policy = context.policy(torch.float64)
    rows = random_rows("comb", 3)
    dlogp = coefficients(rows, 3, torch.float64)
    want = gradients(policy, TreeEngine(policy), rows, dlogp)
    got = gradients(policy, TreeEngine(policy, kernel=ProductKernel()), rows, dlogp)
    assert_close(got, want, 1e-12)


def bf16_error_is_no_larger_than_dense_bf16(context: Context) -> None:
    assert_low_no_worse_than_dense(context.policy(), context.policy(torch.bfloat16), gradients)


def values_equal_dense_and_transformers(context: Context) -> None:
    from transformers import AutoModelForCausalLM

    plans = rotated(4)
    for family in FAMILIES:
        policy = context.policy(family=family)
        model = AutoModelForCausalLM.from_pretrained(context.model(family), dtype=torch.float32)
        for shape, temperature in (("duplicates_and_prefixes", 1.0), ("one_token_rows", 0.6), ("comb", 0.6)):
            rows = random_rows(shape, 7)
            dense = DenseEngine(policy).forward(rows, temperature, want_entropy=True)
            for plan in next(plans):
                tree = tree_engine(policy, plan).forward(rows, temperature, want_entropy=True)
                torch.testing.assert_close(tree.logprobs_T, dense.logprobs_T, atol=1e-5, rtol=0)
                torch.testing.assert_close(tree.entropy_T, dense.entropy_T, atol=1e-5, rtol=0)
            for lo, hi in itertools.pairwise(rows.offsets_S1.tolist()):
                ids = torch.from_numpy(rows.ids_T[lo:hi].astype(np.int64))
                with torch.no_grad():
                    log_p = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
                want = torch.cat([log_p[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)])
                torch.testing.assert_close(tree.logprobs_T[lo:hi], want, atol=1e-5, rtol=0)


def forward_computes_only_what_is_needed(context: Context) -> None:
    engine = TreeEngine(context.policy(), PlanSettings("auto", 8))
    rows = random_rows("three_levels", 2)
    full = engine.forward(rows, 1.0, want_entropy=True)
    blocks_of_all = engine.stats.num_blocks
    need = np.zeros(rows.num_tokens, bool)
    need[rows.offsets_S1[3] + 2 : rows.offsets_S1[4]] = True
    some = engine.forward(rows, 1.0, want_entropy=True, need_T=need)
    assert engine.stats.num_blocks < blocks_of_all / 3
    shown = torch.from_numpy(need)
    torch.testing.assert_close(some.logprobs_T[shown], full.logprobs_T[shown], atol=2e-6, rtol=0)
    assert not some.logprobs_T[~shown].any()
    assert not some.entropy_T[~shown].any()


def masked_nan_and_last_positions_do_not_matter(context: Context) -> None:
    policy = context.policy(torch.float64)
    rows = random_rows("duplicates_and_prefixes", 9)
    dlogp, dentropy = coefficients(rows, 1, torch.float64), coefficients(rows, 2, torch.float64)
    mask = np.random.default_rng(0).random(rows.num_tokens) < 0.5
    hole = torch.from_numpy(~mask)
    clean = [torch.where(hole, 0.0, c) for c in (dlogp, dentropy)]
    want = gradients(policy, DenseEngine(policy), rows, *clean)
    for poison in (float("nan"), float("inf")):
        dirty = [torch.where(hole, poison, c) for c in (dlogp, dentropy)]
        for engine in (TreeEngine(policy), DenseEngine(policy)):
            assert_close(gradients(policy, engine, rows, *dirty, mask=mask), want, 1e-10)
    last = dlogp.clone()
    last[torch.from_numpy(rows.offsets_S1[1:] - 1)] = float("nan")
    assert_close(
        gradients(policy, TreeEngine(policy), rows, last), gradients(policy, DenseEngine(policy), rows, dlogp), 1e-10
    )


def subtrees_without_coefficients_are_not_walked(context: Context) -> None:
    policy = context.policy(torch.float64)
    rows = random_rows("three_levels", 4)
    dlogp = torch.zeros(rows.num_tokens, dtype=torch.float64)
    dlogp[rows.offsets_S1[5] + 3 : rows.offsets_S1[6]] = 1.0
    engine = tree_engine(policy, PlanSettings("auto", 8))
    want = gradients(policy, DenseEngine(policy), rows, dlogp)
    assert_close(gradients(policy, engine, rows, dlogp), want, 1e-10)
    assert engine.stats.num_blocks <= 4
    gradients(policy, engine, rows, torch.ones_like(dlogp))
    assert engine.stats.num_blocks > 12
    zero = gradients(policy, engine, rows, torch.zeros_like(dlogp))
    assert all(not grad.any() for grad in zero.values())


def tight_budgets_recompute_and_generous_ones_keep_every_graph(context: Context) -> None:
    policy, rows = context.policy(torch.float64), random_rows("three_levels", 4)
    dlogp = coefficients(rows, 1, torch.float64)
    want, recomputed = gradients(policy, DenseEngine(policy), rows, dlogp), []
    for budget in (8, 16, 10_000):  # tokens
        engine = tree_engine(policy, PlanSettings("auto", 8, activation_budget=budget))
        assert_close(gradients(policy, engine, rows, dlogp), want, 1e-10, f"{budget=}")
        recomputed.append(engine.stats.recomputed_tokens)
    assert recomputed[0] > 0 == recomputed[2], recomputed
    assert recomputed == sorted(recomputed, reverse=True)


def five_optimizer_steps_equal_dense(context: Context) -> None:
    weights = []
    for mode, plan in (("disabled", None), ("dta", None), ("sparse", None), ("dta", PlanSettings("classic", 7))):
        policy = context.policy(optimizer=STEADY)
        engine = make_engine(mode, policy, plan)
        for step in range(5):
            rows = random_rows("three_levels", 20 + step)
            policy.zero_grad()
            engine.backward(rows, coefficients(rows, step, torch.float32), None, 0.8)
            assert policy.optimizer_step(1e-3).ok
        weights.append({name: param.detach().clone() for name, param in policy.model.named_parameters()})
        before = MegatronPolicy(context.model(), context.sizes, seed=1)
        moved = {name: weights[-1][name] - param for name, param in before.model.named_parameters()}
        assert all(float(change.abs().max()) > 1e-4 for change in moved.values())
    for other in weights[1:]:
        for name, want in weights[0].items():
            assert float((other[name] - want).norm() / want.norm()) < 2e-6, name


def gradients_accumulate_over_backwards_until_reduced(context: Context) -> None:
    policy = context.policy(torch.float64)
    engine = TreeEngine(policy)
    rows = random_rows("three_levels", 6)
    dlogp = coefficients(rows, 6, torch.float64)
    want = gradients(policy, engine, rows, dlogp)
    policy.zero_grad()
    engine.backward(rows, 0.25 * dlogp, sync="none")
    engine.backward(rows, 0.75 * dlogp, sync="full")
    assert_close(policy.gradients(), want, 1e-12)
    with pytest.raises(RuntimeError, match="zero_grad"):
        engine.backward(rows, dlogp)


def non_finite_gradient_skips_the_step(context: Context) -> None:
    policy = context.policy(optimizer=ADAM)
    rows = random_rows("one_leaf", 1)
    policy.zero_grad()
    TreeEngine(policy).backward(rows, coefficients(rows, 1, torch.float32) * 1e38)
    before = {name: param.detach().clone() for name, param in policy.model.named_parameters()}
    result = policy.optimizer_step(1e-3)
    assert not result.ok
    assert all(torch.equal(before[name], param) for name, param in policy.model.named_parameters())
    policy.zero_grad()
    TreeEngine(policy).backward(rows, coefficients(rows, 1, torch.float32))
    assert policy.optimizer_step(1e-3).ok


def hf_round_trip_is_bit_exact(context: Context) -> None:
    for family in FAMILIES:
        target = context.folder / f"roundtrip_{family}"
        context.policy(family=family).save_hf(target)
        want, got = load_file(context.model(family) / "model.safetensors"), load_file(target / "model.safetensors")
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert (target / "config.json").read_text() == (context.model(family) / "config.json").read_text()
        assert (target / "tokenizer.json").is_file()


def same_seed_same_start_without_weights(context: Context) -> None:
    bare = context.folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((context.model() / "config.json").read_text())
    first, again, other = (MegatronPolicy(bare, context.sizes, seed=seed, random_init=True) for seed in (1, 1, 2))
    pairs = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.head_weight(), other.head_weight())
    with pytest.raises(FileNotFoundError, match="random_init=True"):
        MegatronPolicy(bare, context.sizes)


def checkpoint_restores_weights_moments_and_step(context: Context) -> None:
    """Writes the checkpoint and the continuation that the other layouts must reproduce."""
    policy = context.policy(optimizer=ADAM)
    train(policy, range(2))
    path = context.folder / "checkpoint_single"
    policy.save_checkpoint(path)
    want_rng = torch.get_rng_state()
    train(policy, range(2, 4))
    policy.save_hf(context.folder / "continued")
    resumed = context.policy(optimizer=ADAM)
    torch.manual_seed(999)
    resumed.load_checkpoint(path)
    assert resumed.num_steps == 2
    assert torch.equal(torch.get_rng_state(), want_rng)
    train(resumed, range(2, 4))
    pairs = zip(policy.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(FileExistsError):
        policy.save_checkpoint(path)


def checkpoint_moments_alone_can_be_taken(context: Context) -> None:
    path = context.folder / "checkpoint_single"
    policy = context.policy(optimizer=OptimizerSettings(lr=5e-4, beta1=0.8, weight_decay=0.0))
    before = {name: param.detach().clone() for name, param in policy.model.named_parameters()}
    policy.load_checkpoint(path, model=False, zero_first_moment=True)
    assert all(torch.equal(before[name], param) for name, param in policy.model.named_parameters())
    states = list(policy.optimizer.chained_optimizers[0].optimizer.state.values())
    assert all(float(state["step"]) == 2 for state in states)
    assert all(not state["exp_avg"].any() for state in states)
    assert any(state["exp_avg_sq"].any() for state in states)
    assert policy.optimizer.param_groups[0]["betas"][0] == 0.8
    assert policy.num_steps == 0


def torn_or_foreign_checkpoints_are_refused(context: Context) -> None:
    path = context.folder / "checkpoint_single"
    policy = context.policy(optimizer=ADAM)
    torn = context.folder / "torn"
    _copy_tree(path, torn)
    shard = max(torn.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="torn"):
        policy.load_checkpoint(torn)
    (torn / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        policy.load_checkpoint(torn)
    with pytest.raises(CheckpointError, match="another model"):
        context.policy(family="llama").load_checkpoint(path, optimizer=False)
    with pytest.raises(CheckpointError, match="optimizer=False"):
        context.policy().load_checkpoint(path)


def wrong_use_is_refused_with_the_remedy(context: Context) -> None:
    policy = context.policy()
    rows = random_rows("one_leaf", 1)
    engine = TreeEngine(policy)
    with pytest.raises(ValueError, match="tree_training_mode='turbo'.*disabled, sparse, dta"):
        make_engine("turbo", policy)
    with pytest.raises(ValueError, match=f"vocabulary has {VOCAB}"):
        engine.forward(Rows.from_lists([[1, VOCAB]]))
    with pytest.raises(ValueError, match="have 1 tokens|tokens"):
        engine.backward(rows, torch.zeros(3))
    poisoned = torch.zeros(rows.num_tokens)
    poisoned[4] = float("nan")
    with pytest.raises(ValueError, match="row 0, position 4"):
        engine.backward(rows, poisoned)
    with pytest.raises(ValueError, match="no optimizer"):
        policy.optimizer_step(1e-3)
    with pytest.raises(ValueError, match="not the world size 1"):
        MegatronPolicy(context.model(), ParallelSizes(dp=2))
    with pytest.raises(RuntimeError, match="sync='sharded'"):
        context.policy(optimizer=ADAM).optimizer_step(1e-3)
    with pytest.raises(ValueError, match="optimizer=None"):
        context.policy(torch.float64, optimizer=ADAM)
    with pytest.raises(ValueError, match="forward-only"):
        MegatronPolicy(context.model(), context.sizes, trainable=False).zero_grad()


def writes_reference_gradients(context: Context) -> None:
    """What two ranks must reproduce together."""
    for dtype in (torch.float32, torch.float64):
        policy = context.policy(dtype)
        rows = random_rows("duplicates_and_prefixes", 31)
        want = gradients(policy, DenseEngine(policy), rows, *reference_coefficients(rows, dtype), temperature=0.6)
        save_file(want, context.folder / f"reference_{dtype}.safetensors")


def reference_coefficients(rows: Rows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return coefficients(rows, 31, dtype), coefficients(rows, 32, dtype)


def train(policy: MegatronPolicy, steps: range, keep: slice = slice(None)) -> None:
    """Optimizer steps on fixed batches; ``keep`` selects this rank's rows."""
    from tests.parity.tries import subset

    engine = TreeEngine(policy)
    for step in steps:
        rows = random_rows("three_levels", 40 + step)
        dlogp = coefficients(rows, step, torch.float32)
        part, index = subset(rows, list(range(rows.num_rows))[keep])
        policy.zero_grad()
        engine.backward(part, dlogp[torch.from_numpy(index)], None, 0.8)
        assert policy.optimizer_step(1e-3).ok


def _copy_tree(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


CASES = (
    writes_reference_gradients,
    checkpoint_restores_weights_moments_and_step,
    checkpoint_moments_alone_can_be_taken,
    torn_or_foreign_checkpoints_are_refused,
    gradient_equals_dense_fp32,
    gradient_equals_dense_fp64,
    gradient_equals_dense_for_other_families,
    product_kernel_equals_flash_kernel,
    bf16_error_is_no_larger_than_dense_bf16,
    values_equal_dense_and_transformers,
    forward_computes_only_what_is_needed,
    masked_nan_and_last_positions_do_not_matter,
    subtrees_without_coefficients_are_not_walked,
    tight_budgets_recompute_and_generous_ones_keep_every_graph,
    five_optimizer_steps_equal_dense,
    gradients_accumulate_over_backwards_until_reduced,
    non_finite_gradient_skips_the_step,
    hf_round_trip_is_bit_exact,
    same_seed_same_start_without_weights,
    wrong_use_is_refused_with_the_remedy,
)

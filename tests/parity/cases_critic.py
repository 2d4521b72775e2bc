"""A critic on the tree: values and their gradient against dense rows and transformers; its folders and checkpoints."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_dta.engine import CheckpointError, DenseEngine, Engine, MegatronPolicy, PlanSettings, TreeEngine
from areal_dta.engine.hf import TensorReader, to_megatron
from tests.parity.cases_single import ADAM, STEADY
from tests.parity.plans import PLANS, rotated, tree_engine
from tests.parity.support import (
    FAMILIES,
    SEED,
    Context,
    assert_close,
    assert_low_no_worse_than_dense,
    coefficients,
    value_gradients,
)
from tests.parity.tries import SHAPES, random_rows, subset


def _critic_gradients(context: Context, dtype: torch.dtype, bound: float, seeds: range) -> None:
    critic, plans = context.critic(dtype), rotated(4)
    dense = DenseEngine(critic)
    for seed, shape in itertools.product(seeds, SHAPES):
        rows = random_rows(shape.__name__, seed)
        dvalue = coefficients(rows, seed, dtype, zero_share=(0.3, 0.9)[seed % 2])
        want = value_gradients(critic, dense, rows, dvalue)
        for plan in next(plans):
            got = value_gradients(critic, tree_engine(critic, plan), rows, dvalue)
            assert_close(got, want, bound, f"{shape.__name__} seed {seed} plan {plan}")


def critic_gradient_equals_dense_fp32(context: Context) -> None:
    _critic_gradients(context, torch.float32, 1e-5, range(1))


def critic_gradient_equals_dense_fp64(context: Context) -> None:
    _critic_gradients(context, torch.float64, 1e-10, range(1, 2))


def critic_bf16_error_is_no_larger_than_dense_bf16(context: Context) -> None:
    assert_low_no_worse_than_dense(context.critic(), context.critic(torch.bfloat16), value_gradients)


def critic_values_equal_dense_and_transformers(context: Context) -> None:
    """Also that the folder a critic writes is a token classifier to transformers, without being told so."""
    from transformers import AutoModelForTokenClassification

    plans = rotated(4)
    for family in FAMILIES:
        critic, folder = context.critic(family=family), context.folder / f"critic_{family}"
        critic.save_hf(folder)
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        assert model.config.num_labels == 1
        rows = random_rows("duplicates_and_prefixes", 7)
        dense_T = DenseEngine(critic).forward_values(rows)
        assert dense_T.abs().max() > 0.5
        for plan in next(plans):
            torch.testing.assert_close(tree_engine(critic, plan).forward_values(rows), dense_T, atol=1e-5, rtol=0)
        for lo, hi in itertools.pairwise(rows.offsets_S1.tolist()):
            with torch.no_grad():
                want_S = model(torch.from_numpy(rows.ids_T[None, lo:hi].astype(np.int64))).logits[0, :, 0]
            torch.testing.assert_close(dense_T[lo:hi], want_S, atol=1e-5, rtol=0)


def critic_folder_round_trip_is_bit_exact(context: Context) -> None:
    for family in FAMILIES:
        first, second = context.folder / f"critic_{family}", context.folder / f"critic_again_{family}"
        critic = MegatronPolicy(first, context.sizes, value_head=True)
        critic.save_hf(second)
        want, got = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
        assert want.keys() == got.keys()
        assert {"score.weight", "score.bias"} < want.keys()
        assert "lm_head.weight" not in want
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert (first / "config.json").read_text() == (second / "config.json").read_text()
        assert (second / "tokenizer.json").is_file()


def critic_starts_from_a_policy_with_a_seeded_head(context: Context) -> None:
    policy = context.policy()
    same, again, other = (
        MegatronPolicy(context.model(), context.sizes, seed=seed, value_head=True) for seed in (SEED, SEED, SEED + 1)
    )
    shared = dict(same.named_parameters())
    for name, param in policy.named_parameters():
        assert torch.equal(param, shared[name]), name
    assert torch.equal(same.value_layer().weight, again.value_layer().weight)
    assert not torch.equal(same.value_layer().weight, other.value_layer().weight)
    assert 0.2 < float(same.value_layer().weight.std() / same.shape.init_std) < 5
    assert not same.value_layer().bias.any()


def head_without_bias_loads_as_zero_bias(context: Context) -> None:
    source, folder = context.folder / "critic_qwen3", context.folder / "critic_unbiased"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    del tensors["score.bias"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    critic = MegatronPolicy(folder, context.sizes, value_head=True)
    assert not critic.value_layer().bias.any()
    assert torch.equal(critic.value_layer().weight, tensors["score.weight"])


def masked_nan_does_not_matter_and_last_positions_count(context: Context) -> None:
    critic = context.critic(torch.float64)
    rows = random_rows("duplicates_and_prefixes", 9)
    dvalue_T = coefficients(rows, 1, torch.float64)
    hole_T = torch.from_numpy(np.random.default_rng(0).random(rows.num_tokens) < 0.5)
    want = value_gradients(critic, DenseEngine(critic), rows, torch.where(hole_T, 0.0, dvalue_T))
    engines: list[Engine] = [TreeEngine(critic), DenseEngine(critic)]
    for poison, engine in itertools.product((float("nan"), float("inf")), engines):
        dirty_T = torch.where(hole_T, poison, dvalue_T)
        assert_close(value_gradients(critic, engine, rows, dirty_T, mask=~hole_T.numpy()), want, 1e-10)
    last_T = torch.zeros_like(dvalue_T)
    last_T[rows.offsets_S1[1:] - 1] = 1.0
    want = value_gradients(critic, DenseEngine(critic), rows, last_T)
    assert_close(value_gradients(critic, TreeEngine(critic), rows, last_T), want, 1e-10)
    assert float(want["output_layer.bias"]) == pytest.approx(rows.num_rows)


def values_are_computed_only_where_needed(context: Context) -> None:
    engine = TreeEngine(context.critic(), PlanSettings("auto", 8))
    rows = random_rows("three_levels", 2)
    full_T = engine.forward_values(rows)
    blocks_of_all = engine.stats.num_blocks
    need_T = np.zeros(rows.num_tokens, bool)
    need_T[rows.offsets_S1[3] + 2 : rows.offsets_S1[4]] = True
    some_T = engine.forward_values(rows, need_T)
    assert engine.stats.num_blocks < blocks_of_all / 3
    shown_T = torch.from_numpy(need_T)
    torch.testing.assert_close(some_T[shown_T], full_T[shown_T], atol=2e-6, rtol=0)
    assert not some_T[~shown_T].any()


def five_critic_steps_equal_dense(context: Context) -> None:
    weights = []
    for plan in (None, PlanSettings(), PlanSettings("classic", 7)):
        critic = context.critic(optimizer=STEADY)
        engine = DenseEngine(critic) if plan is None else tree_engine(critic, plan)
        before = {name: param.detach().clone() for name, param in critic.named_parameters()}
        _train(critic, engine, range(5))
        weights.append({name: param.detach().clone() for name, param in critic.named_parameters()})
        assert all(float((weights[-1][name] - before[name]).abs().max()) > 1e-4 for name in before)
    for other in weights[1:]:
        for name, want in weights[0].items():
            assert float((other[name] - want).norm() / want.norm()) < 5e-6, name


def _train(critic: MegatronPolicy, engine: Engine, steps: range) -> None:
    for step in steps:
        rows = random_rows("three_levels", 20 + step)
        critic.zero_grad()
        engine.backward_values(rows, coefficients(rows, step, torch.float32))
        assert critic.optimizer_step(1e-3).ok


def critic_checkpoint_continues_and_is_refused_by_a_policy(context: Context) -> None:
    critic, path = context.critic(optimizer=ADAM), context.folder / "checkpoint_critic"
    _train(critic, TreeEngine(critic), range(2))
    critic.save_checkpoint(path)
    _train(critic, TreeEngine(critic), range(2, 4))
    resumed = context.critic(optimizer=ADAM)
    resumed.load_checkpoint(path)
    _train(resumed, TreeEngine(resumed), range(2, 4))
    pairs = zip(critic.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(CheckpointError, match="another model"):
        context.policy().load_checkpoint(path, optimizer=False)


def wrong_head_is_refused_with_the_remedy(context: Context) -> None:
    rows, critic = random_rows("one_leaf", 1), context.critic()
    for engine in (TreeEngine(critic), DenseEngine(critic)):
        with pytest.raises(ValueError, match="use forward_values"):
            engine.forward(rows)
        with pytest.raises(ValueError, match="row 0, position 4"):
            engine.backward_values(rows, torch.zeros(rows.num_tokens).index_fill_(0, torch.tensor(4), float("nan")))
    policy = context.policy()
    for engine in (TreeEngine(policy), DenseEngine(policy)):
        with pytest.raises(ValueError, match="value_head=True"):
            engine.forward_values(rows)
    with pytest.raises(ValueError, match="value_head=True"):
        MegatronPolicy(context.folder / "critic_qwen3", context.sizes)
    two = context.folder / "two_labels"
    two.mkdir()
    raw = json.loads((context.folder / "critic_qwen3" / "config.json").read_text())
    (two / "config.json").write_text(json.dumps({**raw, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ValueError, match="has 2"):
        MegatronPolicy(two, context.sizes, value_head=True, random_init=True)


def writes_critic_reference_gradients(context: Context) -> None:
    """What two ranks must reproduce together."""
    for dtype in (torch.float32, torch.float64):
        critic, rows = context.critic(dtype), random_rows("duplicates_and_prefixes", 31)
        want = value_gradients(critic, DenseEngine(critic), rows, coefficients(rows, 31, dtype))
        save_file(want, context.folder / f"critic_reference_{dtype}.safetensors")


def critic_shards_sum_to_the_single_process_gradient(context: Context) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        critic, rows = context.critic(dtype), random_rows("duplicates_and_prefixes", 31)
        want = load_file(context.folder / f"critic_reference_{dtype}.safetensors")
        everything, dvalue_T = list(range(rows.num_rows)), coefficients(rows, 31, dtype)
        engines: list[Engine] = [TreeEngine(critic), DenseEngine(critic)]
        for split, engine in itertools.product(
            ((everything[:2], everything[2:]), (everything, []), ([], everything)), engines
        ):
            part, index = subset(rows, split[context.rank])
            got = value_gradients(critic, engine, part, dvalue_T[torch.from_numpy(index)])
            assert_close(got, want, bound, f"{[len(s) for s in split]}, {type(engine).__name__}")


def critic_gradient_of_split_layers_equals_the_single_process(context: Context) -> None:
    """Parameters that are whole on each tensor-parallel rank, and the value head, against one process; all of them
    against dense rows."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        critic, rows = context.critic(dtype), random_rows("duplicates_and_prefixes", 31)
        dvalue_T = coefficients(rows, 31, dtype)
        whole = load_file(context.folder / f"critic_reference_{dtype}.safetensors")
        want = value_gradients(critic, DenseEngine(critic), rows, dvalue_T)
        same = {name: whole[name] for name in want if want[name].shape == whole[name].shape}
        assert {"output_layer.weight", "output_layer.bias", "decoder.final_layernorm.weight"} <= same.keys()
        assert_close(want, same, bound, "whole parameters against the single process")
        for plan in PLANS:
            assert_close(value_gradients(critic, tree_engine(critic, plan), rows, dvalue_T), want, bound, str(plan))


def critic_folder_is_the_same_from_split_layers(context: Context) -> None:
    target = context.folder / f"critic_split_{context.sizes.tp}{context.sizes.sequence_parallel}"
    critic = context.critic()
    critic.save_hf(target)
    want, got = (load_file(f / "model.safetensors") for f in (context.folder / "critic_qwen3", target))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    reader = TensorReader(target)
    for name, param in critic.named_parameters():
        assert torch.equal(param, to_megatron(name, reader, critic.shape, critic.tp_rank, context.sizes.tp))


CASES = (
    writes_critic_reference_gradients,
    critic_gradient_equals_dense_fp32,
    critic_gradient_equals_dense_fp64,
    critic_bf16_error_is_no_larger_than_dense_bf16,
    critic_values_equal_dense_and_transformers,
    critic_folder_round_trip_is_bit_exact,
    critic_starts_from_a_policy_with_a_seeded_head,
    head_without_bias_loads_as_zero_bias,
    masked_nan_does_not_matter_and_last_positions_count,
    values_are_computed_only_where_needed,
    five_critic_steps_equal_dense,
    critic_checkpoint_continues_and_is_refused_by_a_policy,
    wrong_head_is_refused_with_the_remedy,
)
DP_CASES = (critic_shards_sum_to_the_single_process_gradient,)
TP_CASES = (critic_gradient_of_split_layers_equals_the_single_process, critic_folder_is_the_same_from_split_layers)

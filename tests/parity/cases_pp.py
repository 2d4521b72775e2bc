"""Pipeline stages, alone and with tensor and data parallelism, against what a single process computed and wrote.

Every rank compares its own part of each parameter, whole layers or slices of them, tied embeddings on both ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_dta.engine import DenseEngine, Engine, MegatronPolicy, PlanSettings, TreeEngine
from areal_dta.engine.hf import from_megatron, to_megatron
from tests.parity.cases_dp import all_shards_empty_gives_zero, continues_to_the_single_process_weights
from tests.parity.cases_single import ADAM, STEADY, reference_coefficients
from tests.parity.cases_tp import ranks_with_different_rows_are_told, values_equal_transformers
from tests.parity.plans import PLANS, tree_engine
from tests.parity.support import FAMILIES, SEED, Context, assert_close, coefficients, gradients, value_gradients
from tests.parity.tries import random_rows, subset

BOUNDS = ((torch.float32, 1e-5), (torch.float64, 1e-10))
TRAIN_PLAN = PlanSettings("auto", 12)  # many blocks


class _Tensors(dict[str, torch.Tensor]):
    """Reads like a folder."""

    def __call__(self, name: str) -> torch.Tensor:
        return self[name]


def _own_part(policy: MegatronPolicy, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank holds of whole gradients by parameter."""
    parts = {}
    for name, _ in policy.named_parameters():
        tensors = _Tensors(from_megatron(name, [whole[name]], policy.shape))
        part = to_megatron(name, tensors, policy.shape, policy.tp_rank, policy.sizes.tp)
        assert part is not None
        parts[name] = part
    return parts


def _layout(context: Context) -> str:
    return f"dp{context.sizes.dp}tp{context.sizes.tp}pp{context.sizes.pp}"


def _shards(policy: MegatronPolicy, num_rows: int) -> Iterator[list[int]]:
    """This rank's rows, without end: equal, unequal and empty shards."""
    everything = list(range(num_rows))
    while True:
        if policy.sizes.dp == 1:
            yield everything
        else:
            for cut in (num_rows // 2, 2, num_rows, 0):
                yield everything[:cut] if policy.dp_rank == 0 else everything[cut:]


def _train(policy: MegatronPolicy, engine: Engine, keep: slice) -> None:
    for step in range(5):
        rows = random_rows("three_levels", 50 + step)
        dlogp = coefficients(rows, step, torch.float32)
        part, index = subset(rows, list(range(rows.num_rows))[keep])
        policy.zero_grad()
        engine.backward(part, dlogp[torch.from_numpy(index)], None, 0.8)
        assert policy.optimizer_step(1e-3).ok


# ---- the single process ----


def writes_references_for_pipelines(context: Context) -> None:
    rows = random_rows("three_levels", 33)
    for family in FAMILIES:
        for dtype, _ in BOUNDS:
            policy = context.policy(dtype, family=family)
            want = gradients(policy, DenseEngine(policy), rows, coefficients(rows, 33, dtype))
            save_file(want, context.folder / f"pipeline_{family}_{dtype}.safetensors")
    values = DenseEngine(context.policy()).forward(rows, 0.6, want_entropy=True)
    assert values.entropy_T is not None
    save_file({"logp": values.logprobs_T, "entropy": values.entropy_T}, context.folder / "pipeline_values.safetensors")
    policy = context.policy(optimizer=STEADY)
    _train(policy, DenseEngine(policy), slice(None))
    policy.save_hf(context.folder / "five_steps")


def checkpoints_of_pipelines_continue_on_one_process(context: Context) -> None:
    for layout in ("dp1tp1pp2", "dp1tp2pp2"):
        policy = context.policy(optimizer=ADAM)
        policy.load_checkpoint(context.folder / f"checkpoint_{layout}")
        assert policy.num_steps == 2
        continues_to_the_single_process_weights(policy, context, slice(None), f"from_{layout}")


# ---- the layouts ----


def gradient_of_every_plan_equals_the_single_process(context: Context) -> None:
    for dtype, bound in BOUNDS:
        policy = context.policy(dtype)
        rows = random_rows("duplicates_and_prefixes", 31)
        dlogp, dentropy = reference_coefficients(rows, dtype)
        want = _own_part(policy, load_file(context.folder / f"reference_{dtype}.safetensors"))
        exact = PLANS if context.sizes.world_size == 2 else PLANS[1::2]
        plans = exact if dtype == torch.float64 else PLANS[::3]
        engines: list[Engine] = [DenseEngine(policy), *(tree_engine(policy, plan) for plan in plans)]
        for engine, keep in zip(engines, _shards(policy, rows.num_rows), strict=False):
            part, index = subset(rows, keep)
            at = torch.from_numpy(index)
            got = gradients(policy, engine, part, dlogp[at], dentropy[at], 0.6)
            what = engine.settings if isinstance(engine, TreeEngine) else "dense"
            assert_close(got, want, bound, f"{dtype} {what} shard of {len(keep)} rows")


def gradient_of_every_family_without_entropy_at_temperature_one(context: Context) -> None:
    for family in FAMILIES:
        policy = context.policy(torch.float64, family=family)
        rows = random_rows("three_levels", 33)
        dlogp = coefficients(rows, 33, torch.float64)
        want = _own_part(policy, load_file(context.folder / f"pipeline_{family}_{torch.float64}.safetensors"))
        for plan, keep in zip(PLANS[6:8], _shards(policy, rows.num_rows), strict=False):
            part, index = subset(rows, keep)
            got = gradients(policy, tree_engine(policy, plan), part, dlogp[torch.from_numpy(index)])
            assert_close(got, want, 1e-10, f"{family} {plan} shard of {len(keep)} rows")


def gradient_without_sequence_parallelism(context: Context) -> None:
    plain = replace(context, sizes=replace(context.sizes, sequence_parallel=False))
    gradient_of_every_family_without_entropy_at_temperature_one(plain)


def values_are_the_single_process_s_on_every_stage(context: Context) -> None:
    policy, rows = context.policy(), random_rows("three_levels", 33)
    want = load_file(context.folder / "pipeline_values.safetensors")
    engines: list[Engine] = [DenseEngine(policy), *(tree_engine(policy, plan) for plan in PLANS[:5])]
    for engine, keep in zip(engines, _shards(policy, rows.num_rows), strict=False):
        part, index = subset(rows, keep)
        got = engine.forward(part, 0.6, want_entropy=True)
        at = torch.from_numpy(index)
        torch.testing.assert_close(got.logprobs_T, want["logp"][at], atol=1e-5, rtol=0)
        torch.testing.assert_close(got.entropy_T, want["entropy"][at], atol=1e-5, rtol=0)


def five_optimizer_steps_equal_the_single_process(context: Context) -> None:
    policy = context.policy(optimizer=STEADY)
    keep = slice(None) if context.sizes.dp == 1 else (slice(0, 5) if policy.dp_rank == 0 else slice(5, None))
    _train(policy, tree_engine(policy, TRAIN_PLAN), keep)
    target = context.folder / f"five_steps_{_layout(context)}"
    policy.save_hf(target)
    want, got = (load_file(f / "model.safetensors") for f in (context.folder / "five_steps", target))
    assert want.keys() == got.keys()
    for name in want:
        error = float((got[name] - want[name]).norm() / want[name].norm())
        assert error < 5e-6, f"{name}: relative error {error:.2e}"


def written_folder_is_the_single_process_s_byte_for_byte(context: Context) -> None:
    for family in FAMILIES:
        target = context.folder / f"roundtrip_{_layout(context)}_{family}"
        context.policy(family=family).save_hf(target)
        single = context.folder / f"roundtrip_{family}"
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (target / name).read_bytes() == (single / name).read_bytes(), f"{family} {name}"


def checkpoint_of_the_single_process_continues(context: Context) -> None:
    """Writes what a single process continues from."""
    policy = context.policy(optimizer=ADAM)
    policy.load_checkpoint(context.folder / "checkpoint_single")
    policy.save_checkpoint(context.folder / f"checkpoint_{_layout(context)}")
    keep = slice(None) if context.sizes.dp == 1 else (slice(0, 3) if policy.dp_rank == 0 else slice(3, None))
    continues_to_the_single_process_weights(policy, context, keep, _layout(context))


def critic_gradient_equals_the_single_process(context: Context) -> None:
    for dtype, bound in BOUNDS:
        critic, rows = context.critic(dtype), random_rows("duplicates_and_prefixes", 31)
        dvalue_T = coefficients(rows, 31, dtype)
        want = _own_part(critic, load_file(context.folder / f"critic_reference_{dtype}.safetensors"))
        engines: list[Engine] = [DenseEngine(critic), *(tree_engine(critic, plan) for plan in PLANS[5:8])]
        for engine in engines:
            assert_close(value_gradients(critic, engine, rows, dvalue_T), want, bound, type(engine).__name__)


def critic_values_are_the_same_on_every_stage(context: Context) -> None:
    critic, rows = context.critic(), random_rows("three_levels", 33)
    dense_T = DenseEngine(critic).forward_values(rows)
    assert dense_T.abs().max() > 0.5
    torch.testing.assert_close(tree_engine(critic, PLANS[6]).forward_values(rows), dense_T, atol=1e-5, rtol=0)


def layers_that_do_not_divide_are_refused_with_the_remedy(context: Context) -> None:
    folder = context.folder / "three_layers"
    if context.rank == 0:
        folder.mkdir()
        raw = json.loads((context.model("llama") / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    torch.distributed.barrier()
    with pytest.raises(ValueError, match=r"3 layers do not divide into pp=2 .*choose a pp"):
        MegatronPolicy(folder, context.sizes, seed=SEED, random_init=True)


SINGLE_CASES = (writes_references_for_pipelines,)
SINGLE_AGAIN_CASES = (checkpoints_of_pipelines_continue_on_one_process,)
GRID_CASES = (
    gradient_of_every_plan_equals_the_single_process,
    gradient_of_every_family_without_entropy_at_temperature_one,
    values_are_the_single_process_s_on_every_stage,
    five_optimizer_steps_equal_the_single_process,
    written_folder_is_the_single_process_s_byte_for_byte,
    checkpoint_of_the_single_process_continues,
    all_shards_empty_gives_zero,
)
SP_CASES = (*GRID_CASES, gradient_without_sequence_parallelism)
CASES = (
    *GRID_CASES,
    values_equal_transformers,
    critic_gradient_equals_the_single_process,
    critic_values_are_the_same_on_every_stage,
    layers_that_do_not_divide_are_refused_with_the_remedy,
    ranks_with_different_rows_are_told,
)

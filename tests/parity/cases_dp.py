"""Two data-parallel ranks: unequal and empty shards, ZeRO-1 steps, resharded checkpoints."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from areal_dta.engine import DenseEngine, Engine, MegatronPolicy, TreeEngine
from tests.parity.cases_single import ADAM, reference_coefficients, train
from tests.parity.support import Context, assert_close, gradients
from tests.parity.tries import random_rows, subset


def _shards_sum_to_the_reference(context: Context, dtype: torch.dtype, bound: float) -> None:
    policy = context.policy(dtype)
    want = load_file(context.folder / f"reference_{dtype}.safetensors")
    rows = random_rows("duplicates_and_prefixes", 31)
    dlogp, dentropy = reference_coefficients(rows, dtype)
    everything = list(range(rows.num_rows))
    splits = {
        "even": (everything[:7], everything[7:]),
        "unequal": (everything[:2], everything[2:]),
        "second empty": (everything, []),
        "first empty": ([], everything),
    }
    engines: list[Engine] = [TreeEngine(policy), DenseEngine(policy)]
    for name, split in splits.items():
        part, index = subset(rows, split[context.rank])
        at = torch.from_numpy(index)
        for engine in engines:
            got = gradients(policy, engine, part, dlogp[at], dentropy[at], 0.6)
            assert_close(got, want, bound, f"{name}, {type(engine).__name__}")


def shards_sum_to_the_single_process_gradient_fp32(context: Context) -> None:
    _shards_sum_to_the_reference(context, torch.float32, 1e-5)


def shards_sum_to_the_single_process_gradient_fp64(context: Context) -> None:
    _shards_sum_to_the_reference(context, torch.float64, 1e-10)


def all_shards_empty_gives_zero(context: Context) -> None:
    policy = context.policy(torch.float64)
    nothing, _ = subset(random_rows("one_leaf", 1), [])
    zero = gradients(policy, TreeEngine(policy), nothing, torch.zeros(0, dtype=torch.float64))
    assert all(not grad.any() for grad in zero.values())
    assert not len(TreeEngine(policy).forward(nothing).logprobs_T)


def checkpoint_of_one_rank_continues_on_two(context: Context) -> None:
    """Moments and step included: two more steps end at the single process's weights. Writes the next layout's start."""
    policy = context.policy(optimizer=ADAM)
    policy.load_checkpoint(context.folder / "checkpoint_single")
    policy.save_checkpoint(context.folder / "checkpoint_dp2")
    continues_to_the_single_process_weights(
        policy, context, slice(0, 3) if context.rank == 0 else slice(3, None), "dp2"
    )


def zero_sharded_steps_from_the_start_equal_one_process(context: Context) -> None:
    """The last rank has no rows in these steps."""
    policy = context.policy(optimizer=ADAM)
    train(policy, range(2), slice(None) if context.rank == 0 else slice(0, 0))
    continues_to_the_single_process_weights(
        policy, context, slice(None) if context.rank == 0 else slice(0, 0), "dp2_start"
    )


def continues_to_the_single_process_weights(policy: MegatronPolicy, context: Context, keep: slice, name: str) -> None:
    train(policy, range(2, 4), keep)
    target = context.folder / f"continued_{name}"
    policy.save_hf(target)
    want, got = (load_file(folder / "model.safetensors") for folder in (context.folder / "continued", target))
    for tensor in want:
        error = float((got[tensor] - want[tensor]).norm() / want[tensor].norm())
        assert error < 2e-5, f"{tensor}: relative error {error:.2e}"


CASES = (
    shards_sum_to_the_single_process_gradient_fp32,
    shards_sum_to_the_single_process_gradient_fp64,
    all_shards_empty_gives_zero,
    checkpoint_of_one_rank_continues_on_two,
    zero_sharded_steps_from_the_start_equal_one_process,
)

"""World 1, AReaL imported once: the linearised step under AReaL's own loss functions against the whole loss under
autograd over dense rows.

Coefficients are taken at the dense values and held fixed, because a ratio that sits on a clip boundary may fall on
either side of it in two computations of the same log-prob. A full step uses the tree's own values; positions where its
coefficient is clipped and the dense one is not (or the reverse) are flips, which are counted.
"""

from __future__ import annotations

import numpy as np
import torch

from areal_dta.engine import DenseEngine, MegatronPolicy, PlanSettings, Rows, TreeEngine
from areal_dta.linear_step import Coefficients, loss_coefficients
from areal_dta.value_step import value_coefficients
from tests.parity.cases_single import STEADY
from tests.parity.direct import direct_gradients
from tests.parity.losses import EPS_CLIP, POLICY_LOSSES, VALUE_LOSSES, packed_batch
from tests.parity.plans import PLANS, rotated, tree_engine
from tests.parity.support import LOSS_CASES, Context, assert_close, gradients, value_gradients
from tests.parity.tries import random_rows, subset

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
OWN_BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-10}  # fp32: sums of coefficients may cancel, part 1's rounding not
SHAPES = ("three_levels", "duplicates_and_prefixes", "comb", "chain", "many_siblings", "one_leaf")


def _rows(shape: str, seed: int, pairs: bool) -> Rows:
    rows = random_rows(shape, seed)
    if not pairs:
        return rows
    lens = np.diff(rows.offsets_S1)
    keep = [row for row in range(rows.num_rows) if lens[row] > 2]
    return subset(rows, keep[: len(keep) // 2 * 2])[0]


def _flips(held: Coefficients, own: Coefficients) -> int:
    return int(_flipped(held, own).sum())


def _flipped(held: Coefficients, own: Coefficients) -> torch.Tensor:
    """Where the two differ by more than rounding: clipped in one only, or exactly on the boundary in one (AReaL's
    maximum then takes half of each side).
    """
    difference, size = (held.dlogp_T - own.dlogp_T).abs(), torch.maximum(held.dlogp_T.abs(), own.dlogp_T.abs())
    return difference > 1e-2 * size


def _policy_loss(policy: MegatronPolicy, name: str, seed: int, plans: tuple[PlanSettings, ...]) -> int:
    """Some plans on one batch; returns the flips of full steps."""
    loss, temperature = POLICY_LOSSES[name], (1.0, 0.6)[seed % 2]
    shape = SHAPES[seed % (5 if loss.pairs else 6)]  # the last one is a single row
    rows = _rows(shape, seed, loss.pairs)
    around = TreeEngine(policy).forward(rows, temperature).logprobs_T
    clean, dirty = (packed_batch(rows, seed, around, name, poison) for poison in (None, float("nan")))
    want, dense = direct_gradients(policy, rows, loss.fn, clean, temperature)
    packed, need = (dirty, dirty["loss_mask"].numpy()) if loss.masks else (clean, None)
    held = loss_coefficients(dense, rows, packed, loss.fn, 1.0, need)
    flips = 0
    for plan in plans:
        engine = tree_engine(policy, plan)
        what = f"{name} on {shape}, {plan}"
        got = gradients(policy, engine, rows, held.dlogp_T, held.dentropy_T, temperature)
        assert_close(got, want, BOUNDS[policy.dtype], what)
        values = engine.forward(rows, temperature, want_entropy=True)
        own = loss_coefficients(values, rows, packed, loss.fn, 1.0, need)
        flipped = _flips(held, own)
        flips += flipped
        if not flipped:
            got = gradients(policy, engine, rows, own.dlogp_T, own.dentropy_T, temperature)
            assert_close(got, want, OWN_BOUNDS[policy.dtype], f"{what}, its own part 1")
    return flips


def _policy_losses(context: Context, dtype: torch.dtype, seeds: int) -> None:
    policy, plans, flips = context.policy(dtype), rotated(3), 0
    for index, name in enumerate(POLICY_LOSSES):
        flips += sum(_policy_loss(policy, name, index + seed, next(plans)) for seed in range(seeds))
    print(f"{flips} coefficients flipped in full steps")
    assert flips <= 2, "ratios drawn at random do not lie on the boundary"


def policy_losses_equal_autograd_of_the_whole_loss_fp32(context: Context) -> None:
    _policy_losses(context, torch.float32, 2)


def policy_losses_equal_autograd_of_the_whole_loss_fp64(context: Context) -> None:
    _policy_losses(context, torch.float64, 2)


def _value_losses(context: Context, dtype: torch.dtype, seeds: int) -> None:
    policy, plans = context.critic(dtype), rotated(3)
    for (name, loss), seed in ((item, seed) for item in VALUE_LOSSES.items() for seed in range(seeds)):
        shape = SHAPES[seed % (5 if loss.pairs else 6)]
        rows = _rows(shape, seed, loss.pairs)
        around = TreeEngine(policy).forward_values(rows)
        clean, dirty = (packed_batch(rows, seed, around, name, poison) for poison in (None, float("nan")))
        want, dense = direct_gradients(policy, rows, loss.fn, clean, 1.0)
        packed, need = (dirty, dirty["loss_mask"].numpy()) if loss.masks else (clean, None)
        held = value_coefficients(dense.logprobs_T, packed, loss.fn, 1.0, need)
        for plan in next(plans):
            engine = tree_engine(policy, plan)
            what = f"{name} on {shape}, {plan}"
            assert_close(value_gradients(policy, engine, rows, held.dlogp_T), want, BOUNDS[dtype], what)
            own = value_coefficients(engine.forward_values(rows), packed, loss.fn, 1.0, need)
            assert _flips(held, own) == 0, what
            got = value_gradients(policy, engine, rows, own.dlogp_T)
            assert_close(got, want, OWN_BOUNDS[dtype], f"{what}, its own part 1")


def value_losses_equal_autograd_of_the_whole_loss_fp32(context: Context) -> None:
    _value_losses(context, torch.float32, 6)


def value_losses_equal_autograd_of_the_whole_loss_fp64(context: Context) -> None:
    _value_losses(context, torch.float64, 6)


def ratios_on_a_clip_boundary_may_flip_and_nothing_else_does(context: Context) -> None:
    """A third of the ratios is put on 1 + eps or 1 - eps as exactly as fp32 allows."""
    policy, loss = context.policy(), POLICY_LOSSES["grpo"]
    rows = random_rows("many_siblings", 3)
    around = TreeEngine(policy).forward(rows).logprobs_T
    packed = packed_batch(rows, 3, around)
    rng = np.random.default_rng(3)
    bound = torch.from_numpy(np.log(1 + EPS_CLIP * np.where(packed["advantages"] > 0, 1.0, -1.0)))
    on_boundary = torch.from_numpy(rng.random(rows.num_tokens) < 0.33) & packed["loss_mask"]
    packed["prox_logp"] = torch.where(on_boundary, (around.double() - bound).float(), packed["prox_logp"])
    want, dense = direct_gradients(policy, rows, loss.fn, packed, 1.0)
    held = loss_coefficients(dense, rows, packed, loss.fn, 1.0)
    for plan in PLANS:
        engine = tree_engine(policy, plan)
        own = loss_coefficients(engine.forward(rows, want_entropy=True), rows, packed, loss.fn, 1.0)
        flipped = _flipped(held, own)
        assert not (flipped & ~on_boundary).any(), plan
        torch.testing.assert_close(own.dlogp_T[~flipped], held.dlogp_T[~flipped], rtol=1e-4, atol=1e-8)
        assert_close(gradients(policy, engine, rows, held.dlogp_T), want, 1e-5, str(plan))
        print(f"{plan}: {int(flipped.sum())} of {int(on_boundary.sum())} ratios on the boundary flipped")


def five_ppo_steps_equal_training_on_dense_rows(context: Context) -> None:
    """At each step the two gradients agree at the same weights; policies trained apart stay together."""
    trained = [_train_by_loss(context, plan) for plan in (None, PlanSettings("auto", 24), PlanSettings("classic", 7))]
    for other in trained[1:]:
        for name, reference in trained[0].items():
            error = float((other[name] - reference).norm() / reference.norm())
            assert error < 5e-6, f"{name}: {error:.2e}"


def _train_by_loss(context: Context, plan: PlanSettings | None) -> dict[str, torch.Tensor]:
    """Weights after five steps of PPO with an entropy bonus; without a plan by autograd over dense rows."""
    loss, policy = POLICY_LOSSES["grpo_entropy_bonus"], context.policy(optimizer=STEADY)
    for step in range(5):
        rows = random_rows(SHAPES[step], 50 + step)
        packed = packed_batch(rows, step, torch.full((rows.num_tokens,), -5.0))
        noise_T = 0.1 * torch.from_numpy(np.random.default_rng(step).normal(size=rows.num_tokens)).float()
        packed["prox_logp"] = DenseEngine(policy).forward(rows, 0.8).logprobs_T + noise_T
        want, dense = direct_gradients(policy, rows, loss.fn, packed, 0.8)
        if plan is not None:
            held = loss_coefficients(dense, rows, packed, loss.fn, 1.0)
            got = gradients(policy, tree_engine(policy, plan), rows, held.dlogp_T, held.dentropy_T, 0.8)
            assert_close(got, want, 1e-5, f"step {step}, {plan}")
        assert policy.optimizer_step(1e-3).ok
    return {name: param.detach().clone() for name, param in policy.named_parameters()}


CASES = (
    policy_losses_equal_autograd_of_the_whole_loss_fp32,
    policy_losses_equal_autograd_of_the_whole_loss_fp64,
    value_losses_equal_autograd_of_the_whole_loss_fp32,
    value_losses_equal_autograd_of_the_whole_loss_fp64,
    ratios_on_a_clip_boundary_may_flip_and_nothing_else_does,
    five_ppo_steps_equal_training_on_dense_rows,
)
assert tuple(case.__name__ for case in CASES) == LOSS_CASES

"""World 1: any rows, any plan. Examples are drawn by hypothesis (always the same ones), a failure prints the smallest
rows and plan that show it.

What vanishes in exact arithmetic (the gradient of queries where there is one key) has no relative error: a parameter is
measured against the size of its own gradient plus what rounding leaves of nothing: in fp64 1e-4 of the whole
gradient's norm, in fp32 what the dense rows themselves get wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areal_dta.engine import DenseEngine, PlanSettings, Rows
from areal_dta.tree import tiles
from tests.parity.direct import equal_length_gradients
from tests.parity.plans import tree_engine
from tests.parity.support import Context, assert_close, coefficients, gradients, value_gradients, worst_errors
from tests.parity.tries import VOCAB, deep_chain, thousand_siblings

Lists = list[list[int]]
NUM_EXAMPLES = 40


def _token(branching: int) -> st.SearchStrategy[int]:
    return st.integers(0, branching - 1)


@st.composite
def grown_rows(draw: st.DrawFn) -> Lists:
    """Every row takes some tokens of an earlier one and goes on: duplicates, strict prefixes, chains, forests."""
    token = _token(draw(st.sampled_from((2, 4, VOCAB))))
    rows: Lists = []
    for _ in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        row = base[: draw(st.integers(0, len(base)))] + draw(st.lists(token, max_size=8))
        rows.append(row or [draw(token)])
    return rows


@st.composite
def combs(draw: st.DrawFn) -> Lists:
    """A trunk with branches at drawn depths, and rows that end on the trunk."""
    trunk = draw(st.lists(_token(VOCAB), min_size=8, max_size=30))
    depths = draw(st.lists(st.integers(1, len(trunk)), min_size=1, max_size=9))
    branches = [trunk[:depth] + draw(st.lists(_token(4), max_size=5)) for depth in depths]
    return draw(st.permutations([*branches, trunk]))


@st.composite
def branching_levels(draw: st.DrawFn) -> Lists:
    """Three levels, with drawn numbers of children and segment lengths (a level may add nothing)."""
    rows = [draw(st.lists(_token(VOCAB), min_size=1, max_size=8))]
    for _ in range(3):
        children = draw(st.integers(1, 3))
        rows = [row + draw(st.lists(_token(8), max_size=5)) for row in rows for _ in range(children)]
    return rows[:14]


@st.composite
def fans(draw: st.DrawFn) -> Lists:
    """Many short children of one path, some of one token."""
    prefix = draw(st.lists(_token(VOCAB), min_size=1, max_size=6))
    children = draw(st.lists(st.lists(_token(16), min_size=1, max_size=2), min_size=10, max_size=24))
    return [prefix + child for child in children]


ROWS = st.one_of(grown_rows(), combs(), branching_levels(), fans())


@st.composite
def plan_settings(draw: st.DrawFn) -> PlanSettings:
    """Any plan that `PlanSettings` accepts."""
    kind = draw(st.sampled_from(("auto", "auto", "classic", "sparse", "dense")))
    block = draw(st.sampled_from((1, 2, 3, 5, 8, 13, 32, 2048)))
    return PlanSettings(
        kind=kind,
        max_block_tokens=block,
        activation_budget=draw(st.sampled_from((0, block + 1, 2 * block + 1, 3 * block + 2))) if kind == "auto" else 0,
        leaf_merge=draw(st.booleans()) if kind == "dense" else True,
        cut_tail=draw(st.booleans()) if kind == "classic" else True,
        order=draw(st.sampled_from(("lexicographic", "heavy_first", "heavy_last"))),
    )


@dataclasses.dataclass(frozen=True)
class Example:
    """One drawn case; its repr is what a failure shows."""

    rows: Lists
    plan: PlanSettings
    temperature: float
    with_entropy: bool
    zero_share: float
    seed: int
    tile_overhead: int  # 0: no masked squares; every rectangle inside a block is a tile of its own

    def arrays(self, dtype: torch.dtype) -> tuple[Rows, torch.Tensor, torch.Tensor | None, np.ndarray]:
        """(rows, dL/dlogp, dL/dentropy, mask); NaN where the mask is false."""
        rows = Rows.from_lists(self.rows)
        mask_T = np.random.default_rng(self.seed).random(rows.num_tokens) < 0.8
        hole_T = torch.from_numpy(~mask_T)
        dlogp_T, dentropy_T = (
            coefficients(rows, self.seed + i, dtype, self.zero_share).masked_fill(hole_T, float("nan"))
            for i in range(2)
        )
        return rows, dlogp_T, dentropy_T if self.with_entropy else None, mask_T


EXAMPLES = st.builds(
    Example,
    rows=ROWS,
    plan=plan_settings(),
    temperature=st.sampled_from((1.0, 0.6)),
    with_entropy=st.booleans(),
    zero_share=st.sampled_from((0.0, 0.5, 0.95)),
    seed=st.integers(0, 999),
    tile_overhead=st.sampled_from((0, 50, 3000)),
)


def _check_examples(check: Callable[[Example], None]) -> None:
    """Run ``check`` on the same drawn examples each time; the smallest failing one is in the error."""

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    @given(EXAMPLES)
    def run(example: Example) -> None:
        try:
            with mock.patch.object(tiles, "TILE_OVERHEAD_PAIRS", example.tile_overhead):
                check(example)
        except AssertionError as error:
            raise AssertionError(f"{error}\nrows: {example.rows}\nfor {example}") from error

    run()


Gradients = dict[str, torch.Tensor]


def _assert_equal(got: Gradients, want: Gradients, slack: dict[str, float], bound: float) -> None:
    for name, reference in want.items():
        error, size = float((got[name] - reference).double().norm()), float(reference.double().norm())
        assert np.isfinite(error), f"{name}: gradient is not finite"
        assert error <= bound * size + slack[name], (
            f"{name}: error {error:.2e}, gradient {size:.2e}, rounding {slack[name]:.2e}"
        )
        if size > 0 and slack[name] < bound * size:
            worst_errors[bound] = max(worst_errors.get(bound, 0.0), error / size)


def _whole_norm(grads: Gradients) -> float:
    return float(sum(float(grad.double().norm()) ** 2 for grad in grads.values()) ** 0.5)


def any_rows_and_plan_give_the_dense_gradient_fp64(context: Context) -> None:
    policy = context.policy(torch.float64)
    dense = DenseEngine(policy)

    def check(example: Example) -> None:
        rows, dlogp_T, dentropy_T, mask_T = example.arrays(torch.float64)
        want = gradients(policy, dense, rows, dlogp_T, dentropy_T, example.temperature, mask_T)
        engine = tree_engine(policy, example.plan)
        got = gradients(policy, engine, rows, dlogp_T, dentropy_T, example.temperature, mask_T)
        _assert_equal(got, want, dict.fromkeys(want, 1e-14 * _whole_norm(want)), 1e-10)

    _check_examples(check)


def any_rows_and_plan_give_the_dense_gradient_fp32(context: Context) -> None:
    policy, exact = context.policy(), context.policy(torch.float64)

    def check(example: Example) -> None:
        rows, dlogp_T, dentropy_T, mask_T = example.arrays(torch.float32)
        arguments: tuple[Any, ...] = (rows, dlogp_T, dentropy_T, example.temperature, mask_T)
        want = gradients(policy, DenseEngine(policy), *arguments)
        true = gradients(exact, DenseEngine(exact), *arguments)
        rounding = {name: 4 * float((want[name].double() - true[name]).norm()) for name in want}
        floor = 1e-8 * _whole_norm(true)
        got = gradients(policy, tree_engine(policy, example.plan), *arguments)
        _assert_equal(got, want, {name: rounding[name] + floor for name in want}, 1e-5)

    _check_examples(check)


def any_rows_and_plan_give_the_dense_log_probs(context: Context) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        policy = context.policy(dtype)

        def check(example: Example, policy: Any = policy, bound: float = bound) -> None:
            rows = Rows.from_lists(example.rows)
            want = DenseEngine(policy).forward(rows, example.temperature, want_entropy=True)
            got = tree_engine(policy, example.plan).forward(rows, example.temperature, want_entropy=True)
            torch.testing.assert_close(got.logprobs_T, want.logprobs_T, atol=bound, rtol=0)
            torch.testing.assert_close(got.entropy_T, want.entropy_T, atol=bound, rtol=0)

        _check_examples(check)


def any_rows_and_plan_give_a_critics_dense_gradient_fp64(context: Context) -> None:
    critic = context.critic(torch.float64)

    def check(example: Example) -> None:
        rows, dvalue_T, _, mask_T = example.arrays(torch.float64)
        engine = tree_engine(critic, example.plan)
        want_T = DenseEngine(critic).forward_values(rows)
        torch.testing.assert_close(engine.forward_values(rows), want_T, atol=1e-12, rtol=0)
        want = value_gradients(critic, DenseEngine(critic), rows, dvalue_T, mask_T)
        got = value_gradients(critic, engine, rows, dvalue_T, mask_T)
        _assert_equal(got, want, dict.fromkeys(want, 1e-14 * _whole_norm(want)), 1e-10)

    _check_examples(check)


def _at_scale(context: Context, rows: Rows, plans: tuple[PlanSettings, ...], dense: Callable[..., Gradients]) -> None:
    """In fp64 all plans, in fp32 the first two."""
    for dtype, bound, num_plans in ((torch.float32, 1e-5, 2), (torch.float64, 1e-10, len(plans))):
        policy = context.policy(dtype)
        dlogp_T, dentropy_T = (coefficients(rows, seed, dtype) for seed in (1, 2))
        want = dense(policy, rows, dlogp_T, dentropy_T, 0.6)
        for plan in plans[:num_plans]:
            got = gradients(policy, tree_engine(policy, plan), rows, dlogp_T, dentropy_T, 0.6)
            assert_close(got, want, bound, f"{dtype} {plan}")


def a_thousand_siblings_give_the_dense_gradient(context: Context) -> None:
    plans = (
        PlanSettings(),
        PlanSettings("auto", 64, activation_budget=64),
        PlanSettings("sparse"),
        PlanSettings("dense", 512),
        PlanSettings("classic", order="heavy_last"),
    )
    _at_scale(context, thousand_siblings(), plans, equal_length_gradients)


def sixty_branchings_below_each_other_give_the_dense_gradient(context: Context) -> None:
    plans = (
        PlanSettings(),
        PlanSettings("auto", 8, activation_budget=8),
        PlanSettings("classic"),
        PlanSettings("dense", leaf_merge=False),
    )
    _at_scale(
        context, deep_chain(), plans, lambda policy, *arguments: gradients(policy, DenseEngine(policy), *arguments)
    )


CASES = (
    any_rows_and_plan_give_the_dense_gradient_fp64,
    any_rows_and_plan_give_the_dense_gradient_fp32,
    any_rows_and_plan_give_the_dense_log_probs,
    any_rows_and_plan_give_a_critics_dense_gradient_fp64,
    a_thousand_siblings_give_the_dense_gradient,
    sixty_branchings_below_each_other_give_the_dense_gradient,
)

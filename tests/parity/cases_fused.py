"""Losses fused into the backward walk against the three-part step: gradients, loss and statistics.

The reference formula is written here in plain torch on whole row arrays, as a loss function of the unfused step would
be. World 1 covers duplicates, prefixes and shared tokens with different advantages; the data-parallel case a rank
without rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from areal_dta.engine import MegatronPolicy, PlanSettings, Rows, TreeEngine
from areal_dta.engine.fused_loss import PPOSettings, PPOSums, PPOTokenLoss, Rejection, SFTTokenLoss
from tests.parity.support import Context, assert_close
from tests.parity.tries import random_rows, subset

TEMPERATURE = 0.7
PLANS = (
    PlanSettings("classic"),
    PlanSettings("classic", cut_tail=False),  # every push is computed again at its POP
    PlanSettings("auto", 24),  # pushes with their graph: the head runs at the POP
    PlanSettings("sparse"),
    PlanSettings("dense", 64),
)
SETTINGS = {
    "clip": PPOSettings(eps_clip=0.1),
    "asymmetric clip, dual clip": PPOSettings(eps_clip=0.1, eps_clip_higher=0.3, c_clip=1.2),
    "weights": PPOSettings(rejection=Rejection("clamp", upper=1.1, lower=0.9), c_clip=3.0),
    "rejection": PPOSettings(rejection=Rejection("mask", upper=1.2, lower=0.8)),
    "rejection by k1": PPOSettings(rejection=Rejection("mask", "kl_k1", upper=0.1)),
    "rejection by k2": PPOSettings(rejection=Rejection("mask", "kl_k2", upper=0.02)),
    "rejection by k3": PPOSettings(rejection=Rejection("mask", "kl_k3", upper=0.02)),
}


@dataclass(frozen=True)
class Batch:
    """Row arrays of a PPO minibatch; every row has its own advantages."""

    rows: Rows
    old_T: torch.Tensor
    prox_T: torch.Tensor
    advantage_T: torch.Tensor
    mask_T: torch.Tensor

    def take(self, keep: list[int]) -> Batch:
        rows, index = subset(self.rows, keep)
        at = torch.from_numpy(index)
        return Batch(rows, self.old_T[at], self.prox_T[at], self.advantage_T[at], self.mask_T[at])

    def token_loss(self, settings: PPOSettings, scale: float) -> PPOTokenLoss:
        return PPOTokenLoss(settings, self.old_T, self.prox_T, self.advantage_T, self.mask_T, scale)


def _batch(policy: MegatronPolicy, shape: str, seed: int) -> Batch:
    """Old and proximal log-probs near the policy's own, so that some tokens are clipped and some are not."""
    rows = random_rows(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    logp_T = TreeEngine(policy).forward(rows, TEMPERATURE).logprobs_T

    def noise(std: float) -> torch.Tensor:
        return (torch.randn(rows.num_tokens, generator=generator, dtype=torch.float64) * std).to(logp_T.dtype)

    mask_T = torch.rand(rows.num_tokens, generator=generator) < 0.7
    mask_T[torch.from_numpy(rows.offsets_S1[1:] - 1)] = False
    prox_T = logp_T + noise(0.2)
    return Batch(rows, prox_T + noise(0.15), prox_T, noise(1.0), mask_T)


def _loss_terms(settings: PPOSettings, batch: Batch, logp_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """The token-level clipped objective with decoupled weights, written for whole arrays."""
    mask, weight = batch.mask_T.clone(), torch.ones_like(logp_T)
    behave = batch.prox_T - batch.old_T
    rejection = settings.rejection
    filtered = torch.zeros_like(mask)
    if rejection is not None:
        weight = behave.exp()
        lower = -np.inf if rejection.lower is None else rejection.lower
        if rejection.action == "clamp":
            clamped = weight.clip(max(lower, 0.0), rejection.upper)
            filtered = mask & (clamped != weight)
            weight = clamped
        else:
            metric = {
                "ratio": behave.exp(),
                "kl_k1": behave,
                "kl_k2": behave**2 / 2,
                "kl_k3": torch.expm1(-behave) + behave,
            }[rejection.metric]
            inside = (metric >= lower) & (metric <= rejection.upper)
            filtered = mask & ~inside
            mask = mask & inside
        weight = weight * mask
    ratio = torch.exp(logp_T - batch.prox_T) * mask
    high = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
    plain = -batch.advantage_T * ratio
    bounded = -batch.advantage_T * torch.clip(ratio, 1 - settings.eps_clip, 1 + high)
    loss = torch.max(plain, bounded)
    dual = torch.zeros_like(mask)
    if settings.c_clip is not None:
        most = settings.c_clip * batch.advantage_T.abs()
        dual = mask & (most < loss)
        loss = torch.min(loss, most)
    return {
        "loss": loss * weight * mask,
        "ratio": ratio,
        "clipped": mask & (plain < bounded),
        "dual": dual,
        "filtered": filtered,
        "behave": mask & (weight > 0) if rejection is not None else torch.zeros_like(mask),
        "weight": weight,
    }


def _unfused(
    policy: MegatronPolicy, settings: PPOSettings, batch: Batch, scale: float, sync: str = "full"
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Forward, loss on rows, backward walk: (gradients, log-probs, loss terms)."""
    engine = TreeEngine(policy)
    values = engine.forward(batch.rows, TEMPERATURE, want_entropy=True)
    logp_T = values.logprobs_T.requires_grad_()
    terms = _loss_terms(settings, batch, logp_T)
    (dlogp_T,) = torch.autograd.grad(terms["loss"].sum() * scale, logp_T)
    policy.zero_grad()
    engine.backward(batch.rows, dlogp_T, temperature=TEMPERATURE, mask_T=batch.mask_T, sync=sync)
    terms |= {"dlogp": dlogp_T, "entropy": values.entropy_T}
    return {name: grad.clone() for name, grad in policy.gradients().items()}, logp_T.detach(), terms


def _fused_equals_three_parts(context: Context, dtype: torch.dtype, bound: float, bound_values: float) -> None:
    policy = context.policy(dtype)
    for number, (name, settings) in enumerate(SETTINGS.items()):
        shape = ("duplicates_and_prefixes", "three_levels", "comb")[number % 3]
        batch = _batch(policy, shape, 40 + number)
        scale = 1.0 / int(batch.mask_T.sum())
        want, logp_T, terms = _unfused(policy, settings, batch, scale)
        assert terms["clipped"].any() or settings.rejection is not None
        for plan in PLANS:
            policy.zero_grad()
            engine = TreeEngine(policy, plan)
            token_loss = batch.token_loss(settings, scale)
            outcome = engine.backward_fused(batch.rows, token_loss, TEMPERATURE, want_entropy=True, sync="full")
            assert_close(policy.gradients(), want, bound, f"{name}, {plan}")
            loss = float(terms["loss"].sum().detach()) * scale
            assert abs(outcome.loss - loss) <= bound_values * (1 + abs(loss))
            shown = batch.mask_T
            for got, expected in (
                (outcome.values.logprobs_T, logp_T), (outcome.values.entropy_T, terms["entropy"]),
                (outcome.dlogp_T, terms["dlogp"]),
            ):  # fmt: skip
                torch.testing.assert_close(got[shown], expected[shown], atol=bound_values, rtol=0)
                assert not got[~shown].any()
            _sums_equal(token_loss.sums(outcome.values.logprobs_T), batch, logp_T, terms, bound_values)


def _sums_equal(
    sums: PPOSums, batch: Batch, logp_T: torch.Tensor, terms: dict[str, torch.Tensor], bound: float
) -> None:
    mask, behave = batch.mask_T, terms["behave"]
    counts = (
        (sums.num_tokens, mask), (sums.clipped, terms["clipped"]), (sums.dual_clipped, terms["dual"]),
        (sums.num_behave, behave), (sums.num_filtered, terms["filtered"]),
    )  # fmt: skip
    assert [got for got, _ in counts] == [int(where.sum()) for _, where in counts]
    totals = (
        (sums.loss, terms["loss"], mask), (sums.importance_weight, terms["ratio"], mask),
        (sums.approx_kl, logp_T - batch.prox_T, mask), (sums.new_logp, logp_T, mask),
        (sums.old_logp, batch.old_T, mask), (sums.behave_imp_weight, terms["weight"], behave),
        (sums.behave_approx_kl, batch.prox_T - batch.old_T, behave),
    )  # fmt: skip
    for number, (got, values, where) in enumerate(totals):
        want = float(values.detach().double()[where].sum())
        assert abs(got - want) <= 100 * bound * (1 + abs(want)), f"statistic {number}: {got}, expected {want}"


def fused_equals_the_three_part_step_fp32(context: Context) -> None:
    _fused_equals_three_parts(context, torch.float32, 1e-5, 1e-5)


def fused_equals_the_three_part_step_fp64(context: Context) -> None:
    _fused_equals_three_parts(context, torch.float64, 1e-10, 1e-11)


def fused_sft_equals_the_three_part_step(context: Context) -> None:
    policy = context.policy(torch.float64)
    batch = _batch(policy, "duplicates_and_prefixes", 3)
    engine = TreeEngine(policy)
    policy.zero_grad()
    engine.backward(batch.rows, -0.25 * batch.mask_T.double(), temperature=TEMPERATURE, sync="full")
    want = {name: grad.clone() for name, grad in policy.gradients().items()}
    policy.zero_grad()
    outcome = engine.backward_fused(batch.rows, SFTTokenLoss(batch.mask_T, 0.25), TEMPERATURE, sync="full")
    assert_close(policy.gradients(), want, 1e-10)
    logp_T = engine.forward(batch.rows, TEMPERATURE).logprobs_T
    assert abs(outcome.loss + 0.25 * float(logp_T[batch.mask_T].sum())) < 1e-10


def fused_gradients_accumulate_and_skip_what_carries_no_loss(context: Context) -> None:
    policy = context.policy(torch.float64)
    batch = _batch(policy, "three_levels", 8)
    only = torch.zeros_like(batch.mask_T)
    lo = int(batch.rows.offsets_S1[5])
    only[lo + 3 : int(batch.rows.offsets_S1[6]) - 1] = True
    batch = Batch(batch.rows, batch.old_T, batch.prox_T, batch.advantage_T, only)
    want, *_ = _unfused(policy, PPOSettings(), batch, 0.1)
    engine = TreeEngine(policy, PlanSettings("classic"))
    policy.zero_grad()
    engine.backward_fused(batch.rows, batch.token_loss(PPOSettings(), 0.04), TEMPERATURE, sync="none")
    assert engine.stats.num_blocks < 5
    engine.backward_fused(batch.rows, batch.token_loss(PPOSettings(), 0.06), TEMPERATURE, sync="full")
    assert_close(policy.gradients(), want, 1e-10)
    with pytest.raises(RuntimeError, match="zero_grad"):
        engine.backward_fused(batch.rows, batch.token_loss(PPOSettings(), 1.0))


def fused_without_any_loss_token_gives_zero(context: Context) -> None:
    policy = context.policy(torch.float64)
    batch = _batch(policy, "one_leaf", 2)
    token_loss = SFTTokenLoss(torch.zeros_like(batch.mask_T), 1.0)
    policy.zero_grad()
    outcome = TreeEngine(policy).backward_fused(batch.rows, token_loss, sync="full")
    assert outcome.loss == 0.0
    assert outcome.values.entropy_T is None
    assert all(not grad.any() for grad in policy.gradients().values())


def what_is_no_sum_over_tokens_is_refused(context: Context) -> None:
    for make, key in (
        (lambda: PPOSettings(importance_sampling_level="sequence"), "importance_sampling_level"),
        (lambda: PPOSettings(entropy_coef=0.01), "entropy_coef"),
        (lambda: PPOSettings(c_clip=1.0), "c_clip"),
        (lambda: Rejection(level="sequence"), "rejection_sampling.level"),
        (lambda: Rejection(metric="entropy"), "rejection_sampling.metric"),
    ):
        with pytest.raises(ValueError, match=key):
            make()


def fused_shards_sum_to_the_unfused_gradient(context: Context) -> None:
    """Every rank computes the whole batch unfused, which two ranks double; then each walks its part fused."""
    policy = context.policy(torch.float64)
    settings = SETTINGS["asymmetric clip, dual clip"]
    batch = _batch(policy, "duplicates_and_prefixes", 12)
    want, *_ = _unfused(policy, settings, batch, 0.05 / context.sizes.dp)
    everything = list(range(batch.rows.num_rows))
    for split in ((everything[:5], everything[5:]), (everything, []), ([], everything)):
        part = batch.take(split[policy.dp_rank])
        policy.zero_grad()
        TreeEngine(policy).backward_fused(part.rows, part.token_loss(settings, 0.05), TEMPERATURE, sync="full")
        assert_close(policy.gradients(), want, 1e-10, f"split {[len(rows) for rows in split]}")


def fused_equals_unfused_over_model_parallel_ranks(context: Context) -> None:
    policy = context.policy(torch.float64)
    settings = SETTINGS["rejection"]
    batch = _batch(policy, "comb", 9)
    want, logp_T, _ = _unfused(policy, settings, batch, 0.05)
    policy.zero_grad()
    outcome = TreeEngine(policy, PlanSettings("auto", 24)).backward_fused(
        batch.rows, batch.token_loss(settings, 0.05), TEMPERATURE, sync="full"
    )
    assert_close(policy.gradients(), want, 1e-10)
    shown = batch.mask_T
    torch.testing.assert_close(outcome.values.logprobs_T[shown], logp_T[shown], atol=1e-11, rtol=0)


CASES = (
    fused_equals_the_three_part_step_fp32,
    fused_equals_the_three_part_step_fp64,
    fused_sft_equals_the_three_part_step,
    fused_gradients_accumulate_and_skip_what_carries_no_loss,
    fused_without_any_loss_token_gives_zero,
    what_is_no_sum_over_tokens_is_refused,
)
DP_CASES = (fused_shards_sum_to_the_unfused_gradient,)
TP_CASES = (fused_equals_unfused_over_model_parallel_ranks,)

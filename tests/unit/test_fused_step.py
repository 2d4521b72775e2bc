"""``dta.fused_loss``: AReaL's own loss function and statistics, with the walk's coefficients, alone in its world."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from areal.trainer.ppo.actor import grpo_loss_fn
from areal.utils import stats_tracker

from areal_dta.bridge import batch_of_shard
from areal_dta.engine.fused_loss import PPOSettings, Rejection
from areal_dta.fused_step import ppo_settings
from tests.unit.train_kit import build_engine, folder_error, local_settings, ppo_step, random_shard, tiny_policy

REJECTION = {"level": "token", "metric": "ratio"}
ACTORS: dict[str, dict[str, Any]] = {
    "clip": {"eps_clip": 0.02},
    "dual clip": {"eps_clip": 0.02, "eps_clip_higher": 0.05, "c_clip": 1.01},
    "rejection": {"rejection_sampling": {**REJECTION, "action": "mask", "upper": 1.5, "lower": 0.5}},
    "weights": {"rejection_sampling": {**REJECTION, "action": "clamp", "upper": 1.5}},
    "rejection by k3": {"rejection_sampling": {**REJECTION, "action": "mask", "metric": "kl_k3", "upper": 0.2}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(autouse=True)
def _fresh_statistics() -> None:
    stats_tracker.export_all()


@pytest.mark.parametrize("name", list(ACTORS))
def test_fused_minibatches_equal_unfused_ones(model: Path, tmp_path: Path, name: str) -> None:
    """Three minibatches: the first finds its part 1 in the forward pass, the others are fused."""
    shard = random_shard(5, num_minibatches=3)
    stats, walks = {}, {}
    for fused in (True, False):
        engine = build_engine(model, local_settings(fused_loss=fused, loss_positions_only=True), **ACTORS[name])
        forward = engine.step.engine.forward
        calls = walks[fused] = []
        engine.step.engine.forward = lambda *a, _f=forward, _c=calls, **k: (_c.append(1), _f(*a, **k))[1]
        stats[fused] = ppo_step(engine, shard, 3)
        engine.policy.save_hf(tmp_path / str(fused))
    assert (len(walks[True]), len(walks[False])) == (1, 3)
    assert folder_error(tmp_path / "True", tmp_path / "False") < 2e-6
    assert stats[True].keys() == stats[False].keys()
    for key, want in stats[False].items():
        assert stats[True][key] == pytest.approx(want, rel=1e-4, abs=1e-5), key
    assert stats[True]["ppo_actor/update/entropy/avg"] > 0


def test_a_batch_without_loss_tokens_makes_no_step(model: Path) -> None:
    engine = build_engine(model, local_settings(fused_loss=True))
    batch = batch_of_shard(random_shard(1))
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for key in ("prox_logp", "advantages"):
        batch[key] = torch.zeros_like(batch["logprobs"])
    loss_fn = functools.partial(grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
    result = engine.train_batch(batch, loss_fn, lambda data: data["loss_mask"].count_nonzero())
    assert result["update_successful"] == 0.0


def test_a_loss_that_is_not_what_was_fused_is_an_error(model: Path) -> None:
    engine = build_engine(model, local_settings(fused_loss=True))
    batch = batch_of_shard(random_shard(1))
    batch |= {"loss_mask": batch["loss_mask"].roll(-1, -1), "advantages": torch.ones_like(batch["logprobs"])}
    batch["prox_logp"] = batch["logprobs"]

    @functools.wraps(grpo_loss_fn)
    def doubled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * grpo_loss_fn(*args, **kwargs)

    loss_fn = functools.partial(doubled, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
    with pytest.raises(RuntimeError, match="dta.fused_loss=false"):
        engine.train_batch(batch, loss_fn, lambda data: data["loss_mask"].count_nonzero())


def test_settings_are_read_off_the_bound_loss_function() -> None:
    rejection = SimpleNamespace(action="clamp", metric="ratio", upper=3.0, lower=None, level="token")
    bound = functools.partial(grpo_loss_fn, eps_clip=0.1, eps_clip_higher=0.3, c_clip=3.0, rejection_sampling=rejection)
    assert ppo_settings(bound) == PPOSettings(0.1, 0.3, 3.0, Rejection("clamp", upper=3.0))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"use_sapo_loss": True}, "actor.use_sapo_loss"),
        ({"m2_threshold": 0.1}, "actor.m2_threshold"),
        ({"prox_logp_method": "loglinear"}, "actor.prox_logp_method"),
        ({"importance_sampling_level": "sequence"}, "actor.importance_sampling_level"),
    ],
)
def test_what_cannot_be_fused_is_refused_by_key(setting: dict[str, Any], key: str) -> None:
    bound = functools.partial(grpo_loss_fn, eps_clip=0.1, **setting)
    with pytest.raises(ValueError, match=key):
        ppo_settings(bound)


def test_other_loss_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="grpo_loss_fn"):
        ppo_settings(lambda logp, entropy, data: logp.sum())


def test_the_dense_engine_trains_unfused(model: Path) -> None:
    engine = build_engine(model, local_settings(fused_loss=True, mode="disabled"))
    assert ppo_step(engine, random_shard(5, num_minibatches=2), 2)["ppo_actor/update/update_successful"] == 1.0

"""AReaL's PPOActor on the engine, alone in its world, against plain torch. Not several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.utils import stats_tracker

from areal_dta.bridge import batch_of_shard, make_actor
from areal_dta.train_engine import DtaTrainEngine
from tests.unit.train_kit import (
    Reference,
    build_engine,
    folder_error,
    local_settings,
    make_shard,
    parameter_error,
    ppo_step,
    random_shard,
    tiny_policy,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(autouse=True)
def _fresh_statistics() -> None:
    stats_tracker.export_all()


def token_mean(logp: torch.Tensor, entropy: torch.Tensor, data: dict[str, Any]) -> torch.Tensor:
    mask = data["loss_mask"].bool()
    return -torch.where(mask, logp, 0).sum() / max(1, int(mask.sum()))


def count(data: dict[str, Any]) -> torch.Tensor:
    return data["loss_mask"].count_nonzero()


def rolled(batch: dict[str, Any]) -> dict[str, Any]:
    """As PPOActor leaves a batch: the loss mask aligned with the predicting position."""
    return {**batch, "loss_mask": batch["loss_mask"].roll(-1, -1)}


def test_every_abstract_method_of_areals_engine_is_implemented() -> None:
    assert not inspect.isabstract(DtaTrainEngine)
    assert issubclass(DtaTrainEngine, TrainEngine)


@pytest.mark.parametrize("mode", ["dta", "disabled", "sparse"])
def test_logprobs_are_those_of_transformers_in_areals_layout(model: Path, mode: str) -> None:
    engine = build_engine(model, local_settings(mode=mode))
    shard = random_shard(0)
    batch = batch_of_shard(shard)
    logp = make_actor(engine.config, engine).compute_logp([batch])[0]
    assert logp.shape == batch["input_ids"].shape
    reference = Reference()
    for row in range(shard.num_rows):
        lo, hi = int(shard.offsets_S1[row]), int(shard.offsets_S1[row + 1])
        with torch.no_grad():
            expected = reference.logp(shard.input_ids_T[lo:hi])
        torch.testing.assert_close(logp[row, : hi - lo - 1], expected, atol=2e-5, rtol=1e-5)
        assert not logp[row, hi - lo - 1 :].any()


@pytest.mark.parametrize(("steps", "num_minibatches"), [(1, 1), (3, 1), (3, 3)])
def test_ppo_steps_equal_plain_autograd(model: Path, tmp_path: Path, steps: int, num_minibatches: int) -> None:
    engine, reference = build_engine(model), Reference()
    for step in range(steps):
        shard = random_shard(step, num_minibatches=num_minibatches)
        stats = ppo_step(engine, shard, num_minibatches)
        expected = np.array(reference.step(shard, num_minibatches))
        assert stats["ppo_actor/update/batch_loss"] == pytest.approx(expected[:, 0].mean(), rel=1e-4, abs=1e-6)
        assert stats["ppo_actor/update/grad_norm"] == pytest.approx(expected[:, 1].mean(), rel=1e-4)
        assert stats["ppo_actor/update/update_successful"] == 1.0
    engine.policy.save_hf(tmp_path / "after")
    assert parameter_error(reference.model, tmp_path / "after") < 2e-3 * 1e-3 * steps  # 0.2% of lr per step


def test_part_one_is_reused_once_per_weights_and_changes_nothing(model: Path, tmp_path: Path) -> None:
    shard = random_shard(5, num_minibatches=3)
    outcomes = []
    for reuse in (True, False):
        engine = build_engine(model, local_settings(reuse_forward=reuse))
        stats = ppo_step(engine, shard, 3)
        engine.policy.save_hf(tmp_path / str(reuse))
        outcomes.append(
            (stats["ppo_actor/update/batch_loss"], stats["ppo_actor/update/entropy/avg"], tmp_path / str(reuse))
        )
        assert engine.step.num_reused == (1 if reuse else 0)  # the first minibatch; the others have new weights
    (loss_a, entropy_a, folder_a), (loss_b, entropy_b, folder_b) = outcomes
    assert loss_a == pytest.approx(loss_b, rel=1e-5)
    assert entropy_a == pytest.approx(entropy_b, rel=1e-5)
    assert folder_error(folder_a, folder_b) < 1e-6


def test_reuse_is_exact_for_the_same_rows(model: Path) -> None:
    engine = build_engine(model)
    batch = batch_of_shard(random_shard(6))
    engine.forward(batch)
    rows = engine.step.rows_of(batch)
    reused, fresh = engine.step.part1(rows), engine.step.engine.forward(rows, temperature=0.8, want_entropy=True)
    assert engine.step.num_reused == 1
    assert torch.equal(reused.logprobs_T, fresh.logprobs_T)
    assert torch.equal(reused.entropy_T, fresh.entropy_T)


@pytest.mark.parametrize("only", [False, True])
def test_nan_in_masked_positions_changes_nothing(model: Path, only: bool) -> None:
    engine = build_engine(model, local_settings(loss_positions_only=only, reuse_forward=False))
    actor = make_actor(engine.config, engine)
    clean = batch_of_shard(random_shard(7))
    clean["prox_logp"] = actor.compute_logp([clean])[0]
    clean = actor.compute_advantages([clean])[0]
    dirty = {k: v.clone() if torch.is_tensor(v) else v for k, v in clean.items()}
    for name in ("advantages", "logprobs"):
        dirty[name][dirty["loss_mask"] == 0] = float("nan")
    coefficients = []
    engine.policy.optimizer_step = lambda lr: _Done()  # type: ignore[method-assign]  # the same weights for both
    for data in (clean, dirty):
        actor.ppo_update([data])
        coefficients.append(engine.step.last[1].dlogp_T)
    assert torch.equal(coefficients[0], coefficients[1])
    assert coefficients[0].any()


class _Done:
    ok, grad_norm = True, 1.0


LOSSES: dict[str, dict[str, Any]] = {
    "rejection": {"rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "upper": 1.2}},
    "rejection_sequence": {
        "rejection_sampling": {"level": "sequence", "action": "mask", "metric": "kl_k2", "upper": 1.6}
    },
    "gspo": {"importance_sampling_level": "sequence"},
    "dual_clip": {"c_clip": 3.0, "eps_clip_higher": 0.3},
    "m2po": {"m2_threshold": 0.04},
    "sapo": {"use_sapo_loss": True, "use_decoupled_loss": False},
    "on_policy": {"use_decoupled_loss": False, "recompute_logprob": True},
    "discounted": {"gae_lambda": 0.9, "discount": 0.99, "kl_ctl": 0.05},
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_of_areals_losses_runs_on_the_tree_as_densely_and_on_a_rank_without_rows(model: Path, name: str) -> None:
    stats = []
    for mode in ("dta", "disabled"):
        engine = build_engine(model, local_settings(mode=mode, loss_positions_only=mode == "dta"), **LOSSES[name])
        stats.append(ppo_step(engine, random_shard(8, num_minibatches=2), 2))
    for key in ("batch_loss", "grad_norm", "clip_ratio/avg", "importance_weight/avg", "actor_loss/avg"):
        full = f"ppo_actor/update/{key}"
        assert stats[0][full] == pytest.approx(stats[1][full], rel=2e-5, abs=1e-6), key
    assert stats[0]["ppo_actor/update/grad_norm"] > 1e-3
    empty = ppo_step(engine, make_shard([], []))
    assert empty["ppo_actor/update/update_successful"] == 0.0


def test_a_loss_that_is_not_finite_makes_no_step(model: Path) -> None:
    engine = build_engine(model)
    before = {n: p.detach().clone() for n, p in engine.policy.model.named_parameters()}
    batch = rolled(batch_of_shard(random_shard(1)))
    stats = engine.train_batch(batch, lambda lp, ent, data: lp.sum() * float("inf"), count)
    assert stats["update_successful"] == 0.0
    assert all(torch.equal(p, before[n]) for n, p in engine.policy.model.named_parameters())
    assert engine.train_batch(batch, token_mean, count)["update_successful"] == 1.0


def test_a_batch_without_loss_tokens_makes_no_step_and_keeps_going(model: Path) -> None:
    engine = build_engine(model)
    batch = rolled(batch_of_shard(make_shard([], [])))
    called = []
    stats = engine.train_batch(batch, lambda lp, ent, data: called.append(1) or lp.sum() * 0, count)
    assert (stats["update_successful"], called) == (0.0, [1])
    assert engine.eval_batch(batch, token_mean, count) is None


def test_a_loss_on_entropy_reaches_the_weights(model: Path) -> None:
    """d(mean entropy)/dw by the engine equals plain autograd's."""
    engine, reference = build_engine(model, local_settings()), Reference()
    shard = random_shard(2, num_groups=1)
    engine.policy.optimizer_step = lambda lr: _Done()  # type: ignore[method-assign]
    mask = rolled(batch_of_shard(shard))
    engine.train_batch(
        mask, lambda lp, ent, d: torch.where(d["loss_mask"].bool(), ent, 0).sum(), lambda d: torch.tensor(1)
    )
    total = torch.zeros(())
    for row in range(shard.num_rows):
        lo, hi = int(shard.offsets_S1[row]), int(shard.offsets_S1[row + 1])
        ids = torch.from_numpy(shard.input_ids_T[lo:hi].astype(np.int64))[None]
        logp = torch.log_softmax(reference.model(ids).logits[0] / 0.8, -1)[:-1]
        entropy = -(logp.exp() * logp).sum(-1)
        total = total + entropy[torch.from_numpy(shard.loss_mask_T[lo + 1 : hi].astype(bool))].sum()
    total.backward()
    expected = reference.model.model.norm.weight.grad
    found = engine.policy.gradients()["decoder.final_layernorm.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_eval_batch_is_the_training_loss_without_a_step(model: Path) -> None:
    engine = build_engine(model)
    batch = rolled(batch_of_shard(random_shard(3)))
    evaluated = engine.eval_batch(batch, token_mean, count)
    trained = engine.train_batch(batch, token_mean, count)
    assert float(evaluated) == pytest.approx(trained["batch_loss"], rel=1e-5)
    assert float(engine.eval_batch(batch, token_mean, count)) < float(evaluated)


def test_learning_rate_zero_changes_no_weight(model: Path) -> None:
    engine = build_engine(model, optimizer={"lr": 0.0, "weight_decay": 0.1})
    before = {n: p.detach().clone() for n, p in engine.policy.model.named_parameters()}
    stats = ppo_step(engine, random_shard(4))
    assert stats["ppo_actor/update/update_successful"] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in engine.policy.model.named_parameters())


def test_checkpoints_continue_as_if_never_interrupted(model: Path, tmp_path: Path) -> None:
    straight, first = build_engine(model), build_engine(model)
    for seed in (0, 1):
        ppo_step(straight, random_shard(seed))
    ppo_step(first, random_shard(0))
    first.save(SaveLoadMeta(path=str(tmp_path / "ckpt"), weight_format="dcp", with_optim=True))
    resumed = build_engine(model)
    resumed.load(SaveLoadMeta(path=str(tmp_path / "ckpt"), weight_format="dcp", with_optim=True))
    resumed.set_lr_step(1)
    ppo_step(resumed, random_shard(1))
    for (name, a), (_, b) in zip(
        straight.policy.model.named_parameters(), resumed.policy.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_hf_weights_survive_save_and_load(model: Path, tmp_path: Path) -> None:
    engine = build_engine(model)
    ppo_step(engine, random_shard(0))
    engine.save(SaveLoadMeta(path=str(tmp_path / "hf"), weight_format="hf", with_optim=False))
    other = build_engine(model)
    other.load(SaveLoadMeta(path=str(tmp_path / "hf"), weight_format="hf", with_optim=False))
    batch = batch_of_shard(random_shard(9))
    assert torch.equal(engine.forward(batch), other.forward(batch))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.rollout_batch([], None), "the batcher feeds this engine"),
        (lambda e: e.prepare_batch(None, None), "the batcher feeds this engine"),
        (lambda e: e.forward_backward_batch(None, None), "use train_batch"),
        (lambda e: e.offload(), "actor.offload=false"),
        (lambda e: e.update_weights(WeightUpdateMeta(type="disk", path="w", version=1)), "EngineSettings.router"),
    ],
)
def test_what_the_engine_does_not_do_it_refuses_with_the_alternative(
    model: Path, call: Callable[[DtaTrainEngine], Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(build_engine(model))


def test_context_parallelism_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="context and expert parallelism"):
        build_engine(model, backend="megatron:d1c2")

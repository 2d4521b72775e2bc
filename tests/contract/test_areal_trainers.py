"""AReaL's PPOCritic, LMEngine, DPOEngine and reward loss, unmodified, on DtaTrainEngine against plain torch.

Five optimizer steps deep; one process. AReaL's RWEngine cannot be called: in 1.0.4 it looks for ``cu_seqlens`` in the
padded batch that its own trainer gives it, so its loss is passed to ``train_batch`` directly. Actors are in
tests/unit/test_train_engine.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from areal.api.cli_args import DPOEngineConfig, PPOCriticConfig, TrainEngineConfig
from areal.trainer.dpo.dpo_engine import DPOEngine
from areal.trainer.ppo.critic import PPOCritic
from areal.trainer.rw.rw_engine import _rw_loss_weight, compute_rw_loss
from areal.trainer.sft.lm_engine import LMEngine
from areal.utils import stats_tracker
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from areal_dta.bridge import actor_config, batch_of_shard, finetune_spec, make_actor
from areal_dta.train_engine import DtaTrainEngine
from tests.unit.train_kit import ACTOR, local_settings, parameter_error, random_shard, tiny_policy

OPTIMIZER = ACTOR["optimizer"]
NUM_STEPS = 5
TOLERANCE = 2e-3 * OPTIMIZER["lr"] * NUM_STEPS  # 0.2% of the learning rate per step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(autouse=True)
def _fresh_statistics() -> None:
    stats_tracker.export_all()


def engine_of(
    config_class: type[TrainEngineConfig], model: Path, mode: str, only: bool = False, **fields: Any
) -> DtaTrainEngine:
    """An initialised engine with one of AReaL's own configurations; ``only``: at loss positions, as in real runs."""
    values = {"experiment_name": "e", "trial_name": "t", "path": str(model), "backend": "megatron:d1"}
    values |= {"dtype": "float32", "optimizer": OPTIMIZER, **fields}
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config_class), OmegaConf.create(values)))
    engine = DtaTrainEngine(config, local_settings(mode=mode, loss_positions_only=only))
    engine.create_process_group()
    engine.initialize(None, finetune_spec(100))
    return engine


class Twin:
    """The same model in transformers, one row at a time, with torch's AdamW."""

    def __init__(self, engine: DtaTrainEngine, folder: Path, kind: Any) -> None:
        engine.policy.save_hf(folder)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=OPTIMIZER["lr"], eps=OPTIMIZER["eps"], weight_decay=0.0
        )

    def rows(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """Per row its log-probs of tokens 1.., or a critic's values of all tokens."""
        out = []
        for ids_L, mask_L in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids_S = ids_L[mask_L.bool()]
            logits_SV = self.model(ids_S[None]).logits[0].float()
            if logits_SV.shape[-1] == 1:
                out.append(logits_SV[:, 0])
            else:
                out.append(logits_SV[:-1].log_softmax(-1).gather(1, ids_S[1:, None])[:, 0])
        return out

    def step(self, loss: torch.Tensor) -> tuple[float, float]:
        """(loss, gradient norm before clipping to 1)."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), float(norm)


def assert_same_step(stats: dict[str, float], scope: str, expected: tuple[float, float]) -> None:
    assert stats[f"{scope}update_successful"] == 1.0
    assert stats[f"{scope}batch_loss"] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    assert stats[f"{scope}grad_norm"] == pytest.approx(expected[1], rel=1e-4)


def critic_batch(engine: DtaTrainEngine, critic: PPOCritic, model: Path, seed: int) -> dict[str, Any]:
    """What AReaL's trainer gives a critic: its values and the returns of PPOActor's advantage estimation."""
    actor = make_actor(
        actor_config({"actor": {**ACTOR, "path": str(model), "backend": "megatron:d1", "gae_lambda": 0.9}}), engine
    )
    batch = batch_of_shard(random_shard(seed))
    batch["values"] = critic.compute_values([batch])[0]
    batch["prox_logp"] = torch.zeros_like(batch["values"])
    return actor.compute_advantages([batch])[0]


def critic_loss(rows: list[torch.Tensor], batch: dict[str, Any], eps_clip: float) -> torch.Tensor:
    """Clipped value loss, mean over loss tokens (AReaL's masks are rolled by then)."""
    total = torch.zeros(())
    for row, value_S in enumerate(rows):
        n = len(value_S)
        old_S, target_S = batch["values"][row, :n], batch["returns"][row, :n]
        clipped_S = old_S + (value_S - old_S).clamp(-eps_clip, eps_clip)
        worse_S = torch.max((value_S - target_S) ** 2, (clipped_S - target_S) ** 2) / 2
        total = total + worse_S[batch["loss_mask"][row, :n].bool()].sum()
    return total / batch["loss_mask"].count_nonzero()


@pytest.mark.parametrize("mode", ["dta", "disabled", "sparse"])
def test_ppo_critic_trains_as_plain_torch(model: Path, tmp_path: Path, mode: str) -> None:
    engine = engine_of(PPOCriticConfig, model, mode, is_critic=True, ppo_n_minibatches=1, eps_clip=0.02)
    critic, twin = PPOCritic(engine.config, engine), Twin(engine, tmp_path / "start", AutoModelForTokenClassification)
    for step in range(NUM_STEPS):
        batch = critic_batch(engine, critic, model, step)
        rows = twin.rows(batch)
        for row, value_S in enumerate(rows):
            got_L = batch["values"][row]
            torch.testing.assert_close(got_L[: len(value_S)], value_S.detach(), atol=2e-5, rtol=1e-5)
            assert not got_L[len(value_S) :].any()
        expected = twin.step(critic_loss(rows, batch, 0.02))
        critic.ppo_update([batch])
        engine.step_lr_scheduler()
        assert_same_step(engine.export_stats(), "ppo_critic/", expected)
    assert engine.step.num_reused == NUM_STEPS  # compute_values gave part 1 of every update
    engine.policy.save_hf(tmp_path / "after")
    assert parameter_error(twin.model, tmp_path / "after") < TOLERANCE


def test_ppo_critic_learns_the_same_from_loss_positions_only(model: Path) -> None:
    outcomes = []
    for only in (False, True):
        engine = engine_of(PPOCriticConfig, model, "dta", only, is_critic=True, ppo_n_minibatches=2)
        critic = PPOCritic(engine.config, engine)
        for step in range(2):
            critic.ppo_update([critic_batch(engine, critic, model, step)])
        outcomes.append(engine.export_stats())
    for key in ("batch_loss", "grad_norm", "new_value/avg", "target_value/avg", "critic_loss/avg"):
        assert outcomes[0][f"ppo_critic/{key}"] == pytest.approx(outcomes[1][f"ppo_critic/{key}"], rel=1e-5), key


def test_ppo_critic_clips_values_in_later_minibatches(model: Path) -> None:
    """AReaL's own splitter; the clipped share is its statistic."""
    engine = engine_of(PPOCriticConfig, model, "dta", is_critic=True, ppo_n_minibatches=3, eps_clip=1e-4)
    critic = PPOCritic(engine.config, engine)
    critic.ppo_update([critic_batch(engine, critic, model, 1)])
    stats = engine.export_stats()
    assert stats["ppo_critic/clip_ratio/avg"] > 0.1
    assert stats["ppo_critic/update_successful"] == 1.0


def test_language_modelling_trains_as_plain_torch(model: Path, tmp_path: Path) -> None:
    engine = engine_of(TrainEngineConfig, model, "dta")
    trainer, twin = LMEngine(engine), Twin(engine, tmp_path / "start", AutoModelForCausalLM)
    for step in range(NUM_STEPS):
        batch = batch_of_shard(random_shard(step))
        mask_SL = batch["loss_mask"].bool()
        total = sum(logp_S[mask_SL[row, 1 : 1 + len(logp_S)]].sum() for row, logp_S in enumerate(twin.rows(batch)))
        expected = twin.step(-total / (1e-5 + mask_SL.count_nonzero()))
        trainer.train_lm([{key: batch[key] for key in ("input_ids", "attention_mask", "loss_mask")}])
        assert_same_step(engine.export_stats(), "sft/", expected)
    engine.policy.save_hf(tmp_path / "after")
    assert parameter_error(twin.model, tmp_path / "after") < TOLERANCE


def pairs(seed: int) -> list[dict[str, torch.Tensor]]:
    """Chosen and rejected rows in turn, each a dict of its own, as AReaL's collate functions make them."""
    batch = batch_of_shard(random_shard(seed))
    lens = batch["attention_mask"].sum(-1).tolist()
    keys = ("input_ids", "attention_mask", "loss_mask")
    return [{key: batch[key][row : row + 1, : lens[row]] for key in keys} for row in range(len(lens) // 2 * 2)]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(row["input_ids"].shape[1] for row in rows)
    return {
        key: torch.cat([torch.nn.functional.pad(row[key], (0, width - row[key].shape[1])) for row in rows])
        for key in rows[0]
    }


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_preference_pairs_train_as_plain_torch(model: Path, tmp_path: Path, loss_type: str) -> None:
    beta = 0.3
    engine = engine_of(DPOEngineConfig, model, "dta", beta=beta, loss_type=loss_type)
    trainer, twin = DPOEngine(engine), Twin(engine, tmp_path / "start", AutoModelForCausalLM)
    reference = Twin(engine, tmp_path / "start", AutoModelForCausalLM)
    for step in range(NUM_STEPS):
        rows = pairs(step)
        with torch.no_grad():
            reference_rows = reference.rows(padded(rows))
        scores, lens = [], []
        for row, logp_S, reference_S in zip(rows, twin.rows(padded(rows)), reference_rows, strict=True):
            mask_S = row["loss_mask"][0, 1:].bool()
            scores.append((logp_S - reference_S)[mask_S].sum())
            lens.append(max(1, int(mask_S.sum())))
            row["ref_logprobs"] = torch.nn.functional.pad(reference_S, (0, 1))[None]
        score_P2, len_P2 = torch.stack(scores).view(-1, 2), torch.tensor(lens).view(-1, 2)
        if loss_type == "ipo":
            margin_P = score_P2[:, 0] / len_P2[:, 0] - score_P2[:, 1] / len_P2[:, 1]
            loss = ((margin_P - 1 / (2 * beta)) ** 2).mean()
        else:
            loss = -torch.nn.functional.logsigmoid(beta * (score_P2[:, 0] - score_P2[:, 1])).mean()
        expected = twin.step(loss)
        trainer.train_dpo(rows)
        assert_same_step(engine.export_stats(), "dpo/", expected)
    engine.policy.save_hf(tmp_path / "after")
    assert parameter_error(twin.model, tmp_path / "after") < TOLERANCE


def test_reward_models_train_as_plain_torch(model: Path, tmp_path: Path) -> None:
    engine = engine_of(TrainEngineConfig, model, "dta", is_critic=True)
    twin = Twin(engine, tmp_path / "start", AutoModelForTokenClassification)
    for step in range(NUM_STEPS):
        batch = padded(pairs(step))
        score_P2 = torch.stack([value_S[-1] for value_S in twin.rows(batch)]).view(-1, 2)
        expected = twin.step(-torch.nn.functional.logsigmoid(score_P2[:, 0] - score_P2[:, 1]).mean())
        stats = engine.train_batch(batch, compute_rw_loss, _rw_loss_weight)
        assert_same_step(stats, "", expected)
    engine.policy.save_hf(tmp_path / "after")
    assert parameter_error(twin.model, tmp_path / "after") < TOLERANCE


def test_evaluation_of_a_critic_is_its_training_loss(model: Path) -> None:
    engine = engine_of(TrainEngineConfig, model, "dta", is_critic=True)
    batch = padded(pairs(1))
    evaluated = engine.eval_batch(batch, compute_rw_loss, _rw_loss_weight)
    assert float(evaluated) == pytest.approx(engine.train_batch(batch, compute_rw_loss, _rw_loss_weight)["batch_loss"])
    assert float(engine.eval_batch(batch, compute_rw_loss, _rw_loss_weight)) < float(evaluated)


def test_critic_checkpoints_continue_as_if_never_interrupted(model: Path, tmp_path: Path) -> None:
    straight, first, resumed = (engine_of(TrainEngineConfig, model, "dta", is_critic=True) for _ in range(3))
    for seed in (0, 1):
        straight.train_batch(padded(pairs(seed)), compute_rw_loss, _rw_loss_weight)
    first.train_batch(padded(pairs(0)), compute_rw_loss, _rw_loss_weight)
    first.policy.save_checkpoint(tmp_path / "checkpoint")
    resumed.policy.load_checkpoint(tmp_path / "checkpoint")
    resumed.step.weights_changed()
    resumed.train_batch(padded(pairs(1)), compute_rw_loss, _rw_loss_weight)
    for (name, a), (_, b) in zip(straight.policy.named_parameters(), resumed.policy.named_parameters(), strict=True):
        assert torch.equal(a, b), name

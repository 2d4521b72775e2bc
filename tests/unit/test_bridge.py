"""Shards become AReaL's batches and back; configuration becomes AReaL's; nothing about the model is covered here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_dta.bridge import BridgeError, actor_config, batch_of_shard, flat_of_padded, make_actor, minibatches
from tests.unit.train_kit import make_shard


def test_a_shard_becomes_a_right_padded_batch_and_back() -> None:
    shard = make_shard([[5, 6, 7, 8], [5, 6]], loss_from=[2, 1])
    batch = batch_of_shard(shard)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch["versions"].tolist() == [[-1, -1, 3, 3], [-1, 3, -1, -1]]
    assert batch["rewards"].tolist() == [0.0, 1.0]
    for name, field in (("input_ids", "input_ids_T"), ("logprobs", "logprobs_T"), ("loss_mask", "loss_mask_T")):
        assert flat_of_padded(batch[name], batch["attention_mask"]).tolist() == getattr(shard, field).tolist()


def test_nan_logprobs_outside_the_loss_mask_do_not_reach_the_batch() -> None:
    shard = make_shard([[5, 6, 7]], loss_from=[2])
    dirty = make_shard([[5, 6, 7]], loss_from=[2], logprobs_T=np.array([np.nan, np.inf, -0.5], np.float32))
    assert batch_of_shard(dirty)["logprobs"].tolist() == [[0.0, 0.0, -0.5]]
    assert batch_of_shard(shard)["logprobs"].isfinite().all()


def test_loss_on_a_first_token_is_refused() -> None:
    with pytest.raises(BridgeError, match=r"row 1 of the shard of step 0 .* at least one prompt token"):
        batch_of_shard(make_shard([[5, 6], [7, 8]], loss_from=[1, 0]))


def test_an_empty_shard_becomes_a_row_without_loss() -> None:
    batch = batch_of_shard(make_shard([], loss_from=[]))
    assert batch["input_ids"].shape == (1, 2)
    assert batch["attention_mask"].all()
    assert not batch["loss_mask"].any()


def test_minibatches_follow_the_deal_and_fill_up_with_placeholders() -> None:
    shard = make_shard([[1, 2, 3, 4], [1, 2], [1, 3, 3]], loss_from=[1, 1, 1])
    batch = batch_of_shard(shard)
    batch["advantages"] = torch.arange(12.0).view(3, 4)
    first, second, third = minibatches(batch, np.array([2, 0, 0]), 3)
    assert first["input_ids"].tolist() == [[1, 2, 0], [1, 3, 3]]
    assert first["advantages"].tolist() == [[4.0, 5.0, 6.0], [8.0, 9.0, 10.0]]
    assert second["attention_mask"].tolist() == [[True, True]]
    assert not second["loss_mask"].any()
    assert set(second) == set(batch)
    assert third["rewards"].tolist() == [0.0]
    with pytest.raises(BridgeError, match=r"minibatch 2, but actor.ppo_n_minibatches=2"):
        minibatches(batch, np.array([2, 0, 0]), 2)


def test_an_empty_shard_takes_part_in_every_minibatch() -> None:
    shard = make_shard([], loss_from=[])
    parts = minibatches(batch_of_shard(shard), shard.minibatch_S, 2)
    assert [int(p["loss_mask"].sum()) for p in parts] == [0, 0]


def test_reward_stages_are_off_and_ppo_keys_pass_through() -> None:
    raw = {
        "experiment_name": "x",
        "actor": {
            "path": "model",
            "backend": "megatron:d2",
            "eps_clip": 0.4,
            "reward_scaling": 10.0,
            "reward_bias": -0.5,
            "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": 4},
            "adv_norm": {"mean_level": "batch", "std_level": "batch"},
            "ppo_n_minibatches": 4,
            "temperature": 0.8,
            "use_decoupled_loss": True,
            "rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0},
            "optimizer": {"lr": 1e-4, "beta2": 0.95},
        },
    }
    config = actor_config(raw)
    assert (config.reward_scaling, config.reward_bias, config.reward_norm) == (1.0, 0.0, None)
    assert (config.eps_clip, config.temperature, config.ppo_n_minibatches) == (0.4, 0.8, 1)
    assert config.adv_norm.std_level == "batch"
    assert config.rejection_sampling.upper == 5.0
    assert (config.optimizer.lr, config.optimizer.beta2, config.optimizer.beta1) == (1e-4, 0.95, 0.9)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"adv_norm": {"mean_level": "group", "std_level": "batch"}}, "adv_norm.mean_level='group'"),
        ({"use_lora": True}, "use_lora=True"),
        ({"overlong_reward_penalty": True}, "overlong_reward_penalty=True"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_remedy(actor: dict[str, Any], message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        actor_config({"actor": {"backend": "megatron:d1", "path": "m", **actor}})


def test_ppo_actor_puts_the_final_reward_on_every_loss_token() -> None:
    """GAE with discount and lambda 1: each loss token's advantage is the row's reward, others 0."""
    config = actor_config({"actor": {"backend": "megatron:d1", "path": "m", "kl_ctl": 0.0, "use_decoupled_loss": True}})
    actor = make_actor(config, None)  # type: ignore[arg-type]  # advantages need no engine
    batch = batch_of_shard(make_shard([[5, 6, 7, 8], [5, 6, 9]], loss_from=[2, 1], rewards_S=np.array([50.0, -1.5])))
    out = actor.compute_advantages([batch])[0]
    assert out["loss_mask"].tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert (out["advantages"] * out["loss_mask"]).tolist() == [[0.0, 50.0, 50.0, 0.0], [-1.5, -1.5, 0.0, 0.0]]

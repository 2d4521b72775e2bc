"""Conversion of workflow results to trajectories. Token content is arbitrary; real producers are tested elsewhere."""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import math
from typing import Any

import pytest
import torch
from areal.api import ModelResponse
from areal.experimental.openai import InteractionWithTokenLogpReward
from areal.utils.data import concat_padded_tensors

from areal_dta.records import Lease
from areal_dta.rollout.worker_convert import Limits, Rejected, to_trajectory

LEASE = Lease("l", group_id=5, sample=2, attempt=0, item={"task_id": "t"}, version=1, epoch=0, seed=1)
NO_LIMIT = Limits(None)


def row(prompt: list[int], output: list[int], reward: float = 1.0, version: int = 3) -> dict[str, torch.Tensor]:
    n, m = len(prompt), len(output)
    return {
        "input_ids": torch.tensor([prompt + output]),
        "attention_mask": torch.ones(1, n + m, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * n + [1] * m]),
        "logprobs": torch.tensor([[math.nan] * n + [-0.5] * m]),
        "versions": torch.tensor([[9] * n + [version] * m]),
        "rewards": torch.tensor([reward]),
    }


def rows(*given: dict[str, torch.Tensor]) -> dict[str, Any]:
    return concat_padded_tensors(list(given))


def rejection(result: Any, limits: Limits = NO_LIMIT, lease: Lease = LEASE) -> Rejected:
    with pytest.raises(Rejected) as caught:
        to_trajectory(result, lease, limits)
    return caught.value


def test_padded_rows_become_ragged_and_prompt_positions_are_neutral() -> None:
    trajectory = to_trajectory(
        rows(row([1, 2], [3], 0.5, 4), row([1, 2, 3, 4], [5, 6], 0.25, 5)), LEASE, NO_LIMIT, "w", {"turns": 2.0}
    )
    assert trajectory.input_ids_T.tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert trajectory.offsets_S1.tolist() == [0, 3, 9]
    assert trajectory.loss_mask_T.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert trajectory.versions_T.tolist() == [-1, -1, 4, -1, -1, -1, -1, 5, 5]
    assert trajectory.logprobs_T.tolist() == [0, 0, -0.5, 0, 0, 0, 0, -0.5, -0.5]
    assert trajectory.rewards_S.tolist() == [0.5, 0.25]
    assert trajectory.reward == 0.25, "without episode_reward the last row's reward is the episode's"
    assert (trajectory.group_id, trajectory.sample, trajectory.task_id, trajectory.worker) == (5, 2, "t", "w")
    assert trajectory.stats == {"turns": 2.0}


def test_left_padding_is_removed_too() -> None:
    padded = {k: torch.nn.functional.pad(v, (2, 0)) if v.ndim == 2 else v for k, v in row([1], [2]).items()}
    assert to_trajectory(padded, LEASE, NO_LIMIT).input_ids_T.tolist() == [1, 2]


@pytest.mark.parametrize("stated", [torch.tensor([0.75]), torch.tensor(0.75), 0.75, [0.75]])
def test_the_stated_episode_reward_wins(stated: Any) -> None:
    assert to_trajectory({**row([1], [2], 0.1), "episode_reward": stated}, LEASE, NO_LIMIT).reward == 0.75


def test_interactions_are_rows_in_order_and_the_last_reward_is_the_episodes() -> None:
    def interaction(prompt: list[int], output: list[int], reward: float | None) -> InteractionWithTokenLogpReward:
        response = ModelResponse(prompt, output, [-1.0] * len(output), [2] * len(output))
        return InteractionWithTokenLogpReward(model_response=response, reward=reward)

    result = {"a": interaction([1], [2], 0.5), "b": interaction([1, 2, 3], [4, 5], 1.0)}
    trajectory = to_trajectory(result, LEASE, NO_LIMIT)
    assert trajectory.input_ids_T.tolist() == [1, 2, 1, 2, 3, 4, 5]
    assert (trajectory.reward, trajectory.rewards_S.tolist()) == (1.0, [0.5, 1.0])
    assert rejection({**result, "c": interaction([1], [2], None)}).cause == "bad_reward"
    assert rejection({**result, "c": 3}).cause == "raised"
    assert "external API" in rejection({"a": InteractionWithTokenLogpReward(reward=1.0)}).detail


@pytest.mark.parametrize(
    ("change", "cause", "text"),
    [
        ({"rewards": torch.tensor([math.nan])}, "bad_reward", "rewards are [nan]"),
        ({"rewards": torch.tensor([math.inf])}, "bad_reward", "inf"),
        ({"rewards": None}, "bad_reward", "no 'rewards'"),
        ({"rewards": [None]}, "bad_reward", "must be numeric"),
        ({"rewards": torch.tensor([1.0, 2.0])}, "bad_reward", "2 rewards for 1 rows"),
        ({"episode_reward": math.nan}, "bad_reward", "nan"),
        ({"episode_reward": "good"}, "bad_reward", "must be numeric"),
        ({"versions": None}, "raised", "lacks ['versions']"),
        ({"versions": torch.tensor([[-1, -1]])}, "raised", "no policy version"),
        ({"logprobs": torch.tensor([[0.0, math.nan]])}, "raised", "log-prob"),
        ({"loss_mask": torch.tensor([1, 1])}, "raised", "one shape [N, L]"),
        ({"loss_mask": torch.tensor([[1, 1]])}, "raised", "starts with a generated token"),
        ({"loss_mask": torch.tensor([[0, 0]])}, "empty", "no generated token"),
        ({"input_ids": torch.tensor([[1, -2]])}, "raised", "negative token id"),
    ],
)
def test_what_cannot_be_trained_on_is_rejected_with_its_cause(change: dict[str, Any], cause: str, text: str) -> None:
    found = rejection({**row([1], [2]), **change})
    assert (found.cause, text in found.detail) == (cause, True), found


@pytest.mark.parametrize(("result", "cause"), [(None, "raised"), ({}, "empty"), ([1], "raised")])
def test_no_result_is_rejected(result: Any, cause: str) -> None:
    assert rejection(result).cause == cause


def test_long_rows_follow_the_configured_rule() -> None:
    result = rows(row([1, 2], [3, 4]), row([1, 2, 3, 4], [5, 6, 7]))
    assert "dta.max_len=5" in rejection(result, Limits(5, "refuse")).detail
    dropped = to_trajectory(result, LEASE, Limits(5, "drop"))
    assert (dropped.num_sequences, dropped.stats) == (1, {"rows_too_long": 1.0})
    cut = to_trajectory(result, LEASE, Limits(5, "truncate"))
    assert cut.input_ids_T.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert to_trajectory(result, LEASE, Limits(4, "truncate")).num_sequences == 1, "a row cut to its prompt is left out"
    assert rejection(result, Limits(2, "truncate")).cause == "too_long"
    assert rejection(result, Limits(2, "drop")).cause == "too_long"


def test_an_evaluation_episode_is_never_refused_for_its_length() -> None:
    lease = Lease("e", 0, 0, 0, {"task_id": "t"}, 0, 0, 1, eval_tag="before")
    trajectory = to_trajectory(row([1, 2], [3, 4, 5], 0.5), lease, Limits(3, "refuse"))
    assert (trajectory.reward, trajectory.num_tokens, trajectory.eval_tag) == (0.5, 3, "before")


def test_rows_without_a_generated_token_are_left_out() -> None:
    assert to_trajectory(rows(row([1, 2], []), row([1], [2])), LEASE, NO_LIMIT).num_sequences == 1


def test_context_behind_the_last_generated_token_is_cut_off() -> None:
    """AReaL puts a row's reward on its last position and discards it there unless the token carries loss."""
    observed = row([1, 2], [3, 4], reward=1.0)
    observed["input_ids"] = torch.tensor([[1, 2, 3, 4, 7, 8]])
    observed["attention_mask"] = torch.ones(1, 6, dtype=torch.bool)
    for name, fill in (("loss_mask", 0), ("logprobs", 0.0), ("versions", -1)):
        observed[name] = torch.cat([observed[name], torch.full((1, 2), fill, dtype=observed[name].dtype)], 1)
    trajectory = to_trajectory(rows(observed), LEASE, NO_LIMIT)
    assert trajectory.input_ids_T.tolist() == [1, 2, 3, 4]
    assert trajectory.loss_mask_T[-1] == 1
    cut = to_trajectory(rows(observed), LEASE, Limits(5, "refuse"))
    assert cut.num_tokens == 4, "the limit counts what is trained, not what follows it"

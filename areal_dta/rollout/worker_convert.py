"""What an AReaL workflow returns, as one `records.Trajectory`.

Accepted are AReaL's two result formats: the padded tensor dict (rows [N, L]) and a dict of
`InteractionWithTokenLogpReward`. What cannot be trained on is a `Rejected` with its cause; nothing is repaired by
guessing and no reward is invented.

Legend of shape suffixes: N rows of the result, L padded row length, T tokens of all kept rows laid end to end, S kept
rows.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from areal.experimental.openai import InteractionWithTokenLogpReward

from areal_dta.records import Lease, RecordError, Trajectory

__all__ = ["CAUSES", "Limits", "Rejected", "to_trajectory"]

CAUSES = ("raised", "timeout", "bad_reward", "too_long", "aborted", "empty")
_KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")


class Rejected(Exception):
    """An episode that yields no trajectory; ``cause`` is one of `CAUSES`, ``detail`` is for people."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True)
class Limits:
    """The length rule: ``max_len`` tokens per row (None: no limit), and what becomes of a longer row.

    ``refuse`` rejects the episode, ``drop`` leaves the row out, ``truncate`` cuts its tail.
    """

    max_len: int | None = None
    too_long: str = "refuse"


@dataclass(frozen=True)
class _Row:
    input_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def without_tail(self) -> _Row:
        """Up to the last generated token. What follows has no gradient, and AReaL puts a row's reward on its last
        position, where it is discarded unless that token carries loss."""
        generated = np.flatnonzero(self.loss_mask)
        return self.cut(int(generated[-1]) + 1) if len(generated) else self

    def cut(self, max_len: int) -> _Row:
        head = slice(0, max_len)
        return _Row(self.input_ids[head], self.loss_mask[head], self.logprobs[head], self.versions[head], self.reward)


def to_trajectory(
    result: Any, lease: Lease, limits: Limits, worker: str = "", stats: Mapping[str, float] | None = None
) -> Trajectory:
    """Convert a workflow's result; raises Rejected (bad_reward, too_long, empty, or raised for a malformed result).

    Rows without a generated token are left out: they carry no gradient. An evaluation episode is never trained on, so
    its rows are cut at ``max_len`` instead of being refused: its reward counts either way.
    """
    if result is None:
        raise Rejected("raised", "the workflow returned None, AReaL's way to reject an episode")
    if not isinstance(result, Mapping):
        raise Rejected("raised", f"the workflow returned {type(result).__name__}, expected a dict or None")
    if not result:
        raise Rejected("empty", "the workflow returned an empty dict: no completion was made")
    if any(isinstance(value, InteractionWithTokenLogpReward) for value in result.values()):
        rows, reward = _interaction_rows(result)
    else:
        rows, reward = _tensor_rows(result)
    if not math.isfinite(reward):
        raise Rejected("bad_reward", f"episode reward is {reward}")
    kept, counts = _within_limits(rows, lease, limits)
    return _assemble(kept, reward, lease, worker, {**(stats or {}), **counts})


def _interaction_rows(result: Mapping[str, Any]) -> tuple[list[_Row], float]:
    rows, reward = [], math.nan
    for key, interaction in result.items():
        if not isinstance(interaction, InteractionWithTokenLogpReward):
            raise Rejected("raised", f"result mixes interactions with {type(interaction).__name__} under {key!r}")
        if not interaction.has_tensor_data:
            raise Rejected("raised", f"interaction {key!r} has no tokens (external API); it cannot be trained on")
        # AReaL turns a missing reward into 0.0 when it makes tensors; here it is an error.
        if interaction.reward is None:
            raise Rejected("bad_reward", f"interaction {key!r} has no reward; set it or call apply_reward_discount")
        rows += _tensor_rows(interaction.to_tensor_dict())[0]
        reward = float(interaction.reward)
    return rows, reward  # the last completion's reward is the episode's, as AReaL reports it


def _tensor_rows(result: Mapping[str, Any]) -> tuple[list[_Row], float]:
    missing = [key for key in _KEYS if result.get(key) is None]
    if "rewards" in missing:
        raise Rejected("bad_reward", "the result has no 'rewards'")
    if missing:
        raise Rejected("raised", f"the result lacks {missing}; an AReaL tensor dict has {list(_KEYS)}")
    arrays = {key: _numpy(key, result[key]) for key in _KEYS}
    shape = arrays["input_ids"].shape
    if len(shape) != 2 or any(arrays[key].shape != shape for key in _KEYS[:-1]):
        found = {key: arrays[key].shape for key in _KEYS}
        raise Rejected("raised", f"token arrays must all have one shape [N, L], got {found}")
    rewards_N = arrays["rewards"].astype(np.float64).reshape(-1)
    if len(rewards_N) != shape[0]:
        raise Rejected("bad_reward", f"{len(rewards_N)} rewards for {shape[0]} rows")
    if not np.isfinite(rewards_N).all():
        raise Rejected("bad_reward", f"rewards are {rewards_N.tolist()}")
    rows = []
    for n in range(shape[0]):
        valid = arrays["attention_mask"][n].astype(bool)
        rows.append(
            _Row(
                arrays["input_ids"][n][valid],
                arrays["loss_mask"][n][valid].astype(bool),
                arrays["logprobs"][n][valid],
                arrays["versions"][n][valid],
                float(rewards_N[n]),
            )
        )
    return rows, _episode_reward(result, rewards_N)


def _episode_reward(result: Mapping[str, Any], rewards_N: np.ndarray) -> float:
    """The environment's own verdict where the workflow states it, else the last row's reward."""
    stated = result.get("episode_reward")
    if stated is None:
        return float(rewards_N[-1]) if len(rewards_N) else math.nan
    values = _numpy("episode_reward", stated).astype(np.float64).reshape(-1)
    if not len(values) or not np.isfinite(values).all():
        raise Rejected("bad_reward", f"episode_reward is {values.tolist()}")
    return float(values[-1])


def _numpy(key: str, value: Any) -> np.ndarray:
    array = value.detach().cpu().float().numpy() if _is_half(value) else None
    if array is None:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        cause = "bad_reward" if "reward" in key else "raised"
        raise Rejected(cause, f"{key} must be numeric, got {value!r:.200}")
    return array


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _within_limits(rows: list[_Row], lease: Lease, limits: Limits) -> tuple[list[_Row], dict[str, float]]:
    kept, num_long = [], 0
    rule = "truncate" if lease.eval_tag is not None else limits.too_long
    for row in (row.without_tail() for row in rows):
        if limits.max_len is not None and row.num_tokens > limits.max_len:
            if rule == "refuse":
                raise Rejected(
                    "too_long",
                    f"a row of {row.num_tokens} tokens exceeds dta.max_len={limits.max_len}; "
                    "raise it, lower gconfig.max_tokens, or set dta.too_long=drop or truncate",
                )
            num_long += 1
            if rule == "drop":
                continue
            row = row.cut(limits.max_len).without_tail()
        if row.num_loss_tokens:
            kept.append(row)
    if not kept:
        if num_long:
            raise Rejected(
                "too_long", f"no generated token within dta.max_len={limits.max_len} in any of {len(rows)} rows"
            )
        raise Rejected("empty", f"no generated token in any of {len(rows)} rows")
    return kept, {"rows_too_long": float(num_long)} if num_long else {}


def _assemble(rows: list[_Row], reward: float, lease: Lease, worker: str, stats: dict[str, float]) -> Trajectory:
    loss_mask_T = np.concatenate([row.loss_mask for row in rows])
    versions_T = np.concatenate([row.versions for row in rows])
    trajectory = Trajectory(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        sample=lease.sample,
        task_id=str(lease.item.get("task_id", lease.group_id)),
        reward=reward,
        input_ids_T=np.concatenate([row.input_ids for row in rows]).astype(np.int32),
        offsets_S1=np.concatenate([[0], np.cumsum([row.num_tokens for row in rows])]).astype(np.int64),
        loss_mask_T=loss_mask_T.astype(np.uint8),
        logprobs_T=np.where(loss_mask_T, np.concatenate([row.logprobs for row in rows]), 0).astype(np.float32),
        versions_T=np.where(loss_mask_T, versions_T, -1).astype(np.int32),
        rewards_S=np.asarray([row.reward for row in rows], np.float32),
        worker=worker,
        eval_tag=lease.eval_tag,
        stats=stats,
    )
    first = np.flatnonzero(trajectory.loss_mask_T[trajectory.offsets_S1[:-1]])
    if len(first):
        raise Rejected(
            "raised", f"row {first[0]} starts with a generated token, which nothing predicts; put a prompt first"
        )
    try:
        trajectory.validate()
    except RecordError as error:
        raise Rejected("raised", f"malformed result: {error}") from error
    return trajectory

"""Final rewards: AReaL's shift, scale and clip, then normalisation over the episodes of a group or of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_dta.batcher.settings import RewardSettings

__all__ = ["episode_moments", "shape", "standardise"]


def shape(reward: np.ndarray, settings: RewardSettings) -> np.ndarray:
    """``clip((reward + bias) * scaling, -clip, clip)`` in float64, as AReaL's PPOActor does before it normalises."""
    scaled = (np.asarray(reward, np.float64) + settings.bias) * settings.scaling
    return np.clip(scaled, -settings.clip, settings.clip)


def episode_moments(rewards_S: np.ndarray) -> tuple[float, float]:
    """(mean, mean square around it) of one episode's shaped sequence rewards: its share in the group's moments."""
    return float(rewards_S.mean()), float(rewards_S.var())


def standardise(
    groups: Sequence[np.ndarray], settings: RewardSettings, within: Sequence[np.ndarray] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(mean, divisor) to apply to the sequences of each episode of each group, given the groups' episode means.

    ``within`` holds each episode's own mean square around its mean (0 when all turns share one reward). It belongs in
    the deviation: in a group of equal episodes whose turns differ, the deviation would else be 0 and the turns'
    differences would be divided by eps.

    The formulas are those of AReaL 1.0.4's ``areal.utils.data.Normalization`` without a mask (mean over the group or
    the batch, optionally leaving the element itself out; standard deviation around that mean; eps only where there is a
    deviation), with one difference on purpose: the population is the *episodes*, not the sequences, so that an episode
    of many turns does not weigh more in its group's mean.
    """
    everything = np.concatenate(groups)
    means = [
        _mean(everything, settings.leave_one_out)[sl] if settings.mean_level == "batch" else _group_mean(g, settings)
        for g, sl in zip(groups, _slices(groups))
    ]
    spreads = [np.zeros_like(g) for g in groups] if within is None else within
    squares = (everything - np.concatenate(means)) ** 2 + np.concatenate(spreads)
    divisors = []
    for group, slice_ in zip(groups, _slices(groups)):
        if settings.std_level is None:
            divisors.append(np.ones_like(group))
            continue
        population = squares if settings.std_level == "batch" else squares[slice_]
        divisors.append(np.full_like(group, _std(population, settings.unbiased_std) + settings.eps))
    return means, divisors


def _group_mean(group: np.ndarray, settings: RewardSettings) -> np.ndarray:
    return _mean(group, settings.leave_one_out) if settings.mean_level == "group" else np.zeros_like(group)


def _mean(x: np.ndarray, leave_one_out: bool) -> np.ndarray:
    if not leave_one_out:
        return np.full_like(x, x.mean())
    return (x.sum() - x) / (len(x) - 1) if len(x) > 1 else np.zeros_like(x)


def _std(squares: np.ndarray, unbiased: bool) -> float:
    if unbiased and len(squares) <= 1:
        return 1.0
    return float(np.sqrt(squares.sum() / (len(squares) - unbiased)))


def _slices(groups: Sequence[np.ndarray]) -> list[slice]:
    ends = np.cumsum([len(g) for g in groups]).tolist()
    return [slice(end - len(g), end) for g, end in zip(groups, ends)]

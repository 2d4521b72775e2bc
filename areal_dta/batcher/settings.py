"""What the batcher needs to know, as one frozen record; the process maps the run's configuration to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.partition import DEFAULT_METHOD

__all__ = ["BatcherSettings", "RewardSettings", "SettingsError"]

StalenessPolicy = Literal["wait", "drop", "mask", "keep"]
NormLevel = Literal["group", "batch"] | None


class SettingsError(ValueError):
    """Settings that cannot work, with the key to change."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """``actor.reward_*`` of AReaL's PPOActorConfig: ``clip((r + bias) * scaling, -clip, clip)``, then normalisation."""

    bias: float = 0.0
    scaling: float = 1.0
    clip: float = float("inf")
    mean_level: NormLevel = None
    std_level: NormLevel = None
    leave_one_out: bool = False
    unbiased_std: bool = True
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class BatcherSettings:
    """Sizes, bounds and policies. ``batch_groups`` is ``train_dataset.batch_size``, ``group_size``
    ``gconfig.n_samples``, ``eta`` ``rollout.max_head_offpolicyness``, ``max_concurrent``
    ``rollout.max_concurrent_rollouts`` (None: no bound).
    """

    num_items: int
    batch_groups: int
    group_size: int
    eta: int
    num_ranks: int = 1
    seed: int = 0
    shuffle: bool = True
    num_minibatches: int = 1
    total_steps: int | None = None
    max_concurrent: int | None = None
    num_eval_items: int = 0
    eval_samples: int = 1
    partition: str = DEFAULT_METHOD
    cost: CostModel = TREE_TOKENS
    staleness_policy: StalenessPolicy = "wait"
    lease_timeout_s: float = 60.0
    group_timeout_s: float = 600.0
    max_attempts: int = 3
    intake_limit: int = 4096
    min_group_size: int | None = None
    filter_equal_rewards: bool = False
    stale_reissues: int = 1  # times that a prompt is sampled again after its group was dropped as stale
    rewards: RewardSettings = field(default_factory=RewardSettings)

    @property
    def batch_episodes(self) -> int:
        return self.batch_groups * self.group_size

    @property
    def min_group(self) -> int:
        """Fewest episodes a group may be trained with; by default two, so that a group mean means something."""
        return min(2, self.group_size) if self.min_group_size is None else self.min_group_size

    @property
    def max_failed_groups(self) -> int:
        """Groups that may fail in a row before the run is declared unable to make progress."""
        return max(16, 4 * self.batch_groups)

    @property
    def max_equal_groups(self) -> int:
        """Groups without a difference in reward that may come between two batches: at least twice the whole data."""
        return max(16 * self.batch_groups, 2 * self.num_items)

    def check(self) -> BatcherSettings:
        """Itself; raises SettingsError for a combination that could only wait for ever or fail later."""
        positive = ("batch_groups", "group_size", "num_ranks", "num_minibatches", "max_attempts", "eval_samples")
        for name in positive:
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.eta < 0:
            raise SettingsError(f"rollout.max_head_offpolicyness is {self.eta}, it must not be negative")
        if self.num_items < self.batch_groups:
            raise SettingsError(
                f"the training data set has {self.num_items} items, fewer than train_dataset.batch_size="
                f"{self.batch_groups}; lower batch_size or add items"
            )
        if self.num_minibatches > self.batch_groups:
            raise SettingsError(
                f"actor.ppo_n_minibatches={self.num_minibatches} exceeds train_dataset.batch_size={self.batch_groups}: "
                "a minibatch would have no group"
            )
        if self.intake_limit < self.batch_episodes:
            raise SettingsError(
                f"batcher.intake_limit={self.intake_limit} cannot hold a batch of {self.batch_episodes} episodes"
            )
        if not 1 <= self.min_group <= self.group_size:
            raise SettingsError(
                f"the smallest usable group is set to {self.min_group} episodes, it must be 1 to "
                f"gconfig.n_samples={self.group_size}"
            )
        if self.stale_reissues < 0:
            raise SettingsError(f"stale_reissues is {self.stale_reissues}, it must not be negative")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise SettingsError(f"rollout.max_concurrent_rollouts is {self.max_concurrent}, it must be at least 1")
        return self

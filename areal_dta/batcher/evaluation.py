"""Evaluation rounds: every item of the evaluation set once per sample, greedy, leased before any training episode."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EvalRound", "EvalTask"]


@dataclass
class EvalTask:
    """One greedy episode: free, leased (`lease_id` set), done (`reward` set) or failed."""

    index: int
    sample: int
    attempt: int = 0
    lease_id: str | None = None
    worker: str = ""
    expires_s: float = 0.0
    task_id: str | None = None
    reward: float | None = None
    failed: bool = False
    request: str = ""  # of the worker, that the lease answered

    @property
    def free(self) -> bool:
        return self.lease_id is None and not self.settled

    @property
    def settled(self) -> bool:
        return self.reward is not None or self.failed


@dataclass
class EvalRound:
    """One round, named by its tag. Leases are not logged: after a restart of the batcher what is not done starts
    again.
    """

    tag: str
    number: int  # policy version under evaluation
    epoch: int
    tasks: list[EvalTask] = field(default_factory=list)

    @classmethod
    def start(cls, tag: str, number: int, epoch: int, num_items: int, num_samples: int) -> EvalRound:
        tasks = [EvalTask(index, sample) for index in range(num_items) for sample in range(num_samples)]
        return cls(tag, number, epoch, tasks)

    @property
    def finished(self) -> bool:
        return all(task.settled for task in self.tasks)

    def task(self, index: int, sample: int) -> EvalTask | None:
        """The task of this (item, sample), or None if the round has no such one."""
        return next((t for t in self.tasks if (t.index, t.sample) == (index, sample)), None)

    def lease_id(self, task: EvalTask) -> str:
        return f"e{self.epoch}.eval.{self.tag}.i{task.index}.s{task.sample}.a{task.attempt}"

    def fail(self, task: EvalTask, max_attempts: int) -> None:
        """The attempt did not work out: free the task again, or give it up."""
        task.lease_id, task.attempt = None, task.attempt + 1
        task.failed = task.attempt >= max_attempts

    def result(self) -> dict[str, Any]:
        """``done`` counts settled episodes; the mean is over those with a reward, ``failed`` ones never count as 0."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for task in self.tasks:
            if task.reward is not None:
                rewards[task.task_id or str(task.index)].append(task.reward)
        values = [r for per_task in rewards.values() for r in per_task]
        done = sum(t.settled for t in self.tasks)
        return {
            "done": done,
            "total": len(self.tasks),
            "finished": done == len(self.tasks),
            "failed": sum(t.failed for t in self.tasks),
            "mean_reward": sum(values) / len(values) if values else None,
            "rewards": dict(rewards),
        }

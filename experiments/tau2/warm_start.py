"""The start policy: a short supervised run through the tree engine that ends where reinforcement learning has
something to do.

First the policy learns each task's gold conversation until it can reproduce it. Then it learns the gold conversations
of *other* tasks as well (distractors), so that it still knows every action but no longer which one a task wants. The
second phase stops by measured reward, not by step count: sampled at the rollout's temperature, the policy must succeed
in about a third of the episodes. A policy that starts at its gold-only optimum, or that is merely undertrained, does
not learn from sampled rewards at this size.

Adam's moments are saved with the weights: a cold second moment makes the first policy-gradient steps far too large.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_dta.engine import MegatronPolicy, OptimizerSettings, ParallelSizes, Rows, TreeEngine, init_process_group
from experiments.tau2.chat import ChatRenderer
from experiments.tau2.domains import task_ids
from experiments.tau2.episode import EpisodeLimits, Sample, TokenEpisode
from experiments.tau2.gold import gold_replies
from experiments.tau2.sampler import BatchSampler, mean_reward

__all__ = ["WarmStartError", "WarmStartSettings", "warm_start"]

Report = Callable[[str], None]


class WarmStartError(RuntimeError):
    """The supervised run did not reach a usable start policy."""


@dataclass(frozen=True)
class WarmStartSettings:
    """Everything that decides the result besides tokenizer and package versions.

    ``reward_low`` and ``reward_high`` bound the accepted start reward at ``temperature``; one outside
    ``reward_limits`` is an error.
    """

    domain: str = "mock"
    seed: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    gold_lr: float = 1e-3
    gold_warmup_steps: int = 10
    gold_loss: float = 0.03
    gold_max_steps: int = 150
    mix_lr: float = 3e-4
    mix_min_steps: int = 12
    mix_max_steps: int = 48
    mix_check_every: int = 4
    distractor_weight: float = 0.35
    reward_low: float = 0.24
    reward_high: float = 0.34
    reward_limits: tuple[float, float] = (0.2, 0.45)
    temperature: float = 0.8
    max_new_tokens: int = 96
    samples_per_task: int = 8
    max_steps: int = 12
    user_patience: int = 1


@dataclass(frozen=True)
class _Conversation:
    """A whole conversation as one training row; ``is_output`` marks what the policy says."""

    ids: list[int]
    is_output: list[bool]


def warm_start(folder: Path, settings: WarmStartSettings, report: Report = print) -> None:
    """Train the untrained policy in ``folder`` (config, weights, tokenizer) in place, on one rank in this process.

    Adds ``optimizer/`` (an engine checkpoint with Adam's moments) and ``warm_start.json`` (start reward, steps). Raises
    WarmStartError when the reward gate is not reached.
    """
    init_process_group(0, 1, "127.0.0.1", _free_port())
    optimizer = OptimizerSettings(
        lr=settings.gold_lr, beta1=settings.beta1, beta2=settings.beta2, weight_decay=0.0, gradient_clipping=1.0
    )
    policy = MegatronPolicy(folder, ParallelSizes(), optimizer, torch.float32, settings.seed)
    trainer = _Trainer(policy, settings, folder, report)
    gold_steps, loss = trainer.learn_gold()
    mix_steps, reward = trainer.blur()
    policy.save_hf(folder)
    policy.save_checkpoint(folder / "optimizer")
    facts = {"gold_steps": gold_steps, "gold_loss": loss, "mix_steps": mix_steps, "start_reward": reward}
    (folder / "warm_start.json").write_text(json.dumps(facts, indent=1))


class _Trainer:
    """The two phases over one policy."""

    def __init__(self, policy: MegatronPolicy, settings: WarmStartSettings, folder: Path, report: Report) -> None:
        self._policy, self._settings, self._folder, self._report = policy, settings, folder, report
        self._engine = TreeEngine(policy)
        self._renderer = ChatRenderer.load(folder)
        self._tasks = [(settings.domain, task_id) for task_id in task_ids(settings.domain)]
        self._gold = [_play(d, t, d, t, self._renderer) for d, t in self._tasks]

    def learn_gold(self) -> tuple[int, float]:
        """Phase one; number of steps and the last loss (nats per output token)."""
        settings = self._settings
        batch = _Batch.of(self._gold, [1.0] * len(self._gold))
        for step in range(1, settings.gold_max_steps + 1):
            self._step(batch, settings.gold_lr * min(1.0, step / settings.gold_warmup_steps))
            if step % 10 == 0:
                loss = batch.loss(self._engine)
                self._report(f"warm start: gold step {step}, loss {loss:.3f}")
                if loss < settings.gold_loss:
                    return step, loss
        raise WarmStartError(
            f"loss on gold conversations is {loss:.3f} after {step} steps, expected {settings.gold_loss}"
        )

    def blur(self) -> tuple[int, float]:
        """Phase two; number of steps and the measured start reward. Shifts the mixture when the reward leaves its
        range.
        """
        settings, weight = self._settings, self._settings.distractor_weight
        distractors = _distractors(self._tasks, self._renderer)
        rewards: list[float] = []
        for step in range(1, settings.mix_max_steps + 1):
            batch = _Batch.of([*self._gold, *distractors], [1.0] * len(self._gold) + [weight] * len(distractors))
            self._step(batch, settings.mix_lr)
            if step % settings.mix_check_every or step < settings.mix_min_steps:
                continue
            rewards.append(self._measure(len(rewards)))
            self._report(
                f"warm start: mix step {step}, distractor weight {weight:.2f}, sampled reward {rewards[-1]:.3f}"
            )
            if settings.reward_low <= rewards[-1] <= settings.reward_high:
                return step, rewards[-1]
            weight *= 0.8 if rewards[-1] < settings.reward_low else 1.5
        low, high = settings.reward_limits
        if low <= rewards[-1] <= high:
            return step, rewards[-1]
        raise WarmStartError(
            f"start reward is {rewards[-1]:.3f} after {step} steps, wanted {low} to {high}; was {rewards}"
        )

    def _step(self, batch: _Batch, lr: float) -> None:
        self._policy.zero_grad()
        self._engine.backward(batch.rows, batch.dlogp_T)
        self._policy.optimizer_step(lr)

    def _measure(self, index: int) -> float:
        settings, export = self._settings, self._folder.with_name(f".{self._folder.name}.probe")
        shutil.rmtree(export, ignore_errors=True)
        self._policy.save_hf(export)
        try:
            seed = settings.seed * 1000 + index
            sampler = BatchSampler(export, self._renderer.eos_id, settings.temperature, settings.max_new_tokens, seed)
        finally:
            shutil.rmtree(export)
        limits = EpisodeLimits(max_steps=settings.max_steps, max_tokens=4096, user_patience=settings.user_patience)
        tasks = [task for task in self._tasks for _ in range(settings.samples_per_task)]
        return mean_reward(sampler, self._renderer, tasks, limits)


@dataclass(frozen=True)
class _Batch:
    """Rows with dL/dlogp of a weighted mean cross-entropy, in the engine's rolled layout."""

    rows: Rows
    dlogp_T: torch.Tensor

    @classmethod
    def of(cls, conversations: Sequence[_Conversation], weights: Sequence[float]) -> _Batch:
        rows = Rows.from_lists([c.ids for c in conversations])
        flat = [w * out for c, w in zip(conversations, weights) for out in [*c.is_output[1:], False]]
        weight_T = torch.tensor(flat, dtype=torch.float32)
        return cls(rows, -weight_T / weight_T.sum())

    def loss(self, engine: TreeEngine) -> float:
        needed = (self.dlogp_T != 0).numpy()
        return float((engine.forward(self.rows, need_T=needed).logprobs_T.cpu() * self.dlogp_T).sum())


def _play(domain: str, task_id: str, gold_domain: str, gold_task: str, renderer: ChatRenderer) -> _Conversation:
    """The conversation about ``task_id`` in which the agent says the gold replies of ``gold_task``."""
    replies = gold_replies(gold_domain, gold_task)
    episode = TokenEpisode(domain, task_id, renderer)
    prompt, turn = episode.start(), 0
    while prompt is not None and turn < len(replies):
        ids = renderer.write_turn(replies[turn])
        prompt = episode.feed(Sample(ids, [0.0] * len(ids), [0] * len(ids)))
        turn += 1
    last = episode.turns[-1]
    ids = [*last.prompt, *last.sample.ids]
    is_output = [False] * len(ids)
    for said in episode.turns:
        start = len(said.prompt)
        is_output[start : start + len(said.sample.ids)] = [True] * len(said.sample.ids)
    return _Conversation(ids, is_output)


def _distractors(tasks: Sequence[tuple[str, str]], renderer: ChatRenderer) -> list[_Conversation]:
    """Each task played with every other distinct gold behaviour (the first task of each kind lends its replies)."""
    kinds = {task: repr([m.tool_calls for m in gold_replies(*task)][:1]) for task in tasks}
    lenders = {kind: task for task, kind in reversed(kinds.items())}
    return [
        _play(*task, *lender, renderer)
        for task in tasks
        for kind, lender in sorted(lenders.items())
        if kind != kinds[task]
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

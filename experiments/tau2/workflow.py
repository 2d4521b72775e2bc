"""AReaL workflow for tau2-bench: one episode per call, every assistant turn exported as its own training row.

Legend of shape suffixes: N turns, L longest row.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from areal.api import InferenceEngine, ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters

from experiments.tau2.chat import ChatRenderer
from experiments.tau2.domains import DOMAINS
from experiments.tau2.episode import EpisodeLimits, Sample, TokenEpisode, Turn

__all__ = ["Tau2Workflow", "WorkflowSettings", "turns_to_rows"]

T = TypeVar("T")


@dataclass(frozen=True)
class WorkflowSettings:
    """The workflow's part of ``econfig``.

    ``turn_discount`` multiplies the reward once per turn before the last; ``invalid_format_penalty`` is taken from the
    training reward (not from ``episode_reward``) when a tool call could not be parsed.
    """

    domain: str = "mock"
    max_steps: int = 50
    turn_discount: float = 1.0
    invalid_format_penalty: float = 0.0

    @classmethod
    def of(cls, econfig: Any) -> WorkflowSettings:
        """From a mapping or a configuration record; raises ValueError for values and modes that do not exist here."""
        items = econfig if isinstance(econfig, Mapping) else vars(econfig)
        given = {key: value for key, value in items.items() if value is not None}
        for mode in ("user_llm", "solo_mode", "add_thinking_tool"):
            if given.get(mode):
                raise ValueError(
                    f"econfig.{mode}={given[mode]!r} is not available (the user is scripted); leave it unset"
                )
        settings = cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})
        if settings.domain not in DOMAINS:
            raise ValueError(f"econfig.domain={settings.domain!r} is unknown; choose one of {', '.join(DOMAINS)}")
        if settings.max_steps <= 0:
            raise ValueError(f"econfig.max_steps={settings.max_steps} must be positive")
        if not 0.0 < settings.turn_discount <= 1.0:
            raise ValueError(f"econfig.turn_discount={settings.turn_discount} must lie in (0, 1]")
        return settings


class Tau2Workflow(RolloutWorkflow):
    """Runs tau2 episodes against any AReaL inference engine.

    ``data`` names the task (``domain``, ``task_id``), and may hold ``_seed`` (fixes all sampling of the episode) and
    ``_greedy`` (an evaluation episode: ``eval_gconfig``, greedy). The model may be any whose chat template shows tool
    calls as ``<tool_call>{json}</tool_call>``; ``template_args`` are given to that template (e.g. ``enable_thinking``).

    ``threads`` run tau2's blocking code, each piece of which must end within ``step_timeout_s`` seconds;
    ``user_patience`` is the scripted user's, ``max_errors`` the number of failed tool calls that ends an episode.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer_path: str,
        econfig: Any = None,
        eval_gconfig: GenerationHyperparameters | None = None,
        *,
        user_patience: int = 1,
        max_errors: int = 10,
        threads: int = 4,
        step_timeout_s: float = 300.0,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = WorkflowSettings.of(econfig or {})
        self._user_patience, self._max_errors, self._step_timeout_s = user_patience, max_errors, step_timeout_s
        self._renderer = ChatRenderer.load(tokenizer_path, dict(template_args or {}))
        stop_ids = sorted({*gconfig.stop_token_ids, self._renderer.eos_id})
        self._gconfig = gconfig.new(n_samples=1, stop_token_ids=stop_ids)
        self._eval_gconfig = (eval_gconfig or gconfig).new(n_samples=1, stop_token_ids=stop_ids, greedy=True)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tau2")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """One episode as AReaL's padded tensors; raises what tau2, the evaluator or the engine raise.

        ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs``, ``versions`` are [N, L], ``rewards`` [N]; also
        ``episode_reward`` [N] (tau2's own number) and ``num_turns`` [N].
        """
        gconfig = self._eval_gconfig if data.get("_greedy") else self._gconfig
        seed = int(data.get("_seed", 0))
        episode = await self._in_thread(lambda: self._new_episode(data, gconfig))
        prompt = await self._in_thread(episode.start)
        while prompt is not None:
            request = ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=prompt,
                gconfig=gconfig.new(),
                metadata={"sampling_seed": turn_seed(seed, len(episode.turns))},
            )
            response = await engine.agenerate(request)
            sample = Sample(response.output_tokens, response.output_logprobs, response.output_versions)
            prompt = await self._in_thread(partial(episode.feed, sample))
        outcome = await self._in_thread(episode.outcome)
        penalty = self.settings.invalid_format_penalty if episode.num_invalid_calls else 0.0
        return turns_to_rows(episode.turns, outcome.reward, self.settings.turn_discount, penalty)

    def _new_episode(self, data: Mapping[str, Any], gconfig: GenerationHyperparameters) -> TokenEpisode:
        limits = EpisodeLimits(
            max_steps=self.settings.max_steps,
            max_errors=self._max_errors,
            max_tokens=gconfig.max_tokens,
            user_patience=self._user_patience,
        )
        return TokenEpisode(str(data.get("domain", self.settings.domain)), str(data["task_id"]), self._renderer, limits)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking tau2 code in the bounded pool; raises TimeoutError naming the limit."""
        timeout_s = self._step_timeout_s
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._pool, work), timeout_s)
        except TimeoutError as error:
            limit = f"workflow_args.step_timeout_s={timeout_s:g}"
            raise TimeoutError(
                f"tau2 did not finish a step within {limit}; raise it, or workflow_args.threads"
            ) from error


def turn_seed(seed: int, turn: int) -> int:
    """31-bit sampling seed of one turn, fixed by the episode's seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def turns_to_rows(
    turns: list[Turn], reward: float, turn_discount: float = 1.0, penalty: float = 0.0
) -> dict[str, torch.Tensor]:
    """AReaL's padded dict from an episode's turns: row n is turn n's full context and its own tokens, loss on those
    alone.

    Row n's reward is ``(reward - penalty) * turn_discount ** (N - 1 - n)``. Raises ValueError without any turn.
    """
    if not turns:
        raise ValueError("the episode has no turn: its first prompt fills gconfig.max_tokens; raise gconfig.max_tokens")
    num_turns, max_len = len(turns), max(len(t.prompt) + len(t.sample.ids) for t in turns)
    rows = {
        "input_ids": torch.zeros(num_turns, max_len, dtype=torch.int32),
        "attention_mask": torch.zeros(num_turns, max_len, dtype=torch.bool),
        "loss_mask": torch.zeros(num_turns, max_len, dtype=torch.int32),
        "logprobs": torch.zeros(num_turns, max_len, dtype=torch.float32),
        "versions": torch.full((num_turns, max_len), -1, dtype=torch.int32),
    }
    for n, turn in enumerate(turns):
        start, end = len(turn.prompt), len(turn.prompt) + len(turn.sample.ids)
        rows["input_ids"][n, :end] = torch.tensor([*turn.prompt, *turn.sample.ids], dtype=torch.int32)
        rows["attention_mask"][n, :end] = True
        rows["loss_mask"][n, start:end] = 1
        rows["logprobs"][n, start:end] = torch.tensor(turn.sample.logprobs, dtype=torch.float32)
        rows["versions"][n, start:end] = torch.tensor(turn.sample.versions, dtype=torch.int32)
    discounts = turn_discount ** torch.arange(num_turns - 1, -1, -1, dtype=torch.float32)
    rows["rewards"] = (reward - penalty) * discounts
    rows["episode_reward"] = torch.full((num_turns,), reward, dtype=torch.float32)
    rows["num_turns"] = torch.full((num_turns,), num_turns, dtype=torch.int32)
    return rows

"""An episode in tokens: `Simulation` plus `ChatRenderer`, stepped by whoever owns the model.

    episode = TokenEpisode("mock", "create_task_1", renderer)
    prompt = episode.start()
    while prompt is not None:
        prompt = episode.feed(sample(prompt))     # a Sample: ids, log-probs, versions
    outcome = episode.outcome()

Each turn's prompt starts with the previous turn's prompt and sampled ids, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tau2.data_model.message import Message

from experiments.tau2.chat import ChatRenderer
from experiments.tau2.domains import tool_schemas
from experiments.tau2.simulation import Outcome, Simulation
from experiments.tau2.toolcalls import INVALID_TOOL

__all__ = ["EpisodeLimits", "Sample", "TokenEpisode", "Turn"]


@dataclass(frozen=True)
class EpisodeLimits:
    """When an episode gives up. ``max_tokens`` bounds prompt plus answer of any turn; the rest as in `Simulation`."""

    max_steps: int = 100
    max_errors: int = 10
    max_tokens: int = 32768
    user_patience: int = 1


@dataclass(frozen=True)
class Sample:
    """What a model generated for one turn; ``logprobs`` and ``versions`` align with ``ids``."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.logprobs) == len(self.versions):
            counts = f"{len(self.logprobs)} log-probs and {len(self.versions)} versions"
            raise ValueError(f"a turn of {len(self.ids)} tokens came with {counts}")


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the full context it was sampled from, and the sample."""

    prompt: tuple[int, ...]
    sample: Sample


class TokenEpisode:
    """One episode; see the module's text. `start` and `feed` do tau2's work and block for milliseconds to seconds."""

    def __init__(self, domain: str, task_id: str, renderer: ChatRenderer, limits: EpisodeLimits | None = None) -> None:
        self._limits = limits or EpisodeLimits()
        self._renderer = renderer
        self._domain = domain
        self._simulation = Simulation(
            domain,
            task_id,
            max_steps=self._limits.max_steps,
            max_errors=self._limits.max_errors,
            user_patience=self._limits.user_patience,
        )
        self._prompt: list[int] = []
        self.turns: list[Turn] = []
        self.num_invalid_calls = 0

    def start(self) -> list[int] | None:
        """The first turn's prompt; None when it does not leave room for a single token."""
        messages = self._simulation.start()
        prompt = self._renderer.first_prompt(self._simulation.system_prompt, messages, tool_schemas(self._domain))
        return self._offer(prompt)

    def feed(self, sample: Sample) -> list[int] | None:
        """Say what was sampled for the last prompt; the next prompt, or None at the end of the episode."""
        self.turns.append(Turn(tuple(self._prompt), sample))
        message = self._renderer.read_turn(sample.ids, turn=len(self.turns))
        self.num_invalid_calls += sum(call.name == INVALID_TOOL for call in message.tool_calls or [])
        incoming: list[Message] | None = self._simulation.reply(message)
        if incoming is None:
            return None
        return self._offer(self._prompt + list(sample.ids) + self._renderer.continuation(sample.ids, incoming))

    def outcome(self) -> Outcome:
        """tau2's verdict on the finished episode (see `Simulation.outcome`)."""
        return self._simulation.outcome()

    def _offer(self, prompt: list[int]) -> list[int] | None:
        self._prompt = prompt
        if len(prompt) < self._limits.max_tokens:
            return prompt
        self._simulation.give_up()
        return None

"""A scripted user: the task's own scenario, told deterministically and without a second model.

It states its request, answers questions with further facts of the scenario, confirms when it has nothing more to add,
carries out device actions that the agent asks for by name (telecom), and says the stop word once the agent has acted
and reports back. It never ends a conversation in which the agent has done nothing before its patience is used up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage
from tau2.data_model.tasks import Action, StructuredUserInstructions, Task
from tau2.user.base import STOP, UserState, ValidUserInputMessage
from tau2.user.user_simulator import UserSimulator

__all__ = ["ScriptedUser", "UserScript", "script_of"]

GO_AHEAD = "Yes, please go ahead."
_FIRST_PERSON = (
    (r"\bYou are\b", "I am"),
    (r"\byou are\b", "I am"),
    (r"\bYou're\b", "I'm"),
    (r"\byou're\b", "I'm"),
    (r"\bYou were\b", "I was"),
    (r"\byou were\b", "I was"),
    (r"\b(to|for|with|from|of|by|about|tell|give|help|let|call|charge|refund) you\b", r"\1 me"),
    (r"\b[Yy]ourself\b", "myself"),
    (r"\b[Yy]ours\b", "mine"),
    (r"\bYour\b", "My"),
    (r"\byour\b", "my"),
    (r"\b[Yy]ou\b", "I"),
)


@dataclass(frozen=True)
class UserScript:
    """What the user will say: the request first, then one fact per question; and the device actions it is able to
    do.
    """

    request: str
    facts: tuple[str, ...]
    actions: tuple[Action, ...] = ()


def first_person(text: str) -> str:
    """Turn a scenario written to the user ("You want ...") into the user's own words ("I want ...")."""
    for pattern, replacement in _FIRST_PERSON:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def script_of(task: Task) -> UserScript:
    """The script that the scenario of ``task`` contains; free-text scenarios are said in one go."""
    instructions = task.user_scenario.instructions
    criteria = task.evaluation_criteria
    actions = tuple(a for a in (criteria.actions or []) if a.requestor == "user") if criteria is not None else ()
    if not isinstance(instructions, StructuredUserInstructions):
        return UserScript(first_person(str(instructions)), (), actions)
    facts = [instructions.known_info, instructions.unknown_info, instructions.task_instructions]
    return UserScript(
        first_person(instructions.reason_for_call), tuple(first_person(f) for f in facts if f and f.strip()), actions
    )


class ScriptedUser(UserSimulator):
    """tau2's user role played from a `UserScript`.

    ``count_agent_calls`` tells how many tool calls the agent has made so far; ``patience`` is how many confirmations
    it gives without seeing the agent act before it gives up.
    """

    def __init__(self, script: UserScript, count_agent_calls: Callable[[], int], patience: int = 1) -> None:
        super().__init__(tools=None, instructions=None, llm="scripted", llm_args={})
        self._script = script
        self._count_agent_calls = count_agent_calls
        self._patience = patience
        self._said_request = False
        self._facts_told = 0
        self._confirmations = 0
        self._calls_seen = 0
        self._actions_done = 0

    def get_init_state(self, message_history: list | None = None) -> UserState:
        return UserState(system_messages=[], messages=list(message_history or []))

    def generate_next_message(self, message: ValidUserInputMessage, state: UserState) -> tuple[UserMessage, UserState]:
        incoming = message.tool_messages if isinstance(message, MultiToolMessage) else [message]
        state.messages.extend(incoming)
        reply = self._reply(incoming)
        state.messages.append(reply)
        return reply, state

    def _reply(self, incoming: Sequence[UserMessage | ToolMessage | AssistantMessage]) -> UserMessage:
        if isinstance(incoming[0], ToolMessage):
            return _say("; ".join(f"It says: {m.content}" for m in incoming))
        text = incoming[-1].content or ""
        if not self._said_request:
            self._said_request = True
            return _say(self._script.request)
        wanted = self._requested_action(text)
        if wanted is not None:
            self._actions_done += 1
            call = ToolCall(
                id=f"user_{self._actions_done}", name=wanted.name, arguments=dict(wanted.arguments), requestor="user"
            )
            return UserMessage(role="user", content=None, tool_calls=[call], cost=0.0)
        return _say(self._answer(text))

    def _answer(self, text: str) -> str:
        num_calls = self._count_agent_calls()
        if num_calls > self._calls_seen:
            self._calls_seen, self._confirmations = num_calls, 0
        if num_calls and "?" not in text:
            return STOP  # the agent acted and reports back: finished
        if self._facts_told < len(self._script.facts):
            self._facts_told += 1
            return self._script.facts[self._facts_told - 1]
        if self._confirmations < self._patience:
            self._confirmations += 1
            return GO_AHEAD
        return STOP

    def _requested_action(self, text: str) -> Action | None:
        """The next action of the scenario, when the agent names it (``toggle_roaming`` or "toggle roaming")."""
        if self._actions_done >= len(self._script.actions):
            return None
        action = self._script.actions[self._actions_done]
        spoken = text.lower()
        return action if action.name in spoken or action.name.replace("_", " ") in spoken else None


def _say(text: str) -> UserMessage:
    return UserMessage(role="user", content=text, cost=0.0)

"""One tau2 conversation that can be stepped: it runs until the agent has to speak, and goes on when the reply arrives.

tau2's orchestrator calls the agent and blocks until it answers. Stepping it from outside instead (`Simulation.start`,
then `reply` per turn) needs no thread that waits for a model, so thousands of episodes fit into a few worker threads
and a batched sampler can drive many of them in lock-step. `Orchestrator.run`'s own loop is the reference; a test holds
the two together.
"""

from __future__ import annotations

import traceback
from copy import deepcopy
from dataclasses import dataclass

from tau2.agent.base import ValidAgentInputMessage
from tau2.agent.llm_agent import LLMAgent, LLMAgentState
from tau2.data_model.message import AssistantMessage, Message, MultiToolMessage
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.data_model.tasks import Task
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator, Role
from tau2.utils.utils import get_now

from experiments.tau2.domains import cached_name, get_task, make_environment
from experiments.tau2.user import ScriptedUser, script_of

__all__ = ["Outcome", "Simulation", "SimulationError"]


class SimulationError(RuntimeError):
    """A simulation that was used out of order, or an evaluator that failed for a reason other than the policy's."""


@dataclass(frozen=True)
class Outcome:
    """Result of a finished conversation; ``reward`` is the number tau2's evaluator gives."""

    reward: float
    termination: str
    num_messages: int
    num_agent_calls: int
    note: str = ""


class SteppedAgent(LLMAgent):
    """tau2's LLM agent whose next message was put in place from outside instead of being asked of a model."""

    pending: AssistantMessage | None = None
    num_calls: int = 0

    def generate_next_message(
        self, message: ValidAgentInputMessage, state: LLMAgentState
    ) -> tuple[AssistantMessage, LLMAgentState]:
        if self.pending is None:
            raise SimulationError(
                "the orchestrator asked the agent to speak before a reply was given; call reply() first"
            )
        reply, self.pending = self.pending, None
        state.messages.extend(_flatten(message))
        state.messages.append(reply)
        self.num_calls += len(reply.tool_calls or [])
        return reply, state


class Simulation:
    """A conversation about one task. Not thread-safe; different simulations may run in different threads.

    ``max_steps`` bounds tau2's steps (a message of agent, user or environment each), ``max_errors`` the failed tool
    calls.
    """

    def __init__(
        self, domain: str, task_id: str, *, max_steps: int = 100, max_errors: int = 10, user_patience: int = 1
    ) -> None:
        self.domain = domain
        self.task: Task = get_task(domain, task_id)
        environment = make_environment(domain)
        self._agent = SteppedAgent(
            tools=environment.get_tools(), domain_policy=environment.get_policy(), llm="policy", llm_args={}
        )
        user = ScriptedUser(script_of(self.task), lambda: self._agent.num_calls, user_patience)
        self._orchestrator = Orchestrator(
            domain=cached_name(domain),
            agent=self._agent,
            user=user,
            environment=environment,
            task=deepcopy(self.task),
            max_steps=max_steps,
            max_errors=max_errors,
        )
        self._started_at = get_now()

    @property
    def system_prompt(self) -> str:
        return self._agent.system_prompt

    @property
    def done(self) -> bool:
        return self._orchestrator.done

    def start(self) -> list[Message]:
        """Run to the agent's first turn; return everything the agent knows by then (history, greeting, request)."""
        self._orchestrator.initialize()
        self._agent.num_calls = 0
        incoming = self._run_to_agent()
        if incoming is None:
            raise SimulationError(f"task {self.task.id!r} of {self.domain} ended before the agent's first turn")
        return [*self._orchestrator.agent_state.messages, *incoming]

    def reply(self, message: AssistantMessage) -> list[Message] | None:
        """Let the agent say ``message`` and run to its next turn; return the new messages for it, or None at the
        end.
        """
        if self.done:
            raise SimulationError("the conversation is over; no further reply is possible")
        # tau2 sorts a conversation by time: a message counts from when it is said, not from when it was composed
        self._agent.pending = message.model_copy(update={"timestamp": get_now()})
        self._orchestrator.step()
        self._check_limits()
        return self._run_to_agent()

    def give_up(self) -> None:
        """End the conversation because the policy's context is full; tau2 rewards such an episode with 0."""
        self._orchestrator.done = True
        self._orchestrator.termination_reason = TerminationReason.MAX_STEPS

    def outcome(self) -> Outcome:
        """Evaluate the finished conversation with tau2's evaluator (no model is asked: natural-language assertions are
        skipped).

        An environment assertion that raises ValueError (the object it looks for does not exist) is a failed assertion:
        reward 0. Any other error of the evaluator raises SimulationError.
        """
        if not self.done:
            raise SimulationError("the conversation is still going on; there is no outcome yet")
        run = self._simulation_run()
        reward, note = 0.0, ""
        try:
            reward = float(
                evaluate_simulation(
                    run, self.task, EvaluationType.ALL, solo_mode=False, domain=cached_name(self.domain)
                ).reward
            )
        except ValueError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            if "run_env_assertion" not in frames:
                raise SimulationError(f"evaluator failed on task {self.task.id!r} of {self.domain}: {error}") from error
            note = f"environment assertion failed: {error}"
        return Outcome(
            reward=reward,
            termination=run.termination_reason.value,
            num_messages=len(run.messages),
            num_agent_calls=self._agent.num_calls,
            note=note,
        )

    def _run_to_agent(self) -> list[Message] | None:
        orchestrator = self._orchestrator
        while not orchestrator.done:
            if orchestrator.to_role == Role.AGENT:
                return _flatten(orchestrator.message)
            orchestrator.step()
            self._check_limits()
        return None

    def _check_limits(self) -> None:
        """The limits of Orchestrator.run, which never ends on a message to the environment."""
        orchestrator = self._orchestrator
        if orchestrator.to_role == Role.ENV:
            return
        if orchestrator.step_count >= orchestrator.max_steps:
            orchestrator.done, orchestrator.termination_reason = True, TerminationReason.MAX_STEPS
        if orchestrator.num_errors >= orchestrator.max_errors:
            orchestrator.done, orchestrator.termination_reason = True, TerminationReason.TOO_MANY_ERRORS

    def _simulation_run(self) -> SimulationRun:
        orchestrator = self._orchestrator
        return SimulationRun(
            id=f"{self.domain}-{self.task.id}",
            task_id=self.task.id,
            start_time=self._started_at,
            end_time=get_now(),
            duration=0.0,
            termination_reason=orchestrator.termination_reason,
            messages=orchestrator.get_trajectory(),
        )


def _flatten(message: ValidAgentInputMessage) -> list[Message]:
    return list(message.tool_messages) if isinstance(message, MultiToolMessage) else [message]

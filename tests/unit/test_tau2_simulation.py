"""Stepped tau2 conversations: gold behaviour, the scripted user, limits, and what the evaluator's errors become.

Not covered: a simulated (model) user, solo mode, natural-language assertions.
"""

from __future__ import annotations

from typing import Any

import pytest
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator

from areal_dta.config_schema_tau2 import DOMAINS as KNOWN_DOMAINS
from experiments.tau2.domains import DOMAINS, cached_name, get_task, make_environment, task_ids
from experiments.tau2.gold import gold_replies
from experiments.tau2.simulation import Outcome, Simulation, SimulationError, SteppedAgent
from experiments.tau2.user import GO_AHEAD, ScriptedUser, UserScript, first_person, script_of


def say(text: str) -> AssistantMessage:
    return AssistantMessage(role="assistant", content=text, cost=0.0)


def call(name: str, **arguments: Any) -> AssistantMessage:
    tool_call = ToolCall(id="c", name=name, arguments=arguments)
    return AssistantMessage(role="assistant", content=None, tool_calls=[tool_call], cost=0.0)


def play(domain: str, task_id: str, replies: list[AssistantMessage], **limits: int) -> tuple[Outcome, list[str]]:
    """Say ``replies`` in turn, repeating the last one until the conversation ends; outcome and all incoming texts."""
    simulation = Simulation(domain, task_id, **limits)
    heard = [str(m.content) for m in simulation.start()]
    for turn in range(200):
        incoming = simulation.reply(replies[min(turn, len(replies) - 1)])
        if incoming is None:
            return simulation.outcome(), heard
        heard += [str(m.content) for m in incoming]
    raise AssertionError("the conversation does not end")


@pytest.mark.parametrize("task_id", task_ids("mock"))
def test_gold_behaviour_earns_full_reward_on_mock(task_id: str) -> None:
    outcome, _ = play("mock", task_id, gold_replies("mock", task_id))
    assert (outcome.reward, outcome.termination) == (1.0, "user_stop")


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
def test_gold_behaviour_earns_full_reward_in_other_domains(domain: str) -> None:
    longest = max(task_ids(domain)[:20], key=lambda t: len(get_task(domain, t).evaluation_criteria.actions or []))
    outcome, _ = play(domain, longest, gold_replies(domain, longest))
    assert outcome.reward == 1.0


def test_doing_nothing_earns_only_what_tau2_gives_away() -> None:
    rewards = {task_id: play("mock", task_id, [say("I cannot help.")])[0].reward for task_id in task_ids("mock")}
    assert [task_id for task_id, reward in rewards.items() if reward] == ["create_task_1_nl_eval"]


def test_stepping_equals_the_orchestrators_own_loop() -> None:
    """The same agent and user under Orchestrator.run and under Simulation: same messages, termination and reward."""

    class TalkingAgent(SteppedAgent):
        script: list[AssistantMessage]

        def generate_next_message(self, message: Any, state: Any) -> Any:
            self.pending = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            return super().generate_next_message(message, state)

    for task_id, replies, max_steps in (
        ("create_task_1", gold_replies("mock", "create_task_1"), 30),
        ("update_task_with_message_history", [say("Which task?"), *gold_replies("mock", "update_task_1")], 30),
        ("create_task_1", [call("get_users")], 9),
        ("create_task_1", [call("no_such_tool")], 60),
    ):
        environment = make_environment("mock")
        agent = TalkingAgent(
            tools=environment.get_tools(), domain_policy=environment.get_policy(), llm="x", llm_args={}
        )
        agent.script = list(replies)
        task = get_task("mock", task_id)
        user = ScriptedUser(script_of(task), lambda agent=agent: agent.num_calls)
        whole = Orchestrator("mock", agent, user, environment, task, max_steps=max_steps)
        simulation = Simulation("mock", task_id, max_steps=max_steps)
        simulation.start()
        turn = 0
        while not simulation.done:
            simulation.reply(replies[min(turn, len(replies) - 1)])
            turn += 1
        stepped = simulation._simulation_run()
        whole.get_trajectory = lambda whole=whole: list(
            whole.trajectory
        )  # composed beforehand: time order means nothing
        run = whole.run()
        assert run.termination_reason == stepped.termination_reason
        assert [(m.role, m.content) for m in run.messages] == [(m.role, m.content) for m in stepped.messages]
        reward = evaluate_simulation(run, task, EvaluationType.ALL, False, cached_name("mock")).reward
        assert reward == simulation.outcome().reward


def test_an_assertion_about_a_missing_object_is_reward_zero_with_a_note() -> None:
    outcome, _ = play("mock", "create_task_1_with_env_assertions", [say("No."), say("Never.")])
    assert outcome.reward == 0.0
    assert "task_2 not found" in outcome.note


def test_any_other_evaluator_error_is_a_failure_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("tool message expected")

    monkeypatch.setattr("experiments.tau2.simulation.evaluate_simulation", broken)
    with pytest.raises(SimulationError, match="tool message expected"):
        play("mock", "create_task_1", [say("No.")])


def test_max_steps_and_too_many_errors_end_with_reward_zero() -> None:
    outcome, _ = play("mock", "create_task_1_nl_eval", [call("get_users")], max_steps=7)
    assert (outcome.reward, outcome.termination) == (0.0, "max_steps")
    outcome, _ = play("mock", "create_task_1_nl_eval", [call("no_such_tool")], max_errors=3)
    assert (outcome.reward, outcome.termination) == (0.0, "too_many_errors")


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tau2 domain 'bank'"):
        Simulation("bank", "1")
    with pytest.raises(ValueError, match="no task 'nope'"):
        Simulation("mock", "nope")
    simulation = Simulation("mock", "create_task_1")
    simulation.start()
    with pytest.raises(SimulationError, match="still going on"):
        simulation.outcome()
    simulation.give_up()
    with pytest.raises(SimulationError, match="is over"):
        simulation.reply(say("hello"))
    assert simulation.outcome().reward == 0.0


def test_the_user_tells_its_facts_when_asked_and_stops_only_after_the_agent_acted() -> None:
    task_id = task_ids("retail")[0]
    script = script_of(get_task("retail", task_id))
    questions = [say("Who are you?"), say("What else?"), say("And then?"), say("Sure?"), say("Hm?"), say("Hm?")]
    _, heard = play("retail", task_id, questions)
    assert heard[1] == script.request
    assert heard[2 : 2 + len(script.facts)] == list(script.facts)
    assert heard[-1] == GO_AHEAD
    outcome, heard = play("mock", "update_task_1", [say("Shall I?"), *gold_replies("mock", "update_task_1")])
    assert (outcome.reward, outcome.num_agent_calls) == (1.0, 1)
    assert GO_AHEAD in heard


def test_the_scripted_user_is_deterministic_and_speaks_in_the_first_person() -> None:
    replies = [say("Who are you?"), call("find_user_id_by_email", email="nobody"), say("Anything else?"), say("Done.")]
    first, second = (play("retail", task_ids("retail")[1], replies) for _ in range(2))
    assert first == second
    assert first_person("You are Ann. You want your order sent to you.") == "I am Ann. I want my order sent to me."


def test_device_actions_are_done_when_the_agent_names_them() -> None:
    task_id = next(t for t in task_ids("telecom") if len(script_of(get_task("telecom", t)).actions) >= 2)
    wanted = script_of(get_task("telecom", task_id)).actions[0]
    _, heard = play("telecom", task_id, [say(f"Please {wanted.name.replace('_', ' ')} now."), say("ok"), say("ok")])
    assert any(text.startswith("It says:") for text in heard)
    user = ScriptedUser(UserScript("r", (), ()), lambda: 0)
    assert user._requested_action("toggle_roaming") is None


def test_the_configuration_knows_exactly_the_domains_there_are() -> None:
    assert KNOWN_DOMAINS == DOMAINS

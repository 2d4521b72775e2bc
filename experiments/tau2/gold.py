"""Gold behaviour per task: what a perfect agent says, from the task's own gold actions. Used to warm-start and to test.

Device actions that belong to the user (telecom) become requests that the scripted user carries out.
"""

from __future__ import annotations

from tau2.data_model.message import AssistantMessage, ToolCall

from experiments.tau2.domains import get_task

__all__ = ["gold_replies"]

# Two mock tasks list no action, but their scenario asks for one: what a perfect agent would do.
_IMPLIED: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("mock", "create_task_1_nl_eval"): ("create_task", {"user_id": "user_1", "title": "Important Meeting"}),
    ("mock", "update_task_with_history_and_env_assertions"): (
        "update_task_status",
        {"task_id": "task_2", "status": "completed"},
    ),
}


def gold_replies(domain: str, task_id: str) -> list[AssistantMessage]:
    """The agent's messages of a gold episode, in order; the last one reports what has to be communicated."""
    criteria = get_task(domain, task_id).evaluation_criteria
    replies: list[AssistantMessage] = []
    for i, action in enumerate((criteria.actions or []) if criteria is not None else []):
        if action.requestor == "user":
            replies.append(_say(f"Please do this on your device: {action.name}"))
        else:
            replies.append(_call(i, action.name, dict(action.arguments)))
    if (domain, task_id) in _IMPLIED:
        name, arguments = _IMPLIED[domain, task_id]
        replies.append(_call(len(replies), name, dict(arguments)))
    info = (criteria.communicate_info or []) if criteria is not None else []
    replies.append(_say(" ".join(["Done.", *map(str, info)]) if info else "Done. Your request has been completed."))
    return replies


def _call(index: int, name: str, arguments: dict) -> AssistantMessage:
    call = ToolCall(id=f"gold_{index}", name=name, arguments=arguments)
    return AssistantMessage(role="assistant", content=None, tool_calls=[call], cost=0.0)


def _say(text: str) -> AssistantMessage:
    return AssistantMessage(role="assistant", content=text, cost=0.0)

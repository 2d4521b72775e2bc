"""Reading an agent's turn: reasoning, text and `<tool_call>` blocks; whatever the policy wrote, the result is a
valid message.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tau2.data_model.message import AssistantMessage, ToolCall

__all__ = ["INVALID_TOOL", "parse_agent_turn"]

INVALID_TOOL = "invalid_tool_call"
EMPTY_REPLY = "(no answer)"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINK = re.compile(r"\A.*?</think>", re.DOTALL)


def parse_agent_turn(text: str, turn: int) -> AssistantMessage:
    """The tau2 message of one generated turn; never raises.

    Reasoning up to ``</think>`` is not shown to anyone. A block that is no JSON object of the form ``{"name": str,
    "arguments": {...}}`` becomes a call of the tool `INVALID_TOOL`, which no environment has: the agent reads an error
    as the tool's answer and may try again. Text beside a tool call is dropped, since tau2's protocol allows one or the
    other. Call ids are ``call_TURN_I``.
    """
    visible = _THINK.sub("", text, count=1)
    blocks = _CALL.findall(visible)
    if not blocks:
        return AssistantMessage(role="assistant", content=visible.strip() or EMPTY_REPLY, cost=0.0)
    calls = [_parse_call(block, f"call_{turn}_{i}") for i, block in enumerate(blocks)]
    return AssistantMessage(role="assistant", content=None, tool_calls=calls, cost=0.0)


def _parse_call(block: str, call_id: str) -> ToolCall:
    cause = "expected one JSON object with name and arguments"
    try:
        call: Any = json.loads(block)
    except (json.JSONDecodeError, RecursionError) as error:
        call, cause = None, str(error)
    if isinstance(call, dict):
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str) and name and isinstance(arguments, dict):
            return ToolCall(id=call_id, name=name, arguments=arguments)
    return ToolCall(id=call_id, name=INVALID_TOOL, arguments={"cause": cause[:120]})

"""Agent prompts of tau2 tasks as token ids: one task mix over several domains, split by task.

A prompt is what an agent sees when it first has to speak: instructions, policy and tools as the system message, tau2's
greeting, and the user's first message, which is told from the task's scenario (`ScriptedUser`). It goes through the
model's own chat template. Tools are listed in the system message, because templates of small models have no place for
them. Offline: tau2's own data is all it needs.

With ``max_prompt`` the tools are listed as briefly as necessary and the policy keeps its head and its tail; the part
before the user's message is the same for all tasks of a domain, so that a server computes it once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE
from transformers import PreTrainedTokenizerBase

from experiments.tau2.domains import DOMAINS, domain_policy, get_task, task_ids, tool_schemas
from experiments.tau2.user import UserScript, script_of

__all__ = ["VARIANTS", "Prompt", "PromptError", "Split", "make_prompts", "split_tasks"]

VARIANTS = 3  # the user says the request; request and who it is; all of the scenario
MESSAGE_TOKENS = 160  # room for the user's message in a bounded prompt
TOOL_SHARE = 0.4  # of a bounded prompt
HEAD_SHARE = 0.6  # of a shortened policy; the rest is its tail
CUT = "\n[...]\n"


class PromptError(ValueError):
    """A bound that leaves no room for a prompt."""


@dataclass(frozen=True)
class Prompt:
    """``variant`` says how much of its scenario the user tells (see `VARIANTS`)."""

    domain: str
    task_id: str
    variant: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Tasks as (domain, task id), domains mixed evenly. No text occurs on both sides."""

    train: tuple[tuple[str, str], ...]
    held_out: tuple[tuple[str, str], ...]


def split_tasks(domains: Iterable[str] = DOMAINS, seed: int = 0) -> Split:
    """tau2's own train and test tasks. Tasks with the same request are one task here (telecom's 114 have three), and
    where both sides of tau2's split have it, every third goes to the held-out side."""
    train: list[list[tuple[str, str]]] = []
    held_out: list[list[tuple[str, str]]] = []
    for domain in domains:
        sides: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        train_texts, test_texts = (
            {script_of(get_task(domain, task)).request: task for task in reversed(task_ids(domain, split))}
            for split in ("train", "test")
        )
        num_shared = 0
        for text, task in {**dict(reversed(train_texts.items())), **test_texts}.items():
            is_held_out = text not in train_texts
            if text in train_texts and text in test_texts:
                is_held_out = num_shared % 3 == 2
                num_shared += 1
            sides[is_held_out].append((domain, task))
        for mixed, side in zip((train, held_out), sides, strict=True):
            random.Random(seed).shuffle(side)
            mixed.append(side)
    return Split(_interleaved(train), _interleaved(held_out))


def _interleaved(groups: Sequence[list[tuple[str, str]]]) -> tuple[tuple[str, str], ...]:
    """Every group spread evenly over the whole."""
    placed = [((i + 0.5) / len(group), item) for group in groups for i, item in enumerate(group)]
    return tuple(item for _, item in sorted(placed, key=lambda p: p[0]))


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, tasks: Iterable[tuple[str, str]], max_prompt: int = 0, variant: int = 1
) -> list[Prompt]:
    """Prompts of at most ``max_prompt`` tokens (0: unbounded), in the order of ``tasks``; raises PromptError."""
    systems: dict[str, str] = {}
    found = []
    for domain, task_id in tasks:
        if domain not in systems:
            systems[domain] = _system(tokenizer, domain, max_prompt)
        text = _message(script_of(get_task(domain, task_id)), variant)
        if max_prompt:
            text = tokenizer.decode(_encode(tokenizer, text)[:MESSAGE_TOKENS])
        ids = _render(tokenizer, systems[domain], text)
        if max_prompt and len(ids) > max_prompt:
            raise PromptError(f"task {task_id} of {domain} needs {len(ids)} tokens; raise --max-prompt {max_prompt}")
        found.append(Prompt(domain, task_id, variant, tuple(ids)))
    return found


def _message(script: UserScript, variant: int) -> str:
    facts = script.facts[: (0, 1, len(script.facts))[variant]]
    return " ".join((script.request, *facts))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _render(tokenizer: PreTrainedTokenizerBase, system: str, message: str) -> list[int]:
    chat = [
        {"role": "system", "content": system},
        {"role": "assistant", "content": DEFAULT_FIRST_AGENT_MESSAGE.content},
        {"role": "user", "content": message},
    ]
    return _encode(tokenizer, str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)))


def _system(tokenizer: PreTrainedTokenizerBase, domain: str, max_prompt: int) -> str:
    policy, schemas = domain_policy(domain), tool_schemas(domain)
    if not max_prompt:
        return _system_text(policy, "\n".join(map(json.dumps, schemas)))
    details: tuple[Callable[[dict[str, Any]], str], ...] = (json.dumps, _described, _signature)
    for detail in details:
        tools = "\n".join(map(detail, schemas))
        if len(_encode(tokenizer, tools)) <= TOOL_SHARE * max_prompt:
            break
    fixed = len(_render(tokenizer, _system_text(CUT, tools), "")) + MESSAGE_TOKENS
    room = max_prompt - fixed - 8  # cutting and joining may change a token or two
    if room < 0:
        raise PromptError(f"{domain} needs at least --max-prompt {fixed + 8} tokens, got {max_prompt}")
    ids = _encode(tokenizer, policy)
    if len(ids) > room:
        head = int(room * HEAD_SHARE)
        policy = tokenizer.decode(ids[:head]) + CUT + tokenizer.decode(ids[len(ids) - (room - head) :])
    return _system_text(policy, tools)


def _system_text(policy: str, tools: str) -> str:
    text = SYSTEM_PROMPT.format(agent_instruction=AGENT_INSTRUCTION, domain_policy=policy)
    return f"{text.strip()}\n<tools>\n{tools}\n</tools>"


def _signature(schema: dict[str, Any]) -> str:
    function = schema["function"]
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"


def _described(schema: dict[str, Any]) -> str:
    text = schema["function"].get("description", "").strip().split("\n")[0]
    return f"{_signature(schema)}: {text}"

"""The small policy's tokenizer: a byte-level BPE trained on tau2's own texts, saved as Hugging Face files with a chat
template.

Training is deterministic: the texts come in a fixed order and `tokenizers` breaks ties by id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tau2.agent.llm_agent import AGENT_INSTRUCTION
from tau2.data_model.tasks import Task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.tau2.domains import DOMAINS, domain_policy, get_task, task_ids, tool_schemas
from experiments.tau2.user import GO_AHEAD, script_of

__all__ = ["EOS", "PAD", "build_tokenizer", "tokenizer_digest"]

PAD = "<pad>"
EOS = "<|im_end|>"
SPECIAL = (PAD, EOS, "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FOCUS_REPEATS = 20  # texts of the focus domain count this often, so that its prompt stays short

CHAT_TEMPLATE = """\
{%- macro start(role) -%}<|im_start|>{{ role }}
{% endmacro -%}
{%- macro stop() -%}<|im_end|>
{% endmacro -%}
{%- if messages[0].role == 'system' -%}
{{ start('system') }}{{ messages[0].content }}
{%- if tools %}

Tools, one JSON schema per line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else.
{%- endif -%}
{{ stop() }}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'tool' -%}
{{ start('user') }}<tool_response>
{{ message.content }}
</tool_response>{{ stop() }}
{%- elif message.role == 'assistant' -%}
{{ start('assistant') }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{{ stop() }}
{%- else -%}
{{ start(message.role) }}{{ message.content }}{{ stop() }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ start('assistant') }}{%- endif -%}
"""


def build_tokenizer(folder: Path, *, vocab_size: int = 2048, focus: str = "mock") -> PreTrainedTokenizerFast:
    """Train the tokenizer and write tokenizer.json, tokenizer_config.json and the template into ``folder``
    (created).
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(focus), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def tokenizer_digest(folder: Path) -> str:
    """Hash of what decides the ids: the vocabulary file and the template."""
    sha = hashlib.sha256(CHAT_TEMPLATE.encode())
    sha.update((folder / "tokenizer.json").read_bytes())
    return sha.hexdigest()[:16]


def _corpus(focus: str) -> Iterator[str]:
    for domain in DOMAINS:
        for _ in range(FOCUS_REPEATS if domain == focus else 1):
            yield from _domain_texts(domain)


def _domain_texts(domain: str) -> Iterator[str]:
    yield AGENT_INSTRUCTION
    yield domain_policy(domain)
    for schema in tool_schemas(domain):
        yield json.dumps(schema)
    for task_id in task_ids(domain):
        yield from _task_texts(get_task(domain, task_id))


def _task_texts(task: Task) -> Iterator[str]:
    script = script_of(task)
    yield from (script.request, *script.facts, GO_AHEAD)
    criteria = task.evaluation_criteria
    for action in (criteria.actions or []) if criteria is not None else []:
        yield json.dumps({"name": action.name, "arguments": action.arguments})
    history = (task.initial_state.message_history or []) if task.initial_state is not None else []
    yield from (message.content for message in history if message.content)

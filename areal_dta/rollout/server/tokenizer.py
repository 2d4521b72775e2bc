"""The model folder's tokenizer through `tokenizers` alone: text in and out, without loading transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = ["TextCodec", "load_codec"]


class TextCodec:
    """Encode and decode text as transformers' fast tokenizer of the same folder would for chat-formatted text."""

    def __init__(self, tokenizer: Tokenizer, settings: dict[str, Any], template: str | None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template
        # Special tokens by name (bos_token, eos_token, ...), which chat templates may use.
        self.special_tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }

        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._content = {token: str(entry.content) for token, entry in added.items()}
        self._texts: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int] | tuple[int, ...], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decode_raw(self, ids: list[int]) -> str:
        """Every token spelled out, special ones included."""
        return self.decode(ids, skip_special_tokens=False)

    def visible(self, ids: Iterable[int], skip_special: bool, keep: tuple[str, ...] = ()) -> list[int]:
        """``ids`` without the special tokens that text does not show; those spelled as one of ``keep`` stay."""
        if not skip_special:
            return list(ids)
        return [t for t in ids if t not in self.special_ids or self._content[t] in keep]

    def token_text(self, token: int) -> str:
        """One token spelled out; remembered, because constraints ask often."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token], skip_special_tokens=False)
        return text


def load_codec(folder: Path) -> TextCodec | None:
    """The codec of a model folder; None when it has no ``tokenizer.json`` (token-in/token-out still works)."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    template = template_path.read_text() if template_path.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return TextCodec(Tokenizer.from_file(str(path)), settings, template)

"""The shape of a one-layer drafter and of the target it drafts for; tensor shapes and refusals follow from it.

Three kinds: ``eagle`` (input ``fc([embedding; feature])``, feature and token loss), ``hass`` (the same network, trained
on its own features over several unrolled steps) and ``eagle3`` (features of three target layers, the layer reads
``[norm(embedding); norm(feature)]``, token loss only).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areal_dta.nn.model_config import DecoderConfig, RopeSpec

__all__ = ["CONFIG_FILE", "KINDS", "DrafterMismatch", "EagleConfig", "sglang_obstacles", "target_digest"]

KINDS = ("eagle", "hass", "eagle3")
CONFIG_FILE = "drafter.json"


class DrafterMismatch(ValueError):
    """Files or tensors that are not a drafter for this target; nothing was loaded, decode without a drafter."""


@dataclass(frozen=True)
class EagleConfig:
    """Attention sizes are always the target's, so that the drafter's KV is one more layer of the target's pages."""

    kind: str
    target_family: str
    target_vocab_size: int
    target_num_layers: int
    target_digest: str  # of the target's shape, the same for every version of the policy
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    norm_eps: float
    max_positions: int
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    draft_vocab_size: int  # 0: the target's whole vocabulary
    trains_head: bool  # False: the head's rows are the target's and follow its updates
    hidden_layers: tuple[int, ...]  # eagle3: target layers (from 0) whose outputs are concatenated, else empty

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DrafterMismatch(f"drafter kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not 0 <= self.draft_vocab_size <= self.target_vocab_size:
            raise DrafterMismatch(
                f"draft vocabulary of {self.draft_vocab_size} tokens, the target has {self.target_vocab_size}; "
                "choose a smaller one or 0 for all"
            )
        if len(self.hidden_layers) != (3 if self.is_eagle3 else 0):
            raise DrafterMismatch(f"{self.kind} drafter with hidden_layers {self.hidden_layers}; eagle3 needs three")
        if any(not 0 <= i < self.target_num_layers for i in self.hidden_layers):
            raise DrafterMismatch(f"hidden_layers {self.hidden_layers} of a target of {self.target_num_layers} layers")

    @property
    def is_eagle3(self) -> bool:
        return self.kind == "eagle3"

    @property
    def feature_size(self) -> int:
        """Width F of what the target hands over per token: D, or 3D for eagle3."""
        return self.hidden_size * (3 if self.is_eagle3 else 1)

    @property
    def layer_input_size(self) -> int:
        """Width X of the decoder layer's input: D, or 2D for eagle3."""
        return self.hidden_size * (2 if self.is_eagle3 else 1)

    @property
    def num_draft_tokens(self) -> int:
        """Vd: rows of the drafter's head."""
        return self.draft_vocab_size or self.target_vocab_size

    @property
    def has_own_head(self) -> bool:
        """Whether the drafter holds head rows (trained ones, or copies of the target's); else it uses the target's."""
        return self.trains_head or self.draft_vocab_size > 0

    @classmethod
    def for_target(
        cls,
        target: DecoderConfig,
        kind: str = "eagle",
        draft_vocab: int = 0,
        *,
        portable: bool = False,
        trains_head: bool | None = None,
        hidden_layers: tuple[int, ...] | None = None,
    ) -> EagleConfig:
        """A drafter whose layer is built like the target's own.

        ``portable`` leaves out what SGLang's Llama-type drafter classes cannot load (q/k-norm, biases). By default only
        an eagle3 drafter with a reduced vocabulary trains its head; other heads stay the target's, as published.
        """
        is_eagle3 = kind == "eagle3"
        return cls(
            kind=kind,
            target_family=target.family,
            target_vocab_size=target.vocab_size,
            target_num_layers=target.num_layers,
            target_digest=target_digest(target),
            hidden_size=target.hidden_size,
            ffn_size=target.ffn_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rope=target.rope,
            norm_eps=target.norm_eps,
            max_positions=target.max_positions,
            qk_norm=target.qk_norm and not portable,
            qkv_bias=target.qkv_bias and not portable,
            out_bias=target.out_bias and not portable,
            mlp_bias=target.mlp_bias and not portable,
            draft_vocab_size=draft_vocab if draft_vocab < target.vocab_size else 0,
            trains_head=is_eagle3 and 0 < draft_vocab < target.vocab_size if trains_head is None else trains_head,
            hidden_layers=(hidden_layers or _three_layers(target.num_layers)) if is_eagle3 else (),
        )

    def check_target(self, target: DecoderConfig) -> None:
        """Raise DrafterMismatch unless this drafter was made for models of ``target``'s shape."""
        if self.target_digest == target_digest(target):
            return
        mine = (self.target_family, self.target_num_layers, self.hidden_size, self.target_vocab_size)
        theirs = (target.family, target.num_layers, target.hidden_size, target.vocab_size)
        raise DrafterMismatch(
            f"drafter made for (family, layers, hidden, vocabulary) {mine}, shape digest {self.target_digest}; the "
            f"target is {theirs}, digest {target_digest(target)}; train a drafter for this target or leave it off"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_layers": list(self.hidden_layers)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Inverse of `to_dict`; DrafterMismatch names what is missing, unknown or of the wrong form."""
        try:
            fields = dict(raw)
            return cls(
                **{**fields, "rope": RopeSpec(**fields["rope"]), "hidden_layers": tuple(fields["hidden_layers"])}
            )
        except (TypeError, KeyError) as error:
            raise DrafterMismatch(f"not the description of a drafter ({error!r}); export the drafter again") from error

    def write(self, folder: Path) -> None:
        """Write ``drafter.json``."""
        (folder / CONFIG_FILE).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def read(cls, folder: Path) -> EagleConfig:
        """Read ``drafter.json``; DrafterMismatch when there is none or it is damaged."""
        path = folder / CONFIG_FILE
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DrafterMismatch(f"{path} cannot be read ({error}); export the drafter again") from error
        if not isinstance(raw, dict):
            raise DrafterMismatch(f"{path} holds a {type(raw).__name__}, not an object; export the drafter again")
        return cls.from_dict(raw)


def sglang_obstacles(config: EagleConfig) -> tuple[str, ...]:
    """Why SGLang's EAGLE classes cannot run this drafter as it is; empty when they can."""
    found = []
    if config.qk_norm:
        found.append("q/k-norm")
    if config.mlp_bias:
        found.append("MLP biases")
    if config.is_eagle3 and (config.qkv_bias or config.out_bias):
        found.append("attention biases of an eagle3 drafter")
    if not config.is_eagle3 and config.trains_head:
        found.append("a trained head (EAGLE takes the target's; EAGLE-3 has its own)")
    if config.is_eagle3 and config.draft_vocab_size and not config.trains_head:
        found.append("a reduced vocabulary without a head of its own in an eagle3 drafter")
    return tuple(found)


def target_digest(target: DecoderConfig) -> str:
    """Digest of everything about a target that a drafter depends on, weights and storage dtype excepted."""
    shape = asdict(replace(target, dtype="", eos_token_ids=(), max_positions=0))
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def _three_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle, high, as published (SGLang's default); shallow models: first, middle, last."""
    if num_layers < 8:
        return (0, (num_layers - 1) // 2, num_layers - 1)
    return (1, num_layers // 2 - 1, num_layers - 4)

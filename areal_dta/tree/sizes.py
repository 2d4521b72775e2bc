"""The sizes of a decoder that costs depend on, from a Hugging Face ``config.json``, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from areal_dta.tree.cost import CostModel, flop_model
from areal_dta.tree.memory import MemoryModel

__all__ = ["ELEMENT_BYTES", "ModelSizes"]

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSizes:
    """``dtype`` is that of the stored weights."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    dtype: str = "float32"

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices: attention and gated feed-forward."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.ffn_size

    def flops(self) -> CostModel:
        """FLOP of forward and backward."""
        return flop_model(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            vocab_size=self.vocab_size,
        )

    def memory(self, dtype: str, tp: int = 1) -> MemoryModel:
        """The analytic memory model. Raises ValueError for an unknown dtype."""
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        return MemoryModel.of_shape(
            hidden=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn_size,
            vocab=self.vocab_size,
            element_bytes=ELEMENT_BYTES[dtype],
            tp=tp,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSizes:
        """Read ``config.json`` in `folder`. Raises ValueError naming the file and what is missing or wrong in it."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
            heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
            return cls(
                hidden_size=hidden,
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or hidden // heads),
                ffn_size=int(raw["intermediate_size"]),
                vocab_size=int(raw["vocab_size"]),
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            )
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; give a Hugging Face model folder") from error
        except KeyError as error:
            raise ValueError(f"{path} has no {error.args[0]}; give the folder of a decoder model") from error
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"{path} does not describe a decoder model: {error}") from error

"""Torch decoder layers of the Qwen3, Qwen2 and Llama families, functional over an explicit KV store.

Used by the embedded rollout server and by drafters; imports neither areal nor any other part of the package.
"""

from areal_dta.nn.decoder import DecoderWeights, Rotary, decode_hidden, project_logits
from areal_dta.nn.loading import WeightsMismatch, load_decoder
from areal_dta.nn.model_config import DecoderConfig, UnsupportedModel

__all__ = [
    "DecoderConfig",
    "DecoderWeights",
    "Rotary",
    "UnsupportedModel",
    "WeightsMismatch",
    "decode_hidden",
    "load_decoder",
    "project_logits",
]

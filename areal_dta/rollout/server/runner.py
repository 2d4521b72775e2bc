"""The forward pass: one weight version, one KV store, any mix of prefill chunks and decoded tokens per call.

Legend of shape suffixes: T new tokens of the batch, D hidden, V vocabulary, R chosen rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_dta.nn import DecoderWeights, Rotary, project_logits
from areal_dta.nn.decoder import decode_features
from areal_dta.nn.packed import pack_decoder
from areal_dta.rollout.server.logits import top_logprobs
from areal_dta.rollout.server.paged_attention import PagedKV, SharedPrefix, Span, plan_attention

__all__ = ["ModelRunner"]

SCORE_ROWS = 512  # logits of this many rows exist at a time while scoring


class ModelRunner:
    """Owns the tensors. Not thread-safe: everything happens on the model thread."""

    def __init__(
        self,
        weights: DecoderWeights,
        num_pages: int,
        page_size: int,
        extra_layers: Sequence[tuple[int, int]] = (),
        hidden_layers: Sequence[int] = (),
    ) -> None:
        """``extra_layers``: key/value heads and head dim of what else keeps KV in the same slots (a drafter);
        ``hidden_layers``: whose outputs are the features of `forward_features`."""
        self._weights, self._fast = weights, pack_decoder(weights)
        self.num_pages, self.page_size = num_pages, page_size
        self.kv = PagedKV(weights.config, num_pages, page_size, weights.dtype, weights.device, extra_layers)
        self._hidden_layers = tuple(hidden_layers)
        self.rotary = Rotary(weights.config, weights.dtype, weights.device)

    @property
    def weights(self) -> DecoderWeights:
        """One version, in the plain layout; setting them is an update."""
        return self._weights

    @weights.setter
    def weights(self, weights: DecoderWeights) -> None:
        self._weights, self._fast = weights, pack_decoder(weights)

    def forward(
        self, spans: Sequence[Span], ids: Sequence[int], shared: Sequence[SharedPrefix] | None = None
    ) -> torch.Tensor:
        """Compute the new tokens ``ids`` of all spans (end to end), store their KV; returns hidden states (T, D)."""
        return self.forward_features(spans, ids, shared)[0]

    @torch.inference_mode()
    def forward_features(
        self, spans: Sequence[Span], ids: Sequence[int], shared: Sequence[SharedPrefix] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the features: the outputs of ``hidden_layers`` side by side (T, len * D), the hidden states
        themselves when there are none."""
        plan = plan_attention(spans, self.page_size, self.weights.device, shared)
        ids_T = torch.tensor(ids, device=self.weights.device)
        cos_sin = self.rotary(plan.positions_T, plan.max_position)

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            return self.kv.attend(plan, layer, q_TNH, k_TKH, v_TKH)

        return decode_features(self._fast, ids_T, cos_sin, attend, self._hidden_layers)

    @torch.inference_mode()
    def logits(self, hidden_TD: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits (R, V) of the chosen rows."""
        return project_logits(self._fast, hidden_TD[torch.tensor(rows, device=hidden_TD.device)])

    @torch.inference_mode()
    def score(
        self, hidden_TD: torch.Tensor, targets: Sequence[int], top: int = 0
    ) -> tuple[list[float], list[tuple[tuple[float, int], ...]]]:
        """Log-prob (temperature 1, fp32) of ``targets[i]`` as the token after row i, and the ``top`` likeliest there
        (nothing with 0)."""
        values: list[float] = []
        tops: list[tuple[tuple[float, int], ...]] = []
        for lo in range(0, len(targets), SCORE_ROWS):
            target_R = torch.tensor(targets[lo : lo + SCORE_ROWS], device=hidden_TD.device)
            logits_RV = project_logits(self._fast, hidden_TD[lo : lo + len(target_R)])
            logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
            chosen_R = logits_RV.gather(1, target_R.unsqueeze(1)).squeeze(1)
            values.extend((chosen_R - logits_RV.logsumexp(-1)).float().tolist())
            if top:
                tops.extend(top_logprobs(logits_RV, top))
        return values, tops

"""KV tensors in pages, and attention over them for a batch of sequences with any number of new tokens each.

A prefix that several sequences of the batch share is attended once for all of them (their queries stacked against one
set of keys) and merged with each sequence's own part by log-sum-exp. Exact up to rounding: softmax over a union of key
sets from the softmaxes over the parts.

Legend of shape suffixes: T new tokens of the batch, N query heads, K key/value heads, G query heads per key/value head,
H head dim, B sequences of a group, Q new tokens per sequence (padded), R queries against one set of keys, S key slots,
J keys and values of all heads (2 K), P pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from areal_dta.nn import DecoderConfig
from areal_dta.rollout.server.attention_plan import (
    AttentionPlan,
    SharedPart,
    SharedPrefix,
    Span,
    TailGroup,
    find_shared,
    plan_attention,
)

__all__ = ["AttentionPlan", "PagedKV", "SharedPrefix", "Span", "find_shared", "plan_attention"]


class PagedKV:
    """The tensors: per layer keys and, behind them, values of shape (pages * page, 2K, H); page 0 stays zero.

    ``extra_layers`` gives (key/value heads, head dim) of layers beside the model's: layer ``num_layers + i`` here.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        extra_layers: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.page_size = page_size
        self._heads = [(config.num_kv_heads, config.head_dim)] * config.num_layers + list(extra_layers)
        self._num_slots = num_pages * page_size
        self._dtype, self._device = dtype, device
        self._layers: list[torch.Tensor] = []
        self.restore()

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self._layers)

    def release(self) -> int:
        """Drop the tensors; returns their bytes. Everything else needs `restore` first."""
        freed = self.num_bytes
        self._layers = []
        return freed

    def restore(self) -> int:
        """Allocate the tensors if they are not there; returns their bytes."""
        if not self._layers:
            # Zeros, not garbage: padded keys get weight 0, and 0 x NaN would still be NaN.
            self._layers = [
                torch.zeros(self._num_slots, 2 * K, H, dtype=self._dtype, device=self._device) for K, H in self._heads
            ]
        return self.num_bytes

    def write(self, slots_T: torch.Tensor, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store keys and values of ``slots_T``."""
        store_SJH, K = self._layers[layer], self._heads[layer][0]
        store_SJH[:, :K].index_copy_(0, slots_T, k_TKH)
        store_SJH[:, K:].index_copy_(0, slots_T, v_TKH)

    def read(self, slots_T: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values (T, K, H) of ``slots_T``."""
        k_TKH, v_TKH = self._layers[layer].index_select(0, slots_T).split(self._heads[layer][0], 1)
        return k_TKH, v_TKH

    def clean(self, layer: int) -> None:
        """Zero what is not finite: even a key that is masked turns its whole softmax into NaN."""
        if self._layers:
            torch.nan_to_num_(self._layers[layer], nan=0.0, posinf=0.0, neginf=0.0)

    def move(self, sources_T: torch.Tensor, targets_T: torch.Tensor, layers: Iterable[int] | None = None) -> None:
        """Copy what stands in the slots ``sources_T`` to ``targets_T``, which may overlap; None: in every layer."""
        for layer in range(len(self._layers)) if layers is None else layers:
            store_SJH = self._layers[layer]
            store_SJH.index_copy_(0, targets_T, store_SJH.index_select(0, sources_T))

    def attend(
        self, plan: AttentionPlan, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values, return the attention output (T, N, H)."""
        self.write(plan.slots_T, layer, k_TKH, v_TKH)
        T, N, H = q_TNH.shape
        K = self._heads[layer][0]
        q_TKGH = q_TNH.view(T, K, N // K, H)
        out_TKGH, lse_TKG = self._tails(plan, layer, q_TKGH)
        for part in plan.shared:
            if part.rows_T is None:
                out_TKGH, lse_TKG = _merge(out_TKGH, lse_TKG, *self._shared(part, layer, q_TKGH))
                continue
            o, lse = self._shared(part, layer, q_TKGH.index_select(0, part.rows_T))
            merged, total = _merge(out_TKGH.index_select(0, part.rows_T), lse_TKG.index_select(0, part.rows_T), o, lse)
            out_TKGH.index_copy_(0, part.rows_T, merged)
            lse_TKG.index_copy_(0, part.rows_T, total)
        return out_TKGH.reshape(T, N, H)

    def _shared(self, part: SharedPart, layer: int, q_TKGH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        T, K, G, H = q_TKGH.shape
        if part.slots is None:
            k, v = self._pages(layer, part.pages_P.unsqueeze(0))
        else:
            k, v = self._layers[layer][part.slots].transpose(0, 1).unsqueeze(0).split(K, 1)
        q = q_TKGH.transpose(0, 1).reshape(1, K, T * G, H)
        out, lse = _attend(q, k, v, None)
        return out.reshape(K, T, G, H).transpose(0, 1), lse.reshape(K, T, G).transpose(0, 1)

    def _pages(self, layer: int, pages_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, K, S, H) of the pages."""
        K, H = self._heads[layer]
        rows = self._layers[layer].view(-1, self.page_size * 2 * K * H).index_select(0, pages_BP.flatten())
        kv_BJSH = rows.view(len(pages_BP), -1, 2 * K, H).transpose(1, 2)
        return kv_BJSH[:, :K], kv_BJSH[:, K:]

    def _tails(self, plan: AttentionPlan, layer: int, q_TKGH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        T, K, G, H = q_TKGH.shape
        if len(plan.tails) == 1 and plan.tails[0].rows_BQ is None:
            group = plan.tails[0]
            B = len(group.pages_BP)
            out_BQKGH, lse_BQKG = self._tail(group, layer, q_TKGH.view(B, T // B, K, G, H))
            return out_BQKGH.reshape(T, K, G, H), lse_BQKG.reshape(T, K, G)
        out_TKGH = q_TKGH.new_empty(q_TKGH.shape)
        lse_TKG = q_TKGH.new_empty(q_TKGH.shape[:-1], dtype=_wide(q_TKGH.dtype))
        for group in plan.tails:
            assert group.rows_BQ is not None
            rows = group.rows_BQ.flatten()
            out, lse = self._tail(group, layer, q_TKGH.index_select(0, rows).view(*group.rows_BQ.shape, K, G, H))
            out, lse = out.reshape(-1, K, G, H), lse.reshape(-1, K, G)
            if group.keep is not None:
                rows, out, lse = (t.index_select(0, group.keep) for t in (rows, out, lse))
            out_TKGH.index_copy_(0, rows, out)
            lse_TKG.index_copy_(0, rows, lse)
        return out_TKGH, lse_TKG

    def _tail(self, group: TailGroup, layer: int, q_BQKGH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        B, Q, K, G, H = q_BQKGH.shape
        k, v = self._pages(layer, group.pages_BP)
        q = q_BQKGH.transpose(1, 2).reshape(B, K, Q * G, H)
        out, lse = _attend(q, k, v, group.bias(G, q.dtype))
        return out.view(B, K, Q, G, H).transpose(1, 2), lse.reshape(B, K, Q, G).transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _attend(
    q_BKRH: torch.Tensor, k_BKSH: torch.Tensor, v_BKSH: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (B, K, R, H) with its log-sum-exp (B, K, R), at least fp32; ``bias`` (B, 1, R or 1, S) is added."""
    if q_BKRH.device.type != "cpu":
        return _attend_plain(q_BKRH, k_BKSH, v_BKSH, bias)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q_BKRH, k_BKSH, v_BKSH, attn_mask=bias, scale=q_BKRH.shape[-1] ** -0.5
    )
    return out, lse


def _attend_plain(
    q_BKRH: torch.Tensor, k_BKSH: torch.Tensor, v_BKSH: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(q_BKRH * q_BKRH.shape[-1] ** -0.5, k_BKSH.transpose(-1, -2)).to(_wide(q_BKRH.dtype))
    if bias is not None:
        scores = scores.add_(bias)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.to(v_BKSH.dtype), v_BKSH)
    return out.div_(total.to(v_BKSH.dtype)), (peak + total.log()).squeeze(-1)


def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    share_b = torch.sigmoid(lse_b - lse_a).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_a, out_b, share_b), torch.logaddexp(lse_a, lse_b)

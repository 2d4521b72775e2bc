"""The EAGLE drafter beside the target: its keys and values live in one more layer of the paged cache.

The drafter's key and value at a slot depend on the token there and the target's feature one position before, so pages
can be shared by prefix like the target's. They are filled from the features of what the target has computed, in bulk
when a draft is asked for or the pages change hands; the feature before a page's first slot is kept per page, so that
a prefix found in the cache can be continued.

Legend of shape suffixes: T rows, F features, D hidden, B sequences, K candidates, L frontier nodes, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.draft_tree import DraftTree, TreeBuilder
from areal_dta.drafter.eagle import (
    EagleWeights,
    draft_hidden,
    draft_inputs,
    draft_keys_values,
    draft_logits,
    follow_target,
    packed,
    target_features,
    to_target_ids,
)
from areal_dta.nn import DecoderWeights
from areal_dta.rollout.server.paged_attention import Span, plan_attention
from areal_dta.rollout.server.runner import ModelRunner
from areal_dta.rollout.server.sampler import gumbel_noise
from areal_dta.rollout.server.sequence import Sequence as Request
from areal_dta.rollout.server.sequence import Step

__all__ = ["EagleRuntime"]

# Rows without drafter KV that a sequence may collect before they are filled, together with others'. Until then views
# keep the features of their whole steps alive; of steps with more rows than LARGE_STEP (prompts) a few are copied.
FILL_ROWS = 64
LARGE_STEP = 256


@dataclass
class _Track:
    """Features of one sequence: rows of positions ``start``.. ``end - 1``; drafter KV is valid below ``filled``."""

    start: int
    rows: list[torch.Tensor]
    end: int
    filled: int


class EagleRuntime:
    """Drafts trees with EAGLE; lives on the model thread."""

    def __init__(self, runner: ModelRunner, weights: EagleWeights, version: str) -> None:
        self.version = version
        self._runner = runner
        self._use(follow_target(weights, runner.weights))
        self._layer = runner.weights.config.num_layers
        width = weights.config.feature_size
        self._boundary_PF = torch.zeros(
            runner.num_pages, width, dtype=runner.weights.dtype, device=runner.weights.device
        )
        self._zero_1F = self._boundary_PF.new_zeros(1, width)
        self._tracks: dict[Request, _Track] = {}

    def fits(self, weights: EagleWeights) -> bool:
        """Whether `swap` can take these weights: what they read from the target and leave in the pages is the same."""
        return weights.config.hidden_layers == self._weights.config.hidden_layers

    def swap(self, weights: EagleWeights, version: str) -> None:
        """New drafter weights of the same shape; what the old ones cached stays, which costs acceptance, not truth."""
        self._use(follow_target(weights, self._runner.weights))
        self._runner.kv.clean(self._layer)  # one that diverged would spoil the drafts of all that follow it
        self.version = version

    def follow(self, target: DecoderWeights) -> None:
        """The target was updated: whatever the drafter has copied from it is copied again."""
        self._use(follow_target(self._weights, target))

    def _use(self, weights: EagleWeights) -> None:
        self._weights = weights
        self._fast = packed(weights)  # the same, for everything but filling

    def slots_needed(self, arm: Arm) -> int:
        return arm.top_k * (arm.depth - 1)

    def observe(self, steps: Sequence[Step], features_TF: torch.Tensor) -> None:
        size = self._runner.page_size
        pages: list[int] = []
        rows: list[int] = []
        for step in steps:
            first = -(step.start + 1) % size  # steps from the start to the first position that ends a page
            for i in range(first, len(step.rows), size):
                pages.append(step.seq.table[(step.start + i) // size])
                rows.append(step.rows[i])
        if pages:
            self._boundary_PF[pages] = features_TF[rows]
        is_any_full = False
        for step in steps:
            track = self._tracks.get(step.seq)
            if track is None:
                track = self._tracks[step.seq] = self._new_track(step.seq, step.start)
            lo, hi = step.rows[0], step.rows[-1] + 1
            mine_TF = features_TF[lo:hi] if hi - lo == len(step.rows) else features_TF[step.rows]
            track.rows.append(mine_TF.clone() if len(features_TF) > max(LARGE_STEP, 4 * len(mine_TF)) else mine_TF)
            track.end += len(step.rows)
            is_any_full |= track.end - track.filled >= FILL_ROWS
        if is_any_full:
            self._fill([seq for seq, track in self._tracks.items() if track.end - track.filled >= FILL_ROWS // 2])

    def _new_track(self, seq: Request, start: int) -> _Track:
        if start == 0:
            return _Track(-1, [self._zero_1F], 0, 0)
        page = seq.table[start // self._runner.page_size - 1]
        return _Track(start - 1, [self._boundary_PF[page : page + 1]], start, start)

    def forget(self, seq: Request) -> None:
        if seq in self._tracks:
            self._fill([seq])
            del self._tracks[seq]

    def _slots(self, seq: Request, lo: int, hi: int) -> list[int]:
        size = self._runner.page_size
        return [seq.table[p // size] * size + p % size for p in range(lo, hi)]

    @torch.inference_mode()
    def _fill(self, seqs: Sequence[Request]) -> None:
        """Drafter KV of all computed positions of ``seqs``; of their features only the last is kept."""
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        rows: list[torch.Tensor] = []
        for seq in seqs:
            track = self._tracks[seq]
            if track.filled < track.end:
                ids += seq.tokens[track.filled : track.end]
                slots += self._slots(seq, track.filled, track.end)
                positions += range(track.filled, track.end)
                features_TF = torch.cat(track.rows) if len(track.rows) > 1 else track.rows[0]
                rows.append(features_TF[track.filled - 1 - track.start : -1])
                # A copy: the view would keep the whole step's features alive.
                track.rows, track.start, track.filled = [features_TF[-1:].clone()], track.end - 1, track.end
        if not ids:
            return
        device = self._runner.weights.device
        ids_T, slots_T, positions_T = (torch.tensor(x, device=device) for x in (ids, slots, positions))
        x_TX = draft_inputs(self._fast, self._runner.weights.embed_VD, ids_T, self._features(torch.cat(rows)))
        k_TKH, v_TKH = draft_keys_values(self._weights, x_TX, self._runner.rotary(positions_T, max(positions) + 1))
        self._runner.kv.write(slots_T, self._layer, k_TKH, v_TKH)

    @torch.inference_mode()
    def draft(self, seqs: Sequence[Request], arm: Arm) -> list[DraftTree]:
        """Expand ``arm.depth`` levels of ``arm.top_k`` nodes per sequence below its pending token."""
        for seq in seqs:
            if seq not in self._tracks:  # admitted in this very step, all but its last token found in the cache
                self._tracks[seq] = self._new_track(seq, seq.num_computed)
        self._fill(seqs)
        builder = TreeBuilder(len(seqs), arm.top_k)
        device = self._runner.weights.device
        spans = [Span(seq.table, len(seq.tokens) - 1, len(seq.tokens)) for seq in seqs]
        ids_T = torch.tensor([seq.tokens[-1] for seq in seqs], device=device)
        features_TD = self._features(torch.cat([self._tracks[seq].rows[-1][-1:] for seq in seqs]))
        expanded = 0
        for depth in range(1, arm.depth + 1):
            f_TD = self._level(spans, ids_T, features_TD)
            logits_TV = self._scores(seqs, draft_logits(self._fast, f_TD, self._runner.weights), depth)
            best = (logits_TV - logits_TV.logsumexp(-1, keepdim=True)).topk(min(arm.top_k, logits_TV.shape[1]))
            tokens = to_target_ids(self._weights, best.indices).view(len(seqs), -1, best.indices.shape[1])
            frontier = builder.grow(tokens.cpu().numpy(), best.values.view(tokens.shape).cpu().numpy())
            if depth == arm.depth:
                break
            width = frontier.tokens_BF.shape[1]
            rows_BF = torch.as_tensor(frontier.rows_BF, device=device)
            per_seq = len(f_TD) // len(seqs)
            features_TD = f_TD[(rows_BF + per_seq * torch.arange(len(seqs), device=device).unsqueeze(1)).flatten()]
            ids_T = torch.as_tensor(frontier.tokens_BF, device=device).flatten()
            spans = [
                Span(
                    seq.table, len(seq.tokens) + expanded, len(seq.tokens) + expanded + width,
                    context=len(seq.tokens), visible=seen_FE, depths=(len(seq.tokens) + depth - 1,) * width,
                )
                for seq, seen_FE in zip(seqs, frontier.seen_BFE, strict=True)
            ]  # fmt: skip
            expanded += width
        return builder.best_nodes(arm.num_verify)

    def _scores(self, seqs: Sequence[Request], logits_TV: torch.Tensor, depth: int) -> torch.Tensor:
        """What candidates are ranked by: for sampled sequences the logits over the temperature plus the very noise that
        the target's token there will be drawn with, which makes the same token likely to win on both sides."""
        rows = [seq.sample_row() for seq in seqs]
        if all(row.greedy for row in rows):
            return logits_TV
        per_seq = len(logits_TV) // len(seqs)
        device, ids_V = logits_TV.device, self._weights.draft_ids_Vd
        keys = [(row.seed, len(seq.tokens) + depth - 1) for seq, row in zip(seqs, rows, strict=True)]
        noise_BV = gumbel_noise(keys, logits_TV.shape[1], device, ids_V).to(logits_TV.dtype)
        scales = [(0.0, 1.0) if row.greedy else (1.0, 1.0 / row.temperature) for row in rows]
        noisy_B11, scale_B11 = torch.tensor(scales, dtype=logits_TV.dtype, device=device)[:, :, None, None].unbind(1)
        scores = logits_TV.view(len(seqs), per_seq, -1) * scale_B11 + noise_BV.unsqueeze(1) * noisy_B11
        return scores.view_as(logits_TV)

    def _features(self, rows_TF: torch.Tensor) -> torch.Tensor:
        return target_features(self._fast, self._runner.weights, rows_TF)

    def _level(self, spans: Sequence[Span], ids_T: torch.Tensor, features_TD: torch.Tensor) -> torch.Tensor:
        plan = plan_attention(spans, self._runner.page_size, self._runner.weights.device)
        cos_sin = self._runner.rotary(plan.positions_T, plan.max_position)
        x_TX = draft_inputs(self._fast, self._runner.weights.embed_VD, ids_T, features_TD)
        return draft_hidden(
            self._fast,
            x_TX,
            cos_sin,
            lambda layer, q, k, v: self._runner.kv.attend(plan, layer, q, k, v),
            self._layer,
        )

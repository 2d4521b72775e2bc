"""The drafter on the paged cache drafts what it would draft from a dense pass over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.draft_tree import ROOT, DraftTree, best_nodes
from areal_dta.drafter.eagle import (
    EagleWeights,
    draft_hidden,
    draft_inputs,
    draft_logits,
    init_weights,
    target_features,
    to_target_ids,
)
from areal_dta.drafter.eagle_config import EagleConfig
from areal_dta.nn import DecoderWeights, Rotary
from areal_dta.nn.decoder import decode_features
from areal_dta.rollout.server.eagle_runtime import EagleRuntime
from areal_dta.rollout.server.sampler import SampleRow, gumbel_noise
from areal_dta.rollout.server.scheduler import Scheduler
from areal_dta.rollout.server.sequence import Sequence as ServerSequence
from areal_dta.rollout.server.speculation import Speculator
from tests.unit.server_kit import make_scheduler
from tests.unit.spec_kit import ScriptedTuner, dense_attend, mixed_requests, run_all, same
from tests.unit.tiny_models import FAMILIES, save_tiny_model

VOCAB = 320
ARMS = (Arm("eagle", 3, 2, 6), Arm("eagle", 1, 1, 1), OFF, Arm("eagle", 4, 4, 12))


class DenseDrafter:
    """The slow twin: every node of the tree by a dense pass of target and drafter over its whole path."""

    def __init__(self, target: DecoderWeights, weights: EagleWeights) -> None:
        self._target, self._weights = target, weights

    def _feature_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        rotary = Rotary(self._target.config, self._target.dtype, self._target.device)
        cos_sin = rotary(torch.arange(len(tokens)), len(tokens))
        layers = self._weights.config.hidden_layers
        _, features = decode_features(self._target, torch.tensor(tokens), cos_sin, dense_attend, layers)
        return target_features(self._weights, self._target, features)

    def next_logprobs(self, tokens: Sequence[int], drafted: Sequence[int], row: SampleRow) -> torch.Tensor:
        """After ``tokens``, the last of them pending, and ``drafted``; over the draft vocabulary, with the noise that
        the target's token there is drawn with."""
        known_TD = self._feature_rows(tokens[:-1]) if len(tokens) > 1 else self._target.embed_VD.new_zeros(0, 48)
        rows = [known_TD.new_zeros(1, known_TD.shape[1]), known_TD]
        ids = list(tokens)
        for step in range(len(drafted) + 1):
            features_TD = torch.cat(rows)
            rotary = Rotary(self._target.config, self._target.dtype, self._target.device)
            cos_sin = rotary(torch.arange(len(ids)), len(ids))
            x = draft_inputs(self._weights, self._target.embed_VD, torch.tensor(ids), features_TD)
            f_TD = draft_hidden(self._weights, x, cos_sin, dense_attend)
            if step < len(drafted):
                rows.append(f_TD[-1:])
                ids.append(drafted[step])
        logits_V = draft_logits(self._weights, f_TD[-1:], self._target)[0]
        if not row.greedy:
            noise_V = gumbel_noise([(row.seed, len(tokens) + len(drafted))], VOCAB)[0]
            ids_Vd = self._weights.draft_ids_Vd
            logits_V = logits_V / row.temperature + (noise_V if ids_Vd is None else noise_V[ids_Vd])
        return logits_V.log_softmax(-1)

    def tree(self, tokens: Sequence[int], arm: Arm, row: SampleRow) -> DraftTree:
        nodes: list[tuple[int, int, float, tuple[int, ...]]] = []  # token, parent, path log-prob, path
        frontier: list[int] = [ROOT]
        for _ in range(arm.depth):
            grown = []
            for node in frontier:
                base, path = (0.0, ()) if node == ROOT else nodes[node][2:]
                best = self.next_logprobs(tokens, path, row).topk(arm.top_k)
                ids = to_target_ids(self._weights, best.indices).tolist()
                for token, value in zip(ids, best.values.tolist(), strict=True):
                    grown.append(len(nodes))
                    nodes.append((token, node, base + value, (*path, token)))
            frontier = sorted(grown, key=lambda n: -nodes[n][2])[: arm.top_k]
        columns = [np.array(column) for column in list(zip(*nodes, strict=True))[:3]]
        return best_nodes(*columns, arm.num_verify)


class Checked(EagleRuntime):
    """Compares every draft with the slow twin's."""

    checked = 0

    def draft(self, seqs: Sequence[ServerSequence], arm: Arm) -> list[DraftTree]:
        trees = super().draft(seqs, arm)
        twin = DenseDrafter(self._runner.weights, self._weights)
        for seq, tree in list(zip(seqs, trees, strict=True))[:2]:
            assert tree == twin.tree(seq.tokens, arm, seq.sample_row()), (len(seq.tokens), seq.num_output, arm)
            self.checked += 1
        return trees


def drafter_for(target: DecoderWeights, kind: str, draft_vocab: int) -> EagleWeights:
    config = EagleConfig.for_target(target.config, kind, draft_vocab)
    ids = torch.arange(0, VOCAB, 2)[:draft_vocab] if draft_vocab else None
    weights = init_weights(config, target, torch.Generator().manual_seed(1), ids)
    return weights


def with_drafter(scheduler: Scheduler, kind: str, draft_vocab: int) -> Checked:
    weights = drafter_for(scheduler.runner.weights, kind, draft_vocab)
    scheduler.rebuild(((weights.config.num_kv_heads, weights.config.head_dim),), weights.config.hidden_layers)
    runtime = Checked(scheduler.runner, weights, "d0")
    scheduler.speculator = Speculator(scheduler.cache, ScriptedTuner(ARMS), None, runtime)
    return runtime


@pytest.mark.parametrize(
    ("family", "kind", "draft_vocab"),
    [("qwen3", "eagle", 0), ("qwen2", "eagle", 64), ("llama", "eagle3", 64), ("qwen3", "eagle3", 0)],
)
def test_drafts_are_those_of_a_dense_pass(family: str, kind: str, draft_vocab: int, tmp_path: Path):
    save_tiny_model(tmp_path, family)
    assert family in FAMILIES
    requests = mixed_requests(12, VOCAB, seed=3, num_prompts=5)
    plain = run_all(make_scheduler(tmp_path, torch.float64), requests, 4)
    # A small pool and small chunks: prefix hits, retractions and evictions in between.
    scheduler = make_scheduler(tmp_path, torch.float64, max_total_tokens=320, max_prefill_tokens=24, page_size=8)
    runtime = with_drafter(scheduler, kind, draft_vocab)

    def disturb(step: int) -> None:
        if step % 11 == 5:
            scheduler.retract_all()

    done = run_all(scheduler, requests, 4, disturb)
    assert all(same(c, d) for c, d in zip(plain, done, strict=True))
    assert runtime.checked > 30
    assert scheduler.stats.cached_tokens > 0
    assert scheduler.stats.retractions > 0

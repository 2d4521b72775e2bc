"""A small batched sampler over a policy folder, for measuring a policy's reward inside one process.

All episodes advance in lock-step: every unfinished one waits at its next turn, and all turns are sampled as one batch.
The prompt's common prefix (system prompt and tools) is computed once. Results depend on weights, seed and task list
only.

Legend of shape suffixes: B rows, S suffix positions, P prefix positions, N query heads, K key/value heads, G query
heads per key/value head, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from areal_dta.nn import DecoderConfig, DecoderWeights, Rotary, decode_hidden, load_decoder, project_logits
from experiments.tau2.chat import ChatRenderer
from experiments.tau2.episode import EpisodeLimits, Sample, TokenEpisode

__all__ = ["BatchSampler", "common_prefix_len", "mean_reward"]

KV = tuple[torch.Tensor, torch.Tensor]


def common_prefix_len(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    low, high = min(map(tuple, rows)), max(map(tuple, rows))
    shared = zip(low, high)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(low), len(high)))


@dataclass
class _Batch:
    """Rows still generating: which they are, where they write next, and their keys and values per layer [B, K, S,
    H].
    """

    row_B: torch.Tensor
    pos_B: torch.Tensor
    caches: list[KV]

    def keep(self, index: torch.Tensor) -> _Batch:
        return _Batch(self.row_B[index], self.pos_B[index], [(k[index], v[index]) for k, v in self.caches])


class BatchSampler:
    """Samples with ``temperature`` (0: greedy) until the end of the turn or ``max_new_tokens``; fp32 weights from
    ``folder``.
    """

    def __init__(self, folder: Path, eos_id: int, temperature: float, max_new_tokens: int, seed: int) -> None:
        self.weights: DecoderWeights = load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)
        self._rotary = Rotary(self.weights.config, self.weights.dtype, self.weights.device)
        self._eos_id, self._temperature, self._max_new = eos_id, temperature, max_new_tokens
        self._noise = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """One sample per prompt, in order."""
        shared = min(common_prefix_len(prompts), min(map(len, prompts)) - 1)
        prefix = self._run_prefix(list(prompts[0][:shared]))
        distinct = {tuple(p): None for p in prompts}  # samples of one task start alike: compute equal prompts once
        index_of = {p: i for i, p in enumerate(distinct)}
        source_B = torch.tensor([index_of[tuple(p)] for p in prompts])
        hidden_BD, caches = self._run_prompts([list(p[shared:]) for p in distinct], prefix)
        end_B = torch.tensor([len(p) - shared for p in prompts])
        batch = _Batch(torch.arange(len(prompts)), end_B, [(k[source_B], v[source_B]) for k, v in caches])
        hidden_BD = hidden_BD[source_B]
        ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for step in range(self._max_new):
            token_B, logprob_B = self._pick(hidden_BD)
            for row, token, logprob in zip(batch.row_B.tolist(), token_B.tolist(), logprob_B.tolist()):
                ids[row].append(token)
                logprobs[row].append(logprob)
            going = torch.nonzero(token_B != self._eos_id)[:, 0]
            if not len(going) or step + 1 == self._max_new:
                break
            if len(going) < len(token_B):
                batch, token_B = batch.keep(going), token_B[going]
            hidden_BD = self._step(token_B, batch, prefix)
        return [Sample(i, p, [0] * len(i)) for i, p in zip(ids, logprobs)]

    def _pick(self, hidden_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BV = project_logits(self.weights, hidden_BD)
        logp_BV = torch.log_softmax(logits_BV / (self._temperature or 1.0), -1)
        scores_BV = logp_BV
        if self._temperature:
            uniform_BV = torch.rand(logp_BV.shape, generator=self._noise).clamp_(1e-20, 1 - 1e-7)
            scores_BV = logp_BV - torch.log(-torch.log(uniform_BV))
        token_B = scores_BV.argmax(-1)
        return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]

    def _run_prefix(self, ids: list[int]) -> list[KV]:
        """Keys and values of the shared prefix per layer, [K, P, H]."""
        kept: list[KV] = []
        group = self.weights.config.group_size

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            k_KPH, v_KPH = k_TKH.transpose(0, 1).contiguous(), v_TKH.transpose(0, 1).contiguous()
            kept.append((k_KPH, v_KPH))
            k, v = k_KPH.repeat_interleave(group, 0), v_KPH.repeat_interleave(group, 0)
            return F.scaled_dot_product_attention(q_TNH.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

        if ids:
            positions = torch.arange(len(ids))
            decode_hidden(self.weights, torch.tensor(ids), self._rotary(positions, len(ids)), attend)
            return kept
        config = self.weights.config
        empty = torch.zeros(config.num_kv_heads, 0, config.head_dim, dtype=self.weights.dtype)
        return [(empty, empty) for _ in self.weights.layers]

    def _run_prompts(self, suffixes: list[list[int]], prefix: list[KV]) -> tuple[torch.Tensor, list[KV]]:
        """Hidden state [B, D] after each prompt; keys and values per layer [B, K, S, H] with room for the answer."""
        config, num_prefix = self.weights.config, prefix[0][0].shape[1]
        num_rows, width = len(suffixes), max(map(len, suffixes))
        last_B = torch.tensor([len(s) for s in suffixes])
        ids_BS = torch.tensor([s + [0] * (width - len(s)) for s in suffixes])
        mask_SC = torch.ones(width, num_prefix + width, dtype=torch.bool).tril(num_prefix)
        shape = (num_rows, config.num_kv_heads, width + self._max_new, config.head_dim)
        caches: list[KV] = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.weights.layers]

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            q_BNSH, k_BKSH, v_BKSH = (
                t.reshape(num_rows, width, -1, config.head_dim).transpose(1, 2) for t in (q_TNH, k_TKH, v_TKH)
            )
            caches[layer][0][:, :, :width], caches[layer][1][:, :, :width] = k_BKSH, v_BKSH
            k, v = (
                torch.cat((p.expand(num_rows, -1, -1, -1), own), 2).repeat_interleave(config.group_size, 1)
                for p, own in zip(prefix[layer], (k_BKSH, v_BKSH))
            )
            return F.scaled_dot_product_attention(q_BNSH, k, v, attn_mask=mask_SC).transpose(1, 2).flatten(0, 1)

        positions = (num_prefix + torch.arange(width)).repeat(num_rows)
        hidden = decode_hidden(self.weights, ids_BS.flatten(), self._rotary(positions, num_prefix + width), attend)
        hidden_BD = hidden.view(num_rows, width, -1)[torch.arange(num_rows), last_B - 1]
        return hidden_BD, caches

    def _step(self, token_B: torch.Tensor, batch: _Batch, prefix: list[KV]) -> torch.Tensor:
        """Append one token per row; hidden states [B, D]. Attention of prefix and suffix under one softmax."""
        config, num_rows, num_prefix = self.weights.config, len(token_B), prefix[0][0].shape[1]
        num_kv, group, head_dim = config.num_kv_heads, config.group_size, config.head_dim
        width = int(batch.pos_B.max()) + 1
        unused_BS = (torch.arange(width) > batch.pos_B[:, None])[:, None, None]
        rows = torch.arange(num_rows)

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            (k_KPH, v_KPH), (k_BKSH, v_BKSH) = prefix[layer], batch.caches[layer]
            k_BKSH[rows, :, batch.pos_B], v_BKSH[rows, :, batch.pos_B] = k_TKH, v_TKH
            q_BKGH = q_TNH.view(num_rows, num_kv, group, head_dim) * head_dim**-0.5
            q_KXH = q_BKGH.transpose(0, 1).reshape(num_kv, num_rows * group, head_dim)
            far = (q_KXH @ k_KPH.mT).view(num_kv, num_rows, group, num_prefix).transpose(0, 1)
            near = (q_BKGH @ k_BKSH[:, :, :width].mT).masked_fill(unused_BS, float("-inf"))
            weight = torch.softmax(torch.cat((far, near), -1), -1)
            far_weight = weight[..., :num_prefix].transpose(0, 1).reshape(num_kv, num_rows * group, num_prefix)
            out = (far_weight @ v_KPH).view(num_kv, num_rows, group, head_dim).transpose(0, 1)
            return (out + weight[..., num_prefix:] @ v_BKSH[:, :, :width]).reshape(num_rows, num_kv * group, head_dim)

        position_B = num_prefix + batch.pos_B
        hidden_BD = decode_hidden(self.weights, token_B, self._rotary(position_B, num_prefix + width), attend)
        batch.pos_B = batch.pos_B + 1
        return hidden_BD


def mean_reward(
    sampler: BatchSampler, renderer: ChatRenderer, tasks: Sequence[tuple[str, str]], limits: EpisodeLimits
) -> float:
    """Mean reward of one episode per (domain, task id) of ``tasks``, all in lock-step."""
    episodes = [TokenEpisode(domain, task_id, renderer, limits) for domain, task_id in tasks]
    waiting = [(episode, prompt) for episode in episodes if (prompt := episode.start()) is not None]
    while waiting:
        samples = sampler.generate([prompt for _, prompt in waiting])
        advanced = [(episode, episode.feed(sample)) for (episode, _), sample in zip(waiting, samples)]
        waiting = [(episode, prompt) for episode, prompt in advanced if prompt is not None]
    return sum(episode.outcome().reward for episode in episodes) / len(episodes)

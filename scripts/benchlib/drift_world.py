"""A small language and a policy on it that reinforcement learning moves away from where it began.

Documents are a topic and phrases; a phrase is a row of slots, each filled with one of five words of its own, the usual
one mostly. Which phrases may follow depends on the phrase before and on the topic, named once at the start. The reward
is for the two rarest words of a slot, in a set of slots that grows with every update, so that every update changes the
policy at new places.

Legend of shape suffixes: B sequences, L length (filled up on the right), R rows that count, V vocabulary, W words,
D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from areal_dta.nn import DecoderWeights, Rotary, project_logits
from areal_dta.nn.decoder import decode_hidden
from areal_dta.nn.loading import build_decoder
from scripts.benchlib.spec_model import random_start, tiny_config

__all__ = ["EOS", "VOCAB", "Document", "Language", "Policy", "hidden_states", "policy_distance"]

PAD, EOS = 0, 1
TOPICS, PHRASES, SLOTS = 4, 20, 6
WORD_SHARES = (0.70, 0.10, 0.08, 0.06, 0.06)
WORDS = len(WORD_SHARES)
NUM_REWARDED = 2  # of a slot's words, the last ones: rare at first, outside the first policy's top 3
FIRST_WORD = 2 + TOPICS
VOCAB = FIRST_WORD + PHRASES * SLOTS * WORDS
FOLLOW_SHARES = (0.65, 0.25, 0.10)
END_SHARE = 0.12  # of phrases that are the last
PROMPT_PHRASES = 2
KL_COST = 0.1


@dataclass(frozen=True)
class Document:
    """Token ids; the first ``prompt_len`` are given, the rest is the policy's own."""

    ids: tuple[int, ...]
    prompt_len: int


class Language:
    """Grammar and reward; the same for every ``seed``, which is for the order in which slots are rewarded."""

    def __init__(self, seed: int, last_share: float) -> None:
        """``last_share``: of all slots, rewarded at the end."""
        fixed = np.random.default_rng(11)
        self._follow = np.stack(
            [[fixed.permutation(PHRASES)[: len(FOLLOW_SHARES)] for _ in range(PHRASES)] for _ in range(TOPICS)]
        )
        order = np.random.default_rng(seed).permutation(PHRASES * SLOTS)
        self._rank = torch.from_numpy(np.argsort(order))
        self._last_share = last_share

    def documents(self, count: int, rng: np.random.Generator, min_phrases: int = 4) -> list[tuple[int, ...]]:
        """As the policy is taught them, end of sequence included."""
        return [tuple(self._walk(rng, min_phrases)) for _ in range(count)]

    def prompts(self, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """The topic and the first phrases of documents."""
        return [d[: 1 + PROMPT_PHRASES * SLOTS] for d in self.documents(count, rng)]

    def _walk(self, rng: np.random.Generator, min_phrases: int) -> Iterator[int]:
        topic, phrase, count = int(rng.integers(TOPICS)), int(rng.integers(PHRASES)), 0
        yield 2 + topic
        while count < min_phrases or rng.random() > END_SHARE:
            for slot in range(SLOTS):
                yield FIRST_WORD + (phrase * SLOTS + slot) * WORDS + int(rng.choice(WORDS, p=WORD_SHARES))
            phrase = int(self._follow[topic, phrase, rng.choice(len(FOLLOW_SHARES), p=FOLLOW_SHARES)])
            count += 1
        yield EOS

    def rewarded(self, ids: torch.Tensor, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """After each token of ``ids``: the words (R, W) that would be rewarded, and whether any is (inside a
        phrase, at a slot that is in the rewarded set after the share ``progress`` of all updates)."""
        slot = torch.div(ids - FIRST_WORD, WORDS, rounding_mode="floor")
        inside = (ids >= FIRST_WORD) & ((slot + 1) % SLOTS != 0)
        following = torch.where(inside, slot + 1, 0)
        active = self._rank[following] < progress * self._last_share * len(self._rank)
        words = torch.arange(WORDS - NUM_REWARDED, WORDS)
        return FIRST_WORD + following.unsqueeze(-1) * WORDS + words, inside & active


class Policy:
    """A decoder of 0.15 million parameters with its optimiser; `weights` is a copy that later steps leave alone."""

    def __init__(self, seed: int, hidden_size: int = 64, num_layers: int = 3) -> None:
        self._config = tiny_config(VOCAB, hidden_size, num_layers, max_positions=1024)
        self._tensors = random_start(self._config, torch.Generator().manual_seed(seed))
        self._optimizer = torch.optim.Adam(self._tensors.values(), lr=0.0, betas=(0.9, 0.95))

    def weights(self) -> DecoderWeights:
        copies = {name: t.detach().clone() for name, t in self._tensors.items()}
        return build_decoder(copies, self._config, torch.float32)

    def teach(self, language: Language, num_steps: int, rng: np.random.Generator, rate: float = 6e-3) -> float:
        """Learn the language by imitation; the last loss in nats per token."""
        value = 0.0
        for step in range(num_steps):
            docs = [Document(d, 1) for d in language.documents(16, rng)]
            logits_RV, _, next_R = self._rows(docs)
            loss = F.cross_entropy(logits_RV, next_R)
            self._step(loss, rate * (1 - 0.95 * step / num_steps), list(self._tensors.values()))
            value = float(loss.detach())
        self._optimizer.state.clear()
        return value

    def improve(
        self,
        language: Language,
        docs: Sequence[Document],
        progress: float,
        first: DecoderWeights,
        num_steps: int,
        rate: float,
    ) -> float:
        """Policy gradient on the layers with the policy's own ``docs``; the reward per token before the first step.

        At every token the expected reward over all next words is known, so its gradient is taken, which is that of
        sampled actions with the mean reward as baseline, without their noise. As usual, the divergence from the
        ``first`` policy costs `KL_COST` per nat, which keeps what is not rewarded as it was. The embedding stays: as
        it is the head too, a model this small would put most of the change there, where every drafter follows for free.
        """
        with torch.no_grad():
            log_q_RV = response_rows(first, docs)[0].log_softmax(-1)
        before, layers = 0.0, [t for name, t in self._tensors.items() if ".layers." in name]
        for step in range(num_steps):
            logits_RV, ids_R, _ = self._rows(docs)
            words_RW, active_R = language.rewarded(ids_R, progress)
            log_p_RV = logits_RV.log_softmax(-1)
            reward = (log_p_RV.gather(1, words_RW).exp().sum(1) * active_R).mean()
            if step == 0:
                before = float(reward.detach())
            self._step(
                KL_COST * F.kl_div(log_q_RV, log_p_RV, reduction="batchmean", log_target=True) - reward, rate, layers
            )
        return before

    def _rows(self, docs: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return response_rows(build_decoder(self._tensors, self._config, torch.float32), docs)

    def _step(self, loss: torch.Tensor, rate: float, trained: list[torch.Tensor]) -> None:
        self._optimizer.zero_grad()
        loss.backward(inputs=trained)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()


def hidden_states(weights: DecoderWeights, docs: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, L) and the hidden states (B, L, D) before the final norm, computed without any cache."""
    B, L = len(docs), max(len(d.ids) for d in docs)
    ids_BL = torch.tensor([d.ids + (PAD,) * (L - len(d.ids)) for d in docs])
    cos_sin = Rotary(weights.config, weights.dtype, weights.device)(torch.arange(L).repeat(B), L)

    def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (B, L)).transpose(1, 2) for t in (q_TNH, k_TKH, v_TKH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return ids_BL, decode_hidden(weights, ids_BL.flatten(), cos_sin, attend).unflatten(0, (B, L))


def response_rows(weights: DecoderWeights, docs: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every position that predicts a token of a response: logits (R, V), its token and the next one (R)."""
    ids_BL, hidden_BLD = hidden_states(weights, docs)
    starts = torch.tensor([[d.prompt_len - 1] for d in docs])
    ends = torch.tensor([[len(d.ids) - 1] for d in docs])
    place_L = torch.arange(ids_BL.shape[1])
    rows_BL = (place_L >= starts) & (place_L < ends)
    next_BL = ids_BL.roll(-1, 1)
    return project_logits(weights, hidden_BLD[rows_BL]), ids_BL[rows_BL], next_BL[rows_BL]


@torch.no_grad()
def policy_distance(weights: DecoderWeights, first: DecoderWeights, docs: Sequence[Document]) -> float:
    """KL(policy || first policy) in nats per token over the vocabulary, at the contexts of the policy's ``docs``."""
    log_p, log_q = (response_rows(w, docs)[0].log_softmax(-1) for w in (weights, first))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

"""Sampling by position-keyed noise: a token depends on its logits, the request's seed and its position, on nothing
else.

The token at a position is ``argmax(logits / temperature + gumbel(seed, position, token))`` over the admissible tokens,
which is an exact draw from the softmax. The noise is a hash, so the batch around a request, retractions and
resubmissions of the same seed do not change what is drawn; a verifier of drafted tokens can ask for the same noise
again.

Legend of shape suffixes: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Draw", "SampleRow", "draw", "gumbel_noise", "sample"]

MASK64 = (1 << 64) - 1
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)
NUCLEUS_FIRST_LOOK = 256  # most nuclei are this small; sorting the whole vocabulary costs ten times more
MIN_TEMPERATURE = 1e-5
CACHED_VALUES = 1 << 16  # noise is made for so many values at a time on a CPU: its temporaries stay in the cache
ALLOWED_FIRST_LOOK = 64  # candidates of a constrained row that are tried before the whole vocabulary is sorted


@dataclass(frozen=True)
class SampleRow:
    """How to draw one token. ``position`` counts from the start of the prompt; temperature 0 is greedy."""

    seed: int
    position: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # <= 0: all
    min_p: float = 0.0  # tokens less likely than this share of the likeliest are left out

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1


def _splitmix(x: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit finaliser (multiply and shift, as C. Wellons' lowbias32), in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= MIX_FACTORS[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed32(MIX_FACTORS[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _uniform(words: torch.Tensor) -> torch.Tensor:
    """Random 32-bit words (int32) as fp32 in (0, 1), with all 32 bits near 0: there the Gumbel value is large and
    decides who wins. A plain conversion would round the smallest 64 words to 0, and hopeless tokens would win 60 times
    too often.
    """
    low = (words & 0xFF).float().add_(0.5).mul_(2.0**-8)
    return ((words >> 8) & 0xFFFFFF).float().add_(low).mul_(2.0**-24).clamp_(max=1 - 2.0**-24)


def gumbel_noise(
    keys: Sequence[tuple[int, int]],
    vocab_size: int,
    device: torch.device | str = "cpu",
    tokens_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Standard Gumbel noise (B, V) in fp32 for the (seed, position) ``keys``: of all ``vocab_size`` tokens, or of
    ``tokens_V`` (which then give V)."""
    words = [_splitmix(_splitmix(seed & MASK64) ^ position) for seed, position in keys]
    ids_V = torch.arange(vocab_size, dtype=torch.int32, device=device) if tokens_V is None else tokens_V.int()
    if torch.device(device).type != "cpu":
        return _noise(words, ids_V)
    rows = max(1, CACHED_VALUES // len(ids_V))
    return torch.cat([_noise_on_cpu(words[i : i + rows], ids_V) for i in range(0, len(words), rows)])


def _noise(words: Sequence[int], ids_V: torch.Tensor) -> torch.Tensor:
    first_B1 = torch.tensor([[_signed32(w)] for w in words], dtype=torch.int32, device=ids_V.device)
    second_B1 = torch.tensor([[_signed32(w >> 32)] for w in words], dtype=torch.int32, device=ids_V.device)
    x_BV = ids_V ^ first_B1
    x_BV = _mix_(_mix_(x_BV).add_(second_B1))
    uniform_BV = _uniform(x_BV)
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


def _mix_words_(x: np.ndarray, spare: np.ndarray) -> None:
    """`_mix_` of uint32, where a right shift brings zeros."""
    for shift, factor in zip((16, 15), MIX_FACTORS, strict=True):
        x ^= np.right_shift(x, shift, out=spare)
        x *= np.uint32(factor)
    x ^= np.right_shift(x, 16, out=spare)


def _noise_on_cpu(words: Sequence[int], ids_V: torch.Tensor) -> torch.Tensor:
    """`_noise`, bit for bit, in a third of the time for one row: numpy has unsigned words and calls cost less."""
    words_B1 = np.array(words, dtype=np.uint64)[:, None]
    x_BV = ids_V.numpy().view(np.uint32) ^ words_B1.astype(np.uint32)
    spare_BV = np.empty_like(x_BV)
    _mix_words_(x_BV, spare_BV)
    x_BV += (words_B1 >> np.uint64(32)).astype(np.uint32)
    _mix_words_(x_BV, spare_BV)
    low_BV = np.bitwise_and(x_BV, np.uint32(0xFF), out=spare_BV).astype(np.float32)
    low_BV += np.float32(0.5)
    low_BV *= np.float32(2.0**-8)
    x_BV >>= np.uint32(8)
    uniform_BV = x_BV.astype(np.float32)
    uniform_BV += low_BV
    uniform_BV *= np.float32(2.0**-24)
    np.minimum(uniform_BV, np.float32(1 - 2.0**-24), out=uniform_BV)
    # The logarithms are torch's on both ways.
    return torch.from_numpy(uniform_BV).neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Draw:
    """One drawn token per row, and the distributions it came from.

    ``scaled_BV`` are the logits over the temperature (1 for greedy rows), before top-k, top-p and min-p cut;
    ``kept_BV`` after (-inf: cut). Both are logits, not normalised.
    """

    tokens_B: torch.Tensor
    scaled_BV: torch.Tensor
    kept_BV: torch.Tensor
    rows: tuple[SampleRow, ...]
    stuck: frozenset[int] = frozenset()  # rows of which no token is allowed; what stands there means nothing

    def logprobs(self) -> torch.Tensor:
        """Log-probs fp32 of the tokens before the cut: what a trainer can recompute."""
        return _logprobs(self.scaled_BV, self.tokens_B)

    def sampling_logprobs(self) -> torch.Tensor:
        """Log-probs fp32 with which the tokens were drawn, after the cut; 0 for greedy rows."""
        greedy_B = torch.tensor([r.greedy for r in self.rows], device=self.tokens_B.device)
        return _logprobs(self.kept_BV, self.tokens_B).masked_fill(greedy_B, 0.0)


def _logprobs(logits_BV: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
    chosen_B = logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    return (chosen_B - logits_BV.logsumexp(-1)).float()


def sample(logits_BV: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: (tokens int64, log-probs fp32 before the cut)."""
    drawn = draw(logits_BV, rows)
    return drawn.tokens_B, drawn.logprobs()


def draw(
    logits_BV: torch.Tensor, rows: Sequence[SampleRow], allowed: Mapping[int, Callable[[int], bool]] | None = None
) -> Draw:
    """Draw one token per row. ``allowed[i](token)`` restricts row i: the best admissible score is an exact draw from
    the softmax over the admissible tokens. Where the cut leaves none of them, it is not applied to that row.
    """
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    scale = [1.0 if r.greedy else r.temperature for r in rows]
    if any(s != 1.0 for s in scale):
        logits_BV = logits_BV / torch.tensor(scale, dtype=logits_BV.dtype, device=logits_BV.device).unsqueeze(1)
    picked = [i for i, r in enumerate(rows) if not r.greedy]
    kept_BV = score_BV = noise = logits_BV
    if picked:
        keys = [(rows[i].seed, rows[i].position) for i in picked]
        noise = gumbel_noise(keys, logits_BV.shape[1], logits_BV.device).to(logits_BV.dtype)
        if len(picked) == len(rows):
            kept_BV = _truncate(logits_BV, rows)
            score_BV = noise + kept_BV if allowed else noise.add_(kept_BV)
        else:
            index = torch.tensor(picked, device=logits_BV.device)
            kept_PV = _truncate(logits_BV[index], [rows[i] for i in picked])
            kept_BV = logits_BV.index_copy(0, index, kept_PV)
            score_BV = logits_BV.index_copy(0, index, noise + kept_PV)
    tokens_B = score_BV.argmax(-1)
    stuck: set[int] = set()
    for i, test in (allowed or {}).items():
        token = _best_allowed(score_BV[i], test)
        if token is None:
            uncut_V = logits_BV[i] if rows[i].greedy else logits_BV[i] + noise[picked.index(i)]
            token = _best_allowed(uncut_V, test)
        if token is None:
            stuck.add(i)
        else:
            tokens_B[i] = token
    return Draw(tokens_B, logits_BV, kept_BV, tuple(rows), frozenset(stuck))


def _best_allowed(score_V: torch.Tensor, test: Callable[[int], bool]) -> int | None:
    for look in (ALLOWED_FIRST_LOOK, len(score_V)):
        best = score_V.topk(min(look, len(score_V)))
        for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            if score == -math.inf:
                return None
            if test(token):
                return int(token)
    return None


def _truncate(logits_BV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Set what top-k, top-p and min-p exclude to -inf; a tie at the border is kept."""
    vocab_size = logits_BV.shape[1]
    nucleus = [i for i, r in enumerate(rows) if r.top_p < 1.0 or 0 < r.top_k < vocab_size]
    cut = sorted({*nucleus, *(i for i, r in enumerate(rows) if r.min_p > 0)})
    if not cut:
        return logits_BV
    index = torch.tensor(cut, device=logits_BV.device)
    x_BV = logits_BV[index]
    shares = [math.log(rows[i].min_p) if rows[i].min_p > 0 else -math.inf for i in cut]
    floor_B1 = x_BV.amax(-1, keepdim=True) + torch.tensor(shares, dtype=x_BV.dtype, device=x_BV.device).unsqueeze(1)
    if nucleus:
        at = torch.tensor([cut.index(i) for i in nucleus], device=x_BV.device)
        lowest = _lowest_kept(x_BV[at], [rows[i] for i in nucleus], min(NUCLEUS_FIRST_LOOK, vocab_size))
        floor_B1[at] = torch.maximum(floor_B1[at], lowest)
    return logits_BV.index_copy(0, index, x_BV.masked_fill(x_BV < floor_B1, float("-inf")))


def _lowest_kept(x_BV: torch.Tensor, rows: Sequence[SampleRow], look: int) -> torch.Tensor:
    vocab_size = x_BV.shape[1]
    top_k_B1 = torch.tensor([[r.top_k if 0 < r.top_k < vocab_size else vocab_size] for r in rows], device=x_BV.device)
    top_p_B1 = torch.tensor([[r.top_p] for r in rows], dtype=x_BV.dtype, device=x_BV.device)
    value_BL = x_BV.topk(look, -1).values
    in_k_BL = torch.arange(look, device=x_BV.device) < top_k_B1
    kept_mass_B1 = x_BV.logsumexp(-1, keepdim=True)
    if look == vocab_size or int(top_k_B1.max()) <= look:  # top-p applies to what top-k leaves
        kept_mass_B1 = value_BL.masked_fill(~in_k_BL, float("-inf")).logsumexp(-1, keepdim=True)
    elif int(top_k_B1.min()) < vocab_size:
        return _lowest_kept(x_BV, rows, vocab_size)
    prob_BL = (value_BL - kept_mass_B1).exp().masked_fill(~in_k_BL, 0.0)
    before_BL = prob_BL.cumsum(-1) - prob_BL
    keep_BL = in_k_BL & (before_BL < top_p_B1)
    keep_BL[:, 0] = True
    undecided = (keep_BL[:, -1:] & (top_k_B1 > look) & (top_p_B1 <= 1.0)).any()
    if look < vocab_size and bool(undecided):
        return _lowest_kept(x_BV, rows, vocab_size)
    return value_BL.masked_fill(~keep_BL, float("inf")).amin(-1, keepdim=True)

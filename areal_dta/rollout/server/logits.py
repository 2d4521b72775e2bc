"""What a request does to its logits before the draw, and which log-probs it wants of the outcome.

The penalties follow SGLang: they count the request's own output, never its prompt; frequency and presence are
subtracted first, the repetition penalty then divides positive and multiplies negative logits, the bias is added last.

Legend of shape suffixes: R rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_dta.rollout.server.sampler import draw
from areal_dta.rollout.server.sequence import Sequence as Request
from areal_dta.rollout.server.sequence import TokenLogprobs

__all__ = ["adjust", "draw_tokens", "top_logprobs"]


def adjust(logits_RV: torch.Tensor, ready: Sequence[Request], ahead: Sequence[int] = ()) -> torch.Tensor:
    """Apply penalties, bias and ``min_new_tokens`` to ``logits_RV`` in place; row i belongs to ``ready[i]``, see
    `draw_tokens` for ``ahead``."""
    device, dtype = logits_RV.device, logits_RV.dtype
    forbidden: list[tuple[int, int]] = []  # row, token
    for row, seq in enumerate(ready):
        s = seq.request.sampling
        if s.penalised and seq.counts:
            ids = torch.tensor(list(seq.counts), device=device)
            counts = torch.tensor(list(seq.counts.values()), dtype=dtype, device=device)
            values = logits_RV[row, ids] - s.frequency_penalty * counts - s.presence_penalty
            if s.repetition_penalty != 1.0:
                values = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
            logits_RV[row, ids] = values
        if s.logit_bias:
            ids = torch.tensor([token for token, _ in s.logit_bias], device=device)
            logits_RV[row, ids] += torch.tensor([bias for _, bias in s.logit_bias], dtype=dtype, device=device)
        if s.min_new_tokens and seq.num_output + (ahead[row] if ahead else 0) < s.min_new_tokens:
            forbidden += [(row, token) for token in seq.stop_ids]
    if forbidden:
        rows, tokens = torch.tensor(forbidden, device=device).unbind(1)
        logits_RV[rows, tokens] = float("-inf")
    return logits_RV


def draw_tokens(
    ready: Sequence[Request], logits_RV: torch.Tensor, ahead: Sequence[int] = ()
) -> list[TokenLogprobs | None]:
    """The next token of every request with the log-probs it asked for, None where its constraint allows no token;
    overwrites ``logits_RV``. Row i is for the token ``ahead[i]`` (default 0) after the next one of ``ready[i]``, if the
    request has neither penalties nor a constraint, which ask for the tokens between."""
    logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    wants = [seq.request.wants for seq in ready]
    raw_rows = [i for i, w in enumerate(wants) if w.raw]
    raw_logprobs_RV = logits_RV[raw_rows].log_softmax(-1) if raw_rows else logits_RV
    rows = [seq.sample_row(n) for seq, n in zip(ready, ahead or [0] * len(ready), strict=True)]
    allowed = {i: seq.allows for i, seq in enumerate(ready) if seq.constraint is not None}
    drawn = draw(adjust(logits_RV, ready, ahead), rows, allowed)
    tokens, logprobs = drawn.tokens_B.tolist(), drawn.logprobs().tolist()
    sampling = drawn.sampling_logprobs().tolist() if any(w.sampling for w in wants) else []
    raw: dict[int, float] = {}
    if raw_rows:
        raw_R = raw_logprobs_RV.gather(1, drawn.tokens_B[raw_rows].unsqueeze(1)).squeeze(1)
        raw = dict(zip(raw_rows, raw_R.tolist(), strict=True))
    out: list[TokenLogprobs | None] = []
    for i, want in enumerate(wants):
        if i in drawn.stuck:
            out.append(None)
            continue
        top = top_logprobs(drawn.scaled_BV[i : i + 1], want.top)[0] if want.top else ()
        out.append(TokenLogprobs(tokens[i], logprobs[i], raw.get(i), sampling[i] if want.sampling else None, top))
    return out


def top_logprobs(logits_RV: torch.Tensor, count: int) -> list[tuple[tuple[float, int], ...]]:
    """Per row the ``count`` likeliest tokens as (log-prob, token), likeliest first."""
    best = (logits_RV - logits_RV.logsumexp(-1, keepdim=True)).float().topk(min(count, logits_RV.shape[1]))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [tuple(zip(values, ids, strict=True)) for values, ids in pairs]

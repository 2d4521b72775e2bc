"""The loss as a user would write it: every row alone through the model, one autograd graph from weights to loss.

The slowest twin of the linearised step: no coefficients, no parts. One process only.

Legend: S tokens of a row, B rows of one length, T tokens of all rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from areal_dta.engine import MegatronPolicy, Rows, RowValues

LossFn = Callable[..., torch.Tensor]


def row_outputs(policy: MegatronPolicy, rows: Rows, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs, entropies) of all rows, or a critic's (values, None), with their graphs."""
    first, second = [], []
    for lo, hi in itertools.pairwise(rows.offsets_S1.tolist()):
        ids_S = torch.from_numpy(rows.ids_T[lo:hi].astype(np.int64))
        hidden_SD = policy.row_hidden(ids_S)
        if policy.shape.value_head:
            first.append(policy.value_layer()(hidden_SD)[:, 0])
            continue
        log_p_SV = torch.log_softmax(hidden_SD[:-1] @ policy.head_weight().t() / temperature, -1)
        zero = hidden_SD.new_zeros(1)
        first.append(torch.cat([log_p_SV.gather(1, ids_S[1:, None])[:, 0], zero]))
        second.append(torch.cat([-(log_p_SV.exp() * log_p_SV).sum(-1), zero]))
    return torch.cat(first), torch.cat(second) if second else None


def equal_length_gradients(
    policy: MegatronPolicy, rows: Rows, dlogp_T: torch.Tensor, dentropy_T: torch.Tensor, temperature: float
) -> dict[str, torch.Tensor]:
    """Gradients of ``sum(dlogp * logp + dentropy * entropy)`` for many rows of one length, as one batch of B rows."""
    num_positions = int(rows.offsets_S1[1])
    ids_BS = torch.from_numpy(rows.ids_T.astype(np.int64)).view(-1, num_positions)
    policy.zero_grad()
    freqs = policy.rope_freqs(num_positions)[:num_positions]
    hidden_SBD = policy.model.decoder(policy.model.embedding(ids_BS, None), attention_mask=None, rotary_pos_emb=freqs)
    log_p_SBV = torch.log_softmax(hidden_SBD[:-1] @ policy.head_weight().t() / temperature, -1)
    logp_BS = log_p_SBV.gather(-1, ids_BS.t()[1:, :, None])[..., 0].t()
    entropy_BS = -(log_p_SBV.exp() * log_p_SBV).sum(-1).t()
    dlogp_BS, dentropy_BS = (x.view(-1, num_positions)[:, :-1] for x in (dlogp_T, dentropy_T))
    (logp_BS * dlogp_BS + entropy_BS * dentropy_BS).sum().backward()
    policy.finish_gradients("full")
    return {name: grad.clone() for name, grad in policy.gradients().items()}


def call(
    loss_fn: LossFn, first_T: torch.Tensor, entropy_T: torch.Tensor | None, packed: dict[str, Any]
) -> torch.Tensor:
    """The loss of fp32 values, as AReaL's engines hand them over: critics' loss functions take no entropy."""
    if entropy_T is None:
        return loss_fn(first_T.float(), packed)
    return loss_fn(first_T.float(), entropy_T.float(), packed)


def direct_gradients(
    policy: MegatronPolicy, rows: Rows, loss_fn: LossFn, packed: dict[str, Any], temperature: float
) -> tuple[dict[str, torch.Tensor], RowValues]:
    """Gradients of the loss on every parameter, and the row values they came from (a critic's in ``logprobs_T``)."""
    policy.zero_grad()
    first_T, entropy_T = row_outputs(policy, rows, temperature)
    call(loss_fn, first_T, entropy_T, packed).backward()
    policy.finish_gradients("full")
    values = RowValues(first_T.detach(), None if entropy_T is None else entropy_T.detach())
    return {name: grad.clone() for name, grad in policy.gradients().items()}, values

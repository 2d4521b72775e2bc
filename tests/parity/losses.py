"""AReaL's loss functions, unmodified, with the per-token arrays that they read. Importing this imports AReaL.

Arrays are in row layout (position t speaks of token t+1). Outside the loss mask they hold what must not matter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import areal_dta.areal_env  # noqa: F401

# isort: split
import numpy as np
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.trainer.dpo.dpo_engine import compute_dpo_loss
from areal.trainer.ppo.actor import grpo_loss_fn
from areal.trainer.ppo.critic import ppo_loss_fn as critic_loss_fn
from areal.trainer.rw.rw_engine import compute_rw_loss
from areal.trainer.sft.lm_engine import compute_packed_sft_loss
from areal.utils import stats_tracker

from areal_dta.engine import Rows
from tests.parity.direct import LossFn

EPS_CLIP = 0.2


def _ppo(**settings: Any) -> LossFn:
    defaults: dict[str, Any] = {"eps_clip": EPS_CLIP, "eps_clip_higher": None, "c_clip": None, "current_version": 7}
    return functools.partial(grpo_loss_fn, **{**defaults, **settings})


def _with_entropy_bonus(logp_T: torch.Tensor, entropy_T: torch.Tensor, packed: dict[str, Any]) -> torch.Tensor:
    """AReaL's own loss detaches the entropy; this is the usual bonus with a coefficient of 0.05."""
    mask_T = packed["loss_mask"].bool()
    bonus = torch.where(mask_T, entropy_T, 0).sum() / mask_T.count_nonzero()
    return _ppo()(logp_T, entropy_T, packed) - 0.05 * bonus


def _rejection(level: str, action: str, metric: str, upper: float) -> RejectionSamplingConfig:
    return RejectionSamplingConfig(level=level, action=action, metric=metric, upper=upper)


@dataclass(frozen=True)
class Loss:
    """A loss function. ``pairs``: rows 2i and 2i + 1 are chosen and rejected. ``masks``: what its loss mask excludes
    does not enter (AReaL's others multiply by the mask, so that NaN would stay NaN).
    """

    function: LossFn
    pairs: bool = False
    masks: bool = True

    def fn(self, *args: Any) -> torch.Tensor:
        """The loss; drops what earlier calls recorded, since AReaL's tracker takes one batch at a time."""
        stats_tracker.export_all()
        return self.function(*args)


POLICY_LOSSES = {
    "grpo": Loss(_ppo()),
    "grpo_clip_higher_dual": Loss(_ppo(eps_clip_higher=0.3, c_clip=3.0)),
    "grpo_rejection_token": Loss(_ppo(rejection_sampling=_rejection("token", "mask", "ratio", 1.3))),
    "grpo_rejection_sequence": Loss(_ppo(rejection_sampling=_rejection("sequence", "clamp", "ratio", 1.05))),
    "grpo_m2po": Loss(_ppo(m2_threshold=0.04)),
    "grpo_distilled": Loss(_ppo(), masks=False),
    "grpo_entropy_bonus": Loss(_with_entropy_bonus),
    "gspo": Loss(_ppo(importance_sampling_level="sequence", eps_clip=0.05)),
    "sapo": Loss(_ppo(use_sapo_loss=True)),
    "sapo_sequence": Loss(_ppo(use_sapo_loss=True, importance_sampling_level="sequence")),
    "sft": Loss(compute_packed_sft_loss),
    "dpo": Loss(functools.partial(compute_dpo_loss, beta=0.5), pairs=True, masks=False),
    "dpo_ipo": Loss(functools.partial(compute_dpo_loss, beta=0.5, loss_type="ipo"), pairs=True, masks=False),
}
VALUE_LOSSES = {
    "critic": Loss(functools.partial(critic_loss_fn, eps_clip=0.5)),
    "reward_model": Loss(compute_rw_loss, pairs=True, masks=False),
}


def packed_batch(
    rows: Rows, seed: int, around_T: torch.Tensor, name: str = "", poison: float | None = None
) -> dict[str, Any]:
    """What AReaL's engines pass to a loss function besides the model's output.

    Old and proximal log-probs (old values for a critic) lie around the model's own ``around_T``, so that some ratios
    are clipped. The loss mask has holes; there arrays hold ``poison`` if given.
    """
    rng = np.random.default_rng(seed)
    num, base = rows.num_tokens, around_T.double().numpy()
    mask = rng.random(num) < 0.7
    last = rows.offsets_S1[1:] - 1
    critic = name in VALUE_LOSSES
    if not critic:
        mask[last] = False
    mask[np.argmax(np.diff(rows.offsets_S1))] |= not mask.any()
    prox = base + rng.normal(0, 0.2, num)
    arrays: dict[str, np.ndarray] = {
        "prox_logp": prox,
        "logprobs": prox + rng.normal(0, 0.2, num),
        "advantages": rng.normal(0, 1, num),
        "ref_logprobs": base + rng.normal(0, 0.3, num),
        "values": base + rng.normal(0, 0.5, num),
        "returns": base + rng.normal(0, 1, num),
    }
    if name == "grpo_distilled":
        arrays["teacher_logp"] = base + rng.normal(0, 0.3, num)
    if poison is not None:
        for key in set(arrays) - {"prox_logp"}:  # AReaL checks these to be finite everywhere: they are the engine's own
            arrays[key][~mask] = poison
    packed: dict[str, Any] = {key: torch.from_numpy(array).float() for key, array in arrays.items()}
    packed["versions"] = torch.from_numpy(rng.integers(3, 7, num))
    packed["loss_mask"] = torch.from_numpy(mask)
    if name.startswith("dpo"):  # AReaL rolls it itself
        packed["loss_mask"] = torch.from_numpy(np.roll(mask, 1))
    packed["input_ids"] = torch.from_numpy(rows.ids_T.astype(np.int64))
    packed["cu_seqlens"] = torch.from_numpy(rows.offsets_S1).int()
    packed["max_seqlen"] = int(np.diff(rows.offsets_S1).max())
    return packed

"""The linearised step of a critic or reward model: values in the place of log-probs; no AReaL in here.

Part 1 gives the value at every position, a row's last one included; AReaL's loss functions for critics take
``(values, packed)``, and part 3 walks the tree with dL/dvalue.

Legend of shape suffixes: T tokens of all rows laid end to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from areal_dta.engine import Rows, RowValues
from areal_dta.linear_step import Coefficients, LinearStep, LossFn

__all__ = ["ValueStep", "value_coefficients"]


def value_coefficients(
    values_T: torch.Tensor, packed: dict[str, Any], loss_fn: LossFn, scale: float, need_T: np.ndarray | None = None
) -> Coefficients:
    """`areal_dta.linear_step.loss_coefficients` for ``loss_fn(values_T, packed)``; ``dlogp_T`` holds dL/dvalue."""
    with torch.enable_grad():
        leaf_T = values_T.detach().float().clone().requires_grad_()
        loss = loss_fn(leaf_T, packed)
        if scale == 0 or not loss.requires_grad:
            return Coefficients(float(loss.detach()), torch.zeros_like(leaf_T), None)
        (dvalue_T,) = torch.autograd.grad(loss * scale, (leaf_T,))
    if need_T is not None:
        dvalue_T = dvalue_T.masked_fill(torch.from_numpy(~need_T).to(dvalue_T.device), 0.0)
    return Coefficients(float(loss.detach()), dvalue_T, None)


class ValueStep(LinearStep):
    """A critic's three parts; the memory holds values where a policy's holds log-probs."""

    def _compute(self, rows: Rows, want_entropy: bool, need_T: np.ndarray | None) -> RowValues:
        return RowValues(self.engine.forward_values(rows, need_T), None)

    def _loss(self, values: RowValues, packed: dict[str, Any], loss_fn: LossFn) -> torch.Tensor:
        return loss_fn(values.logprobs_T.float(), packed)

    def _differentiate(
        self, values: RowValues, rows: Rows, packed: dict[str, Any], loss_fn: LossFn, scale: float,
        need_T: np.ndarray | None,
    ) -> Coefficients:  # fmt: skip
        return value_coefficients(values.logprobs_T, packed, loss_fn, scale, need_T)

    def _walk_back(self, rows: Rows, coefficients: Coefficients) -> None:
        self.engine.backward_values(rows, coefficients.dlogp_T, sync=self.gradient_sync)

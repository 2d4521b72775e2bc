"""Which cases run on which process grid. Each layout is one spawn of processes."""

from __future__ import annotations

from areal_dta.engine import ParallelSizes
from tests.parity import (
    cases_critic,
    cases_dp,
    cases_fused,
    cases_memory,
    cases_pp,
    cases_property,
    cases_single,
    cases_tp,
)
from tests.parity.support import LOSS_CASES

__all__ = ["LAYOUTS", "case_names"]

LAYOUTS = {
    "single": (
        ParallelSizes(),
        cases_single.CASES + cases_critic.CASES + cases_fused.CASES + cases_property.CASES + cases_pp.SINGLE_CASES,
    ),
    "memory": (ParallelSizes(), cases_memory.CASES),
    "losses": (ParallelSizes(), ()),  # its cases import AReaL, which takes longer than all others' start
    "dp2": (ParallelSizes(dp=2), cases_dp.CASES + cases_critic.DP_CASES + cases_fused.DP_CASES),
    "tp2": (ParallelSizes(tp=2), cases_tp.CASES + cases_critic.TP_CASES + cases_fused.TP_CASES),
    "tp2sp": (
        ParallelSizes(tp=2, sequence_parallel=True),
        cases_tp.SP_CASES + cases_critic.TP_CASES + cases_fused.TP_CASES,
    ),
    "pp2": (
        ParallelSizes(pp=2),
        cases_pp.CASES + cases_fused.TP_CASES + cases_memory.STAGES + cases_memory.LONG_ROW,
    ),
    "tp2pp2": (ParallelSizes(tp=2, pp=2, sequence_parallel=True), cases_pp.SP_CASES),
    "dp2tp2": (ParallelSizes(dp=2, tp=2), cases_pp.GRID_CASES),
    "dp2pp2": (ParallelSizes(dp=2, pp=2), cases_pp.GRID_CASES),
    "single_again": (ParallelSizes(), cases_pp.SINGLE_AGAIN_CASES),
}


def case_names(layout: str) -> list[str]:
    return list(LOSS_CASES) if layout == "losses" else [case.__name__ for case in LAYOUTS[layout][1]]

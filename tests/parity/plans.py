"""Plans that between them use every mode and switch, with blocks from a few tokens to the whole tree, and activation
budgets from one block (every pushed one is computed twice) to the automatic one.

Budgets are in tokens here: the memory model of the tests' engines counts one byte for each token of a kept graph or of
the block at work, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_dta.engine import MegatronPolicy, PlanSettings, TreeEngine
from areal_dta.tree.memory import MemoryModel

__all__ = ["PLANS", "rotated", "tree_engine"]

PLANS = (
    PlanSettings("auto", 24),
    PlanSettings("classic"),
    PlanSettings("sparse"),
    PlanSettings("dense", 40),
    PlanSettings("auto", 512),
    PlanSettings("classic", 7, cut_tail=False, order="heavy_last"),
    PlanSettings("auto", 8, activation_budget=8, order="heavy_first"),
    PlanSettings("dense", 2048, leaf_merge=False),
    PlanSettings("sparse", order="heavy_first"),
    PlanSettings("auto", 5, activation_budget=15, order="heavy_last"),
    PlanSettings("classic", 24, order="heavy_first"),
    PlanSettings("auto", 4, activation_budget=4),
)
_ONE_BYTE_PER_TOKEN = MemoryModel(
    bytes_per_kept_token=1,
    bytes_per_working_token=1,
    bytes_per_forward_token=0,
    bytes_per_stack_row=0,
    bytes_per_grad_row=0,
    bytes_per_checkpoint_token=1,
    bytes_fixed=0,
)


def tree_engine(policy: MegatronPolicy, plan: PlanSettings | None = None) -> TreeEngine:
    """An engine whose ``activation_budget`` is a number of tokens."""
    return TreeEngine(policy, plan, memory=_ONE_BYTE_PER_TOKEN)


def rotated(count: int) -> Iterator[tuple[PlanSettings, ...]]:
    """Without end: the next ``count`` plans of the list, round and round."""
    first = 0
    while True:
        yield tuple(PLANS[(first + i) % len(PLANS)] for i in range(count))
        first += count

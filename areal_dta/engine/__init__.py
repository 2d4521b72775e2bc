"""The tree engine: exact training steps over prefix trees on Megatron-core; usable without the rest of the package.

init_process_group(rank, world, addr, port)
policy = MegatronPolicy(hf_path, ParallelSizes(dp=world), OptimizerSettings(lr=1e-5))
engine = make_engine("dta", policy)
rows = Rows.from_lists(token_lists)
values = engine.forward(rows, temperature=1.0)
policy.zero_grad()
engine.backward(rows, dlogp_T)          # gradient of sum(dlogp * logp), summed over ranks
policy.optimizer_step(lr=1e-5)
"""

from areal_dta.engine.checkpoint import CheckpointError
from areal_dta.engine.groups import init_process_group
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.reference import DenseEngine, make_engine
from areal_dta.engine.rows import Engine, GradientSync, Rows, RowValues, WalkStats
from areal_dta.engine.settings import OptimizerSettings, ParallelSizes, StepResult
from areal_dta.engine.walk import TreeEngine
from areal_dta.tree.plan import PlanSettings

__all__ = [
    "CheckpointError",
    "DenseEngine",
    "Engine",
    "GradientSync",
    "MegatronPolicy",
    "OptimizerSettings",
    "ParallelSizes",
    "PlanSettings",
    "RowValues",
    "Rows",
    "StepResult",
    "TreeEngine",
    "WalkStats",
    "init_process_group",
    "make_engine",
]

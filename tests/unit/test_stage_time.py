"""Predicted seconds of a pipeline against the prediction for one stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree.plan import PlanSettings
from areal_dta.tree.planner import plan_walk
from areal_dta.tree.schedule import stage_tasks
from areal_dta.tree.stage_time import pipeline_seconds
from areal_dta.tree.timing import TimeModel
from areal_dta.tree.trie import build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
PLANS = (PlanSettings("classic", 2), PlanSettings("auto", 1), PlanSettings("auto", 4), PlanSettings("sparse"))
TIMES = TimeModel((5.0, 1.0, 0.1, 0.2, 0.3, 2.0), (9.0, 2.0, 0.2, 0.4, 0.5, 3.0), (1.0, 0.5), (2.0, 1.5), 0.7)


@given(ROWS, st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_one_stage_takes_what_the_time_model_says_and_two_no_less(rows: list[list[int]], seed: int) -> None:
    offsets = np.cumsum([0, *map(len, rows)])
    trie = build_trie(np.asarray([t for row in rows for t in row], np.int32), offsets)
    need_U = np.random.default_rng(seed).random(trie.num_tokens) < 0.6
    for choice in PLANS:
        plan = plan_walk(trie, choice, None, need_U)
        for kept in (plan, replace(plan, keep_B=(False,) * len(plan.blocks))):
            whole = TIMES.seconds(kept, need_U)
            assert pipeline_seconds(TIMES, kept, [stage_tasks(kept.ops, 0, 1)], need_U) == pytest.approx(whole)
            two = pipeline_seconds(TIMES, kept, [stage_tasks(kept.ops, stage, 2) for stage in (0, 1)], need_U)
            assert two >= whole - 1e-9  # each stage does all blocks of its layers, the second after the first

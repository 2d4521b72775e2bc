"""Measured time as what a partition balances: from the run's calibration, or an error that says how to get one."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from areal_dta.batcher.costs import CALIBRATION_FILE, cost_from_model, measured_cost
from areal_dta.batcher.settings import SettingsError
from areal_dta.channel import RpcError
from areal_dta.tree.cost import TREE_TOKENS
from tests.unit.batcher_kit import write_calibration
from tests.unit.batcher_service_kit import Harness


def test_seconds_of_tokens_and_pairs_and_of_full_blocks(tmp_path):
    write_calibration(tmp_path, block_s=0.5)
    cost = measured_cost(tmp_path, max_block_tokens=1000)
    assert cost.per_token == pytest.approx(3e-3 + 2 * 0.5 / 1000)
    assert cost.per_pair == pytest.approx(2e-6)


def test_without_a_usable_calibration_the_error_says_what_makes_one(tmp_path):
    with pytest.raises(SettingsError, match=r"calibration.json does not exist; .*`areal-dta run CONFIG dta.calibrate"):
        measured_cost(tmp_path, 2048)
    (tmp_path / CALIBRATION_FILE).write_text("{}")
    with pytest.raises(SettingsError, match=r"dta.calibrate=true writes a new one; or set batcher.cost=flops"):
        measured_cost(tmp_path, 2048)
    write_calibration(tmp_path, token_s=0.0)
    with pytest.raises(SettingsError, match="tokens cost nothing; remove it"):
        measured_cost(tmp_path, 2048)
    with pytest.raises(SettingsError, match="batcher.cost=flops needs the model's sizes: .*or set it to tree_tokens"):
        cost_from_model("flops", tmp_path)
    assert cost_from_model("tree_tokens", tmp_path) == TREE_TOKENS


def test_a_batch_is_cut_by_the_seconds_that_the_trainer_measured_after_the_batcher_started(tmp_path):
    async def main():
        ask = {"world_size": 2, "step": 0, "wait_s": 20}
        async with Harness(tmp_path, trace=False, measured_cost=partial(measured_cost, tmp_path, 2048)) as h:
            for lease in await h.lease():
                await h.deliver(lease)
            with pytest.raises(RpcError, match=r"batcher.cost=time .*calibration.json does not exist"):
                await h.call("shard", {"rank": 0, **ask})
            write_calibration(tmp_path)
            shards = [(await h.call("shard", {"rank": rank, **ask})).body for rank in range(2)]
            assert {s["status"] for s in shards} == {"ready"}
            loads = [r.value for r in h.metrics.records["batch/rank_cost"]]
            assert loads == pytest.approx([s["cost"] for s in shards])
            assert loads == pytest.approx([3e-3 * s["tree_tokens"] for s in shards], rel=0.02)  # few pairs

    asyncio.run(main())

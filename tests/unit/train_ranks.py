"""One rank of test_train_engine_ranks.py: run a grid's scenarios, write what came out; started as a process by the
test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_dta.publish import PublishError
from areal_dta.records import Shard
from tests.unit.train_kit import build_engine, local_settings, ppo_step, random_shard, subset

Cut = Callable[[Shard], list[list[int]]]


def halves(shard: Shard) -> list[list[int]]:
    middle = shard.num_rows // 3
    return [list(range(middle)), list(range(middle, shard.num_rows))]


def all_on_rank_0(shard: Shard) -> list[list[int]]:
    return [list(range(shard.num_rows)), []]


def rank_1_misses_a_minibatch(shard: Shard) -> list[list[int]]:
    second = np.flatnonzero(shard.minibatch_S == 1).tolist()
    return [sorted({0, *second}), [r for r in range(1, shard.num_rows) if r not in second]]


def both_have_all(shard: Shard) -> list[list[int]]:
    return [list(range(shard.num_rows))] * 2


# backend: name: (seed, minibatches, who gets which rows, only loss positions are computed)
SCENARIOS: dict[str, dict[str, tuple[int, int, Cut, bool]]] = {
    "megatron:d2": {
        "halves": (11, 1, halves, False),
        "empty_rank": (12, 1, all_on_rank_0, True),
        "missing_minibatch": (13, 2, rank_1_misses_a_minibatch, False),
    },
    "megatron:d1t1p2": {
        "pipeline": (14, 2, both_have_all, True),
    },
}


def main(backend: str, rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, (seed, num_minibatches, cut, only) in SCENARIOS[backend].items():
        settings = local_settings(rank=rank, world_size=2, master_port=port, loss_positions_only=only)
        engine = build_engine(model, settings, backend=backend)
        whole = random_shard(seed, num_minibatches=num_minibatches)
        results[name] = ppo_step(engine, subset(whole, cut(whole)[rank]), num_minibatches)
        engine.policy.save_hf(out / name)
        results[name]["head"] = engine.is_data_parallel_head()
    results["publish_error"] = _publish_to_nobody(engine, out)
    (out / f"rank_{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _publish_to_nobody(engine, out: Path) -> str:  # type: ignore[no-untyped-def]
    """A publish that fails on rank 0 fails on every rank."""
    import dataclasses

    from areal.api.io_struct import WeightUpdateMeta

    engine.settings = dataclasses.replace(engine.settings, router="http://127.0.0.1:9", publish_timeout_s=0.2)
    try:
        engine.update_weights(WeightUpdateMeta(type="disk", path=str(out / "e0_v000001"), version=1))
    except PublishError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))

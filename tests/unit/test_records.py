"""Records: pack and unpack, validation, launch plan, the trace file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal_dta.records import LaunchPlan, Lease, RecordError, Trajectory, WeightVersion, pack, unpack, write_trace
from tests.unit.batcher_kit import trajectory

LEASE = Lease("e0.g1.s0.a0", 1, 0, 0, {"task_id": "t"}, 2, 0, 5)


def test_pack_and_unpack_are_inverse():
    traj = trajectory(LEASE)
    plain, arrays = pack(traj)
    assert {a.dtype for a in arrays.values()} == {np.dtype(t) for t in ("i4", "i8", "u1", "f4")}
    back = unpack(Trajectory, plain, arrays)
    back.validate()
    for name in arrays:
        np.testing.assert_array_equal(getattr(back, name), getattr(traj, name))
    assert unpack(Lease, pack(LEASE)[0]) == LEASE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"extra": 1}, "no field 'extra'"),
        ({"group_id": "1"}, "group_id is '1', expected int"),
        ({"sample": True}, "sample is True"),
        ({"logprobs_T": [0.0]}, "logprobs_T is"),
    ],
)
def test_foreign_fields_and_wrong_types_are_refused(change, text):
    plain, arrays = pack(trajectory(LEASE))
    arrays = {k: v for k, v in arrays.items() if k not in change}
    with pytest.raises(RecordError, match=text):
        unpack(Trajectory, {**plain, **change}, arrays)


def test_missing_fields_and_wrong_dtypes_are_refused():
    plain, arrays = pack(trajectory(LEASE))
    with pytest.raises(RecordError, match=r"lacks \['task_id'\]"):
        unpack(Trajectory, {k: v for k, v in plain.items() if k != "task_id"}, arrays)
    with pytest.raises(RecordError, match="dtype int64, expected int32"):
        unpack(Trajectory, plain, {**arrays, "input_ids_T": arrays["input_ids_T"].astype(np.int64)})


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"reward": None}, "bad_reward"),
        ({"reward": float("inf")}, "bad_reward"),
        ({"offsets_S1": np.array([0, 5])}, "malformed"),
        ({"offsets_S1": np.array([0, 7, 7, 19])}, "malformed"),
        ({"rewards_S": np.zeros(3)}, "malformed"),
        ({"input_ids_T": np.full(19, -1)}, "malformed"),
        ({"loss_mask_T": np.zeros(19)}, "empty"),
    ],
)
def test_validation_names_the_cause(change, cause):
    with pytest.raises(RecordError) as caught:
        replace(trajectory(LEASE), **change).validate()
    assert caught.value.cause == cause


def test_weight_versions_read_what_they_write():
    assert WeightVersion.parse(str(WeightVersion(2, 13))) == WeightVersion(2, 13)
    for bad in ("7", "a:1", "1:", "-1:2"):
        with pytest.raises(RecordError, match="EPOCH:NUMBER"):
            WeightVersion.parse(bad)


def test_a_launch_plan_survives_its_file(tmp_path):
    plan = LaunchPlan("run", 1, "tcp://b", "tcp://m", "http://r", ("http://s",), "h", 5, 2, 1, 1, 3, resume_step=4)
    plan.write(tmp_path / "launch.json")
    assert LaunchPlan.read(tmp_path / "launch.json") == plan
    assert plan.trainer_world_size == 2


def test_a_trace_holds_the_turns_of_each_episode_as_spans_of_one_sequence(tmp_path):
    growing = trajectory(LEASE, turns=3)
    other = trajectory(replace(LEASE, group_id=2, sample=1))
    ids = other.input_ids_T.copy()
    ids[other.offsets_S1[1]] += 1  # the second turn no longer extends the first
    write_trace(tmp_path / "batch.npz", [growing, replace(other, input_ids_T=ids)], "mock", 4)
    with np.load(tmp_path / "batch.npz", allow_pickle=False) as trace:
        assert trace["offsets"].tolist() == [0, 17, 24, 36]
        assert trace["turn_traj"].tolist() == [0, 0, 0, 1, 2]
        assert trace["turn_end"].tolist() == [7, 12, 17, 7, 12]
        assert (trace["turn_end"] - trace["turn_start"]).tolist() == [2] * 5
        np.testing.assert_array_equal(trace["ids"][:17], growing.input_ids_T[-17:])
        assert trace["versions"].shape == trace["logprobs"].shape == trace["ids"].shape
        assert set(trace["domain"]) == {"mock"} and set(trace["set"]) == {"step4"}
        assert trace["trial"].tolist() == [0, 1, 1]


def test_a_trace_keeps_log_probs_and_versions_of_every_turn(tmp_path):
    growing = trajectory(LEASE, turns=3)
    distinct = np.arange(len(growing.input_ids_T), dtype=np.float32)
    growing = replace(growing, logprobs_T=-distinct, versions_T=distinct.astype(np.int32))
    write_trace(tmp_path / "batch.npz", [growing], "mock", 0)
    with np.load(tmp_path / "batch.npz", allow_pickle=False) as trace:
        for turn, (start, end) in enumerate(zip(trace["turn_start"], trace["turn_end"], strict=True)):
            own = slice(int(growing.offsets_S1[turn]) + int(start), int(growing.offsets_S1[turn]) + int(end))
            np.testing.assert_array_equal(trace["logprobs"][start:end], growing.logprobs_T[own])
            np.testing.assert_array_equal(trace["versions"][start:end], growing.versions_T[own])

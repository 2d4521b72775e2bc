"""Checkpoints of drafter training: exact, whole or not at all, and cheap for the training they interrupt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_dta.drafter import checkpoint as checkpoint_module
from areal_dta.drafter.averaging import decode_state, encode_state
from areal_dta.drafter.checkpoint import AsyncCheckpoint, flatten, latest_step, measure, resume, save_sync, unflatten
from areal_dta.wire import ChannelError

D, FFN, VD, V = 576, 1536, 8192, 49152  # a drafter for SmolLM2-135M with a reduced vocabulary


def state(seed: int, size: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = {n: torch.randn(size, generator=generator) for n in ("trained_P", "first_moment_P", "second_moment_P")}
    return {**named, "num_steps": torch.tensor(seed)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_what_is_resumed_is_what_was_saved_last(tmp_path: Path) -> None:
    writer = AsyncCheckpoint(tmp_path)
    writer.prepare(state(0))
    for step in (1, 2, 3):
        assert writer.save(step, state(step), {"lineage": f"l{step}"})
        writer.wait(10)
    found = resume(tmp_path)
    assert found is not None and (found.step, found.meta) == (3, {"lineage": "l3"})
    assert same(found.state, state(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000000002.safetensors", "step_000000003.safetensors"]
    assert latest_step(tmp_path) == 3


def test_training_may_go_on_while_the_file_is_written(tmp_path: Path) -> None:
    writer, trained = AsyncCheckpoint(tmp_path), state(1, 1_000_000)
    before = {n: t.clone() for n, t in trained.items()}
    writer.save(1, trained, {})
    for tensor in trained.values():
        tensor.zero_()
    writer.wait(10)
    found = resume(tmp_path)
    assert found is not None and same(found.state, before)


def test_a_save_during_a_save_is_skipped_and_counted(tmp_path: Path) -> None:
    writer, large = AsyncCheckpoint(tmp_path), state(1, 4_000_000)
    assert writer.save(1, large, {})
    assert not writer.save(2, large, {})
    assert writer.num_skipped == 1
    writer.wait(10)
    assert writer.save(3, large, {})
    writer.wait(10)


@pytest.mark.parametrize("damage", ["cut", "altered", "no digest"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    writer = AsyncCheckpoint(tmp_path)
    for step in (1, 2):
        writer.save(step, state(step), {})
        writer.wait(10)
    path = tmp_path / "step_000000002.safetensors"
    data = path.read_bytes()
    changed = {"cut": data[:-5], "altered": data[:-5] + b"abcde", "no digest": data.replace(b'"digest"', b'"dogest"')}
    path.write_bytes(changed[damage])
    found = resume(tmp_path)
    assert found is not None and found.step == 1 and same(found.state, state(1))


def test_debris_of_a_killed_writer_is_cleared_and_never_read(tmp_path: Path) -> None:
    (tmp_path / ".step_000000009.safetensors.1.partial").write_bytes(b"half")
    assert resume(tmp_path) is None
    AsyncCheckpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AsyncCheckpoint(tmp_path)

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint_module, "_write_file", full)
    assert writer.save(1, state(1), {})
    writer.wait(5)
    assert writer.num_failed == 1
    monkeypatch.undo()
    assert writer.save(2, state(2), {})
    writer.wait(5)
    assert latest_step(tmp_path) == 2


def test_optimiser_states_of_torch_survive_with_their_integer_keys(tmp_path: Path) -> None:
    moments = torch.randn(4, 3, dtype=torch.bfloat16)
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moments}}, "param_groups": [{"params": [0]}]}
    tree = {"optimizer": optimizer, "note": [1, 2.5, "x", None, True], "empty": torch.zeros(0)}
    back = unflatten(*flatten(tree))
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], moments)
    assert back["optimizer"]["param_groups"] == optimizer["param_groups"]
    assert back["note"] == tree["note"]
    save_sync(tmp_path / "step_000000001.safetensors", tree, {})
    found = resume(tmp_path)
    assert found is not None and found.state["optimizer"]["state"][0]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="state.x is a object"):
        flatten({"x": object()})


def test_a_state_sent_between_workers_arrives_exactly_or_is_refused() -> None:
    tree = {**state(4, 17), "half": torch.randn(3).bfloat16(), "flags": torch.tensor([True, False, True])}
    body, values = encode_state(tree)
    assert same(decode_state(body, values), tree)
    for broken in (values[:-1], values[:5]):
        with pytest.raises(ChannelError, match="cannot be understood"):
            decode_state(body, broken)
    with pytest.raises(ChannelError):
        decode_state({"layout": [["a", "os", [1]]], "skeleton": None}, values)


def test_blocking_time_is_at_least_five_times_below_a_full_synchronous_save(tmp_path: Path) -> None:
    layer = D * (2 * D) + D * (D + 2 * 192) + D * D + 3 * D * FFN
    trained = {n: torch.ones(layer) for n in ("trained_P", "first_moment_P", "second_moment_P")}
    timing = measure(tmp_path, trained, {"embed": torch.ones(V, D), "head_rows": torch.ones(VD, D)})
    print(
        f"full synchronous {timing.full_sync_s:.3f} s ({timing.full_bytes / 1e6:.0f} MB), selective asynchronous "
        f"{timing.selective_async_s * 1e3:.1f} ms ({timing.selective_bytes / 1e6:.0f} MB): {timing.ratio:.0f}x"
    )
    assert timing.ratio >= 5

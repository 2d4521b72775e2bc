"""The memory meter on allocations whose peak is known. Not covered: CUDA."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from areal_dta.engine.memory_meter import MemoryMeter

MB = 1 << 20


def megabytes(count: float) -> torch.Tensor:
    return torch.empty(int(count * MB), dtype=torch.uint8)


def test_peak_and_end_of_known_allocations() -> None:
    before = megabytes(8)
    with MemoryMeter() as meter:
        first = megabytes(3)
        second = megabytes(4)
        del first
        third = megabytes(2)
        view = third[:10]
    assert (meter.peak_bytes, meter.end_bytes) == (7 * MB, 6 * MB)
    assert len(before) == 8 * MB and len(second) == 4 * MB and len(view) == 10


def test_releasing_what_was_there_before_hides_nothing() -> None:
    old = megabytes(16)
    with MemoryMeter() as meter:
        del old
        new = megabytes(5)
    assert meter.peak_bytes == meter.end_bytes == len(new)


def test_survivors_of_an_earlier_meter_do_not_count_in_a_later_one() -> None:
    with MemoryMeter() as first:
        survivor = megabytes(6)
    assert first.end_bytes == 6 * MB
    del survivor
    reused = megabytes(6)  # likely at the survivor's address, and unknown to both meters
    with MemoryMeter() as second:
        other = megabytes(2)
        del reused
        third = megabytes(1)
    assert second.peak_bytes == len(other) + len(third)


def test_nothing_allocated_is_zero() -> None:
    with MemoryMeter() as meter:
        pass
    assert (meter.peak_bytes, meter.end_bytes) == (0, 0)


def test_saved_tensors_of_an_autograd_graph_count_until_backward() -> None:
    weight = torch.randn(256, 1024, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    size = weight.numel() * 4
    with MemoryMeter() as graph:
        out = weight
        for _ in range(5):
            out = out.exp()  # saves its result
    assert size * 5 <= graph.peak_bytes < size * 5.1
    with MemoryMeter() as backward:
        out.backward(torch.ones_like(out))
    assert size * 2 <= backward.peak_bytes < size * 3.1
    with MemoryMeter() as whole:
        weight.exp().exp().sum().backward()
    assert whole.peak_bytes >= size * 3
    assert whole.end_bytes < size * 0.1


def test_scratch_of_a_kernel_counts() -> None:
    query = torch.randn(1, 4, 512, 32)
    with MemoryMeter() as meter:
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert meter.peak_bytes > meter.end_bytes >= out.numel() * 4


def test_no_tensor_is_kept_alive_and_errors_pass_through() -> None:
    meter, seen = MemoryMeter(), []

    def fail() -> None:
        with meter:
            tensor = megabytes(1)
            seen.append(weakref.ref(tensor))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert seen[0]() is None
    assert meter.peak_bytes == MB
    with MemoryMeter():  # the profiler of the failed block is closed
        pass


def test_a_hundred_thousand_events() -> None:
    small = torch.ones(8)
    with MemoryMeter() as meter:
        for _ in range(50_000):
            small.clone()
    assert meter.peak_bytes == 32


def test_inside_a_profiler_is_refused() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="profiler is running"), MemoryMeter():
            pass

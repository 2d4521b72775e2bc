"""Peak bytes of live tensors inside a block of code, exact, temporaries of kernels included.

On the CPU the allocator's own events are replayed: every block that torch hands out or takes back, also scratch that a
kernel allocates and frees within one call. Not seen: numpy arrays, scratch that MKL or oneDNN allocate themselves, and
blocks allocated in threads that torch did not start from this one. On CUDA the caching allocator's peak is read.

Metering the CPU costs about 5 microseconds and 2.5 kB per event until the block ends, so time and meter separate runs.
"""

from __future__ import annotations

import torch
from torch._C._profiler import _EventType  # torch.profiler has no public name for the kind of an event
from torch.profiler import ProfilerActivity, profile

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """``with MemoryMeter(device) as meter: ...``; then ``meter.peak_bytes`` and ``meter.end_bytes``.

    ``peak_bytes`` is the largest sum of blocks allocated inside the ``with`` and not yet freed; releasing something
    older lowers nothing on the CPU. ``end_bytes`` is what of it was alive at the end. Both are 0 until then. Holds no
    tensor. Raises RuntimeError inside a running torch profiler, which cannot be nested.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.end_bytes = 0
        self._profile: profile | None = None
        self._before_bytes = 0

    def __enter__(self) -> MemoryMeter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before_bytes = torch.cuda.memory_allocated(self.device)
        elif torch.autograd._profiler_enabled():
            raise RuntimeError("a torch profiler is running; MemoryMeter cannot be used inside it")
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
            self._profile.__enter__()
            torch.autograd._enable_record_function(False)  # operators would be most of the events
        return self

    def __exit__(self, *exc: object) -> None:
        if self._profile is None:
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before_bytes
            self.end_bytes = torch.cuda.memory_allocated(self.device) - self._before_bytes
            return
        torch.autograd._enable_record_function(True)
        self._profile.__exit__(None, None, None)
        self.peak_bytes, self.end_bytes = _replay(_allocations(self._profile))
        self._profile = None


def _allocations(finished: profile) -> list[tuple[int, int, int]]:
    """(time, address, bytes; negative when freed) of every CPU allocator event, in order."""
    assert finished.profiler is not None and finished.profiler.kineto_results is not None
    events = []
    pending = finished.profiler.kineto_results.experimental_event_tree()
    while pending:
        event = pending.pop()
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        pending.extend(event.children)
    events.sort(key=lambda event: event[0])
    return events


def _replay(events: list[tuple[int, int, int]]) -> tuple[int, int]:
    """(peak, end) of bytes allocated and not yet freed; frees of unknown addresses are older than the first event."""
    size_of: dict[int, int] = {}
    live = peak = 0
    for _, address, num_bytes in events:
        if num_bytes > 0:
            size_of[address] = num_bytes
            live += num_bytes
            peak = max(peak, live)
        else:
            live -= size_of.pop(address, 0)
    return peak, live

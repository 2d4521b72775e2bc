"""Captured steps with static inputs: copy in, replay, read out.

Capturing itself (`record_cuda`) has not been exercised on a GPU; `tests/gpu/test_cuda_graphs.py` is there to do it. The
choice of a graph, padding and the eager way are tested on the CPU with a stand-in for the recorder.

Inputs of a step have shape (batch, rows, ...) or (batch, ...), its output (batch, rows, ...). A captured step runs on
the buffers it was captured with; a smaller step fills their upper left corner, and the rest keeps the values that it
was captured with, which must be harmless (a padded row must write its keys and values to a slot nobody reads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from areal_dta.drafter.graphs import GraphKey, GraphPlan

__all__ = ["GraphPool", "Recording", "record_cuda"]

WARM_UP_RUNS = 3  # kernels are chosen and workspaces allocated in the first runs, which a capture must not see

Step = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Recording:
    """``replay`` runs the step again on the buffers it was recorded with; ``output`` is overwritten by it."""

    replay: Callable[[], None]
    output: torch.Tensor


@dataclass(frozen=True)
class _Captured:
    buffers: dict[str, torch.Tensor]
    padding: dict[str, torch.Tensor]
    recording: Recording


def record_cuda() -> Callable[[Step, Mapping[str, torch.Tensor]], Recording]:
    """A recorder whose captures share one memory pool; they must not replay concurrently."""
    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a CUDA device; run without a graph pool on this machine")
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step, inputs: Mapping[str, torch.Tensor]) -> Recording:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                step(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = step(inputs)
        return Recording(graph.replay, output)

    return record


class GraphPool:
    """The captures of a plan. Not thread-safe: used by the model thread only."""

    def __init__(self, plan: GraphPlan, record: Callable[[Step, Mapping[str, torch.Tensor]], Recording]) -> None:
        self._plan = plan
        self._record = record
        self._captured: dict[GraphKey, _Captured] = {}

    @torch.inference_mode()
    def capture(self, kind: str, step: Step, inputs_of: Callable[[GraphKey], Mapping[str, torch.Tensor]]) -> int:
        """Capture ``step`` for every planned graph of ``kind``, the largest first so that the pool grows once; returns
        how many. ``inputs_of`` gives harmless inputs of a graph's size. New weights in new tensors need a new capture.
        """
        keys = [g.key for g in self._plan.graphs if g.key.kind == kind]
        for key in sorted(keys, key=lambda k: k.batch * k.num_rows, reverse=True):
            padding = {name: value.clone() for name, value in inputs_of(key).items()}
            buffers = {name: value.clone() for name, value in padding.items()}
            self._captured[key] = _Captured(buffers, padding, self._record(step, buffers))
        return len(keys)

    @torch.inference_mode()
    def run(self, kind: str, step: Step, inputs: Mapping[str, torch.Tensor], batch: int, num_rows: int) -> torch.Tensor:
        """The step's output (batch, rows, ...), by replay where a graph fits, else eagerly. A replayed output is valid
        until the next run of its kind."""
        key = self._plan.find(kind, batch, num_rows)
        captured = self._captured.get(key) if key is not None else None
        if captured is None:
            return step(inputs)
        if inputs.keys() != captured.buffers.keys():
            raise ValueError(f"{key} was captured with inputs {sorted(captured.buffers)}, not {sorted(inputs)}")
        for name, value in inputs.items():
            buffer = captured.buffers[name]
            if value.shape != buffer.shape:
                buffer.copy_(captured.padding[name])
            buffer[tuple(slice(size) for size in value.shape)].copy_(value)
        captured.recording.replay()
        return captured.recording.output[:batch, :num_rows]

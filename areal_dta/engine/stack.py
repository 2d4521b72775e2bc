"""Keys and values of the current root-to-leaf path, and the gradients its descendants leave on them.

Values are rows of one buffer per layer, appended in place: autograd nodes keep views of row ranges, so a path costs its
length once. A pushed block is a `Frame`. The gradients of its rows are collected in segments that short neighbours
share, so that a long path of many small frames is still few ranges, and memory grows with the path. Blocks may be
computed ahead of older pops (pipeline stages): a push that would overwrite rows still in use takes a new buffer, as
long as the paths below it, and copies what it shares.

Legend: L layers, G key/value heads of this rank, C capacity in rows, H head dim, P rows of the path, S rows of a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Frame", "PathStack", "PathView"]

_SEGMENTS = 16  # about as many ranges a full path's accumulators have at most


class _Segment:
    """Gradient accumulators (fp32 or wider) of path positions ``start .. end - 1``; freed with its last frame."""

    def __init__(self, start: int, end: int, like_LGCH: torch.Tensor) -> None:
        self.start, self.end = start, end
        self.num_frames = 0
        shape = (*like_LGCH.shape[:2], end - start, like_LGCH.shape[3])
        dtype = torch.promote_types(like_LGCH.dtype, torch.float32)
        self._k_LGSH: torch.Tensor | None = torch.zeros(shape, dtype=dtype, device=like_LGCH.device)
        self._v_LGSH: torch.Tensor | None = torch.zeros_like(self._k_LGSH)

    def rows(self, layer: int | slice, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._k_LGSH is not None and self._v_LGSH is not None
        span = slice(start - self.start, end - self.start)
        return self._k_LGSH[layer, ..., span, :], self._v_LGSH[layer, ..., span, :]

    def leave(self) -> None:
        self.num_frames -= 1
        if not self.num_frames:
            self._k_LGSH = self._v_LGSH = None


class Frame:
    """Rows ``depth .. depth + num_rows - 1`` of the path: one pushed block, or what is left of it."""

    def __init__(self, depth: int, num_rows: int, segments: tuple[_Segment, ...] = ()) -> None:
        self.depth = depth
        self.num_rows = num_rows
        self.segments = segments  # none: forward-only, or released
        for segment in segments:
            segment.num_frames += 1

    @property
    def end(self) -> int:
        return self.depth + self.num_rows

    def grads(self, layer: int, start: int, end: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """What descendants left on the frame's positions ``start .. end - 1``: (first position, keys, values) views."""
        for segment in self.segments:
            low, high = max(start, segment.start), min(end, segment.end)
            if low < high:
                yield low, *segment.rows(layer, low, high)

    def keep_rows(self, num_rows: int) -> None:
        """Give up the rows from ``num_rows`` on, and the segments that held nothing else."""
        self.num_rows = min(self.num_rows, num_rows)
        kept = tuple(segment for segment in self.segments if self.num_rows and segment.start < self.end)
        for segment in self.segments[len(kept) :]:
            segment.leave()
        self.segments = kept


@dataclass(frozen=True)
class PathView:
    """What one block sees of the path: the buffers and frames as they were when it was computed."""

    k_LGCH: torch.Tensor
    v_LGCH: torch.Tensor
    frames: tuple[Frame, ...]

    def rows(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[G, end - start, H]`` of keys and values."""
        return self.k_LGCH[layer, :, start:end], self.v_LGCH[layer, :, start:end]

    def write(self, layer: int, start: int, k_GSH: torch.Tensor, v_GSH: torch.Tensor) -> None:
        """Store rows ``start ..`` of one layer."""
        end = start + k_GSH.shape[1]
        self.k_LGCH[layer, :, start:end] = k_GSH
        self.v_LGCH[layer, :, start:end] = v_GSH

    def add_grad(self, layer: int, grad_k_GPH: torch.Tensor, grad_v_GPH: torch.Tensor) -> None:
        """Accumulate gradients of rows 0 .. P-1 on the frames that hold them."""
        num_rows = grad_k_GPH.shape[1]
        for segment, start, end in self._ranges:
            if start >= num_rows:
                break
            path = slice(start, min(end, num_rows))
            segment_k, segment_v = segment.rows(layer, path.start, path.stop)
            segment_k.add_(grad_k_GPH[:, path])
            segment_v.add_(grad_v_GPH[:, path])

    @cached_property
    def _ranges(self) -> list[tuple[_Segment, int, int]]:
        """Where the path's gradients go, by position; neighbours in one segment are one range."""
        ranges: list[tuple[_Segment, int, int]] = []
        for i, frame in enumerate(self.frames):
            above = self.frames[i + 1].depth if i + 1 < len(self.frames) else frame.end  # where the next one takes over
            for segment in frame.segments:
                start, end = max(frame.depth, segment.start), min(frame.end, above, segment.end)
                if start >= end:
                    continue
                if ranges and ranges[-1][0] is segment:
                    start = ranges.pop()[1]
                ranges.append((segment, start, end))
        return ranges


class PathStack:
    """Row storage of shape ``[L, G, C, H]`` in the model's dtype, and the frames of the current path.

    ``with_grad=False`` (a forward-only walk) allocates no accumulators.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        device: torch.device, with_grad: bool,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        self._with_grad = with_grad
        self._segment_rows = max(1, capacity // _SEGMENTS)
        self._k_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self._v_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self._path: list[Frame] = []  # in the order of forwards, none of them released

    def push(self, depth: int, num_rows: int, reach: int = 0) -> Frame:
        """A frame for the rows ``depth ..`` of a new block; the path above ends there. ``reach``: the end of the
        longest path that pushes below this block will make, if any.
        """
        reach = max(reach, depth + num_rows)
        in_use = bool(self._path) and self._path[-1].end > depth
        while self._path and self._path[-1].depth >= depth:
            self._path.pop()
        if in_use or reach > self._k_LGCH.shape[2]:
            self._k_LGCH, self._v_LGCH = (_copy(old, depth, reach) for old in (self._k_LGCH, self._v_LGCH))
        segments = self._segments(depth, depth + num_rows, reach, in_use) if self._with_grad else ()
        self._path.append(Frame(depth, num_rows, segments))
        return self._path[-1]

    def _segments(self, depth: int, end: int, reach: int, in_use: bool) -> tuple[_Segment, ...]:
        """Zeroed accumulators: what the last segment of the path has left, if nobody uses it, and a new one."""
        segments, start = [], depth
        if self._path and not in_use and self._path[-1].segments[-1].end > depth:
            segments.append(self._path[-1].segments[-1])
            start = min(end, segments[0].end)
            for rows in segments[0].rows(slice(None), depth, start):
                rows.zero_()
        if start < end:
            full = -(-end // self._segment_rows) * self._segment_rows
            segments.append(_Segment(start, min(full, reach), self._k_LGCH))
        return tuple(segments)

    def view(self, depth: int) -> PathView:
        """The path's first ``depth`` rows, for a block that sees no more of it."""
        num_frames = bisect_left(self._path, depth, key=lambda frame: frame.depth)
        return PathView(self._k_LGCH, self._v_LGCH, tuple(self._path[:num_frames]))

    def frames_from(self, depth: int) -> tuple[Frame, ...]:
        """Frames with rows at or below position ``depth``, for a block that absorbs these."""
        first = len(self._path)
        while first and self._path[first - 1].end > depth:
            first -= 1
        return tuple(self._path[first:])

    def release(self, frames: tuple[Frame, ...], depth: int) -> None:
        """After a backward: the rows from position ``depth`` on are done; a frame without rows is dropped."""
        for frame in frames:
            frame.keep_rows(max(depth - frame.depth, 0))
        while self._path and not self._path[-1].num_rows:
            self._path.pop()


def _copy(old_LGCH: torch.Tensor, depth: int, capacity: int) -> torch.Tensor:
    """A buffer of ``capacity`` rows that holds the first ``depth`` ones of another."""
    new_LGCH = old_LGCH.new_empty((*old_LGCH.shape[:2], capacity, old_LGCH.shape[3]))
    new_LGCH[:, :, :depth] = old_LGCH[:, :, :depth]
    return new_LGCH

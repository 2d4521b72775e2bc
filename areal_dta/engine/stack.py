"""Keys and values of the current root-to-leaf path, and the gradients its descendants leave on them.

Values are rows of one buffer per layer, appended in place: autograd nodes keep views of row ranges, so a path costs its
length once. A pushed block is a `Frame` with accumulators of its own for the gradients of its rows. Blocks may be
computed ahead of older pops (pipeline stages): a push that would overwrite rows still in use takes a new buffer and
copies what it shares.

Legend: L layers, G key/value heads of this rank, C capacity in rows, H head dim, P rows of the path, S rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Frame", "PathStack", "PathView"]


class Frame:
    """Rows ``depth .. depth + num_rows - 1`` of the path: one pushed block, or what is left of it.

    ``grad_k_LGSH`` and ``grad_v_LGSH`` collect the gradients of descendants in fp32 or wider (None: forward-only).
    """

    def __init__(self, depth: int, num_rows: int) -> None:
        self.depth = depth
        self.num_rows = num_rows
        self.grad_k_LGSH: torch.Tensor | None = None
        self.grad_v_LGSH: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.depth + self.num_rows


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
        end = grad_k_GPH.shape[1]
        for i, frame in enumerate(self.frames):
            assert frame.grad_k_LGSH is not None and frame.grad_v_LGSH is not None
            above = self.frames[i + 1].depth if i + 1 < len(self.frames) else end  # where the next frame takes over
            rows = min(frame.end, above, end) - frame.depth
            if rows > 0:
                path = slice(frame.depth, frame.depth + rows)
                frame.grad_k_LGSH[layer, :, :rows] += grad_k_GPH[:, path]
                frame.grad_v_LGSH[layer, :, :rows] += grad_v_GPH[:, path]


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
        self._k_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self._v_LGCH = torch.empty(shape, dtype=dtype, device=device)
        self._path: list[Frame] = []  # in the order of forwards
        self._alive: list[Frame] = []  # frames in the current buffer that are not released

    def push(self, depth: int, num_rows: int) -> Frame:
        """A frame for the rows ``depth ..`` of a new block; the path above ends there."""
        end = depth + num_rows
        if any(frame.depth < end and frame.end > depth for frame in self._alive):
            k, v = torch.empty_like(self._k_LGCH), torch.empty_like(self._v_LGCH)
            k[:, :, :depth], v[:, :, :depth] = self._k_LGCH[:, :, :depth], self._v_LGCH[:, :, :depth]
            self._k_LGCH, self._v_LGCH = k, v
            self._alive = [frame for frame in self._alive if frame.depth < depth]
        self._path = [frame for frame in self._path if frame.depth < depth]
        frame = Frame(depth, num_rows)
        if self._with_grad:
            shape = (*self._k_LGCH.shape[:2], num_rows, self._k_LGCH.shape[3])
            grad_dtype = torch.float64 if self._k_LGCH.dtype == torch.float64 else torch.float32
            frame.grad_k_LGSH, frame.grad_v_LGSH = (
                torch.zeros(shape, dtype=grad_dtype, device=self._k_LGCH.device) for _ in range(2)
            )
        self._path.append(frame)
        self._alive.append(frame)
        return frame

    def view(self, depth: int) -> PathView:
        """The path's first ``depth`` rows, for a block that sees no more of it."""
        return PathView(self._k_LGCH, self._v_LGCH, tuple(frame for frame in self._path if frame.depth < depth))

    def frames_from(self, depth: int) -> tuple[Frame, ...]:
        """Frames with rows at or below position ``depth``, for a block that absorbs these."""
        return tuple(frame for frame in self._path if frame.end > depth)

    def release(self, frames: tuple[Frame, ...], depth: int) -> None:
        """After a backward: the rows from position ``depth`` on are done; a frame without rows is dropped."""
        for frame in frames:
            frame.num_rows = min(frame.num_rows, max(depth - frame.depth, 0))
            if not frame.num_rows:
                frame.grad_k_LGSH = frame.grad_v_LGSH = None
        self._alive = [frame for frame in self._alive if frame.num_rows]
        self._path = [frame for frame in self._path if frame.num_rows]

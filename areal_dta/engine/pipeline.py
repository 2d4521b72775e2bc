"""What a pipeline stage says to its neighbours: hidden states to the next stage, their gradients to the one before.

Both sides know every shape from the plan, so a message is the tensor and nothing else. Messages of one direction are
taken in the order in which they were sent; `areal_dta.tree.schedule` makes both sides agree on it. Sends return at
once, because two neighbours may be sending to each other; a receive waits, at most the group's time-out.

Legend of shapes: S rows of a block (of this tensor-parallel rank with sequence parallelism), D hidden.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from areal_dta.engine.groups import PipelineGroups

__all__ = ["StageLink"]


class _Outbox:
    """Sends under way, with the tensors they read: backends differ in when they copy. At most ``limit`` stay open."""

    def __init__(self) -> None:
        self.limit = 1
        self._open: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._open.append((work, tensor))
        while len(self._open) > self.limit:
            self._open.popleft()[0].wait()

    def flush(self) -> None:
        while self._open:
            self._open.popleft()[0].wait()


class StageLink:
    """One stage's ends of the channels to its neighbours; the first has none before it, the last none after it.

    Every stage of the pipeline makes its link at the same time and calls `finish` when it is done. A send waits while
    more than one earlier one of its direction (see `allow_open`) has not been taken.
    """

    def __init__(self, stage: int, groups: PipelineGroups, dtype: torch.dtype, device: torch.device) -> None:
        self.stage = stage
        self.num_stages = dist.get_world_size(groups.forward)
        self._groups, self._dtype, self._device = groups, dtype, device
        self._ahead, self._back = _Outbox(), _Outbox()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def allow_open(self, num_forward: int, num_backward: int) -> None:
        """How many sends of each direction may be under way."""
        self._ahead.limit, self._back.limit = num_forward, num_backward

    def send_forward(self, hidden_S1D: torch.Tensor) -> None:
        """Hidden states to the next stage."""
        self._send(hidden_S1D, self.stage + 1, self._groups.forward, self._ahead)

    def recv_forward(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Hidden states of the stage before, a leaf that collects its gradient."""
        return self._recv(shape, self.stage - 1, self._groups.forward, "hidden states").requires_grad_()

    def send_backward(self, grad_S1D: torch.Tensor) -> None:
        """The gradient of what `recv_forward` gave, to the stage before."""
        self._send(grad_S1D, self.stage - 1, self._groups.backward, self._back)

    def recv_backward(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The gradient of what `send_forward` sent."""
        return self._recv(shape, self.stage + 1, self._groups.backward, "gradients")

    def broadcast_from_last(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` on every stage with the last stage's."""
        dist.broadcast(tensor, group=self._groups.forward, group_src=self.num_stages - 1)

    def finish(self) -> None:
        """Wait until the neighbours have taken everything."""
        self._ahead.flush()
        self._back.flush()

    def _send(self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, outbox: _Outbox) -> None:
        message = tensor.detach().contiguous()
        outbox.add(dist.isend(message, group=group, group_dst=peer), message)

    def _recv(self, shape: tuple[int, ...], peer: int, group: dist.ProcessGroup, what: str) -> torch.Tensor:
        message = torch.empty(shape, dtype=self._dtype, device=self._device)
        try:
            dist.recv(message, group=group, group_src=peer)
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {self.stage} waited for {what} {list(shape)} of stage {peer}, which did not come: {error}"
            ) from error
        return message

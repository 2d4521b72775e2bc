"""Averaging gradients of however many workers are there, over ZeroMQ on one machine.

The leader binds a ROUTER, the others connect DEALERs. A follower joins with the state it holds; the leader answers that
it is the same, or sends its own. Per step the followers send summed gradients, the leader adds up those that arrived in
time and sends the sum to all, and each applies its mean. So every member holds the whole state (weights and optimiser)
and can lead from it; ``lineage`` names a state: it changes with every step, by the leader's choice.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import zmq

from areal_dta.drafter.checkpoint import flatten, unflatten
from areal_dta.drafter.losses import DraftScores
from areal_dta.wire import MAX_FRAME_BYTES, ChannelError, decode, encode

__all__ = [
    "Hub",
    "Link",
    "Message",
    "Share",
    "checksum",
    "decode_share",
    "decode_state",
    "encode_share",
    "encode_state",
]

QUEUED_MESSAGES = 4  # gradients kept for a peer that does not read


@dataclass(frozen=True)
class Share:
    """Gradients and losses summed over ``num_rows`` positions, so that adding shares is what a larger batch gives."""

    sum_P: torch.Tensor
    num_rows: int
    loss: float
    scores: DraftScores

    def __add__(self, other: Share) -> Share:
        return Share(
            self.sum_P + other.sum_P,
            self.num_rows + other.num_rows,
            self.loss + other.loss,
            self.scores + other.scores,
        )


def encode_share(share: Share) -> tuple[dict[str, Any], np.ndarray]:
    """Body fields and one fp32 vector."""
    body = {"num_rows": share.num_rows, "loss": share.loss, "scores": share.scores.to_dict()}
    return body, share.sum_P.detach().to("cpu", torch.float32).numpy()


def decode_share(body: Mapping[str, Any], values: np.ndarray | None, num_elements: int) -> Share:
    """Inverse of `encode_share`; raises ChannelError for another drafter's, or for NaN."""
    if values is None or values.dtype != np.float32 or values.shape != (num_elements,):
        shape = None if values is None else (values.shape, str(values.dtype))
        raise ChannelError(f"gradients {shape}; this drafter trains {num_elements} float32 elements")
    if not np.isfinite(values.sum(dtype=np.float64)):
        raise ChannelError("gradients hold NaN or infinity")
    try:
        scores = DraftScores.from_dict(body["scores"])
        return Share(torch.from_numpy(values.copy()), int(body["num_rows"]), float(body["loss"]), scores)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ChannelError(f"gradients without row count, loss or scores: {error!r}") from error


def checksum(flat_P: torch.Tensor) -> int:
    """CRC-32 of the values: equal for members that applied the same averages to the same state."""
    return zlib.crc32(flat_P.detach().cpu().contiguous().view(torch.uint8).numpy())


def encode_state(state: Any) -> tuple[dict[str, Any], np.ndarray]:
    """A state tree (`checkpoint.flatten`) as a message body and one vector of bytes."""
    tensors, skeleton = flatten(state)
    layout, parts = [], []
    for name, tensor in tensors.items():
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return {"skeleton": skeleton, "layout": layout}, np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def decode_state(body: Mapping[str, Any], values: np.ndarray) -> Any:
    """Inverse of `encode_state`; raises ChannelError."""
    tensors: dict[str, torch.Tensor] = {}
    raw, start = torch.from_numpy(values.copy()), 0
    try:
        for name, dtype_name, shape in body["layout"]:
            dtype = getattr(torch, dtype_name)
            stop = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            # Cloned: a view into the message need not be aligned for its type.
            tensors[name] = raw[start:stop].clone().view(dtype).reshape(shape)
            start = stop
        if start != len(raw):
            raise ValueError(f"{len(raw)} bytes, the layout names {start}")
        return unflatten(tensors, body["skeleton"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ChannelError(f"a state that cannot be understood: {error!r}") from error


@dataclass(frozen=True)
class Message:
    """``sender`` is the worker's name."""

    sender: str
    kind: str
    body: dict[str, Any]
    values: np.ndarray | None


class Hub:
    """Where others reach this worker while it leads. ``counters``: ``malformed``, ``unsent``."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self._name = name
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _limit(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: dict[str, bytes] = {}
        self.counters: Counter[str] = Counter()

    def poll(self, wait_s: float) -> bool:
        """Whether there is a message, waiting up to ``wait_s`` for it."""
        return bool(self._socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN))

    def receive(self) -> list[Message]:
        """What has arrived."""
        found: list[Message] = []
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            try:
                message = _message(frames)
            except ChannelError:
                self.counters["malformed"] += 1
                continue
            self._peers[message.sender] = peer.bytes
            found.append(message)

    def send(self, to: str, kind: str, body: Mapping[str, Any], values: np.ndarray | None = None) -> None:
        """To a worker heard before; lost when it is gone or does not read (it will ask again)."""
        frames = encode(self._name, kind, body, {} if values is None else {"values": values})
        try:
            self._socket.send_multipart([self._peers[to], *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.counters["unsent"] += 1

    def close(self) -> None:
        self._socket.close(0)


class Link:
    """A follower's connection to its leader."""

    def __init__(self, name: str, leader: str, address: str) -> None:
        self._name: str = name
        self.address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _limit(self._socket)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ChannelError(f"leader {leader} gave the address {address!r}: {error}") from error

    def send(self, kind: str, body: Mapping[str, Any], values: np.ndarray | None = None) -> bool:
        """False: the leader does not read."""
        frames = encode(self._name, kind, body, {} if values is None else {"values": values})
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def poll(self, wait_s: float) -> bool:
        """Whether there is a message, waiting up to ``wait_s`` for it."""
        return bool(self._socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN))

    def receive(self, wait_s: float = 0.0) -> Message | None:
        """The next message, None when none came within ``wait_s``; raises ChannelError for a malformed one."""
        if not self.poll(wait_s):
            return None
        return _message(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def close(self) -> None:
        self._socket.close(200)  # a last "leave" may still go out; the context waits no longer than this


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 400)


def _message(frames: Sequence[zmq.Frame]) -> Message:
    """Its values are the received bytes themselves."""
    sender, kind, body, arrays = decode([cast(bytes, frame.buffer) for frame in frames])
    return Message(sender, kind, body, arrays.get("values"))

"""The bytes of one message: a msgpack header and raw array frames. Pure; the sockets are in `areal_dta.channel`.

A message is ``[header, array frame, ...]``. The header is the msgpack map ``{v, id, kind, body, arrays}`` where
``arrays`` lists ``[name, dtype, shape]`` in the order of the frames. Nothing is pickled. Whatever breaks the format or
a size limit raises ChannelError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

__all__ = ["MAX_FRAME_BYTES", "ChannelError", "Reply", "Request", "decode", "decode_header", "encode"]

WIRE_VERSION = 1
MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_FRAMES = 64
_ARRAY_DTYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])


class ChannelError(ValueError):
    """A message that cannot be put on, or was not understood from, the wire."""


@dataclass(frozen=True)
class Request:
    """What a handler gets. Arrays are read-only views of the received frames; ``client`` is the caller's name."""

    kind: str
    body: dict[str, Any]
    arrays: dict[str, np.ndarray]
    client: str


@dataclass(frozen=True)
class Reply:
    """What a handler returns and a client receives. Received arrays are read-only."""

    body: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(
    message_id: str, kind: str, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[bytes | memoryview]:
    """Frames of one message; raises ChannelError when it breaks a limit or holds a value msgpack cannot carry."""
    described, frames = [], []
    for name, value in arrays.items():
        array = np.ascontiguousarray(value)
        if array.dtype.str not in _ARRAY_DTYPES:
            raise ChannelError(f"array {name!r} of {kind!r} has dtype {array.dtype}; send numbers or booleans")
        if array.nbytes > MAX_FRAME_BYTES:
            raise ChannelError(f"array {name!r} of {kind!r} has {array.nbytes} bytes, the limit is {MAX_FRAME_BYTES}")
        described.append([name, array.dtype.str, list(array.shape)])
        frames.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
    if len(frames) >= MAX_FRAMES:
        raise ChannelError(f"{kind!r} has {len(frames)} arrays, the limit is {MAX_FRAMES - 1}")
    try:
        header = msgpack.packb(
            {"v": WIRE_VERSION, "id": message_id, "kind": kind, "body": dict(body), "arrays": described},
            default=_plain_number,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ChannelError(f"the body of {kind!r} cannot be sent: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise ChannelError(f"the header of {kind!r} has {len(header)} bytes, the limit is {MAX_HEADER_BYTES}")
    return [header, *frames]


def decode(frames: Sequence[bytes]) -> tuple[str, str, dict[str, Any], dict[str, np.ndarray]]:
    """Inverse of `encode`: (id, kind, body, arrays); raises ChannelError for anything malformed."""
    header = decode_header(frames)
    described = header.get("arrays")
    if not isinstance(described, list) or len(described) != len(frames) - 1:
        raise ChannelError(f"{len(frames) - 1} array frames do not match the header's list {described!r:.120}")
    arrays = {}
    for entry, frame in zip(described, frames[1:], strict=True):
        name, array = _decode_array(entry, frame)
        arrays[name] = array
    return header["id"], header["kind"], header["body"], arrays


def decode_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """The checked header map of a message; raises ChannelError."""
    if not frames or len(frames) > MAX_FRAMES or len(frames[0]) > MAX_HEADER_BYTES:
        raise ChannelError(f"a message of {len(frames)} frames, header {len(frames[0]) if frames else 0} bytes")
    try:
        header = msgpack.unpackb(frames[0], raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ChannelError(f"the header is not msgpack: {error}") from error
    if not isinstance(header, dict) or header.get("v") != WIRE_VERSION:
        raise ChannelError(f"the header is not a map of wire version {WIRE_VERSION}")
    for key, kind in (("id", str), ("kind", str), ("body", dict)):
        if not isinstance(header.get(key), kind):
            raise ChannelError(f"header field {key!r} is {header.get(key)!r:.80}, expected {kind.__name__}")
    return header


def _decode_array(entry: object, frame: bytes) -> tuple[str, np.ndarray]:
    match entry:
        case [str() as name, str() as dtype, list() as shape] if dtype in _ARRAY_DTYPES:
            pass
        case _:
            raise ChannelError(f"array description {entry!r:.120} is not [name, dtype, shape]")
    if len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
        raise ChannelError(f"array {name!r:.80} has the shape {shape!r:.120}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if expected != len(frame):
        raise ChannelError(f"array {name!r:.80} has {len(frame)} bytes, its shape {shape} needs {expected}")
    return name, np.frombuffer(frame, dtype=dtype).reshape(shape)


def _plain_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r:.80} (send numbers, strings, lists and maps)")

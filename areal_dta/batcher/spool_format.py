"""The bytes of the batcher's log: segments that start with a magic and hold length- and CRC-framed records.

A record is ``[u32 length][u32 crc32][payload]``; the payload is a msgpack list of the frames that `areal_dta.wire`
makes of (kind, body, arrays). Arrays are not copied on the way to the disk: a record is a list of buffers until it is
written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack

from areal_dta.batcher.leases import Place
from areal_dta.batcher.ledger import Event
from areal_dta.wire import ChannelError, decode, encode

__all__ = ["MAGIC", "SpoolError", "frame", "framed", "parse", "payload_at", "payload_of", "read_at"]

MAGIC = b"DTASPL02"
HEAD = struct.Struct("<II")
_BIN32 = struct.Struct(">BI")
_PACKER = msgpack.Packer()
Buffer = bytes | memoryview


class SpoolError(OSError):
    """A log that cannot be used: damaged, locked by another process, or of another format."""


@dataclass(frozen=True)
class Framed:
    """A record ready to be written: its buffers, head included, and where in it the payload starts."""

    buffers: tuple[Buffer, ...]
    num_bytes: int


def payload_of(event: Event) -> list[Buffer]:
    """The payload as buffers; those of arrays are views."""
    frames = encode("", event.kind, event.body, event.arrays)
    payload: list[Buffer] = [_PACKER.pack_array_header(len(frames))]
    for piece in frames:
        payload += [_BIN32.pack(0xC6, len(piece)), piece]
    return payload


def frame(payload: Sequence[Buffer]) -> Framed:
    """Length and checksum in front of a payload. zlib lets other threads run meanwhile."""
    crc, length = 0, 0
    for piece in payload:
        crc = zlib.crc32(piece, crc)
        length += len(piece)
    return Framed((HEAD.pack(length, crc), *payload), HEAD.size + length)


def framed(event: Event) -> Framed:
    return frame(payload_of(event))


def payload_at(data: bytes, at: int) -> bytes | None:
    """The payload of the record at this offset, or None if it is torn or damaged."""
    if at + HEAD.size > len(data):
        return None
    length, crc = HEAD.unpack_from(data, at)
    payload = data[at + HEAD.size : at + HEAD.size + length]
    if length == 0 or len(payload) != length or zlib.crc32(payload) != crc:
        return None
    return payload


def parse(path: Path, payload: bytes) -> Event:
    try:
        _, kind, body, arrays = decode(msgpack.unpackb(payload))
    except (ValueError, ChannelError) as error:
        raise SpoolError(f"{path} holds a record that cannot be read: {error}") from error
    return Event(kind, body, arrays)


def read_at(directory: Path, place: Place) -> Event:
    """The event that was written at this place; raises SpoolError when it is not there unharmed."""
    path = directory / place.segment
    handle = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(handle, place.num_bytes, place.offset)
    finally:
        os.close(handle)
    payload = payload_at(data, 0)
    if payload is None:
        raise SpoolError(f"{path} is damaged at byte {place.offset}; restore the file from a copy, or start a new run")
    return parse(path, payload)

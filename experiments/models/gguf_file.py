"""Read a GGUF file: its metadata and its tensors, quantised ones widened to fp32. Needs numpy only.

GGUF (version 2 and 3, little endian) is a header, typed key-value pairs, a list of tensors, and their data, aligned.
A quantised tensor is a run of blocks of 32 values that share a scale (and an offset):

    Q4_1   fp16 scale d, fp16 offset m, 16 bytes of two 4-bit numbers q; value = d q + m
    Q8_0   fp16 scale d, 32 signed bytes q; value = d q
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BadGguf", "GgufFile", "read_gguf"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BLOCK_VALUES = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", BLOCK_VALUES, 20), 8: ("Q8_0", BLOCK_VALUES, 34)}
_MAX_DIMS = 4


class BadGguf(ValueError):
    """The file is not GGUF, ends early, or holds something that is not read here."""


@dataclass(frozen=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]  # outermost first, as numpy has it
    first_byte: int
    num_bytes: int


class GgufFile:
    """``metadata`` by key, and tensors on demand."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, _Tensor], data: np.ndarray):
        self.path = path
        self.metadata = metadata
        self._tensors = tensors
        self._data = data

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def kinds(self) -> list[str]:
        """The kinds of its tensors, each once: what the weights were rounded to."""
        return sorted({t.kind for t in self._tensors.values()})

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as fp32 (a new array)."""
        entry = self._tensors[name]
        raw = np.asarray(self._data[entry.first_byte : entry.first_byte + entry.num_bytes])
        return _widen(entry.kind, raw).reshape(entry.shape)

    def get(self, key: str) -> Any:
        """A value of the metadata; raises BadGguf when the file has none."""
        if key not in self.metadata:
            raise BadGguf(f"{self.path} has no metadata {key!r}")
        return self.metadata[key]


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of ``path``; the data stays a memory map. Raises BadGguf or OSError."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != MAGIC:
        raise BadGguf(f"{path} starts with {bytes(data[:4])!r}, a GGUF file with {MAGIC!r}")
    cursor.at = len(MAGIC)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise BadGguf(f"{path} is GGUF version {version}; versions {VERSIONS} are read")
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    headers = [_read_header(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise BadGguf(f"{path} has general.alignment={alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, _Tensor] = {}
    for name, shape, code, offset in headers:
        if code not in _KINDS:
            known = ", ".join(kind for kind, _, _ in _KINDS.values())
            raise BadGguf(f"{path}: {name} is of type {code}; read are {known}. Take a file quantised to one of them")
        kind, values, num_bytes = _KINDS[code]
        if shape[-1] % values:
            raise BadGguf(f"{path}: {name} has rows of {shape[-1]} values, {kind} comes in blocks of {values}")
        tensors[name] = _Tensor(kind, shape, start + offset, math.prod(shape) // values * num_bytes)
        if tensors[name].first_byte + tensors[name].num_bytes > len(data):
            raise BadGguf(f"{path} ends before the data of {name}; fetch it again")
    return GgufFile(path, metadata, tensors, data)


class _Cursor:
    """Reads one item after the other."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.at = 0
        self._path = path
        self._data = data.data

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def text(self) -> str:
        return bytes(self._take(self.scalar("Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[inner])
                return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise BadGguf(f"{self._path}: metadata of type {kind} at byte {self.at} is not known")
        return self.scalar(_SCALARS[kind])

    def _take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._data) - self.at:
            raise BadGguf(f"{self._path} ends in its header (byte {len(self._data)}); fetch it again")
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]


def _read_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.text(), cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise BadGguf(f"tensor {name!r} has {num_dims} dimensions, 1 to {_MAX_DIMS} are possible")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]  # innermost first
    return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")


def _widen(kind: str, raw: np.ndarray) -> np.ndarray:
    """fp32 values of a tensor's bytes."""
    if kind in ("F32", "F16"):
        return raw.view("<f4" if kind == "F32" else "<f2").astype(np.float32)
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    assert kind == "Q4_1"
    blocks = raw.reshape(-1, 20)
    scale, offset = (blocks[:, i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
    packed = blocks[:, 4:]
    numbers = np.concatenate((packed & 15, packed >> 4), 1)  # low halves are the first 16 values
    return scale * numbers.astype(np.float32) + offset

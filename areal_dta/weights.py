"""Weight folders: written whole or not at all, identified by a digest, verified before anything loads them.

A version is a Hugging Face folder plus ``version.json``. The digest is the SHA-256 over the contents of the folder's
``*.safetensors`` files in the order of their names, so that it can be recomputed with standard tools:
``cat *.safetensors | sha256sum``. No torch, no areal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import TensorSpec, serialize_file

__all__ = [
    "TornWeights",
    "VersionManifest",
    "folder_digest",
    "read_manifest",
    "replaced_folder",
    "seal_version",
    "verify",
    "write_version",
]

MANIFEST = "version.json"
CHUNK_BYTES = 4 << 20


class TornWeights(ValueError):
    """A weight folder that is incomplete or differs from its manifest; it must not be loaded."""


@dataclass(frozen=True)
class VersionManifest:
    """``version.json``: which version the folder holds and what proves it."""

    weight_version: str
    digest: str
    files: dict[str, int]  # file name -> bytes


def folder_digest(folder: Path) -> str:
    """Digest of the folder's safetensors files; raises TornWeights when there are none."""
    files = _weight_files(folder)
    if not files:
        raise TornWeights(f"no *.safetensors in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda p: p.name)


def read_manifest(folder: Path) -> VersionManifest | None:
    """The folder's manifest, None when it has none; raises TornWeights when it cannot be read."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        files = {str(name): int(size) for name, size in raw["files"].items()}
        return VersionManifest(str(raw["weight_version"]), str(raw["digest"]), files)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise TornWeights(f"{path} cannot be read ({error!r}); publish the version again") from error


def verify(folder: Path, expected_digest: str | None = None) -> VersionManifest:
    """Recompute the digest of ``folder`` and compare it with its manifest and, if given, with ``expected_digest``.

    Raises TornWeights naming what differs. The folder must have a manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise TornWeights(f"{folder} has no {MANIFEST}; it was not published completely")
    sizes = {p.name: p.stat().st_size for p in _weight_files(folder)}
    if sizes != manifest.files:
        raise TornWeights(f"{folder} holds {sizes} (bytes), its {MANIFEST} says {manifest.files}")
    digest = folder_digest(folder)
    if digest != manifest.digest:
        raise TornWeights(f"{folder} has digest {digest}, its {MANIFEST} says {manifest.digest}")
    if expected_digest is not None and digest != expected_digest:
        raise TornWeights(f"{folder} has digest {digest}, the publisher announced {expected_digest}")
    return manifest


def seal_version(folder: Path, weight_version: str) -> VersionManifest:
    """Write the manifest of a folder whose safetensors files are complete (written by other means); returns it."""
    manifest = VersionManifest(
        weight_version, folder_digest(folder), {p.name: p.stat().st_size for p in _weight_files(folder)}
    )
    tmp = folder / f".{MANIFEST}.{uuid.uuid4().hex}"
    tmp.write_text(json.dumps(asdict(manifest), indent=1))
    os.replace(tmp, folder / MANIFEST)
    return manifest


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` to write to; it takes the place of ``folder`` by one rename when the block ends,
    and is removed when the block fails."""
    tmp = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    tmp.mkdir(parents=True)
    try:
        yield tmp
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(tmp, folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_version(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    weight_version: str,
    template: Path | None = None,
    bfloat16: bool = False,
) -> VersionManifest:
    """Write one version of the policy to ``folder`` (replaced if it exists) and return its manifest.

    ``tensors``: Hugging Face names to arrays; numpy has no bfloat16, so with ``bfloat16`` the arrays are uint16 bit
    patterns. Every file of ``template`` that is not weights (config, tokenizer) is copied. The folder appears by one
    rename after everything is on disk, so a reader sees a complete version or none.
    """
    if not tensors:
        raise ValueError(f"no tensors to write to {folder}")
    with replaced_folder(folder) as tmp:
        if template is not None:
            _copy_companions(template, tmp)
        _write_tensors(tmp / "model.safetensors", tensors, bfloat16)
        return seal_version(tmp, weight_version)


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray], bfloat16: bool) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    specs = {}
    for name, array in contiguous.items():
        if bfloat16 and array.dtype != np.uint16:
            raise ValueError(f"{name} has dtype {array.dtype}; with bfloat16=True pass uint16 bit patterns")
        specs[name] = TensorSpec(
            dtype="bfloat16" if bfloat16 else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    serialize_file(specs, str(path), metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _copy_companions(template: Path, target: Path) -> None:
    for path in template.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != MANIFEST:
            if path.name.endswith(".safetensors.index.json"):
                continue
            shutil.copy2(path, target / path.name)

"""Weight folders: whole or refused. Not covered: a disk that lies about fsync."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_dta.weights import TornWeights, folder_digest, read_manifest, seal_version, verify, write_version

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_version(tmp_path / "v1", TENSORS, "0:1")
    return tmp_path / "v1"


def test_what_was_written_is_read_back_and_verified(folder: Path):
    manifest = verify(folder)
    assert manifest.weight_version == "0:1"
    assert (
        manifest.digest
        == folder_digest(folder)
        == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    )
    assert all(np.array_equal(v, TENSORS[k]) for k, v in load_file(folder / "model.safetensors").items())
    assert verify(folder, manifest.digest) == manifest


def test_nothing_but_the_finished_folder_remains(folder: Path):
    assert sorted(p.name for p in folder.parent.iterdir()) == ["v1"]
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "version.json"]


def test_companions_of_the_template_come_along_but_not_its_weights(folder: Path, tmp_path: Path):
    (folder / "config.json").write_text("{}")
    write_version(tmp_path / "v2", {"c": np.zeros(1, np.float32)}, "0:2", template=folder)
    assert (tmp_path / "v2" / "config.json").read_text() == "{}"
    assert list(load_file(tmp_path / "v2" / "model.safetensors")) == ["c"]
    assert verify(tmp_path / "v2").weight_version == "0:2"


def test_rewriting_a_version_replaces_it(folder: Path):
    before = verify(folder).digest
    after = write_version(folder, {"a": np.zeros(2, np.float32)}, "0:9")
    assert verify(folder) == after
    assert after.digest != before


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "bytes"),
        (_flip, "digest"),
        (lambda f: (f / "version.json").unlink(), "no version.json"),
        (lambda f: (f / "version.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "version.json").write_text(json.dumps({"weight_version": "0:1"})), "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "version.json says"),
        (lambda f: (f / "more.safetensors").write_bytes(b"x"), "version.json says"),
    ],
)
def test_damage_is_noticed(damage, message: str, folder: Path):
    damage(folder)
    with pytest.raises(TornWeights, match=message):
        verify(folder)


def test_another_digest_than_announced_is_refused(folder: Path):
    with pytest.raises(TornWeights, match="announced"):
        verify(folder, "0" * 64)


def test_a_folder_written_by_other_means_can_be_sealed(folder: Path):
    (folder / "version.json").unlink()
    assert read_manifest(folder) is None
    assert verify(folder) if seal_version(folder, "1:0") else False


def test_bfloat16_bits_survive(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    bits = np.array([0x3F80, 0x4000], np.uint16)
    write_version(tmp_path / "b", {"x": bits}, "0:1", bfloat16=True)
    assert load_torch(tmp_path / "b" / "model.safetensors")["x"].equal(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bit patterns"):
        write_version(tmp_path / "c", TENSORS, "0:1", bfloat16=True)


def test_an_empty_version_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no tensors"):
        write_version(tmp_path / "e", {}, "0:1")
    with pytest.raises(TornWeights, match=r"no \*.safetensors"):
        folder_digest(tmp_path)

"""Training samples as files, and the pure rules on them: which may be used, which are dropped first.

One safetensors file holds one sample; its name says what the rules need (step, lengths, whether it is finished, policy
version), so that neither listing nor dropping opens a file. A file appears by one rename and carries a checksum.

Legend of shape suffixes: T tokens, F feature width.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from areal_dta.nn import DecoderConfig, DecoderWeights, WeightsMismatch
from areal_dta.weights import TornWeights, read_manifest

__all__ = [
    "Entry",
    "FrozenTarget",
    "Sample",
    "TornSample",
    "choose_drops",
    "find_version",
    "list_entries",
    "read_sample",
    "tail_threshold",
    "usable",
    "write_sample",
]

SUFFIX = ".sample.safetensors"
TORCH_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}
MAX_VERSION_CHARS = 80
DEFAULT_TAIL_SHARE = 0.25


class TornSample(ValueError):
    """A sample file that is cut short, altered, or no sample at all; it is skipped."""


@dataclass(frozen=True)
class Sample:
    """One sequence with what the target computed for it: position t of ``features_TF`` belongs to token t.

    The loss covers positions ``loss_start`` to ``loss_end`` (exclusive). ``step`` counts rollout steps; a sequence that
    still runs, or was cut off, is not ``finished``.
    """

    ids_T: torch.Tensor  # int32
    features_TF: torch.Tensor  # float16, bfloat16 or float32; hidden states before the final norm, or three layers'
    loss_start: int
    loss_end: int
    policy_version: str
    prompt_tokens: int
    response_tokens: int
    finished: bool
    step: int
    hidden_TD: torch.Tensor | None = None  # hidden states before the final norm, where the features are not these

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"ids": self.ids_T, "features": self.features_TF, "hidden": self.hidden_TD}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def check(self) -> None:
        """Raises ValueError when the parts do not fit together."""
        shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}
        if self.ids_T.dim() != 1 or any(s[0] != len(self.ids_T) for s in shapes.values() if s):
            raise ValueError(f"shapes {shapes} do not match; send ids (T,), features (T, F), hidden (T, D)")
        for name, tensor in self.tensors.items():
            if name != "ids" and (tensor.dim() != 2 or tensor.dtype not in TORCH_DTYPES):
                raise ValueError(
                    f"{name} {shapes[name]} of dtype {tensor.dtype}; send (T, F) of float16, bfloat16, float32"
                )
        if not 0 <= self.loss_start < self.loss_end <= len(self.ids_T):
            raise ValueError(f"loss span [{self.loss_start}, {self.loss_end}) of {len(self.ids_T)} tokens")
        if not 0 < len(self.policy_version) <= MAX_VERSION_CHARS:
            raise ValueError(f"policy version {self.policy_version!r:.120} needs 1 to {MAX_VERSION_CHARS} characters")


@dataclass(frozen=True, order=True)
class Entry:
    """What a file's name and size say. Orders by age: step, then the writer's sequence number."""

    step: int
    sequence: int
    num_tokens: int
    response_tokens: int
    finished: bool
    policy_version: str
    num_bytes: int
    path: Path

    def file_name(self) -> str:
        kind = "f" if self.finished else "p"
        version = quote(self.policy_version, safe="")
        return f"{self.step:08d}-{self.sequence:08d}-{self.num_tokens}-{self.response_tokens}-{kind}-{version}{SUFFIX}"

    @classmethod
    def parse(cls, path: Path, num_bytes: int) -> Entry | None:
        """None for a name that is not a sample's."""
        parts = path.name.removesuffix(SUFFIX).split("-", 5)
        if not path.name.endswith(SUFFIX) or len(parts) != 6 or parts[4] not in ("f", "p"):
            return None
        try:
            step, sequence, num_tokens, response_tokens = (int(p) for p in parts[:4])
        except ValueError:
            return None
        return cls(step, sequence, num_tokens, response_tokens, parts[4] == "f", unquote(parts[5]), num_bytes, path)


def list_entries(folder: Path) -> list[Entry]:
    """Samples in ``folder``, oldest first; none when it does not exist. Opens no file."""
    entries = []
    try:
        with os.scandir(folder) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):  # dropped by its writer just now
                    entry = Entry.parse(Path(item.path), item.stat().st_size)
                    if entry is not None:
                        entries.append(entry)
    except FileNotFoundError:
        return []
    return sorted(entries)


def tail_threshold(lengths: Sequence[int], tail_share: float) -> int:
    """The shortest length that belongs to the longest ``tail_share`` of ``lengths``, rounded up to whole samples."""
    if not lengths:
        return 0
    count = max(1, -int(-len(lengths) * tail_share // 1))
    return sorted(lengths, reverse=True)[min(count, len(lengths)) - 1]


def usable(entries: Iterable[Entry], tail_share: float = DEFAULT_TAIL_SHARE) -> list[Entry]:
    """The one-step offset: what is finished of the latest step, and the long tail of the step before.

    Short responses finish first, so the part of a step that is there early lacks the long ones, which the step before
    has in full. The step before is the latest earlier one that left samples.
    """
    known = list(entries)
    current, previous = _last_two_steps(known)
    threshold = tail_threshold([e.response_tokens for e in known if e.step == previous], tail_share)
    return sorted(
        e
        for e in known
        if (e.step == current and e.finished) or (e.step == previous and e.response_tokens >= threshold)
    )


def _last_two_steps(entries: Iterable[Entry]) -> tuple[int | None, int | None]:
    steps = sorted({e.step for e in entries}, reverse=True)[:2]
    return (steps[0] if steps else None), (steps[1] if len(steps) > 1 else None)


def choose_drops(entries: Iterable[Entry], budget_bytes: int, tail_share: float = DEFAULT_TAIL_SHARE) -> list[Entry]:
    """What to delete so that the rest fits ``budget_bytes``: oldest first, sparing the long tail of the previous step.

    The spared part is limited to half of the budget (its longest samples), so that a new step always finds room; where
    nothing else is left it is dropped too.
    """
    known = sorted(entries)
    excess = sum(e.num_bytes for e in known) - budget_bytes
    if excess <= 0:
        return []
    _, previous = _last_two_steps(known)
    threshold = tail_threshold([e.response_tokens for e in known if e.step == previous], tail_share)
    spared: set[Path] = set()
    spared_bytes = 0
    tail = [e for e in known if e.step == previous and e.response_tokens >= threshold]
    for entry in sorted(tail, key=lambda e: -e.response_tokens):
        if spared_bytes + entry.num_bytes <= budget_bytes // 2:
            spared.add(entry.path)
            spared_bytes += entry.num_bytes
    drops = []
    for entry in sorted(known, key=lambda e: (e.path in spared, e)):
        if excess <= 0:
            break
        drops.append(entry)
        excess -= entry.num_bytes
    return drops


def write_sample(folder: Path, sample: Sample, sequence: int) -> Entry:
    """Write one file, visible only when complete; raises OSError (disk full, folder gone)."""
    tensors = {n: t.detach().cpu().contiguous() for n, t in sample.tensors.items()}
    tensors["ids"] = tensors["ids"].to(torch.int32)
    fields = {"loss_start": sample.loss_start, "loss_end": sample.loss_end, "prompt_tokens": sample.prompt_tokens}
    specs = {
        n: TensorSpec(dtype=TORCH_DTYPES[t.dtype], shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes)
        for n, t in tensors.items()
    }
    entry = Entry(
        sample.step,
        sequence,
        sample.num_tokens,
        sample.response_tokens,
        sample.finished,
        sample.policy_version,
        0,
        folder,
    )
    path = folder / entry.file_name()
    temporary = folder / f".{sequence}.{os.getpid()}.partial"
    metadata = {"sample": json.dumps(fields), "crc32": str(_checksum(tensors))}
    try:
        serialize_file(specs, str(temporary), metadata=metadata)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{temporary} cannot be written: {error}") from error
    num_bytes = temporary.stat().st_size
    os.replace(temporary, path)
    found = Entry.parse(path, num_bytes)
    assert found is not None
    return found


def read_sample(entry: Entry) -> Sample:
    """Read and verify; raises TornSample, or FileNotFoundError when it has been dropped meanwhile."""
    path = entry.path
    if not path.exists():
        raise FileNotFoundError(f"{path} has been dropped")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        fields = json.loads(metadata["sample"])
        sample = Sample(
            tensors["ids"],
            tensors["features"],
            int(fields["loss_start"]),
            int(fields["loss_end"]),
            entry.policy_version,
            int(fields["prompt_tokens"]),
            entry.response_tokens,
            entry.finished,
            entry.step,
            tensors.get("hidden"),
        )
        sample.check()
        checksum = int(metadata["crc32"])
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise TornSample(f"{path} is no readable sample: {error!r}") from error
    if checksum != _checksum(tensors):
        raise TornSample(f"{path} has checksum {_checksum(tensors)}, its header says {checksum}")
    if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
        raise TornSample(f"{path} holds features that are NaN or infinite")
    return sample


def _checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(), checksum)
    return checksum


@dataclass(frozen=True)
class FrozenTarget:
    """What a drafter takes from one policy version and never changes: embedding, final norm and head, no layers."""

    version: str
    weights: DecoderWeights

    @classmethod
    def load(cls, folder: Path, version: str, dtype: torch.dtype = torch.float32) -> FrozenTarget:
        """Read only these tensors of ``folder``; raises WeightsMismatch, UnsupportedModel or OSError."""
        config = DecoderConfig.from_folder(folder)
        head_name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        shapes = {
            "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
            head_name: (config.vocab_size, config.hidden_size),
        }
        found = {name: tensor.to(dtype) for name, tensor in _read_named(folder, set(shapes)).items()}
        for name, shape in shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                got = tuple(found[name].shape) if name in found else "nothing"
                raise WeightsMismatch(f"{folder}: {name} is {got}, the config asks for {shape}")
        embed_VD = found["model.embed_tokens.weight"]
        return cls(version, DecoderWeights(config, embed_VD, (), found["model.norm.weight"], found[head_name]))


def _read_named(folder: Path, names: set[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                # Copied out of the memory map: the folder may be pruned while the tensors are in use.
                tensors.update({n: file.get_tensor(n).clone() for n in names & set(file.keys())})
        except SafetensorError as error:
            raise WeightsMismatch(f"{path} is not a readable safetensors file ({error})") from error
    return tensors


def find_version(roots: Sequence[Path], version: str) -> Path | None:
    """The folder among ``roots`` and their subfolders whose manifest names ``version``; None when it is not there."""
    for root in roots:
        for folder in (root, *sorted(p for p in root.glob("*") if p.is_dir() and not p.name.startswith("."))):
            try:
                manifest = read_manifest(folder)
            except TornWeights:
                continue
            if manifest is not None and manifest.weight_version == version:
                return folder
    return None

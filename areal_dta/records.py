"""The frozen records that travel between processes, and their wire and file formats.

A record is packed into a msgpack-able header and named numpy arrays (`pack`), which `areal_dta.channel` sends as a
header frame plus raw frames; nothing is ever pickled. The trace file is the npz written by `write_trace`.

Legend of shape suffixes: S sequences (training rows), T tokens of all sequences laid end to end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["LaunchPlan", "Lease", "Shard", "Trajectory", "WeightVersion", "pack", "unpack", "write_trace"]


class RecordError(ValueError):
    """A record that violates its own contract: wrong lengths, dtypes or values."""


@dataclass(frozen=True)
class WeightVersion:
    """Identity of one set of policy weights: (run epoch, number); a resumed run has a new epoch and never reuses
    one.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of `str`; raises RecordError for anything but ``EPOCH:NUMBER``."""
        epoch, sep, number = text.partition(":")
        if not sep or not epoch.isdigit() or not number.isdigit():
            raise RecordError(f"weight version {text!r} is not of the form EPOCH:NUMBER")
        return cls(int(epoch), int(number))


@dataclass(frozen=True)
class Lease:
    """The permission to run one episode: one sample of one group (prompt)."""

    lease_id: str
    group_id: int  # position in the shuffled data stream; every sample of a prompt shares it
    sample: int  # 0 .. n_samples-1
    attempt: int
    item: dict[str, Any]  # one line of dataset/*.jsonl
    version: int  # policy number when granted
    epoch: int
    seed: int  # fixed by (run seed, group_id, sample): the same episode draws the same noise
    eval_tag: str | None = None  # set: a greedy evaluation episode, never trained on


@dataclass(frozen=True)
class Trajectory:
    """One finished episode: its training sequences (turns exported individually) as ragged arrays.

    ``input_ids_T`` holds the sequences end to end; ``offsets_S1`` (S+1) their bounds. ``loss_mask_T`` is 1 on tokens
    the policy produced in this sequence; ``logprobs_T`` (natural log, sampling temperature) and ``versions_T`` (-1
    elsewhere) align with the token itself (not with its predecessor). ``rewards_S`` is the reward of each sequence.
    """

    lease_id: str
    group_id: int
    sample: int
    task_id: str
    reward: float  # the episode's, from the environment's own evaluator
    input_ids_T: np.ndarray
    offsets_S1: np.ndarray
    loss_mask_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    rewards_S: np.ndarray
    worker: str = ""
    eval_tag: str | None = None
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets_S1) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    def validate(self) -> None:
        """Raise RecordError unless shapes agree and every number is finite where it counts."""
        n = len(self.input_ids_T)
        for name in ("loss_mask_T", "logprobs_T", "versions_T"):
            if len(getattr(self, name)) != n:
                raise RecordError(f"{name} has {len(getattr(self, name))} entries, input_ids_T has {n}")
        _check_offsets(self.offsets_S1, n)
        if len(self.rewards_S) != self.num_sequences:
            raise RecordError(f"rewards_S has {len(self.rewards_S)} entries for {self.num_sequences} sequences")
        if not np.isfinite(self.reward) or not np.isfinite(self.rewards_S).all():
            raise RecordError(f"reward is not finite: {self.reward}, per sequence {self.rewards_S.tolist()}")
        mask = self.loss_mask_T.astype(bool)
        if not np.isfinite(self.logprobs_T[mask]).all():
            raise RecordError("log-prob of a generated token is not finite")
        if n and int(self.input_ids_T.min()) < 0:
            raise RecordError(f"negative token id {int(self.input_ids_T.min())}")
        if mask.any() and int(self.versions_T[mask].min()) < 0:
            raise RecordError("a generated token carries no policy version")


@dataclass(frozen=True)
class Shard:
    """What one data-parallel rank trains on in one step: its rows, lexicographically sorted.

    ``rewards_S`` are final (group-normalised if so configured); ``raw_rewards_S`` are the environment's.
    ``num_rows_total`` and ``num_loss_tokens_total`` count the whole batch over all ranks, for exact normalisation.
    ``minibatch_S`` assigns rows to optimizer steps.
    """

    step: int
    rank: int
    world_size: int
    epoch: int
    input_ids_T: np.ndarray
    offsets_S1: np.ndarray
    loss_mask_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    rewards_S: np.ndarray
    raw_rewards_S: np.ndarray
    group_ids_S: np.ndarray
    samples_S: np.ndarray
    minibatch_S: np.ndarray
    num_rows_total: int = 0
    num_loss_tokens_total: int = 0
    cost: float = 0.0  # this rank's share in the partition's cost unit
    tree_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.offsets_S1) - 1


@dataclass(frozen=True)
class LaunchPlan:
    """Addresses and sizes that the launcher fixed for one launch of a run; `RUN/launch.json`."""

    run_dir: str
    epoch: int
    batcher: str
    metrics: str
    router: str
    servers: tuple[str, ...]
    trainer_master_addr: str
    trainer_master_port: int
    dp: int
    tp: int
    pp: int
    num_workers: int
    resume_step: int | None = None
    api_key: str | None = None

    @property
    def trainer_world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> LaunchPlan:
        raw = json.loads(path.read_text())
        return cls(**{**raw, "servers": tuple(raw["servers"])})


_KINDS: dict[str, type] = {"lease": Lease, "trajectory": Trajectory, "shard": Shard}
_DTYPES = {
    "input_ids_T": np.int32,
    "offsets_S1": np.int64,
    "loss_mask_T": np.uint8,
    "logprobs_T": np.float32,
    "versions_T": np.int32,
    "rewards_S": np.float32,
    "raw_rewards_S": np.float32,
    "group_ids_S": np.int64,
    "samples_S": np.int32,
    "minibatch_S": np.int32,
}
R = TypeVar("R", Lease, Trajectory, Shard)


def pack(record: Lease | Trajectory | Shard) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Split a record into (plain fields, arrays); arrays are cast to their wire dtypes."""
    plain: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if f.name in _DTYPES:
            arrays[f.name] = np.ascontiguousarray(value, dtype=_DTYPES[f.name])
        else:
            plain[f.name] = value
    return plain, arrays


def unpack(kind: type[R], plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> R:
    """Inverse of `pack`; unknown or missing fields and wrong dtypes raise RecordError, nothing is guessed."""
    arrays = arrays or {}
    fields = {f.name: f for f in dataclasses.fields(kind)}
    given = {**plain, **arrays}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise RecordError(f"{kind.__name__} has no field {unknown[0]!r}")
    for name, array in arrays.items():
        if array.dtype != _DTYPES[name]:
            raise RecordError(f"{kind.__name__}.{name} has dtype {array.dtype}, expected {np.dtype(_DTYPES[name])}")
    required = {
        n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(given))
    if missing:
        raise RecordError(f"{kind.__name__} lacks {missing}")
    return kind(**given)


def _check_offsets(offsets_S1: np.ndarray, num_tokens: int) -> None:
    if len(offsets_S1) < 2 or int(offsets_S1[0]) != 0 or int(offsets_S1[-1]) != num_tokens:
        raise RecordError(f"offsets must run from 0 to {num_tokens}, got {np.asarray(offsets_S1).tolist()[:8]}")
    if (np.diff(offsets_S1) <= 0).any():
        raise RecordError("a sequence is empty or offsets decrease")


def write_trace(path: Path, trajectories: list[Trajectory], domain: str, step: int) -> None:
    """Write whole-batch trajectories in the trace schema (npz, uncompressed arrays, no pickle).

    Arrays: ``ids`` int32 flat, ``offsets`` [n+1]; per training sequence ``turn_traj``, ``turn_start``, ``turn_end``:
    the episode's token span relative to its offset; ``set``, ``domain``, ``task_id``, ``trial``, ``reward`` per
    episode; plus ``versions``, ``logprobs`` flat for replays. An episode whose turns do not extend each other is stored
    as one entry per sequence.
    """
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    turn_traj, turn_start, turn_end, meta = [], [], [], []
    for traj in trajectories:
        chain = _as_chain(traj)
        for lo, hi, spans in chain:
            index = len(ids)
            ids.append(traj.input_ids_T[lo:hi])
            logprobs.append(traj.logprobs_T[lo:hi])
            versions.append(traj.versions_T[lo:hi])
            for start, end in spans:
                turn_traj.append(index)
                turn_start.append(start)
                turn_end.append(end)
            meta.append((traj.task_id, traj.sample, traj.reward))
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(x) for x in ids], out=offsets[1:])
    tmp = path.with_suffix(".tmp.npz")
    np.savez(
        tmp,
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        offsets=offsets,
        turn_traj=np.asarray(turn_traj, np.int32),
        turn_start=np.asarray(turn_start, np.int32),
        turn_end=np.asarray(turn_end, np.int32),
        set=np.asarray([f"step{step}"] * len(ids)),
        domain=np.asarray([domain] * len(ids)),
        task_id=np.asarray([m[0] for m in meta]),
        trial=np.asarray([m[1] for m in meta], np.int32),
        reward=np.asarray([m[2] for m in meta], np.float32),
        logprobs=np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32),
        versions=np.concatenate(versions) if versions else np.zeros(0, np.int32),
    )
    tmp.replace(path)


def _as_chain(traj: Trajectory) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Merge sequences that extend their predecessor: list of (token lo, token hi of the longest, loss spans relative to
    lo).
    """
    out: list[tuple[int, int, list[tuple[int, int]]]] = []
    for s in range(traj.num_sequences):
        lo, hi = int(traj.offsets_S1[s]), int(traj.offsets_S1[s + 1])
        mask = np.flatnonzero(traj.loss_mask_T[lo:hi])
        span = (int(mask[0]), int(mask[-1]) + 1) if len(mask) else (hi - lo, hi - lo)
        if out:
            plo, phi, spans = out[-1]
            n = phi - plo
            if n <= hi - lo and np.array_equal(traj.input_ids_T[plo:phi], traj.input_ids_T[lo : lo + n]):
                out[-1] = (lo, hi, [*spans, span])
                continue
        out.append((lo, hi, [span]))
    return out

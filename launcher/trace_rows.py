"""The training rows of a trace file: ids and offsets, and where loss lies when the trace has turns.

Legend: E episodes of the trace, S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.npyio import NpzFile

from launcher.rundir import RunError

__all__ = ["RowKind", "TraceRows", "read_arrays", "read_rows"]

RowKind = Literal["auto", "episodes", "turns"]
_TURNS = ("turn_traj", "turn_start", "turn_end")
_MAX_ID = (1 << 31) - 1
# What numpy and zipfile raise for damaged or foreign bytes. ValueError, TypeError, TokenError: a header, or pickled
# objects; MemoryError, OverflowError: a header may ask for any size (its text says how much); RuntimeError: encrypted,
# or (NotImplementedError) an unknown compression; OSError, zlib.error, LZMAError: damaged compressed bytes.
_UNREADABLE = (
    OSError, ValueError, TypeError, EOFError, MemoryError, OverflowError, RuntimeError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


@dataclass(frozen=True)
class TraceRows:
    """``loss_T`` marks tokens that carry loss; None when the trace does not tell (every token counts)."""

    ids_T: np.ndarray
    offsets_S1: np.ndarray
    loss_T: np.ndarray | None
    num_episodes: int

    @property
    def num_rows(self) -> int:
        return len(self.offsets_S1) - 1

    def take(self, rows: np.ndarray) -> TraceRows:
        """These rows, in this order."""
        lens_S = np.diff(self.offsets_S1)[rows]
        index_T, offsets_S1 = _spans(self.offsets_S1[:-1][rows], lens_S)
        loss_T = None if self.loss_T is None else self.loss_T[index_T]
        return TraceRows(self.ids_T[index_T], offsets_S1, loss_T, self.num_episodes)


def read_rows(path: Path, kind: RowKind = "auto", where: Sequence[str] = ()) -> TraceRows:
    """Rows of an npz file with ``ids`` and ``offsets``.

    ``turns``: one row per turn, the episode's tokens up to the turn's end, with loss on the turn, as training expands
    episodes; needs the arrays ``turn_traj``, ``turn_start``, ``turn_end``. ``episodes``: the sequences of the file as
    they are. ``auto``: turns where the file has them. ``where`` keeps episodes whose fields have given values
    (``field=value``). Raises RunError.
    """
    trace = read_arrays(path)
    keep_E = _selected(path, _checked(path, trace), where)
    has_turns = all(name in trace for name in _TURNS)
    if kind == "turns" and not has_turns:
        raise RunError(f"{path} has no {', '.join(_TURNS)}; use --rows episodes")
    ids, offsets = trace["ids"], trace["offsets"].astype(np.int64)
    if kind == "episodes" or not has_turns:
        whole = TraceRows(ids, offsets, None, int(keep_E.sum()))
        return whole if keep_E.all() else whole.take(np.flatnonzero(keep_E))
    for name in _TURNS:
        if trace[name].ndim != 1 or trace[name].dtype.kind not in "iu":
            raise RunError(
                f"{path}: {name} must be a flat integer array, it is {trace[name].dtype} of shape {trace[name].shape}; "
                "write the trace anew, or use --rows episodes"
            )
    episode_S, start_S, end_S = (trace[name].astype(np.int64) for name in _TURNS)
    lens_E = np.diff(offsets)
    if len(episode_S) and not (
        len(episode_S) == len(start_S) == len(end_S)
        and 0 <= episode_S.min() <= episode_S.max() < len(lens_E)
        and (start_S >= 0).all()
        and (end_S <= lens_E[episode_S]).all()
    ):
        raise RunError(f"{path}: a turn lies outside its episode; write the trace anew, or use --rows episodes")
    used_S = (end_S > start_S) & keep_E[episode_S]
    if not used_S.any():
        raise RunError(f"{path} has no turn with generated tokens{' there' if where else ''}; use --rows episodes")
    lens_S = end_S[used_S]
    index_T, offsets_S1 = _spans(offsets[episode_S[used_S]], lens_S)
    within_T = np.arange(len(index_T)) - np.repeat(offsets_S1[:-1], lens_S)
    return TraceRows(ids[index_T], offsets_S1, within_T >= np.repeat(start_S[used_S], lens_S), int(keep_E.sum()))


def read_arrays(path: Path, skip: Sequence[str] = ("logprobs", "versions")) -> dict[str, np.ndarray]:
    """The arrays of an npz file but those to skip; members that are no arrays are left out. Raises RunError."""
    if not path.is_file():
        raise RunError(f"{path} is no file; give an npz file of plain arrays")
    try:
        file = np.load(path, allow_pickle=False)
    except _UNREADABLE as error:
        pickled = isinstance(error, ValueError) and not zipfile.is_zipfile(path)  # numpy then takes it for a pickle
        why = "its format is another" if pickled else str(error) or type(error).__name__
        raise RunError(f"{path} is not a readable npz file: {why}; write one with numpy.savez") from error
    if not isinstance(file, NpzFile):
        raise RunError(f"{path} is not a readable npz file: it is one array (.npy); write one with numpy.savez")
    arrays: dict[str, np.ndarray] = {}
    with file:
        for name in file.files:
            if name in skip:
                continue
            try:
                array = file[name]
            except _UNREADABLE as error:
                has_objects = "allow_pickle" in str(error)
                why = "it holds Python objects" if has_objects else str(error) or type(error).__name__
                raise RunError(f"{path}: array {name!r} cannot be read: {why}; write it as plain numbers") from error
            if isinstance(array, np.ndarray):
                arrays[name] = array
    return arrays


def _spans(start_S: np.ndarray, lens_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(flat indices of the spans end to end, their offsets)."""
    offsets_S1 = np.zeros(len(lens_S) + 1, np.int64)
    np.cumsum(lens_S, out=offsets_S1[1:])
    return np.repeat(start_S - offsets_S1[:-1], lens_S) + np.arange(int(offsets_S1[-1])), offsets_S1


def _checked(path: Path, trace: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    for name in ("ids", "offsets"):
        if name not in trace:
            raise RunError(f"{path} has no array {name!r}; a trace holds ids (flat) and offsets (one more than rows)")
    ids, offsets = trace["ids"], trace["offsets"]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise RunError(f"{path}: ids and offsets must be flat integer arrays, got {ids.dtype} and {offsets.dtype}")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise RunError(f"{path}: offsets must rise from 0 to {len(ids)}, got {offsets[:4].tolist()} ...")
    if len(ids) and int(ids.min()) < 0:
        raise RunError(f"{path}: negative token id {int(ids.min())}; write the trace anew")
    if len(ids) and int(ids.max()) > _MAX_ID:
        raise RunError(f"{path}: token id {int(ids.max())} is above {_MAX_ID}; write the trace anew")
    return trace


def _selected(path: Path, trace: Mapping[str, np.ndarray], where: Sequence[str]) -> np.ndarray:
    keep_E = np.ones(len(trace["offsets"]) - 1, bool)
    for condition in where:
        name, equals, value = condition.partition("=")
        fields = sorted(field for field, array in trace.items() if array.shape[:1] == keep_E.shape)
        if not equals or name not in fields:
            what = f"{path} has no episode field {name!r}; it has" if equals else "give field=value; the fields are"
            raise RunError(f"--where {condition}: {what} {', '.join(fields) or 'none'}")
        keep_E &= np.asarray([str(v) == value for v in trace[name].tolist()])
    if not keep_E.any():
        raise RunError(f"{path}: no episode has {' and '.join(where)}")
    return keep_E

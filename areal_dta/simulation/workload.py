"""What episodes are like: turns, lengths, and what their training rows share. From a trace, or from a distribution.

Legend: E episodes of a trace, S rows (one per turn), R rows by sorted position.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from areal_dta.tree.trie import SortedRows, sort_rows

__all__ = ["EpisodeScript", "LengthWorkload", "TraceWorkload", "Workload", "WorkloadError", "gamma", "read_traces"]

_ARRAYS = ("ids", "offsets", "turn_traj", "turn_start", "turn_end")


class WorkloadError(ValueError):
    """Lengths or a trace that no episode can be made of."""


@dataclass(frozen=True)
class EpisodeScript:
    """One episode: by turn its prompt's tokens and those to generate. The first ``system_tokens`` of every prompt are
    common to all episodes, the first ``shared_tokens`` to its group. ``source`` finds its rows again.
    """

    prompts: tuple[int, ...]
    generated: tuple[int, ...]
    system_tokens: int
    shared_tokens: int
    source: int

    @property
    def num_turns(self) -> int:
        return len(self.prompts)


class Workload(Protocol):
    """A source of episodes, fixed by its seed: the same group and sample are always the same episode."""

    def group(self, group_id: int, group_size: int) -> list[EpisodeScript]:
        """The samples of a group."""

    def rows(self, groups: Sequence[Sequence[EpisodeScript]]) -> SortedRows:
        """All training rows of these episodes as a sorted list: what their prefix tree costs follows from it."""


# ---- lengths ----


@dataclass(frozen=True, kw_only=True)
class LengthWorkload:
    """Gamma-distributed lengths around means; ``*_spread`` is the relative standard deviation, 0 makes all equal.

    A turn adds ``observation_tokens`` (tool output, user) and ``generated_tokens``. The first prompt has
    ``prompt_tokens``, of which ``system_tokens`` are common to all groups. ``task_spread`` is what tasks differ by
    (a factor on the number of turns, common to a group).
    """

    prompt_tokens: float
    generated_tokens: float
    turns: float = 1.0
    observation_tokens: float = 0.0
    system_tokens: float = 0.0
    generated_spread: float = 0.0
    turns_spread: float = 0.0
    task_spread: float = 0.0
    max_tokens: int = 1 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "generated_tokens", "turns"):
            if not getattr(self, name) >= 1:
                raise WorkloadError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("observation_tokens", "system_tokens", "generated_spread", "turns_spread", "task_spread"):
            if not getattr(self, name) >= 0:
                raise WorkloadError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.system_tokens > self.prompt_tokens:
            raise WorkloadError(f"system_tokens={self.system_tokens} exceeds prompt_tokens={self.prompt_tokens}")
        if self.max_tokens <= self.prompt_tokens:
            raise WorkloadError(f"max_tokens={self.max_tokens} leaves no room after {self.prompt_tokens} prompt tokens")

    def group(self, group_id: int, group_size: int) -> list[EpisodeScript]:
        rng = np.random.default_rng([self.seed, group_id])
        factor = gamma(rng, 1.0, self.task_spread)
        return [self._episode(rng, factor, sample) for sample in range(group_size)]

    def _episode(self, rng: np.random.Generator, factor: float, sample: int) -> EpisodeScript:
        turns = max(1, round(gamma(rng, self.turns * factor, self.turns_spread)))
        prompts, generated, context = [], [], round(self.prompt_tokens)
        for _ in range(turns):
            drawn = max(1, round(gamma(rng, self.generated_tokens, self.generated_spread)))
            length = min(drawn, self.max_tokens - context)
            if length <= 0:
                break
            prompts.append(context)
            generated.append(length)
            context += length + round(self.observation_tokens)
        return EpisodeScript(
            tuple(prompts), tuple(generated), round(self.system_tokens), round(self.prompt_tokens), sample
        )

    def rows(self, groups: Sequence[Sequence[EpisodeScript]]) -> SortedRows:
        """Each turn's row extends the one before; groups share their prompt, all share the system's."""
        lens: list[int] = []
        lcps: list[int] = []
        for group in groups:
            for sample, episode in enumerate(group):
                ends = [p + g for p, g in zip(episode.prompts, episode.generated, strict=True)]
                first = episode.shared_tokens if sample else episode.system_tokens if lens else 0
                lcps += [first, *ends[:-1]]
                lens += ends
        lens_R, lcp_R = np.asarray(lens, np.int64), np.asarray(lcps, np.int64)
        return SortedRows(np.arange(len(lens_R)), lens_R, lcp_R)


def gamma(rng: np.random.Generator, mean: float, spread: float) -> float:
    """A gamma-distributed number with this mean and relative standard deviation."""
    if spread == 0 or mean == 0:
        return mean
    shape = 1 / spread**2
    return float(rng.gamma(shape, mean / shape))


# ---- traces ----


class TraceWorkload:
    """Episodes of recorded batches. A group takes a task of the trace, and its samples are episodes of that task,
    different ones as long as there are any.

    A batch that holds an episode more than once is charged for each further copy what its rows added to the tree of
    the trace: another sample of the same length.
    """

    def __init__(self, arrays: dict[str, np.ndarray], seed: int = 0) -> None:
        offsets = arrays["offsets"].astype(np.int64)
        turn_traj, start_S, end_S = (arrays[n].astype(np.int64) for n in ("turn_traj", "turn_start", "turn_end"))
        lens_E = np.diff(offsets)
        if (
            ((turn_traj < 0) | (turn_traj >= len(lens_E))).any()
            or (start_S < 0).any()
            or (end_S > lens_E[turn_traj]).any()
        ):
            raise WorkloadError("a turn of the trace lies outside its episode; record the trace again")
        used = end_S > start_S
        if not used.any():
            raise WorkloadError("the trace has no turn with generated tokens")
        turn_traj, start_S, end_S = turn_traj[used], start_S[used], end_S[used]
        self._seed = seed
        take_T = np.concatenate([np.arange(offsets[e], offsets[e] + n) for e, n in zip(turn_traj, end_S, strict=True)])
        order = sort_rows(arrays["ids"][take_T], np.concatenate([[0], np.cumsum(end_S)]))
        self._order = order
        rank_S = np.empty(len(end_S), np.int64)
        rank_S[order.order_R] = np.arange(len(end_S))
        tasks = arrays["task_id"] if "task_id" in arrays else np.zeros(len(offsets) - 1, int)
        system = int(order.lcp_R[1:].min()) if order.num_rows > 1 else 0
        self._ranks: dict[int, np.ndarray] = {}
        by_task: dict[str, list[int]] = {}
        for episode in np.unique(turn_traj).tolist():
            self._ranks[episode] = np.sort(rank_S[turn_traj == episode])
            by_task.setdefault(str(tasks[episode]), []).append(episode)
        self._tasks = [by_task[name] for name in sorted(by_task)]
        self._scripts: dict[int, EpisodeScript] = {}
        for members in self._tasks:
            first_prompt = int(min(start_S[turn_traj == e].min() for e in members))
            shared = self._common([self._ranks[e] for e in members], first_prompt)
            for episode in members:
                mine = np.flatnonzero(turn_traj == episode)
                mine = mine[np.argsort(end_S[mine], kind="stable")]
                lengths = (end_S - start_S)[mine]
                self._scripts[episode] = EpisodeScript(
                    tuple(start_S[mine].tolist()), tuple(lengths.tolist()), min(system, shared), shared, episode
                )

    def _common(self, ranks: Sequence[np.ndarray], first_prompt: int) -> int:
        """Tokens that all rows of a task begin with, at most the first prompt."""
        members = np.sort(np.concatenate(ranks))
        lcp = self._order.subset(members).lcp_R[1:]
        return int(min(first_prompt, lcp.min())) if len(lcp) else first_prompt

    @property
    def num_episodes(self) -> int:
        return len(self._scripts)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def group(self, group_id: int, group_size: int) -> list[EpisodeScript]:
        rng = np.random.default_rng([self._seed, group_id])
        epoch, index = divmod(group_id, len(self._tasks))
        task = np.random.default_rng([self._seed, epoch, 1]).permutation(len(self._tasks))[index]
        members = self._tasks[task]
        chosen: list[int] = []
        while len(chosen) < group_size:
            chosen += rng.permutation(members)[: group_size - len(chosen)].tolist()
        return [self._scripts[e] for e in chosen]

    def rows(self, groups: Sequence[Sequence[EpisodeScript]]) -> SortedRows:
        sources = [e.source for group in groups for e in group]
        ranks = np.sort(np.concatenate([self._ranks[s] for s in sources]))
        subset = self._order.subset(np.unique(ranks))
        again = ranks[1:][ranks[1:] == ranks[:-1]]
        if not len(again):
            return subset
        copies = np.minimum(self._order.lcp_R[again], self._order.lens_R[again] - 1)
        return SortedRows(
            np.arange(subset.num_rows + len(again)),
            np.concatenate([subset.lens_R, self._order.lens_R[again]]),
            np.concatenate([subset.lcp_R, copies]),
        )


def read_traces(paths: Sequence[Path], seed: int = 0) -> TraceWorkload:
    """The episodes of one or several npz files (`areal_dta.records.write_trace`). Raises WorkloadError."""
    parts: dict[str, list[np.ndarray]] = {}
    episodes = tokens = 0
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as file:
                trace = {name: file[name] for name in (*_ARRAYS, "task_id") if name in file.files}
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:  # TypeError: .npy
            raise WorkloadError(f"{path} is not a readable npz file: {error}; record the trace again") from error
        missing = [name for name in _ARRAYS if name not in trace]
        if missing:
            raise WorkloadError(f"{path} has no array {missing[0]!r}; a simulation needs the turns of episodes")
        num = len(trace["offsets"]) - 1
        parts.setdefault("ids", []).append(trace["ids"])
        parts.setdefault("offsets", []).append(trace["offsets"][1:].astype(np.int64) + tokens)
        parts.setdefault("turn_traj", []).append(trace["turn_traj"].astype(np.int64) + episodes)
        parts.setdefault("turn_start", []).append(trace["turn_start"])
        parts.setdefault("turn_end", []).append(trace["turn_end"])
        parts.setdefault("task_id", []).append(trace.get("task_id", np.zeros(num, int)).astype(str))
        episodes, tokens = episodes + num, tokens + len(trace["ids"])
    if not parts:
        raise WorkloadError("no trace was given")
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    arrays["offsets"] = np.concatenate([[0], arrays["offsets"]])
    return TraceWorkload(arrays, seed)

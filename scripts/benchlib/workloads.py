"""Row sets that benchmarks run on: random ones in the shapes of agent training, and turns of recorded trajectories.

Numpy only, so that benchmarks without a model can use them too. Random ones depend on their arguments and seed alone.

Legend: S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.benchlib.report import UsageError, trace_arrays

__all__ = ["MODEL_VOCAB", "Workload", "by_task", "grpo", "spread_over_lengths", "trace", "turns"]

MODEL_VOCAB = 4096


@dataclass(frozen=True, eq=False)
class Workload:
    """Rows and where a training loss would fall on them.

    ``loss_T[t]`` marks positions whose *next* token was generated in the row's last turn; a row's last position never
    is. ``notes`` go into the result as they are.
    """

    name: str
    ids_T: np.ndarray
    offsets_S1: np.ndarray
    loss_T: np.ndarray
    vocab_size: int = MODEL_VOCAB
    notes: dict[str, int | str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.offsets_S1) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def lens_S(self) -> np.ndarray:
        return np.diff(self.offsets_S1)

    @property
    def predicting_T(self) -> np.ndarray:
        """True at every position that predicts a token: all but each row's last."""
        predicting = np.ones(self.num_tokens, bool)
        predicting[self.offsets_S1[1:] - 1] = False
        return predicting

    def token_index(self, rows: np.ndarray) -> np.ndarray:
        """Flat token positions of some rows, row after row."""
        bounds = self.offsets_S1
        return np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in rows])

    def subset(self, rows: np.ndarray) -> Workload:
        """The same workload with these rows only."""
        index = self.token_index(rows)
        offsets = np.concatenate([[0], np.cumsum(self.lens_S[rows])])
        return Workload(self.name, self.ids_T[index], offsets, self.loss_T[index], self.vocab_size, self.notes)


def spread_over_lengths(lens_S: np.ndarray, share: float) -> np.ndarray:
    """About ``share`` of the rows (at least one), evenly over the sorted lengths and always with the longest; ascending
    row numbers.
    """
    order = np.argsort(lens_S, kind="stable")
    count = max(1, round(share * len(order)))
    ranks = np.floor((np.arange(count) + 1) * len(order) / count).astype(np.int64) - 1
    return np.sort(order[ranks])


def grpo(
    seed: int = 0, num_rows: int = 32, length: int = 768, shared: float = 0.8, branches: int | None = None
) -> Workload:
    """One group: ``num_rows`` rows of ``length`` random tokens that share the first ``shared`` of them.

    With ``branches`` below ``num_rows`` the tree has two levels: the rows are dealt evenly over that many branches, and
    those of one branch share half of what follows the common part. The loss is on everything after the common part.
    """
    branches = num_rows if branches is None else branches
    prompt_len = round(length * shared)
    if not 1 <= branches <= num_rows or not 1 <= prompt_len < length:
        raise UsageError(
            f"grpo needs 1 <= branches <= rows and a shared part of 1 to length-1 tokens; got branches={branches}, "
            f"rows={num_rows}, shared={prompt_len} of {length} tokens"
        )
    rng = np.random.default_rng(seed)
    prompt = _random_ids(rng, prompt_len)
    stem_len = (length - prompt_len) // 2 if branches < num_rows else 0
    stems = [_random_ids(rng, stem_len) for _ in range(branches)]
    rows = [
        np.concatenate([prompt, stems[row * branches // num_rows], _random_ids(rng, length - prompt_len - stem_len)])
        for row in range(num_rows)
    ]
    return _workload("grpo", rows, [prompt_len] * num_rows)


def turns(
    seed: int = 0, num_tasks: int = 4, num_samples: int = 3, num_turns: int = 5, scale: float = 1.0,
    system_tokens: int = 400,
) -> Workload:  # fmt: skip
    """Agent conversations, one row per turn, as a chat template that strips earlier thinking renders them.

    All begin with one system prompt; samples of a task share its first user turn. A turn is thinking of 30-150 tokens
    and an answer of 20-60; user turns have 20-60. History holds answers without their thinking, so that every turn's
    thinking and answer hang beside the trunk. ``scale`` multiplies all lengths. The loss is on the last turn's thinking
    and answer.
    """
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> np.ndarray:
        return _random_ids(rng, max(1, round(scale * int(rng.integers(low, high + 1)))))

    system = _random_ids(rng, max(1, round(scale * system_tokens)))
    rows, loss_starts = [], []
    for _ in range(num_tasks):
        question = np.concatenate([system, draw(20, 60)])
        for _ in range(num_samples):
            history = question
            for _ in range(num_turns):
                thinking, answer = draw(30, 150), draw(20, 60)
                rows.append(np.concatenate([history, thinking, answer]))
                loss_starts.append(len(history))
                history = np.concatenate([history, answer, draw(20, 60)])
    return _workload("turns", rows, loss_starts)


def trace(file: str | Path, set_name: str, num_trajectories: int, max_len: int, samples_per_task: int = 8) -> Workload:
    """Recorded trajectories, one row per assistant turn: everything up to that turn's end, the loss on the turn.

    ``set_name`` names one set of the file, or all sets below it (``airline`` covers ``airline/...``). Tasks with the
    most trajectories come first, each with at most ``samples_per_task`` of them, until there are ``num_trajectories``.
    Turns that end after ``max_len`` tokens are dropped, not cut. Token ids are renumbered densely in the order of their
    old numbers; more of them than `MODEL_VOCAB` enlarge the vocabulary, and ``notes`` say so.
    """
    arrays = trace_arrays(file, ("set", "task_id", "ids", "offsets", "turn_traj", "turn_start", "turn_end"))
    sets = arrays["set"]
    members = np.flatnonzero((sets == set_name) | np.char.startswith(sets, f"{set_name}/"))
    if not len(members):
        raise UsageError(f"the trace has no set {set_name!r}; it has {', '.join(np.unique(sets).tolist())}")
    chosen = by_task(members, arrays["task_id"], samples_per_task)
    if len(chosen) < num_trajectories:
        raise UsageError(
            f"set {set_name!r} has {len(chosen)} trajectories at {samples_per_task} per task, "
            f"{num_trajectories} were asked for; lower --trajectories or raise --samples-per-task"
        )
    chosen = chosen[:num_trajectories]
    ids_T, offsets = arrays["ids"], arrays["offsets"].tolist()
    turn_traj, turn_start, turn_end = (arrays[f"turn_{name}"] for name in ("traj", "start", "end"))
    rows, loss_starts, num_dropped = [], [], 0
    for trajectory in chosen:
        for turn in np.flatnonzero(turn_traj == trajectory).tolist():
            if turn_end[turn] > max_len:
                num_dropped += 1
                continue
            rows.append(ids_T[offsets[trajectory] : offsets[trajectory] + int(turn_end[turn])])
            loss_starts.append(int(turn_start[turn]))
    if not rows:
        raise UsageError(f"all {num_dropped} turns are longer than --max-len {max_len}; raise it")
    flat = np.concatenate(rows)
    distinct = np.unique(flat)
    rows = [np.searchsorted(distinct, row).astype(np.int32) for row in rows]
    notes: dict[str, int | str] = {
        "set": set_name,
        "trajectories": num_trajectories,
        "max_len": max_len,
        "dropped_turns": num_dropped,
        "distinct_ids": len(distinct),
    }
    if len(distinct) > MODEL_VOCAB:
        notes["vocabulary"] = f"enlarged from {MODEL_VOCAB} to the {len(distinct)} distinct ids of the trace"
    return _workload("trace", rows, loss_starts, max(MODEL_VOCAB, len(distinct)), notes)


def by_task(members: np.ndarray, task_id: np.ndarray, samples_per_task: int) -> list[int]:
    """``members``, at most so many of a task, those of the tasks that have most of them first."""
    groups: dict[str, list[int]] = {}
    for trajectory in members.tolist():
        groups.setdefault(str(task_id[trajectory]), []).append(trajectory)
    largest_first = sorted(groups.values(), key=lambda group: -len(group))
    return list(itertools.chain.from_iterable(group[:samples_per_task] for group in largest_first))


def _random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, MODEL_VOCAB, count, dtype=np.int32)


def _workload(
    name: str, rows: list[np.ndarray], loss_starts: Iterable[int], vocab_size: int = MODEL_VOCAB,
    notes: dict[str, int | str] | None = None,
) -> Workload:  # fmt: skip
    """Rows end to end; the loss is on a row's tokens from its loss start on, each predicted one position before."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    loss_T = np.zeros(int(offsets[-1]), bool)
    for start, (lo, hi) in zip(loss_starts, itertools.pairwise(offsets.tolist()), strict=True):
        loss_T[lo + max(start, 1) - 1 : hi - 1] = True
    return Workload(name, np.concatenate(rows).astype(np.int32), offsets, loss_T, vocab_size, notes or {})

"""The data set of a run: one line per task, in tau2's own order."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tau2.domains import task_ids

__all__ = ["write_dataset"]


def write_dataset(folder: Path, domain: str, train_split: str = "train", eval_split: str = "test") -> tuple[int, int]:
    """Write train.jsonl and eval.jsonl of ``{"domain", "task_id", "split"}`` lines; returns how many each holds.

    The mock domain has no test tasks: its nine tasks serve for both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(  # type: ignore[return-value]
        _write(folder / name, domain, split)
        for name, split in (("train.jsonl", train_split), ("eval.jsonl", eval_split))
    )


def _write(path: Path, domain: str, split: str) -> int:
    ids = task_ids(domain, split)
    lines = [json.dumps({"domain": domain, "task_id": task_id, "split": split}) + "\n" for task_id in ids]
    path.write_text("".join(lines))
    return len(lines)

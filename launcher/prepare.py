"""The first act of a run: ``python -m launcher.prepare --run RUN`` calls the configured function.

It is a process of its own, because the function may train a start policy (and load torch), which the launcher must not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_dta.config import ConfigError, load_run_config

__all__ = ["check_prepared", "count_items", "main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.prepare", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    run_dir: Path = parser.parse_args(argv).run
    try:
        config = load_run_config(run_dir)
        if config.prepare is None:
            raise ConfigError("prepare is not set; there is nothing to run")
        resolve(config.prepare)(config, run_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def resolve(dotted: str) -> Callable[..., Any]:
    """The function behind ``package.module.name``; raises ConfigError when there is none."""
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"prepare={dotted}: {error}; give the dotted name of a function (config, run_dir)") from error
    if not callable(found):
        raise ConfigError(f"prepare={dotted} is not a function")
    return found


def count_items(path: Path) -> int:
    """Lines of a jsonl file that hold something."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def check_prepared(run_dir: Path, batch_size: int) -> int:
    """Number of training prompts in a prepared run; ConfigError when data or model are missing or too few."""
    train = run_dir / "dataset" / "train.jsonl"
    if not train.is_file():
        raise ConfigError(f"{train} is missing after prepare; set prepare to a function that writes it")
    if not (run_dir / "model" / "config.json").is_file():
        raise ConfigError(
            f"{run_dir / 'model'} holds no model after prepare; set actor.path, or a prepare that builds one"
        )
    items = count_items(train)
    if items < batch_size:
        raise ConfigError(
            f"the training data set has {items} prompts, fewer than train_dataset.batch_size={batch_size}; "
            f"lower train_dataset.batch_size to at most {items} or add data"
        )
    return items


if __name__ == "__main__":
    sys.exit(main())

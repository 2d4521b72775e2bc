#!/usr/bin/env python3
"""Benchmarks of single parts, each a subcommand that prints one JSON object; exit code 1 if it holds "passed": false.

    scripts/bench.py tree --workload turns --json -

A subcommand is a module of `scripts.benchlib` with ``add_arguments(parser)`` and ``run(args) -> dict``; register it in
`COMMANDS`. Only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "batcher": ("scripts.benchlib.batcher", "trajectories per second into the batcher, log on disk included"),
    "drift": ("scripts.benchlib.drift", "accept length over policy updates: adapted drafter, frozen, and trained anew"),
    "partition": ("scripts.benchlib.partition", "cuts of a batch over ranks: balance, duplicates, seconds"),
    "pipeline": ("scripts.benchlib.pipeline", "idle time and memory of pipeline stages on a plan, simulated"),
    "simulate": ("scripts.benchlib.simulation", "simulated step time and staleness against real runs"),
    "rollout": ("scripts.benchlib.rollout", "the embedded server's engine against static batches of transformers"),
    "soak": ("scripts.benchlib.soak", "a server under mixed load for minutes; nothing may leak"),
    "spec": ("scripts.benchlib.spec", "speculative decoding against plain, every arm and the tuner"),
    "tail": ("scripts.benchlib.tail", "a long-tailed rollout step: plain, static speculation, TLT with spot training"),
    "tree": ("scripts.benchlib.tree", "training step of the tree engine against dense rows"),
    "weights": ("scripts.benchlib.weights", "latency of weight updates and the pause they cause, per path"),
}
_QUIET = {
    "OMP_NUM_THREADS": "1",  # torch reads it at import; a command with --threads sets the number afterwards
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KINETO_LOG_LEVEL": "99",  # the memory meter's profiler announces itself otherwise
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py", description="Benchmarks; `bench.py COMMAND --help` for options.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
        command.add_argument("--json", default="-", metavar="PATH", help="where the result goes; - is standard output")
    args = parser.parse_args(argv)
    report = importlib.import_module("scripts.benchlib.report")
    try:
        result = args.run(args)
    except report.UsageError as error:
        parser.exit(2, f"bench.py {args.command}: {error}\n")
    report.write_json(result, args.json)
    return 1 if result.get("passed") is False else 0


def _use_the_projects_python() -> None:
    """Start again under .venv's Python if this is another one."""
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    _use_the_projects_python()
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    warnings.simplefilter("ignore")  # Megatron lists what is not installed
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))

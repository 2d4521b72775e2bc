"""The `areal-dta` command. Parsing only: each sub-command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main"]

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped."""
    from areal_dta.config_errors import ConfigError

    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except (ConfigError, _run_error()) as error:
        print(f"error: {error}", file=sys.stderr)
        if getattr(args, "json", False):
            print(json.dumps({"status": "failed", "cause": str(error)}), flush=True)
        return EXIT_USAGE
    except BrokenPipeError:
        return 1

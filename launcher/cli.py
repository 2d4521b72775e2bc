"""The `areal-dta` command. Parsing only: each sub-command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_dta.config import ConfigError
from launcher.rundir import RunDir, RunError

__all__ = ["main"]

EXIT_WRONG_INPUT = 2
EXIT_STOPPED = 130
MAX_PORT = 65_535
PLANS = ("auto", "classic", "sparse", "dense")
ORDERS = ("lexicographic", "heavy_first", "heavy_last")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped."""
    args = _parse(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_STOPPED
    except (ConfigError, RunError) as error:  # damaged files and a dashboard that cannot be served included
        print(f"error: {error}", file=sys.stderr)
        if getattr(args, "json", False):
            print(json.dumps({"status": "failed", "cause": str(error)}), flush=True)
        return EXIT_WRONG_INPUT
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but ``key=value`` may stand after options, where argparse no longer fills a ``nargs='*'``."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(late) < len(rest) or (late and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word not in late) or ' '.join(late)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-dta",
        description="Reinforcement learning on multi-turn LLM agents: AReaL with prefix-tree training.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _command(commands, "run", _run, "train from a configuration file")
    run.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; AReaL's files load too")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    run.add_argument(
        "--dry-run", action="store_true", help="show processes, placement, ports and values; start nothing"
    )
    run.add_argument("--run-dir", type=Path, help="folder of the run (default: fileroot/experiment/trial)")
    _output_options(run)

    plan = _command(commands, "plan", _plan, "the prefix tree of a trace, and what training on it will cost")
    plan.add_argument(
        "file", type=Path, metavar="TRACE", help="npz file with ids and offsets (or a CONFIG: run --dry-run)"
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    plan.add_argument("--ranks", type=_count, metavar="K", help="data-parallel ranks to cut the rows over (default: 1)")
    plan.add_argument("--partition", metavar="METHOD", help="how they are cut (default: refined)")
    plan.add_argument("--model", type=Path, metavar="FOLDER", help="Hugging Face folder; only its config.json is read")
    plan.add_argument("--plan", choices=PLANS, help="how the trie is cut into blocks (default: auto)")
    plan.add_argument("--max-block-tokens", type=_count, metavar="N", help="tokens of one block (default: 2048)")
    plan.add_argument("--activation-budget", metavar="BYTES", help="peak of a walk, such as 2GiB (default: automatic)")
    plan.add_argument("--calibration", type=Path, metavar="FILE", help="measured costs, RUN/calibration.json")
    plan.add_argument(
        "--rows", choices=("episodes", "turns"), help="what a row is (default: turns, if the file has any)"
    )
    plan.add_argument(
        "--where", action="append", default=[], metavar="field=value", help="only episodes with that value"
    )
    plan.add_argument("--dtype", help="of activations, for estimates (default: the model's)")
    plan.add_argument("--tp", type=_count, metavar="N", help="tensor-parallel ranks, for estimates (default: 1)")
    plan.add_argument("--pp", type=_count, metavar="N", help="pipeline stages, for estimates (default: 1)")
    plan.add_argument("--order", choices=ORDERS, help="of subtrees, as dta.order (default: lexicographic)")
    plan.add_argument("--no-cut-tail", action="store_true", help="as dta.cut_tail=false, for --plan classic")
    plan.add_argument("--no-leaf-merge", action="store_true", help="as dta.leaf_merge=false, for --plan dense")
    plan.add_argument("--compare", action="store_true", help="also plan it in the other ways")
    _simulation_options(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")

    resume = _command(commands, "resume", _resume, "continue a failed or stopped run from its last checkpoint")
    _run_argument(resume)
    _output_options(resume)

    status = _command(commands, "status", _status, "state, processes and latest metrics of a run")
    _run_argument(status)
    status.add_argument("--json", action="store_true", help="print one JSON object")

    stop = _command(commands, "stop", _stop, "stop a run and wait until everything has ended")
    _run_argument(stop)

    report = _command(commands, "report", _report, "write one self-contained HTML file about a run")
    _run_argument(report)
    report.add_argument("--out", type=Path, help="file to write (default: RUN/report.html)")

    dashboard = _command(commands, "dashboard", _dashboard, "serve a live page about a run")
    _run_argument(dashboard)
    dashboard.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    dashboard.add_argument(
        "--port", type=_port, default=8787, help="port to bind, 0: any free one (default: %(default)s)"
    )

    _command(commands, "doctor", _doctor, "check this machine and its packages")
    return parser


def _simulation_options(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("simulation", "a CONFIG's whole pipeline in simulated time (docs/simulation.md)")
    group.add_argument("--simulate", action="store_true", help="throughput, idle shares and staleness of a CONFIG")
    group.add_argument("--from-run", type=Path, metavar="RUN", help="speeds and lengths of a recorded run")
    group.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help="lengths of a trace")
    group.add_argument("--assume", action="append", default=[], metavar="name=value", help="a speed or a length")
    group.add_argument("--search", type=_count, metavar="GPUS", help="the best split between rollout and training")
    group.add_argument("--steps", type=_count, metavar="N", help="steps to simulate (default: 20)")


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= MAX_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 0 (any free one) to {MAX_PORT}")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number above 0")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=function)
    return parser


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")


def _output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout; all else goes to stderr")
    parser.add_argument("--no-progress", action="store_true", help="no line that is updated in place")


def _run(args: argparse.Namespace) -> int:
    from launcher.commands import run

    return run(args.config, args.overrides, args.dry_run, args.json, args.run_dir, not args.no_progress)


def _plan(args: argparse.Namespace) -> int:
    from launcher.plan_command import plan

    return plan(args)


def _resume(args: argparse.Namespace) -> int:
    from launcher.commands import resume

    return resume(args.run, args.json, not args.no_progress)


def _status(args: argparse.Namespace) -> int:
    from launcher.commands import status

    return status(args.run, args.json)


def _stop(args: argparse.Namespace) -> int:
    from launcher.commands import stop

    return stop(args.run)


def _report(args: argparse.Namespace) -> int:
    run = RunDir(args.run).require()
    from launcher.report import write_report

    out = args.out or run.path / "report.html"
    write_report(run.path, out)
    print(f"wrote {out}")
    return 0


def _dashboard(args: argparse.Namespace) -> int:
    run = RunDir(args.run).require()
    from launcher.dashboard import serve
    from launcher.run_files import read_run_files

    api_key = read_run_files(run.path).setting("runtime.api_key")
    stopped_by = serve(run.path, args.host, args.port, str(api_key) if api_key else None)
    return EXIT_STOPPED if stopped_by == signal.SIGINT else 0


def _doctor(args: argparse.Namespace) -> int:
    from launcher.doctor import diagnose

    return diagnose(sys.stdout)


if __name__ == "__main__":
    sys.exit(main())

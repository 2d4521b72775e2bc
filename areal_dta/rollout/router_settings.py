"""What a router process needs to know, from a run directory or from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from areal_dta.config import load_run_config
from areal_dta.records import LaunchPlan
from areal_dta.rollout.router_pool import PoolTimeouts

__all__ = ["RouterSettings", "parse_args", "settings_from_run"]

DESCRIPTION = "One address for all rollout servers: affinity, hand-over when a server dies, weight updates."


@dataclass(frozen=True)
class RouterSettings:
    """Everything a router process needs to know."""

    servers: tuple[str, ...]
    host: str
    port: int
    state_file: Path | None = None
    epoch: int | None = None
    needs_publish: bool = False
    api_key: str | None = None
    metrics_address: str | None = None
    report_interval_s: float = 1.0
    request_timeout_s: float = 3600.0
    no_server_wait_s: float = 120.0  # how long a request waits for a live server
    max_attempts: int = 4
    spill_above: int = 16  # unanswered requests by which the preferred server may exceed the least loaded
    max_body_bytes: int = 64 << 20
    timeouts: PoolTimeouts = field(default_factory=PoolTimeouts)


def settings_from_run(run_dir: Path) -> RouterSettings:
    plan = LaunchPlan.read(run_dir / "launch.json")
    config = load_run_config(run_dir)
    address = urlsplit(plan.router)
    if address.hostname is None or address.port is None:
        raise ValueError(f"router address {plan.router!r} in {run_dir / 'launch.json'} has no host or port")
    return RouterSettings(
        servers=plan.servers,
        host=address.hostname,
        port=address.port,
        state_file=run_dir / "weights" / "current.json",
        epoch=plan.epoch,
        needs_publish=plan.resume_step is not None,
        api_key=plan.api_key,
        metrics_address=plan.metrics,
        report_interval_s=config.telemetry.interval_s,
        request_timeout_s=config.rollout.request_timeout,
    )


def parse_args(argv: list[str] | None = None) -> RouterSettings:
    parser = argparse.ArgumentParser(prog="python -m areal_dta.rollout.router", description=DESCRIPTION)
    parser.add_argument("--run", type=Path, help="run directory; takes every other setting from it")
    parser.add_argument("--servers", help="comma-separated URLs, e.g. http://127.0.0.1:30000")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30100, help="0: any free port, printed on start")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=RouterSettings.no_server_wait_s,
        help="how long a request waits for a live server",
    )
    parser.add_argument(
        "--spill-above", type=int, default=RouterSettings.spill_above, help="requests that affinity may cost in balance"
    )
    parser.add_argument("--state-file", type=Path, help="remembers the current version across restarts")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.servers is None):
        parser.error("give either --run RUN or --servers URL,URL")
    if args.run is not None:
        return settings_from_run(args.run)
    if args.spill_above < 0:
        parser.error(f"--spill-above must not be negative, got {args.spill_above}")
    servers = tuple(url.strip().rstrip("/") for url in args.servers.split(",") if url.strip())
    if not servers or not all(urlsplit(u).scheme in ("http", "https") and urlsplit(u).hostname for u in servers):
        parser.error(f"--servers must be URLs like http://127.0.0.1:30000, got {args.servers!r}")
    return RouterSettings(
        servers,
        args.host,
        args.port,
        state_file=args.state_file,
        api_key=args.api_key,
        no_server_wait_s=args.wait_s,
        spill_above=args.spill_above,
    )

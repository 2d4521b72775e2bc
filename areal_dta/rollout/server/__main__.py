"""``python -m areal_dta.rollout.server --run RUN --index i``, or standalone with ``--model PATH --port P``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import torch
import uvloop
from aiohttp import web

from areal_dta import metrics
from areal_dta.config import Config, load_run_config
from areal_dta.drafter.arms import DEFAULT_ARMS, Arm
from areal_dta.drafter.ngram import NgramLimits
from areal_dta.drafter.publish import newest_drafter
from areal_dta.drafter.reporter import ServerReporter
from areal_dta.drafter.tuner import TunerSettings
from areal_dta.nn import DecoderConfig, UnsupportedModel, WeightsMismatch, load_decoder
from areal_dta.records import LaunchPlan
from areal_dta.rollout.server.api import ApiSettings, ServerApi
from areal_dta.rollout.server.control_api import WHILE_RELEASED
from areal_dta.rollout.server.engine import Engine
from areal_dta.rollout.server.feature_recorder import RecorderSettings
from areal_dta.rollout.server.sampling_fields import Limits
from areal_dta.rollout.server.scheduler import SchedulerLimits
from areal_dta.rollout.server.spec_control import SpecSettings
from areal_dta.rollout.server.tokenizer import load_codec
from areal_dta.weights import TornWeights, read_manifest, verify

log = logging.getLogger("areal_dta.server")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SWITCH_INTERVAL_S = 0.0005  # bounds how long the event loop keeps the interpreter from the model thread
WATCH_INTERVAL_S = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """Everything a server process needs to know."""

    name: str
    model: Path
    host: str
    port: int
    dtype: str
    limits: SchedulerLimits
    initial_version: str | None = None  # None: from the folder's manifest, else "default"
    api: ApiSettings = field(default_factory=ApiSettings)
    metrics_address: str | None = None
    report_interval_s: float = 1.0
    threads: int = 1
    seed: int | None = None
    stop_timeout_s: float = 10.0
    speculation: SpecSettings | None = None  # None: plain decoding only
    coordinator: str | None = None  # of the drafter's training


def settings_from_run(run_dir: Path, index: int) -> ServerSettings:
    """Settings of server ``index`` of a run: its address from launch.json, its sizes from config.yaml."""
    plan = LaunchPlan.read(run_dir / "launch.json")
    config = load_run_config(run_dir)
    own = config.embedded
    if not 0 <= index < len(plan.servers):
        raise ValueError(f"--index {index} but {run_dir / 'launch.json'} names {len(plan.servers)} servers")
    address = urlsplit(plan.servers[index])
    if address.hostname is None or address.port is None:
        raise ValueError(f"server address {plan.servers[index]!r} in {run_dir / 'launch.json'} has no host or port")
    return ServerSettings(
        name=f"server.{index}",
        model=run_dir / "model",
        host=address.hostname,
        port=address.port,
        dtype=config.actor.dtype,
        limits=SchedulerLimits(own.max_batch, own.max_total_tokens, own.max_prefill_tokens),
        initial_version=f"{plan.epoch}:0",
        api=ApiSettings(
            plan.api_key,
            config.rollout.request_timeout,
            max_waiting=own.max_waiting,
            while_released=own.while_released,
            reasoning=own.reasoning_parser != "none",
        ),
        metrics_address=plan.metrics,
        report_interval_s=config.telemetry.interval_s,
        threads=own.threads,
        seed=config.seed * 1009 + index,
        stop_timeout_s=config.runtime.stop_timeout_s,
        speculation=_run_speculation(config, run_dir, index),
        coordinator=plan.coordinator,
    )


def _run_speculation(config: Config, run_dir: Path, index: int) -> SpecSettings | None:
    tlt = config.tlt
    if not tlt.enabled:
        return None
    trained = newest_drafter(run_dir / "drafter" / "versions") if tlt.train else None  # of before a restart
    return SpecSettings(
        arms=tuple(Arm.parse(name) for name in tlt.arms) or DEFAULT_ARMS,
        drafter=trained or (None if tlt.drafter is None else Path(tlt.drafter)),
        tuner=TunerSettings(max_regret=tlt.max_regret, max_batch=tlt.max_batch, seed=config.seed + index),
        ngram=NgramLimits(max_tokens=tlt.ngram_tokens),
        buffer=run_dir / "drafter" / f"buffer.{index}" if tlt.train else None,
        buffer_bytes=tlt.buffer_bytes,
        recorder=RecorderSettings(tlt.record_share, tlt.record_tokens),
        eagle3=tlt.train and tlt.kind == "eagle3",
    )


def parse_args(argv: list[str] | None = None) -> ServerSettings:
    defaults = SchedulerLimits()
    parser = argparse.ArgumentParser(prog="python -m areal_dta.rollout.server", description=__doc__)
    parser.add_argument("--run", type=Path, help="run directory; takes every other setting from it")
    parser.add_argument("--index", type=int, default=0, help="which server of the run")
    parser.add_argument("--model", type=Path, help="Hugging Face folder (config.json, *.safetensors, tokenizer.json)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0: any free port, printed on start")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: as stored")
    parser.add_argument("--api-key")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the model thread")
    parser.add_argument("--max-batch", type=int, default=defaults.max_batch)
    parser.add_argument("--max-total-tokens", type=int, default=defaults.max_total_tokens)
    parser.add_argument("--max-prefill-tokens", type=int, default=defaults.max_prefill_tokens)
    parser.add_argument("--seed", type=int, help="makes seeds of requests without one reproducible")
    parser.add_argument("--request-timeout-s", type=float, default=3600.0)
    parser.add_argument("--max-waiting", type=int, default=ApiSettings.max_waiting, help="more requests are refused")
    parser.add_argument("--max-body-bytes", type=int, default=ApiSettings.max_body_bytes)
    parser.add_argument(
        "--while-released", choices=WHILE_RELEASED, default="wait", help="requests while the KV memory is given back"
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=["none", "qwen3"],
        default="none",
        help="splits <think>...</think> off chat replies",
    )
    parser.add_argument("--speculation", choices=["off", "auto"], default="off", help="auto: where it is faster")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter; without one: n-gram drafts")
    parser.add_argument("--speculation-max-batch", type=int, help="never speculate on more sequences at once")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.model is None):
        parser.error("give either --run RUN or --model PATH")
    if args.run is not None:
        return settings_from_run(args.run, args.index)
    if args.speculation == "off" and (args.drafter is not None or args.speculation_max_batch is not None):
        parser.error("--drafter and --speculation-max-batch need --speculation auto")
    for name in ("threads", "max_batch", "max_total_tokens", "max_prefill_tokens", "max_waiting", "max_body_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return ServerSettings(
        name="server",
        model=args.model,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        limits=SchedulerLimits(args.max_batch, args.max_total_tokens, args.max_prefill_tokens),
        api=ApiSettings(
            args.api_key,
            args.request_timeout_s,
            args.max_body_bytes,
            args.max_waiting,
            args.while_released,
            args.reasoning_parser != "none",
        ),
        threads=args.threads,
        seed=args.seed,
        speculation=SpecSettings(drafter=args.drafter, tuner=TunerSettings(max_batch=args.speculation_max_batch))
        if args.speculation == "auto"
        else None,
    )


def build(settings: ServerSettings, publisher: metrics.Publisher) -> tuple[Engine, ServerApi]:
    """Load the model and assemble the server; raises if the folder is missing, unsupported or torn."""
    model = settings.model
    config = DecoderConfig.from_folder(model)
    dtype = DTYPES.get(config.dtype if settings.dtype == "auto" else settings.dtype)
    if dtype is None:
        raise UnsupportedModel(f"dtype {settings.dtype!r} (stored: {config.dtype!r}) is none of {', '.join(DTYPES)}")
    manifest = verify(model) if read_manifest(model) is not None else None
    version = settings.initial_version or (manifest.weight_version if manifest else "default")
    codec = load_codec(model)
    engine = Engine(
        load_decoder(model, config, dtype),
        version,
        settings.limits,
        publisher,
        codec.decode_raw if codec else None,
        settings.report_interval_s,
        settings.threads,
        settings.speculation,
        None if settings.coordinator is None else ServerReporter(settings.coordinator, settings.name),
    )
    limits = Limits(engine.max_sequence_tokens, config.vocab_size, seed=settings.seed)
    return engine, ServerApi(engine, codec, limits, model, publisher, settings.api)


async def serve(settings: ServerSettings, publisher: metrics.Publisher) -> int:
    """Serve until SIGTERM or SIGINT (returns 0) or until the model thread dies (returns 1)."""
    engine, api = build(settings, publisher)
    engine.start()
    runner = web.AppRunner(
        api.app, handler_cancellation=True, access_log=None, shutdown_timeout=settings.stop_timeout_s
    )
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
    await site.start()
    gc.freeze()  # what start-up built lives as long as the process: not worth scanning again
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    port = _bound_port(runner)
    log.info(
        "%s serves %s (version %s) on http://%s:%d", settings.name, settings.model, engine.version, settings.host, port
    )
    print(f"READY http://{settings.host}:{port}", flush=True)
    while engine.alive and not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), WATCH_INTERVAL_S)
        except TimeoutError:
            continue
    await site.stop()
    await asyncio.to_thread(engine.stop, settings.stop_timeout_s)
    await runner.cleanup()
    await api.close()
    return 0 if engine.error is None else 1


def _bound_port(runner: web.AppRunner) -> int:
    for address in runner.addresses:
        return int(address[1])
    raise RuntimeError("the server is bound to no address")


def main(argv: list[str] | None = None) -> int:
    """Process entry; start-up errors are one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    try:
        settings = parse_args(argv)
        publisher = metrics.init(settings.name, settings.metrics_address)
        with uvloop_runner() as runner:
            code = runner.run(serve(settings, publisher))
        publisher.close()
        return code
    except (
        OSError,
        ValueError,
        socket.gaierror,
        UnsupportedModel,
        WeightsMismatch,
        TornWeights,
    ) as error:
        log.error("cannot serve: %s", error)
        return 2


def uvloop_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())

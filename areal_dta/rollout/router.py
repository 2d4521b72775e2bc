"""``python -m areal_dta.rollout.router --run RUN``, or ``--servers URL,URL --port P``: one address for all servers.

Requests go to the server that holds their prefix and survive the death of a server; weights reach every server through
``/publish``. To SGLang's clients the router looks like one server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop
from aiohttp import web

from areal_dta import metrics
from areal_dta.config import load_run_config
from areal_dta.records import LaunchPlan, WeightVersion
from areal_dta.rollout.router_affinity import Affinity, RequestKeys, request_keys
from areal_dta.rollout.router_pool import INSTANCE_HEADER, Current, Pool, PoolTimeouts, Published, Server, ServerFailed
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.http import guard, json_response, read_json
from areal_dta.weights import TornWeights, folder_digest, read_manifest, verify

__all__ = ["Router", "RouterSettings", "main"]

log = logging.getLogger("areal_dta.router")
AFFINITY_HEADER = "X-Affinity"
RETRY_STATUS = (500, 502, 503)
RETRY_DELAY_S = 0.1


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
    max_body_bytes: int = 64 << 20
    timeouts: PoolTimeouts = field(default_factory=PoolTimeouts)


class Router:
    """Handlers over a `Pool`."""

    def __init__(
        self, settings: RouterSettings, pool: Pool, session: aiohttp.ClientSession, publisher: metrics.Publisher
    ):
        self._settings = settings
        self._pool = pool
        self._session = session
        self._publisher = publisher
        self._affinity = Affinity()
        self._publishing: set[asyncio.Future[Published]] = set()
        self.app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[guard(settings.api_key)])
        post, get = self.app.router.add_post, self.app.router.add_get
        get("/health", self.health)
        get("/get_server_info", self.server_info)
        post("/generate", self.proxy)
        post("/v1/chat/completions", self.proxy)
        for path in ("/get_model_info", "/model_info", "/v1/models", "/health_generate"):
            get(path, self.proxy)
        for path in ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"):
            post(path, self.broadcast)
        get("/flush_cache", self.broadcast)
        post("/update_weights_from_disk", self.update_from_disk)
        post("/publish", self.publish)

    async def proxy(self, request: web.Request) -> web.Response:
        """Forward to one server; if that dies or is restarted meanwhile, to another, at most ``max_attempts`` times."""
        raw = await request.read()
        keys = self._keys(request, raw)
        deadline = time.monotonic() + self._settings.request_timeout_s
        failure = ""
        for attempt in range(self._settings.max_attempts):
            if attempt:
                await asyncio.sleep(RETRY_DELAY_S * attempt)
            server = await self._choose(keys, deadline)
            server.outstanding += 1
            try:
                status, body, content_type = await self._forward(server, request, raw, deadline)
            except (aiohttp.ClientError, ServerFailed) as error:
                failure = f"{server.url}: {error!r}"
                await self._pool.check_suspect(server, f"request failed: {error!r}")
                continue
            except TimeoutError as error:
                limit = self._settings.request_timeout_s
                raise ApiError(f"{server.url} did not answer within {limit:g} s", 504, "timeout") from error
            finally:
                server.outstanding -= 1
            if status in RETRY_STATUS:
                failure = f"{server.url} answered {status}: {body[:200].decode(errors='replace')}"
                await self._pool.check_suspect(server, failure)
                continue
            return web.Response(body=body, status=status, headers={"Content-Type": content_type})
        raise ApiError(f"{self._settings.max_attempts} servers failed in turn, last {failure}", 502, "unavailable")

    def _keys(self, request: web.Request, raw: bytes) -> RequestKeys:
        header = request.headers.get(AFFINITY_HEADER)
        if header or not raw or len(self._pool.servers) == 1:
            return request_keys(header, None)
        try:
            body = json.loads(raw)
        except ValueError:
            return RequestKeys()  # whichever server gets it will say what is wrong
        return request_keys(None, body if isinstance(body, dict) else None)

    async def _choose(self, keys: RequestKeys, deadline: float) -> Server:
        if not self._pool.may_serve:
            wait_s = min(self._settings.no_server_wait_s, max(0.0, deadline - time.monotonic()))
            if not await self._pool.wait_until_serving(wait_s):
                raise ApiError(f"{self._pool.why_not_serving()} (waited {wait_s:g} s)", 503, "unavailable")
        url = self._affinity.pick(keys, {s.url: s.outstanding for s in self._pool.live})
        return self._pool.servers[url]

    async def _forward(
        self, server: Server, request: web.Request, raw: bytes, deadline: float
    ) -> tuple[int, bytes, str]:
        """One attempt; raises ServerFailed as soon as the pool declares the server lost."""
        attempt = asyncio.ensure_future(self._send(server, request, raw))
        lost = asyncio.ensure_future(server.lost.wait())
        try:
            done, _ = await asyncio.wait(
                {attempt, lost}, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
            if attempt in done:
                return attempt.result()
            if lost in done:
                raise ServerFailed(f"went out: {server.reason}")
            raise TimeoutError
        finally:
            attempt.cancel()
            lost.cancel()

    async def _send(self, server: Server, request: web.Request, raw: bytes) -> tuple[int, bytes, str]:
        headers = {"Content-Type": "application/json"} if raw else {}
        instance = server.instance
        async with self._session.request(
            request.method, server.url + request.path, data=raw or None, headers=headers
        ) as r:
            body = await r.read()
            if r.headers.get(INSTANCE_HEADER) != instance:
                raise ServerFailed("answered after a restart, with weights the router has not set")
            return r.status, body, r.headers.get("Content-Type", "application/json")

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok", "alive": len(self._pool.live), "servers": len(self._pool.servers)})

    async def server_info(self, request: web.Request) -> web.Response:
        pool, control_s = self._pool, self._settings.timeouts.control
        infos, failures = await pool.on_all(pool.live, lambda s: pool.call(s, "/get_server_info", None, control_s))
        servers = {
            s.url: {
                "live": s.live,
                "reason": s.reason or str(failures.get(s.url, "")),
                "outstanding": s.outstanding,
                "weight_version": s.version,
                "info": infos.get(s.url),
            }
            for s in pool.servers.values()
        }
        current = pool.current.weight_version if pool.current else next((s.version for s in pool.live), None)
        return json_response({"router": True, "weight_version": current, "paused": pool.paused, "servers": servers})

    async def broadcast(self, request: web.Request) -> web.Response:
        """A control request to all live servers; pausing is remembered for servers that join later."""
        body = await read_json(request, allow_empty=True)
        pool, control_s = self._pool, self._settings.timeouts.control
        was_paused = pool.paused
        if request.path == "/pause_generation":
            pool.paused = True
        elif request.path == "/continue_generation":
            pool.paused = False
        results, failures = await pool.on_all(pool.live, lambda s: pool.call(s, request.path, body, control_s))
        refused = [e for e in failures.values() if isinstance(e, ServerFailed) and e.refused]
        if refused:
            pool.paused = was_paused
            raise ApiError("; ".join(str(e) for e in refused), 400, "refused")
        return json_response({"success": True, "servers": results, "out": {u: str(e) for u, e in failures.items()}})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """SGLang's form of `publish`: without a version or digest of its own, the folder's are used."""
        body = await read_json(request)
        abort = bool(body.get("abort_all_requests"))
        return await self._publish(body.get("model_path"), body.get("weight_version"), None, abort)

    async def publish(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        digest = body.get("digest")
        if not isinstance(digest, str) or not isinstance(body.get("weight_version"), str):
            raise ApiError("send model_path, weight_version and digest (the folder's version.json has them)")
        return await self._publish(body.get("model_path"), body["weight_version"], digest, False)

    async def _publish(self, path: Any, version: Any, digest: str | None, abort: bool) -> web.Response:
        if not isinstance(path, str) or not path:
            raise ApiError(f"model_path must be a folder, got {path!r:.80}")
        try:
            target = await asyncio.to_thread(_identify, Path(path), version, digest)
        except (TornWeights, ValueError, OSError) as error:
            return self._outcome(False, {}, f"refused, nothing was changed: {error}", status=400)
        wait_s = self._settings.timeouts.control
        if not self._pool.live and not await self._wait_live(wait_s):
            return self._outcome(False, {}, f"{self._pool.why_not_serving()} (waited {wait_s:g} s)", status=503)
        # Its own task: a caller that hangs up between pause and continue must not leave the servers paused.
        publishing = asyncio.ensure_future(self._pool.publish(target, abort=abort))
        self._publishing.add(publishing)
        publishing.add_done_callback(self._publishing.discard)
        done = await asyncio.shield(publishing)
        failures = "; ".join(f"{url}: {why}" for url, why in done.failures.items())
        if not done.servers:
            message = f"no server took {target.weight_version}, the old version keeps serving: {failures}"
            return self._outcome(False, {}, message, done.pause_s, done.update_s, 500)
        self._publisher.emit("router/publish_s", done.update_s)
        self._publisher.emit("router/pause_s", done.pause_s)
        message = f"some servers are out and will catch up: {failures}" if failures else "published"
        return self._outcome(True, done.servers, message, done.pause_s, done.update_s)

    async def _wait_live(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._pool.live and time.monotonic() < deadline:
            await asyncio.sleep(self._settings.timeouts.health_interval / 5)
        return bool(self._pool.live)

    def _outcome(
        self,
        success: bool,
        servers: dict[str, str],
        message: str,
        pause_s: float = 0.0,
        update_s: float = 0.0,
        status: int = 200,
    ) -> web.Response:
        return json_response(
            {
                "success": success,
                "servers": servers,
                "pause_s": pause_s,
                "update_s": update_s,
                "message": message,
                "num_paused_requests": 0,
            },
            status,
        )

    async def report(self) -> None:
        """Emit how many servers are alive, until cancelled."""
        while True:
            self._publisher.emit("router/alive", len(self._pool.live))
            await asyncio.sleep(self._settings.report_interval_s)


def _identify(folder: Path, version: Any, digest: str | None) -> Current:
    """Verify a folder and name what is in it; raises TornWeights or ValueError."""
    if version is not None and (not isinstance(version, str) or not version):
        raise ValueError(f"weight_version must be a non-empty string, got {version!r:.60}")
    manifest = read_manifest(folder)
    if manifest is None and digest is None:
        found = folder_digest(folder)
        return Current(str(folder), version or f"sha256:{found[:16]}", found)
    manifest = verify(folder, digest)
    if version is not None and version != manifest.weight_version:
        raise TornWeights(f"{folder} holds version {manifest.weight_version}, not {version}")
    return Current(str(folder), manifest.weight_version, manifest.digest)


def recall(state_file: Path | None, epoch: int | None) -> Current | None:
    """The version published before the router restarted; one of another run epoch is not current any more."""
    if state_file is None or not state_file.is_file():
        return None
    current = Current(**json.loads(state_file.read_text()))
    if epoch is not None and WeightVersion.parse(current.weight_version).epoch != epoch:
        return None
    return current


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
    parser = argparse.ArgumentParser(prog="python -m areal_dta.rollout.router", description=__doc__)
    parser.add_argument("--run", type=Path, help="run directory; takes every other setting from it")
    parser.add_argument("--servers", help="comma-separated URLs, e.g. http://127.0.0.1:30000")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30100, help="0: any free port, printed on start")
    parser.add_argument("--api-key")
    parser.add_argument("--wait-s", type=float, default=120.0, help="how long a request waits for a live server")
    parser.add_argument("--state-file", type=Path, help="remembers the current version across restarts")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.servers is None):
        parser.error("give either --run RUN or --servers URL,URL")
    if args.run is not None:
        return settings_from_run(args.run)
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
    )


async def serve(settings: RouterSettings, publisher: metrics.Publisher) -> int:
    """Route until SIGTERM or SIGINT."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s, sock_connect=settings.timeouts.health)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        current = recall(settings.state_file, settings.epoch)
        pool = Pool(settings.servers, session, settings.state_file, settings.timeouts, current, settings.needs_publish)
        router = Router(settings, pool, session, publisher)
        runner = web.AppRunner(router.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
        await site.start()
        stop = asyncio.Event()
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, stop.set)
        print(f"READY http://{settings.host}:{runner.addresses[0][1]}", flush=True)
        tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(router.report())]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome  # a loop that must run for ever failed: let the launcher restart the router
    return 0


def main(argv: list[str] | None = None) -> int:
    """Process entry; start-up errors are one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        settings = parse_args(argv)
        publisher = metrics.init("router", settings.metrics_address)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve(settings, publisher))
        publisher.close()
        return code
    except (OSError, ValueError) as error:
        log.error("cannot route: %s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""``python -m areal_dta.rollout.router --run RUN``, or ``--servers URL,URL --port P``: one address for all servers.

Requests go to the server that holds their prefix and survive the death of a server; weights reach every server through
``/publish``. To SGLang's clients the router looks like one server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from areal_dta import metrics
from areal_dta.records import WeightVersion
from areal_dta.rollout.router_affinity import Affinity, RequestKeys, request_keys
from areal_dta.rollout.router_pool import Current, Pool, Published, Server, ServerFailed
from areal_dta.rollout.router_relay import Relay
from areal_dta.rollout.router_settings import RouterSettings, parse_args
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.exposition import CONTENT_TYPE, render
from areal_dta.rollout.server.http import guard, json_response, read_json
from areal_dta.weights import TornWeights, folder_digest, read_manifest, verify

__all__ = ["Router", "RouterSettings", "main"]

log = logging.getLogger("areal_dta.router")
AFFINITY_HEADER = "X-Affinity"
RETRY_STATUS = (500, 502, 503)
RETRY_DELAY_S = 0.1


class Router:
    """Handlers over a `Pool`."""

    def __init__(
        self, settings: RouterSettings, pool: Pool, session: aiohttp.ClientSession, publisher: metrics.Publisher
    ):
        self._settings = settings
        self._pool = pool
        self._session = session
        self._publisher = publisher
        self._affinity = Affinity(spill_above=settings.spill_above)
        self.num_requests = self.num_retries = 0
        self._publishing: set[asyncio.Future[Published]] = set()
        self.app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[guard(settings.api_key)])
        post, get = self.app.router.add_post, self.app.router.add_get
        get("/health", self.health)
        get("/get_server_info", self.server_info)
        post("/generate", self.proxy)
        post("/v1/chat/completions", self.proxy)
        for path in ("/get_model_info", "/model_info", "/v1/models", "/health_generate"):
            get(path, self.proxy)
        get("/metrics", self.metrics)
        for path in (
            "/pause_generation",
            "/continue_generation",
            "/abort_request",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            post(path, self.broadcast)
        for path in ("/init_weights_update_group", "/update_weights_from_distributed", "/begin_weight_update"):
            post(path, self.refuse_group_update)
        get("/flush_cache", self.broadcast)
        post("/update_weights_from_disk", self.update_from_disk)
        post("/publish", self.publish)

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """Forward to one server; if that dies or is restarted meanwhile, to another, at most ``max_attempts`` times.

        A stream that has begun cannot move: it ends with an error event.
        """
        raw = await request.read()
        keys = self._keys(request, raw)
        deadline = time.monotonic() + self._settings.request_timeout_s
        failure = ""
        tried: set[str] = set()
        self.num_requests += 1
        for attempt in range(self._settings.max_attempts):
            if attempt:
                self.num_retries += 1
                await asyncio.sleep(RETRY_DELAY_S * attempt)
            server = await self._choose(keys, deadline, tried)
            tried.add(server.url)
            server.outstanding += 1
            relay = Relay(self._session, server, request, raw)
            try:
                response = await relay.run(deadline)
            except (aiohttp.ClientError, ServerFailed) as error:
                failure = f"{server.url}: {error!r}"
                await self._pool.check_suspect(server, f"request failed: {error!r}")
                if relay.stream is not None:
                    return await relay.break_off(ApiError(f"the stream broke off: {failure}", 502, "unavailable"))
                continue
            except TimeoutError as error:
                limit = self._settings.request_timeout_s
                late = ApiError(f"{server.url} did not answer within {limit:g} s", 504, "timeout")
                if relay.stream is not None:
                    return await relay.break_off(late)
                raise late from error
            finally:
                server.outstanding -= 1
            if response.status in RETRY_STATUS and isinstance(response, web.Response):
                failure = f"{server.url} answered {response.status}: {(response.text or '')[:200]}"
                await self._pool.check_suspect(server, failure)
                continue
            return response
        raise ApiError(f"{self._settings.max_attempts} servers failed in turn, last {failure}", 502, "unavailable")

    def _keys(self, request: web.Request, raw: bytes) -> RequestKeys:
        header = request.headers.get(AFFINITY_HEADER)
        if header or not raw or len(self._pool.servers) == 1:
            return request_keys(header, None)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return RequestKeys()  # whichever server gets it will say what is wrong
        return request_keys(None, body if isinstance(body, dict) else None)

    async def _choose(self, keys: RequestKeys, deadline: float, tried: set[str]) -> Server:
        """A live server, one that has not been ``tried`` if there is any."""
        if not self._pool.may_serve:
            wait_s = min(self._settings.no_server_wait_s, max(0.0, deadline - time.monotonic()))
            if not await self._pool.wait_until_serving(wait_s):
                raise ApiError(f"{self._pool.why_not_serving()} (waited {wait_s:g} s)", 503, "unavailable")
        live = self._pool.live
        fresh = [s for s in live if s.url not in tried] or live
        url = self._affinity.pick(keys, {s.url: s.outstanding for s in fresh})
        return self._pool.servers[url]

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok", "alive": len(self._pool.live), "servers": len(self._pool.servers)})

    async def refuse_group_update(self, request: web.Request) -> web.Response:
        raise ApiError(
            f"{request.path} is not available through the router: a server that comes back later could not catch up; "
            "use /publish or /update_weights_from_disk, or call the servers directly"
        )

    async def metrics(self, request: web.Request) -> web.Response:
        servers = list(self._pool.servers.values())
        text = render(
            [
                (
                    "areal_dta:router_server_live", "gauge", "1 for a server that takes requests.",
                    [({"server": s.url}, float(s.live)) for s in servers],
                ),
                (
                    "areal_dta:router_outstanding_requests", "gauge", "Unanswered requests of a server.",
                    [({"server": s.url}, float(s.outstanding)) for s in servers],
                ),
                (
                    "areal_dta:router_requests_total", "counter", "Requests taken.",
                    [({}, float(self.num_requests))],
                ),
                (
                    "areal_dta:router_retries_total", "counter", "Requests handed to another server or again.",
                    [({}, float(self.num_retries))],
                ),
                (
                    "areal_dta:router_choices_total", "counter", "Choices of a server by reason.",
                    [({"reason": why}, float(count)) for why, count in self._affinity.reasons.items()],
                ),
            ]
        )  # fmt: skip
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

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

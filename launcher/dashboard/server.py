"""The web server of the page: static files, one data endpoint, nothing else."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from launcher.dashboard.page import ASSETS, PAGE, asset
from launcher.dashboard.source import RunSource
from launcher.rundir import RunError

__all__ = ["Dashboard", "DashboardError", "serve"]

STOP_TIMEOUT_S = 2.0
_COOKIE = "areal_dta_key"
_HEADERS = {
    # The page loads nothing from elsewhere, and the browser enforces it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardError(RunError):
    """The page cannot be served; the message names the remedy."""


class Dashboard:
    """A running server: `start`, then ``url``, then `stop`. Raises RunFileError where there is no run directory."""

    def __init__(self, run_dir: Path, api_key: str | None = None) -> None:
        self.url = ""
        self._source = RunSource(run_dir)
        self._api_key = api_key
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind (``port`` 0: any free one) and return the URL; DashboardError where that is not possible.

        Other machines are let in with a key only.
        """
        if self._api_key is None and not _is_loopback(host):
            raise DashboardError(
                f"--host {host} would show the run to everyone who can reach this machine; bind 127.0.0.1 and use a "
                "tunnel (ssh -L 8787:127.0.0.1:8787 HOST), or give the run a runtime.api_key"
            )
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/api/run", self._run)
        for name in ASSETS:
            app.router.add_get(f"/{name}", self._asset)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_TIMEOUT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:  # taken, no such address, or a host that does not resolve
            await self.stop()
            raise DashboardError(
                f"cannot serve on {host} port {port}: {error.strerror}; choose another --port (0: any free one)"
            ) from error
        bound_port = self._runner.addresses[0][1]
        shown_host = f"[{host}]" if ":" in host else host
        query = f"?key={quote(self._api_key, safe='')}" if self._api_key else ""
        self.url = f"http://{shown_host}:{bound_port}/{query}"
        return self.url

    async def stop(self) -> None:
        """Close all connections; bounded by `STOP_TIMEOUT_S`."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, from the query, a bearer header, or the cookie set by the first visit; add the headers."""
        if self._api_key is not None:
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            offered = request.query.get("key") or bearer or request.cookies.get(_COOKIE, "")
            if not hmac.compare_digest(offered.encode(), self._api_key.encode()):
                raise web.HTTPUnauthorized(text="open the address that `areal-dta dashboard` printed, with its key\n")
        response = await handler(request)
        response.headers.update(_HEADERS)
        if self._api_key is not None and "key" in request.query:
            response.set_cookie(_COOKIE, self._api_key, httponly=True, samesite="Strict")
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=asset(PAGE), content_type="text/html")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        return web.Response(text=asset(name), content_type=ASSETS[name])

    async def _run(self, request: web.Request) -> web.Response:
        """`GET /api/run?since=CURSOR`: the view of `RunModel.view` as JSON."""
        view = await asyncio.to_thread(self._source.view, request.query.get("since"))
        return web.Response(text=json.dumps(view, allow_nan=False), content_type="application/json")


def serve(run_dir: Path, host: str = "127.0.0.1", port: int = 8787, api_key: str | None = None) -> int:
    """Serve the page of a run until SIGINT or SIGTERM, whose number is returned; prints the URL (port 0: any)."""
    return asyncio.run(_serve(run_dir, host, port, api_key))


async def _serve(run_dir: Path, host: str, port: int, api_key: str | None) -> int:
    dashboard = Dashboard(run_dir, api_key)
    url = await dashboard.start(host, port)
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    print(f"dashboard of {run_dir}: {url}  (Ctrl-C stops it; the run goes on)", flush=True)
    stopped_by = await stopped  # for ever by intent: until a person or a program ends the server
    await dashboard.stop()
    return stopped_by


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or nothing, which binds every address
        return host == "localhost"

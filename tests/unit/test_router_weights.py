"""Weights through the router: every live server serves one version of one digest, whatever single servers do.

Scripted servers in this process, as the embedded server and as releases of SGLang. No model, no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from areal_dta.rollout import router_pool
from areal_dta.rollout.router_pool import Current, Pool, PoolTimeouts
from areal_dta.rollout.sglang_contract import PINNED, contract_of

TIMEOUTS = PoolTimeouts(health=2.0, health_interval=0.05, health_failures=2, control=5.0, max_backoff=0.2)
NEXT = Current("/weights/v1", "0:1", "digest-1")


class Scripted:
    """A server that takes weights as told: ``lie`` is the digest it reports instead, ``refuse`` a refused update."""

    def __init__(self, release: str | None = None) -> None:
        self.release = release  # None: the embedded server
        self.version, self.digest = "0:0", "digest-0"
        self.lie: str | None = None
        self.refuse = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.url = ""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_post("/update_weights_from_disk", self._update)
        for path in ("/pause_generation", "/continue_generation"):
            app.router.add_post(path, self._control)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(headers={} if self.release else {"X-Server-Instance": self.url})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.release} if self.release else {"instance": self.url})

    async def _model_info(self, request: web.Request) -> web.Response:
        told = {} if self.release else {"weights_digest": self.lie or self.digest}
        return web.json_response({"weight_version": self.version, **told})

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json()))
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        if self.refuse:
            return web.json_response({"success": False, "message": "torn"}, status=400)
        self.version, self.digest = body["weight_version"], "digest-1"
        return web.json_response({"success": True})


@asynccontextmanager
async def pool_of(*servers: Scripted) -> AsyncIterator[Pool]:
    for server in servers:
        await server.start()
    async with aiohttp.ClientSession() as session:
        pool = Pool([s.url for s in servers], session, None, TIMEOUTS)
        watching = asyncio.create_task(pool.watch())
        try:
            await until(lambda: len(pool.live) == len(servers))
            for server in servers:
                server.calls.clear()
            yield pool
        finally:
            watching.cancel()
            for server in servers:
                await server.runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def scenario(run: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await run()

    asyncio.run(bounded())


def test_a_server_that_serves_another_digest_is_out_until_it_is_right():
    async def run() -> None:
        right, wrong = Scripted(), Scripted()
        async with pool_of(right, wrong) as pool:
            wrong.lie = "digest-of-something-else"
            done = await pool.publish(NEXT)
            assert done.servers == {right.url: "0:1"}
            assert "digest-of-something-else" in done.failures[wrong.url]
            assert [s.url for s in pool.live] == [right.url]
            wrong.lie = None
            await until(lambda: len(pool.live) == 2)
            assert (wrong.version, wrong.digest) == ("0:1", "digest-1")

    scenario(run)


def test_a_server_that_comes_back_with_the_version_but_other_weights_is_updated_first():
    async def run() -> None:
        first, second = Scripted(), Scripted()
        async with pool_of(first, second) as pool:
            await pool.publish(NEXT)
            second.digest = "digest-0"
            second.calls.clear()
            await pool.send_out(pool.servers[second.url], "restarted")
            await until(lambda: len(pool.live) == 2)
            assert "/update_weights_from_disk" in [path for path, _ in second.calls]

    scenario(run)


def test_when_no_server_takes_the_weights_all_go_on_with_the_old_ones():
    async def run() -> None:
        servers = [Scripted(), Scripted()]
        async with pool_of(*servers) as pool:
            for server in servers:
                server.refuse = True
            done = await pool.publish(NEXT)
            assert (done.servers, pool.current, len(pool.live)) == ({}, None, 2)
            assert [s.calls[-1][0] for s in servers] == ["/continue_generation"] * 2

    scenario(run)


@pytest.mark.parametrize(("release", "mode"), [(None, "retract"), (PINNED, "abort"), ("0.5.23", "retract")])
def test_requests_make_way_for_an_update_as_the_release_can(release: str | None, mode: str):
    async def run() -> None:
        server = Scripted(release)
        async with pool_of(server) as pool:
            assert pool.servers[server.url].contract.update_pause == mode
            done = await pool.publish(NEXT)
            assert done.servers == {server.url: "0:1"}
            assert [path for path, _ in server.calls] == [
                "/pause_generation",
                "/update_weights_from_disk",
                "/continue_generation",
            ]
            assert server.calls[0][1] == {"mode": mode}
            assert server.calls[1][1]["flush_cache"] is True

    scenario(run)


def test_what_a_release_cannot_do_is_logged_when_it_joins(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # Of its own, since libraries that were imported before may have replaced the root logger that caplog listens to.
    monkeypatch.setattr(router_pool, "log", logging.Logger("router_pool"))
    router_pool.log.addHandler(caplog.handler)

    async def run() -> None:
        async with pool_of(Scripted(PINNED)):
            pass

    scenario(run)
    for limit in contract_of(PINNED).limits():
        assert limit in caplog.text

"""The router before scripted servers in this process: overload, deaths, streams, affinity. No model, no torch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from areal_dta import metrics
from areal_dta.rollout.router import Router
from areal_dta.rollout.router_pool import Pool, PoolTimeouts
from areal_dta.rollout.router_settings import RouterSettings

TIMEOUTS = PoolTimeouts(health=2.0, health_interval=0.05, health_failures=2, control=5.0, max_backoff=0.2)
CONVERSATION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


class Scripted:
    """A server that answers as told: ``mode`` is ok, hold (until released), busy, stream, or die (close the socket)."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.seen: list[dict[str, Any]] = []
        self.release = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.url = ""
        app = web.Application()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/get_model_info", self._ok)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        for path in ("/continue_generation", "/release_memory_occupation", "/begin_weight_update"):
            app.router.add_post(path, self._ok)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def _headers(self) -> dict[str, str]:
        return {"X-Server-Instance": self.url}

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0:0", "success": True}, headers=self._headers())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json())
        if self.mode == "busy":
            return web.json_response({"error": "busy"}, status=503, headers=self._headers())
        if self.mode == "die":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.mode.startswith("stream"):
            return await self._stream(request)
        if self.mode == "hold":
            await self.release.wait()
        return web.json_response({"from": self.url}, headers=self._headers())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**self._headers(), "Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"n": 0}\n\ndata: {"n":')
        try:
            await self.release.wait()
            if self.mode == "stream then die":
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(b" 1}\n\ndata: [DONE]\n\n")
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return response


class Bench:
    """Scripted servers, the router before them, and a client."""

    def __init__(self, servers: list[Scripted], router: Router, url: str, client: aiohttp.ClientSession) -> None:
        self.servers, self.router, self.url, self.client = servers, router, url, client

    async def ask(self, path: str = "/generate", **body: Any) -> dict[str, Any]:
        async with self.client.post(self.url + path, json=body) as answer:
            return {"status": answer.status, **(await answer.json())}

    async def home(self, **body: Any) -> Scripted:
        """The server that gets such a request."""
        where = (await self.ask(**body))["from"]
        return next(s for s in self.servers if s.url == where)

    def other(self, server: Scripted) -> Scripted:
        return next(s for s in self.servers if s is not server)

    async def metrics(self) -> str:
        async with self.client.get(self.url + "/metrics") as answer:
            return await answer.text()


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    servers = [Scripted() for _ in range(2)]
    for server in servers:
        await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        own = RouterSettings(tuple(s.url for s in servers), "127.0.0.1", 0, timeouts=TIMEOUTS, **settings)
        pool = Pool(own.servers, session, None, TIMEOUTS)
        router = Router(own, pool, session, metrics.init("test", None))
        runner = web.AppRunner(router.app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        watching = asyncio.create_task(pool.watch())
        while len(pool.live) < 2:
            await asyncio.sleep(0.01)
        try:
            yield Bench(servers, router, f"http://127.0.0.1:{runner.addresses[0][1]}", session)
        finally:
            watching.cancel()
            for server in servers:
                server.release.set()
            await runner.cleanup()
            for server in servers:
                await server.runner.cleanup()


async def until(condition: Any) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def test_requests_spill_over_once_their_server_is_overloaded():
    async def scenario() -> None:
        async with bench(spill_above=2) as b:
            home = await b.home(rid="group-1")
            home.mode = "hold"
            held = [asyncio.create_task(b.ask(rid="group-1")) for _ in range(3)]
            await until(lambda: len(home.seen) == 4)
            assert (await b.ask(rid="group-1"))["from"] == b.other(home).url
            assert 'router_choices_total{reason="spill"} 1' in await b.metrics()
            assert f'router_outstanding_requests{{server="{home.url}"}} 3' in await b.metrics()
            home.release.set()
            assert {a["from"] for a in await asyncio.gather(*held)} == {home.url}
            assert (await b.ask(rid="group-1"))["from"] == b.other(home).url  # its prefix is there now

    asyncio.run(scenario())


def test_a_busy_server_is_not_asked_twice_while_another_is_there():
    async def scenario() -> None:
        async with bench() as b:
            home = await b.home(rid="a")
            home.mode = "busy"
            assert (await b.ask(rid="a"))["from"] == b.other(home).url
            assert len(home.seen) == 2
            assert len(b.router._pool.live) == 2
            for server in b.servers:
                server.mode = "busy"
            assert (await b.ask(rid="a"))["status"] == 502

    asyncio.run(scenario())


def test_a_dead_servers_requests_are_handed_over():
    async def scenario() -> None:
        async with bench() as b:
            home = await b.home(rid="a")
            home.mode = "hold"
            asked = [asyncio.create_task(b.ask(rid="a")) for _ in range(5)]
            await until(lambda: len(home.seen) == 6)
            await home.runner.cleanup()
            assert {(a["status"], a["from"]) for a in await asyncio.gather(*asked)} == {(200, b.other(home).url)}
            await until(lambda: len(b.router._pool.live) == 1)
            assert f'router_server_live{{server="{home.url}"}} 0' in await b.metrics()
            assert (await b.ask(rid="a"))["from"] == b.other(home).url

    asyncio.run(scenario())


def test_a_request_that_kills_its_connection_is_tried_elsewhere():
    async def scenario() -> None:
        async with bench() as b:
            home = await b.home(rid="a")
            home.mode = "die"
            assert (await b.ask(rid="a"))["from"] == b.other(home).url
            assert b.router.num_retries == 1

    asyncio.run(scenario())


def test_streams_pass_through_event_by_event():
    async def scenario() -> None:
        async with bench() as b:
            for server in b.servers:
                server.mode = "stream"
            async with b.client.post(b.url + "/generate", json={"stream": True}) as answer:
                assert answer.content_type == "text/event-stream"
                assert await answer.content.readany() == b'data: {"n": 0}\n\n'
                for server in b.servers:
                    server.release.set()
                assert await answer.content.read() == b'data: {"n": 1}\n\ndata: [DONE]\n\n'

    asyncio.run(scenario())


def test_a_stream_whose_server_dies_ends_with_an_error_event():
    async def scenario() -> None:
        async with bench() as b:
            for server in b.servers:
                server.mode = "stream then die"
            async with b.client.post(b.url + "/v1/chat/completions", json={"stream": True}) as answer:
                assert await answer.content.readany() == b'data: {"n": 0}\n\n'
                for server in b.servers:
                    server.release.set()
                rest = (await answer.content.read()).decode().split("\n\n")
            assert "the stream broke off" in json.loads(rest[0].removeprefix("data: "))["error"]["message"]
            assert rest[1:] == ["data: [DONE]", ""]

    asyncio.run(scenario())


def test_a_streaming_caller_that_hangs_up_reaches_the_server():
    async def scenario() -> None:
        async with bench() as b:
            for server in b.servers:
                server.mode = "stream"
            answer = await b.client.post(b.url + "/generate", json={"stream": True, "rid": "x"})
            await answer.content.readany()
            used = next(s for s in b.servers if s.seen)
            answer.close()
            await asyncio.wait_for(used.hung_up.wait(), 10)
            await until(lambda: not any(s.outstanding for s in b.router._pool.servers.values()))

    asyncio.run(scenario())


def test_turns_of_a_conversation_and_samples_of_a_group_stay_together():
    async def scenario() -> None:
        async with bench() as b:
            homes = set()
            for turns in range(4):
                body = {"messages": [*CONVERSATION, *[{"role": "user", "content": "more"}] * turns]}
                homes.add((await b.ask("/v1/chat/completions", **body))["from"])
            assert len(homes) == 1
            prompt = list(range(300))
            groups = {(await b.ask(input_ids=[*prompt, *range(k)]))["from"] for k in range(0, 200, 40)}
            assert len(groups) == 1
            header = {"X-Affinity": "group-7"}
            named = set()
            for k in range(6):
                async with b.client.post(b.url + "/generate", json={"input_ids": [k]}, headers=header) as answer:
                    named.add((await answer.json())["from"])
            assert len(named) == 1

    asyncio.run(scenario())


def test_memory_is_released_everywhere_and_group_updates_are_refused():
    async def scenario() -> None:
        async with bench() as b:
            answer = await b.ask("/release_memory_occupation")
            assert (answer["status"], set(answer["servers"])) == (200, {s.url for s in b.servers})
            answer = await b.ask("/begin_weight_update", selector="all")
            assert answer["status"] == 400
            assert "/publish" in answer["error"]["message"]

    asyncio.run(scenario())


def test_the_router_process_needs_no_torch():
    code = "import sys, areal_dta.rollout.router; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

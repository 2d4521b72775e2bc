"""The servers behind the router: who is alive, which weights they serve, and how new weights reach them.

A server is LIVE only while it answers health checks, is the same process as when it joined, and serves the current
version. Every other server is OUT, with the reason; the health loop brings it back: update first, requests afterwards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from areal_dta.rollout.sglang_contract import EMBEDDED, Contract, contract_of_info

__all__ = ["Current", "Pool", "PoolTimeouts", "Published", "Server", "ServerFailed"]

log = logging.getLogger(__name__)
INSTANCE_HEADER = "X-Server-Instance"


class ServerFailed(RuntimeError):
    """A server refused or failed a control request; the message names it. ``refused``: it answered with a 4xx."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class PoolTimeouts:
    """Seconds that each kind of request to a server may take."""

    health: float = 5.0
    health_interval: float = 0.5
    health_failures: int = 3  # silent checks in a row before a server counts as hung
    control: float = 60.0
    update: float = 600.0
    max_backoff: float = 10.0


@dataclass(frozen=True)
class Current:
    """The weights every server has to serve."""

    model_path: str
    weight_version: str
    digest: str | None


@dataclass(eq=False)
class Server:
    """One server as the router sees it."""

    url: str
    live: bool = False
    reason: str = "not seen yet"
    instance: str | None = None
    version: str | None = None
    contract: Contract = EMBEDDED
    outstanding: int = 0
    silent_checks: int = 0
    next_try: float = 0.0
    backoff_s: float = 0.25
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set when it goes out: requests under way move on


@dataclass(frozen=True)
class Published:
    """Outcome of a weight update: version per server, failures by server, seconds."""

    servers: dict[str, str]
    failures: dict[str, str]
    pause_s: float
    update_s: float


class Pool:
    """``session`` talks to the servers; ``state_file`` keeps the current version across restarts of the router."""

    def __init__(
        self,
        urls: Iterable[str],
        session: aiohttp.ClientSession,
        state_file: Path | None,
        timeouts: PoolTimeouts,
        current: Current | None = None,
        needs_publish: bool = False,
    ) -> None:
        self.servers = {url: Server(url) for url in urls}
        self.current = current
        self.paused = False  # by a client through /pause_generation
        self._needs_publish = needs_publish
        self._session = session
        self._state_file = state_file
        self._timeouts = timeouts
        self._update_lock = asyncio.Lock()
        self._changed = asyncio.Condition()

    @property
    def live(self) -> list[Server]:
        return [s for s in self.servers.values() if s.live]

    @property
    def may_serve(self) -> bool:
        """False in a resumed run until its trainer has published: the start policy must not answer for a later one."""
        return bool(self.live) and (self.current is not None or not self._needs_publish)

    async def wait_until_serving(self, timeout_s: float) -> bool:
        """Wait for a live server with the right weights; False when ``timeout_s`` passed."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self.may_serve), timeout_s)
            except TimeoutError:
                return False
        return True

    def why_not_serving(self) -> str:
        if self.live:
            return "no weights have been published in this run epoch yet"
        return "no live server: " + "; ".join(f"{s.url}: {s.reason}" for s in self.servers.values())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def send_out(self, server: Server, reason: str) -> None:
        """Stop using ``server``; its requests are retried elsewhere, the health loop tries to bring it back."""
        if server.live:
            log.warning("%s is out: %s", server.url, reason)
        server.live, server.reason = False, reason
        server.lost.set()
        await self._notify()

    async def check_suspect(self, server: Server, reason: str) -> None:
        """A request failed on the wire: out, unless the server is healthy and still the same process."""
        try:
            instance = await self._health(server)
        except (aiohttp.ClientError, TimeoutError, ServerFailed) as error:
            await self.send_out(server, f"{reason}; health: {error!r}")
            return
        if instance != server.instance:
            await self.send_out(server, f"{reason}; restarted")

    async def watch(self) -> None:
        """The health loop: runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self.servers.values():
                group.create_task(self._watch_one(server))

    async def _watch_one(self, server: Server) -> None:
        while True:
            await self._check(server)
            await asyncio.sleep(self._timeouts.health_interval)

    async def _check(self, server: Server) -> None:
        try:
            instance = await self._health(server)
        except TimeoutError:
            server.silent_checks += 1
            if server.silent_checks >= self._timeouts.health_failures or not server.live:
                waited_s = server.silent_checks * self._timeouts.health
                await self.send_out(server, f"no answer to {server.silent_checks} health checks in {waited_s:.0f} s")
            return
        except (aiohttp.ClientError, ServerFailed) as error:
            await self.send_out(server, f"health check failed: {error}")
            return
        server.silent_checks = 0
        if server.live and instance != server.instance:
            await self.send_out(server, "restarted")
        if not server.live and time.monotonic() >= server.next_try:
            await self._join(server)

    async def _health(self, server: Server) -> str | None:
        timeout = aiohttp.ClientTimeout(total=self._timeouts.health)
        async with self._session.get(server.url + "/health", timeout=timeout) as answer:
            if answer.status != 200:
                raise ServerFailed(f"{server.url}/health answered {answer.status}: {(await answer.text())[:200]}")
            return answer.headers.get(INSTANCE_HEADER)

    async def _join(self, server: Server) -> None:
        """Bring a healthy server to the current version and pause state, then let requests reach it."""
        async with self._update_lock:
            try:
                # Asked again under the lock: whatever restarted in between must not join with another's version.
                server.instance = await self._health(server)
                await self._identify(server)
                info = await self.call(server, "/get_model_info", None, self._timeouts.control)
                server.version = info.get("weight_version")
                if self.current is not None and _differs(info, self.current):
                    await self.call(
                        server, "/pause_generation", {"mode": server.contract.update_pause}, self._timeouts.control
                    )
                    await self._update(server, self.current, abort=False)
                await self._set_pause(server)
            except (aiohttp.ClientError, TimeoutError, ServerFailed) as error:
                server.backoff_s = min(self._timeouts.max_backoff, server.backoff_s * 2)
                server.next_try = time.monotonic() + server.backoff_s
                server.reason = f"cannot join: {error!r}"
                log.warning("%s %s", server.url, server.reason)
                return
            server.live, server.reason, server.backoff_s = True, "", 0.25
            server.lost = asyncio.Event()
        log.info("%s joins with version %s", server.url, server.version)
        await self._notify()

    async def _identify(self, server: Server) -> None:
        """Only the embedded server names its instance; others say which release they are."""
        if server.instance is not None:
            server.contract = EMBEDDED
            return
        server.contract = contract_of_info(await self.call(server, "/server_info", None, self._timeouts.control))
        for limit in server.contract.limits():
            log.warning("%s is %s: %s", server.url, server.contract.name, limit)

    async def _set_pause(self, server: Server) -> None:
        if self.paused:
            await self.call(server, "/pause_generation", {"mode": "in_place"}, self._timeouts.control)
        else:
            await self.call(server, "/continue_generation", {}, self._timeouts.control)

    async def call(self, server: Server, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """One control request (GET without ``body``); raises ServerFailed with the server's own words."""
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, server.url + path, json=body, timeout=timeout) as answer:
            text = await answer.text()
            if answer.status != 200:
                refused = 400 <= answer.status < 500
                raise ServerFailed(f"{server.url}{path} answered {answer.status}: {text[:500]}", refused)
        try:
            parsed = json.loads(text or "{}")
        except ValueError:
            parsed = {"text": text}
        return parsed if isinstance(parsed, dict) else {"answer": parsed}

    async def _update(self, server: Server, target: Current, abort: bool) -> None:
        body = {
            "model_path": target.model_path,
            "weight_version": target.weight_version,
            "abort_all_requests": abort,
            "flush_cache": True,
        }
        await self.call(server, "/update_weights_from_disk", body, self._timeouts.update)
        info = await self.call(server, "/get_model_info", None, self._timeouts.control)
        if _differs(info, target):
            raise ServerFailed(
                f"{server.url} serves {info.get('weight_version')!r} (digest {info.get('weights_digest')}) after its "
                f"update to {target.weight_version!r} (digest {target.digest})"
            )
        server.version = target.weight_version

    async def on_all(
        self, servers: list[Server], what: Callable[[Server], Awaitable[Any]]
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Do ``what`` on all at once; returns (results, failures) by URL. Unreachable servers go out."""
        outcomes = await asyncio.gather(*(what(s) for s in servers), return_exceptions=True)
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, aiohttp.ClientError | TimeoutError | ServerFailed):
                failures[server.url] = outcome
                if not (isinstance(outcome, ServerFailed) and outcome.refused):
                    await self.send_out(server, f"control request failed: {outcome!r}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[server.url] = outcome
        return results, failures

    async def publish(self, target: Current, abort: bool = False) -> Published:
        """Pause all live servers, update them, continue. At least one success makes ``target`` current; servers that
        failed go out and catch up later. With no success at all the old version keeps serving. So all live servers
        serve one version, of one digest, at any time that requests run."""
        async with self._update_lock:
            began = time.monotonic()
            asked = self.live
            _, failures = await self.on_all(
                asked,
                lambda s: self.call(s, "/pause_generation", {"mode": s.contract.update_pause}, self._timeouts.control),
            )
            paused = [s for s in asked if s.url not in failures]
            updating = time.monotonic()
            updated, failed = await self.on_all(paused, lambda s: self._update(s, target, abort))
            update_s = time.monotonic() - updating
            failures |= failed
            if updated:
                self.current = target
                self._remember(target)
                for server in paused:
                    if server.url in failures:
                        await self.send_out(server, f"update failed: {failures[server.url]}")
            going_on = [s for s in paused if s.live]
            await self.on_all(going_on, self._set_pause)
            pause_s = time.monotonic() - began
        await self._notify()
        versions = {s.url: s.version or "" for s in self.live}
        return Published(
            {url: v for url, v in versions.items() if v == target.weight_version},
            {url: str(error) for url, error in failures.items()},
            pause_s,
            update_s,
        )

    def _remember(self, target: Current) -> None:
        if self._state_file is None:
            return
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        tmp = self._state_file.with_suffix(".tmp")
        tmp.write_text(json.dumps(asdict(target), indent=1))
        os.replace(tmp, self._state_file)


def _differs(info: dict[str, Any], target: Current) -> bool:
    """Whether a server serves anything else than ``target``; SGLang tells no digest, only the version it was given."""
    told = info.get("weights_digest")
    if info.get("weight_version") != target.weight_version:
        return True
    return told is not None and target.digest is not None and told != target.digest

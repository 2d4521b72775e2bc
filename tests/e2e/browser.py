"""A headless Chromium, driven over the DevTools protocol; collects what a page complains about and what it requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-port=0",
)
TIMEOUT_S = 60.0


class BrowserError(RuntimeError):
    """The browser or the page did not do what was asked of it."""


def find_chromium() -> str:
    """Path of Chromium; without one the test fails in CI and is skipped with the reason elsewhere."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        reason = "no chromium on the PATH; install the Debian package `chromium`"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return str(path)


@dataclass
class Page:
    """One tab. ``problems`` are console errors and exceptions, ``requests`` all addresses asked for."""

    socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _ids: itertools.count = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future] = field(default_factory=dict)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command; BrowserError when it is refused, TimeoutError after `TIMEOUT_S`."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], TIMEOUT_S)

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited if it is a promise; BrowserError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Until a JavaScript condition holds, checked on every change of the document."""
        await self.evaluate(
            f"""new Promise((done, fail) => {{
              const holds = () => {{ try {{ return Boolean({condition}); }} catch (error) {{ return false; }} }};
              if (holds()) return done();
              const seen = new MutationObserver(() => {{ if (holds()) {{ seen.disconnect(); done(); }} }});
              seen.observe(document, {{ subtree: true, childList: true, attributes: true, characterData: true }});
              setTimeout(() => fail(new Error({condition!r})), {(TIMEOUT_S - 5) * 1000});
            }})"""
        )

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def listen(self) -> None:
        async for message in self.socket:
            self._take(message.json())

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            waiting = self._waiting.pop(message["id"])
            if waiting.done():  # given up
                return
            if "error" in message:
                waiting.set_exception(BrowserError(str(message["error"])))
            else:
                waiting.set_result(message["result"])
            return
        method, params = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {params['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def open_page(
    url: str, profile: Path, width: int = 1280, height: int = 900, dark: bool = False
) -> AsyncIterator[Page]:
    """Start a Chromium with an empty profile, open ``url`` and listen before its first script runs."""
    process = await asyncio.create_subprocess_exec(
        find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    drain = None
    try:
        port = await asyncio.wait_for(_devtools_port(process.stderr), TIMEOUT_S)
        drain = asyncio.create_task(_discard(process.stderr))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(t for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
                await page.call("Emulation.setEmulatedMedia", features=scheme)
                await page.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
                )
                await page.call("Page.navigate", url=url)
                yield page
                listener.cancel()
    finally:
        if drain is not None:
            drain.cancel()
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        with contextlib.suppress(ProcessLookupError):  # its helpers, which still write to the profile
            os.killpg(process.pid, signal.SIGKILL)


async def _devtools_port(stderr: asyncio.StreamReader) -> int:
    lines = []
    while line := await stderr.readline():
        lines.append(line.decode("utf-8", "replace"))
        if found := re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", lines[-1]):
            return int(found[1])
    raise BrowserError(f"chromium ended before it listened: {''.join(lines[-5:])}")


async def _discard(stderr: asyncio.StreamReader) -> None:
    while await stderr.read(65536):
        pass

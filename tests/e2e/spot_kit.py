"""Fake rollout servers, a sink for metrics, and the processes of drafter training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from areal_dta.drafter.reporter import ServerReporter
from areal_dta.metrics import MetricRecord
from areal_dta.weights import TornWeights, verify
from scripts.benchlib.tail_site import Sink

API_KEY = "spot-key"


class FakeServer:
    """The two endpoints that training calls, and the reporter of a rollout server."""

    def __init__(self, name: str, coordinator: str) -> None:
        self.name = name
        self.posts: list[tuple[str, dict[str, Any], str]] = []
        self.drafters: list[str] = []
        self.refuse_drafters = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.posts.append((self.path, body, self.headers.get("Authorization", "")))
                status, answer = outer.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.reporter = ServerReporter(coordinator, name)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/release_memory_occupation":
            return 200, {"success": True, "bytes_released": 1}
        if self.refuse_drafters:
            return 400, {"success": False, "message": "drafter of another model"}
        try:
            verify(Path(body["model_path"]), body["digest"])
        except TornWeights as error:
            return 400, {"success": False, "message": str(error)}
        self.drafters.append(body["drafter_version"])
        return 200, {"success": True}

    def close(self) -> None:
        self.reporter.close()
        self._http.shutdown()
        self._http.server_close()


class MetricsSink(Sink):
    """With the records of what has happened since."""

    def since(self, mark: int, name: str, proc: str | None = None) -> list[MetricRecord]:
        return [r for r in self.records[mark:] if r.name == name and proc in (None, r.proc)]


class Process:
    """One of our processes, with its output in a file; ready once it has said so."""

    def __init__(self, module: str, settings: dict[str, Any], folder: Path, name: str) -> None:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        self.name, self.log_path = name, folder / f"{name}.log"
        self._told = False
        with self.log_path.open("a") as log:
            self._start = log.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, "--settings", str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        def ready() -> bool:
            assert self._popen.poll() is None, f"{self.name} ended: {self.log_path.read_text()[-2000:]}"
            return "READY" in self.log_path.read_text()[self._start :]

        until(ready, timeout_s, f"{self.name} to be ready")

    @property
    def killed(self) -> bool:
        return self._popen.returncode == -signal.SIGKILL

    def kill(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait(5)

    def terminate(self) -> None:
        """Once: an interpreter that is ending has no signal handler any more, and would die of a second SIGTERM."""
        if not self._told and self._popen.poll() is None:
            self._told = True
            self._popen.terminate()

    def stop(self) -> int:
        """SIGTERM, if it has not had one; the exit code."""
        self.terminate()
        return self._popen.wait(15)


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s:g} s for {what}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

"""``python -m areal_dta.drafter.coordinator --settings FILE.json``: lends idle rollout servers to drafter training.

One loop over a ZeroMQ ROUTER: servers and workers report, every report of a worker is answered with what it should do,
and what changes is told at once. Nothing here is needed by the rollouts: killed, it is started again and learns the
state of all from their next reports; until then workers stop by themselves when their lease runs out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import queue
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from areal_dta import metrics
from areal_dta.drafter.states import (
    MAX_MESSAGE_BYTES,
    Assignment,
    Fleet,
    ReportError,
    Rules,
    ServerState,
    pack,
    read_server,
    read_worker,
    unpack,
)
from areal_dta.process_log import set_up_logging

__all__ = ["Coordinator", "CoordinatorSettings", "get_json", "post_json"]

log = logging.getLogger(__name__)
POLL_S = 0.05


@dataclass(frozen=True)
class CoordinatorSettings:
    """``servers``: name to URL; only these are believed and asked to release memory."""

    address: str
    servers: Mapping[str, str]
    rules: Rules = field(default_factory=Rules)
    api_key: str | None = None
    metrics_address: str | None = None
    release_timeout_s: float = 2.0
    release_requests: str = "resume"  # the server takes its memory again when a request comes
    report_interval_s: float = 1.0
    nice: int = 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CoordinatorSettings:
        """Raises ValueError naming an unknown key."""
        unknown = sorted(set(raw) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown coordinator settings {unknown}; known: {[f.name for f in fields(cls)]}")
        return cls(**{**raw, "rules": Rules(**raw.get("rules", {}))})


class Coordinator:
    """Owns the ROUTER; `run` serves until `stop`. ``address`` holds the bound address."""

    def __init__(self, settings: CoordinatorSettings, publisher: metrics.Publisher) -> None:
        self._settings, self._publisher = settings, publisher
        self._fleet = Fleet(settings.rules)
        self._peers: dict[str, bytes] = {}  # worker name -> routing id
        self._told: dict[str, Assignment] = {}
        self._released: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="release")
        self._stopping = False
        self._round_id = ""
        self.counters: Counter[str] = Counter()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.bind(settings.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"cannot listen on {settings.address}: {error.strerror}") from error
        self._socket = socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def stop(self) -> None:
        """Make `run` return within its next poll; safe from signal handlers and other threads."""
        self._stopping = True

    def run(self) -> None:
        """Serve; every wait in here is a poll of 50 ms."""
        report_s, cpu_s = time.monotonic(), time.process_time()
        try:
            while not self._stopping:
                if self._socket.poll(int(POLL_S * 1000), zmq.POLLIN):
                    self._receive()
                self._collect_releases()
                self._act()
                now_s = time.monotonic()
                if now_s - report_s >= self._settings.report_interval_s:
                    share = (time.process_time() - cpu_s) / (now_s - report_s)
                    self._report(now_s, share)
                    report_s, cpu_s = now_s, time.process_time()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._socket.close(0)

    def _receive(self) -> None:
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(peer, frames[-1] if frames else b"")
            except ReportError as error:
                self.counters["malformed"] += 1
                log.warning("malformed report: %s", error)

    def _hear(self, peer: bytes, frame: bytes) -> None:
        kind, body = unpack(frame)
        now_s = time.monotonic()
        if kind == "server":
            report = read_server(body)
            if report.name not in self._settings.servers:
                raise ReportError(f"server {report.name!r} is none of {', '.join(self._settings.servers)}")
            self._fleet.hear_server(report, now_s)
        elif kind == "worker":
            worker = read_worker(body)
            self._peers[worker.name] = peer
            self._fleet.hear_worker(worker, now_s)
            self._told.pop(worker.name, None)  # answered below, whether or not anything changed
        else:
            raise ReportError(f"kind {kind!r:.40} is neither server nor worker")

    def _act(self) -> None:
        now_s = time.monotonic()
        plan = self._fleet.plan(now_s)
        for name in plan.release:
            self._fleet.release_started(name)
            self._pool.submit(self._release, name)
        if plan.round_id != self._round_id:
            event = "drafter/round_started" if plan.round_id else "drafter/round_ended"
            self._publisher.event(event, members=",".join(plan.members), leader=plan.leader)
            log.info("%s: leader %s of %s", event, plan.leader or "-", ", ".join(plan.members) or "-")
            self._round_id = plan.round_id
        for name, peer in self._peers.items():
            assignment = self._fleet.assignment(name, now_s)
            if assignment is not None and assignment != self._told.get(name):
                self._told[name] = assignment
                self._tell(peer, assignment)

    def _tell(self, peer: bytes, assignment: Assignment) -> None:
        try:
            self._socket.send_multipart([peer, pack("assignment", assignment.to_wire())], zmq.NOBLOCK)
        except zmq.Again:
            self.counters["unsent"] += 1  # it will report again

    def _release(self, name: str) -> None:
        """On a pool thread: ask the server for its KV memory; a refusal means that it has work after all."""
        settings = self._settings
        url = f"{settings.servers[name].rstrip('/')}/release_memory_occupation"
        body = {"tags": ["kv_cache"], "requests": settings.release_requests}
        start_s = time.monotonic()
        try:
            post_json(url, body, settings.api_key, settings.release_timeout_s)
        except (OSError, ValueError) as error:
            self.counters["refused"] += 1
            self._publisher.event("drafter/release_refused", str(error), server=name)
            log.warning("%s keeps its KV memory: %s", name, error)
            self._released.put((name, False))
            return
        self._publisher.emit("drafter/release_s", time.monotonic() - start_s, server=name)
        self._released.put((name, True))

    def _collect_releases(self) -> None:
        while True:
            try:
                name, ok = self._released.get_nowait()
            except queue.Empty:
                return
            self._fleet.release_ended(name, ok, time.monotonic())

    def _report(self, now_s: float, cpu_share: float) -> None:
        states = list(self._fleet.server_states(now_s).values())
        for state in ServerState:
            self._publisher.emit("drafter/servers", states.count(state), state=str(state))
        self._publisher.emit("drafter/coordinator_cpu_share", cpu_share)


def post_json(url: str, body: Mapping[str, Any], api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """POST to a server of this run and return its JSON answer; raises OSError, or ValueError when it refuses."""
    return _ask(url, json.dumps(body).encode(), api_key, timeout_s)


def get_json(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """`post_json`, as a GET."""
    return _ask(url, None, api_key, timeout_s)


def _ask(url: str, data: bytes | None, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    headers = {} if data is None else {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace").strip()
        raise ValueError(f"{url} answered {error.code}: {text}") from error
    except http.client.HTTPException as error:
        raise ValueError(f"{url} broke off: {error!r}") from error
    if not isinstance(answer, dict) or answer.get("success") is False:
        raise ValueError(f"{url} refused: {answer!r:.500}")
    return answer


def main(argv: list[str] | None = None) -> int:
    """Process entry; start-up errors are one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m areal_dta.drafter.coordinator", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with the coordinator's settings")
    args = parser.parse_args(argv)
    set_up_logging()
    try:
        settings = CoordinatorSettings.from_dict(json.loads(args.settings.read_text()))
        publisher = metrics.init("coordinator", settings.metrics_address)
        coordinator = Coordinator(settings, publisher)
    except (OSError, ValueError, TypeError) as error:
        log.error("cannot coordinate: %s", error)
        return 2
    if settings.nice:
        os.nice(settings.nice)

    def end(number: int, frame: FrameType | None) -> None:
        coordinator.stop()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    print(f"READY {coordinator.address}", flush=True)
    coordinator.run()
    publisher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

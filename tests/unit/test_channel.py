"""The RPC channel: round trips, errors, malformed input, re-sends, restarts. Not covered: links that lose single
packets.
"""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import zmq

from areal_dta import channel, wire
from areal_dta.channel import (
    AsyncRpcClient,
    ChannelError,
    Reply,
    Request,
    RpcClient,
    RpcError,
    RpcFailure,
    RpcServer,
    RpcTimeout,
)


class ServerThread:
    """An RpcServer on its own loop and thread, so that blocking clients can be tested in this one."""

    def __init__(self, handlers, address="tcp://127.0.0.1:0", **options):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self.run(self._make(address, handlers, options))
        self.address = self.server.address

    async def _make(self, address, handlers, options):
        server = RpcServer(address, handlers, **options)
        await server.start()
        return server

    def run(self, coroutine, timeout_s=10):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def stop(self):
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


async def echo(request: Request) -> Reply:
    return Reply({**request.body, "client": request.client}, request.arrays)


@pytest.fixture
def serve():
    servers = []

    def start(handlers, **options):
        servers.append(ServerThread(handlers, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_body_and_arrays_come_back_unchanged(serve):
    server = serve({"echo": echo})
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "empty": np.zeros(0, np.float32), "b": np.array([True])}
    with RpcClient(server.address, "me", connect_timeout_s=20) as client:
        reply = client.call("echo", {"x": np.float32(0.5), "s": "é", "n": None}, arrays, timeout_s=20)
    assert reply.body == {"x": 0.5, "s": "é", "n": None, "client": "me"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(reply.arrays[name], array)
        assert reply.arrays[name].dtype == array.dtype


def test_errors_come_back_as_rpc_errors_and_the_server_lives_on(serve):
    async def refuse(request):
        raise RpcFailure("no_room", "come back later")

    async def broken(request):
        return Reply({"x": 1 / 0})

    async def unsendable(request):
        return Reply({"x": object()})

    server = serve({"refuse": refuse, "broken": broken, "unsendable": unsendable, "echo": echo})
    with RpcClient(server.address, "me") as client:
        for kind, code in [
            ("refuse", "no_room"),
            ("broken", "internal"),
            ("nope", "unknown_kind"),
            ("unsendable", "internal"),
        ]:
            with pytest.raises(RpcError) as caught:
                client.call(kind, timeout_s=20)
            assert caught.value.kind == code
        assert client.call("echo", {"ok": 1}, timeout_s=20).body["ok"] == 1


def test_malformed_messages_are_counted_and_answered(serve):
    server = serve({"echo": echo})
    good = wire.encode("me/1/0", "echo", {}, {"a": np.zeros(4, np.int32)})
    bad = [
        [b"\xff\xfe not msgpack"],
        [b""],
        [good[0]],  # the array frame is missing
        [good[0], b"123"],  # too short for its shape
        [good[0], *[b""] * 100],
        wire.encode("me/1/1", "echo", {}, {})[:1] * 2,
    ]
    with zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(server.address)
        for frames in bad:
            raw.send_multipart(frames)
            assert raw.poll(20000), "no answer to a malformed message"
            _, kind, body, _ = wire.decode(raw.recv_multipart())
            assert (kind, body["code"]) == ("error", "malformed")
    assert server.server.counters["malformed"] == len(bad)
    with RpcClient(server.address, "me") as client:
        client.call("echo", timeout_s=20)


def test_unsendable_values_and_oversize_arrays_are_refused_before_sending(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ChannelError, match="limit is 100"):
        wire.encode("i", "k", {}, {"a": np.zeros(101, np.uint8)})
    with pytest.raises(ChannelError, match="dtype object"):
        wire.encode("i", "k", {}, {"a": np.array([{}])})
    with pytest.raises(ChannelError, match="set"):
        wire.encode("i", "k", {"a": {1}}, {})


def test_time_out_names_what_and_where(serve):
    async def never(request):
        await asyncio.Event().wait()

    server = serve({"never": never})
    with RpcClient(server.address, "me") as client, pytest.raises(RpcTimeout, match=rf"'never' from {server.address}"):
        client.call("never", timeout_s=0.2)
    with pytest.raises(RpcTimeout, match="nobody accepted a connection"):
        RpcClient("tcp://127.0.0.1:1", "me", connect_timeout_s=0.2)
    with pytest.raises(ChannelError, match="tcp://HOST:PORT"):
        RpcClient("not an address", "me")


def test_a_taken_port_is_an_error_with_the_address(serve):
    server = serve({})
    with pytest.raises(OSError, match="cannot listen on tcp://"):
        ServerThread({}, address=server.address)


def test_an_id_in_flight_runs_once_and_a_late_duplicate_gets_the_cached_reply(serve):
    runs = []
    gate = threading.Event()

    async def slow(request):
        runs.append(request.body["x"])
        await asyncio.get_running_loop().run_in_executor(None, gate.wait, 5)
        return Reply({"run": len(runs)})

    server = serve({"slow": slow})
    frames = wire.encode("me/1/7", "slow", {"x": 1}, {})
    with zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(server.address)
        for _ in range(3):
            raw.send_multipart(frames)
        deadline = time.monotonic() + 5
        while server.server.counters["resent"] < 2 and time.monotonic() < deadline:
            raw.poll(10)
        gate.set()
        assert raw.poll(20000)
        first = wire.decode(raw.recv_multipart())
        raw.send_multipart(frames)
        assert raw.poll(20000)
        assert wire.decode(raw.recv_multipart())[2] == first[2] == {"run": 1}
    assert runs == [1]
    assert server.server.counters["replayed"] == 1


def test_blocking_and_async_clients_survive_a_restart_of_the_server(monkeypatch):
    monkeypatch.setattr(channel, "_RESEND_FIRST_S", 0.2)
    started = threading.Event()

    async def never(request):
        started.set()
        await asyncio.Event().wait()

    first = ServerThread({"echo": never})
    results = {}

    def blocking():
        with RpcClient(first.address, "blocking") as client:
            results["blocking"] = client.call("echo", {"x": 1}, timeout_s=20).body["x"]

    async def concurrent():
        client = AsyncRpcClient(first.address, "async")
        replies = await asyncio.gather(*[client.call("echo", {"x": i}, timeout_s=20) for i in range(20)])
        results["async"] = [r.body["x"] for r in replies]
        await client.close()

    threads = [threading.Thread(target=blocking), threading.Thread(target=lambda: asyncio.run(concurrent()))]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    first.stop()
    second = ServerThread({"echo": echo}, address=first.address)
    for thread in threads:
        thread.join(20)
    second.stop()
    assert results == {"blocking": 1, "async": list(range(20))}


def test_async_errors_and_time_outs_reach_their_own_caller(serve):
    async def fail(request):
        raise RpcFailure("bad", "thing")

    async def never(request):
        await asyncio.Event().wait()

    server = serve({"echo": echo, "fail": fail, "never": never})

    async def main():
        client = AsyncRpcClient(server.address, "me")
        outcome = await asyncio.gather(
            client.call("echo", {"x": 1}, timeout_s=20),
            client.call("fail", timeout_s=20),
            client.call("never", timeout_s=0.2),
            return_exceptions=True,
        )
        await client.close()
        return outcome

    good, failed, late = asyncio.run(main())
    assert good.body["x"] == 1
    assert isinstance(failed, RpcError) and failed.kind == "bad"
    assert isinstance(late, RpcTimeout)

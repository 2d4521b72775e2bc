"""Metric records: publishing, dropping, reading back. Not covered: a run store on another machine."""

from __future__ import annotations

import gc
import json
import socket as socketlib
import subprocess
import sys
import threading
import time

import msgpack
import numpy as np
import pytest
import zmq

from areal_dta import metrics
from areal_dta.metrics import MetricError, MetricRecord, MetricsTail, NullPublisher


@pytest.fixture
def sink():
    """A PULL socket and its address; receiving is bounded by 5 s."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


def receive(socket) -> MetricRecord:
    return MetricRecord.from_wire(msgpack.unpackb(socket.recv()))


def test_value_span_and_event_arrive_as_one_message_each(sink):
    socket, address = sink
    publisher = metrics.init("trainer.0", address)
    publisher.emit("train/loss", np.float32(0.5), step=np.int64(3), rank=np.int32(1))
    publisher.event("process/exit", "died", name="server.0", code=-9)
    with publisher.span("time/update", step=3):
        pass
    value, event, span = (receive(socket) for _ in range(3))
    publisher.close()
    assert (value.proc, value.kind, value.name, value.value, value.step) == ("trainer.0", "value", "train/loss", 0.5, 3)
    assert value.labels == {"rank": 1}
    assert (event.kind, event.message, event.value) == ("event", "died", None)
    assert event.labels == {"name": "server.0", "code": -9}
    assert span.kind == "span" and 0 <= span.value < 1 and span.step == 3
    assert value.t <= event.t <= span.t


def test_a_span_whose_body_raises_is_published_as_failed_and_the_error_goes_on(sink):
    socket, address = sink
    publisher = metrics.init("p", address)
    with pytest.raises(KeyError), publisher.span("time/step"):
        raise KeyError("x")
    assert receive(socket).labels == {"failed": True}
    publisher.close()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_kept_as_text(sink, number):
    socket, address = sink
    publisher = metrics.init("p", address)
    publisher.emit("train/loss", number, step=1)
    record = receive(socket)
    publisher.close()
    assert record.value is None and record.message == str(number)
    json.dumps(record.to_wire(), allow_nan=False)


def test_emitting_from_many_threads_loses_and_mixes_nothing(sink):
    socket, address = sink
    publisher = metrics.init("p", address)

    def work(thread: int) -> None:
        for i in range(200):
            publisher.emit("n", thread * 1000 + i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    got = {receive(socket).value for _ in range(800)}
    for thread in threads:
        thread.join(5)
    publisher.close()
    assert got == {float(k * 1000 + i) for k in range(4) for i in range(200)}


def test_without_a_run_store_emitting_neither_blocks_nor_raises_and_closing_is_bounded():
    publisher = metrics.init("p", "tcp://127.0.0.1:1")
    start = time.monotonic()
    for i in range(metrics.QUEUE_RECORDS + 50):
        publisher.emit("n", i)
    publisher.close(timeout_s=0.1)
    assert time.monotonic() - start < 5
    assert publisher.dropped >= 50


def test_drops_are_reported_once_there_is_room_again(monkeypatch):
    monkeypatch.setattr(metrics, "QUEUE_RECORDS", 5)
    with socketlib.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    publisher = metrics.init("p", address)
    for i in range(8):
        publisher.emit("n", i)
    assert publisher.dropped == 3
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.bind(address)
        assert [receive(socket).value for _ in range(5)] == [0, 1, 2, 3, 4]
        emitted, received = 8, []
        deadline = time.monotonic() + 30
        while not any(r.value == publisher.dropped for r in received if r.name == metrics.DROPPED):
            assert time.monotonic() < deadline, [(r.name, r.value) for r in received]
            publisher.emit("n", 8)  # room is noticed by a background thread: this one may still be dropped
            emitted += 1
            while socket.poll(50):
                received.append(receive(socket))
        while publisher.dropped + 5 + len([r for r in received if r.name == "n"]) < emitted:
            received.append(receive(socket))
    publisher.close()
    assert {r.value for r in received if r.name == "n"} <= {8}
    reports = [r.value for r in received if r.name == metrics.DROPPED]
    assert reports[-1] == publisher.dropped >= 3 and reports == sorted(set(reports))  # cumulative, each count once


def test_emitting_after_close_counts_as_dropped_and_closing_twice_is_fine(sink):
    publisher = metrics.init("p", sink[1])
    publisher.close()
    publisher.close()
    publisher.emit("n", 1)
    assert publisher.dropped == 1


def test_a_forgotten_publisher_hands_over_its_records_and_holds_nobody_up(sink):
    socket, address = sink
    publisher = metrics.init("p", address)
    publisher.emit("n", 1)
    cycle = [publisher]
    cycle.append(cycle)
    del publisher, cycle
    start = time.monotonic()
    gc.collect()
    assert time.monotonic() - start < 4
    assert receive(socket).value == 1


def test_an_address_of_the_wrong_form_is_an_error_that_says_so():
    with pytest.raises(MetricError, match="tcp://HOST:PORT"):
        metrics.init("p", "localhost:99")


def test_without_address_the_publisher_is_silent_and_complete():
    publisher = metrics.init("p", None)
    assert isinstance(publisher, NullPublisher)
    publisher.emit("n", 1, step=2, rank=0)
    publisher.event("e", "text", field=1)
    with publisher.span("s"):
        pass
    publisher.close()
    assert publisher.dropped == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"t": "now"}, "'t'"),
        ({"proc": ""}, "'proc'"),
        ({"name": None}, "'name'"),
        ({"kind": "gauge"}, "'kind'"),
        ({"value": "1"}, "'value'"),
        ({"step": 1.5}, "'step'"),
        ({"labels": [1]}, "'labels'"),
    ],
)
def test_a_malformed_record_names_the_wrong_field(change, field):
    good = MetricRecord(1.0, "p", "value", "n", 2.0, 3, {"a": 1}, "m").to_wire()
    assert MetricRecord.from_wire(good).to_wire() == good
    with pytest.raises(MetricError, match=field):
        MetricRecord.from_wire({**good, **change})


def line(**fields) -> str:
    return json.dumps(MetricRecord(**{"t": 1.0, "proc": "p", "kind": "value", "name": "n", **fields}).to_wire()) + "\n"


def test_the_tail_reads_each_record_once_and_waits_for_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read_new() == []
    whole = line(value=2.0)
    with path.open("w") as file:
        file.write(line(value=1.0) + whole[:10])
        file.flush()
        assert [r.value for r in tail.read_new()] == [1.0]
        assert tail.read_new() == []
        file.write(whole[10:])
        file.flush()
        assert [r.value for r in tail.read_new()] == [2.0]
    assert tail.bad_lines == 0


def test_broken_lines_inside_the_file_are_skipped_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        line(value=1.0)[:-9].encode() + line(value=2.0).encode() + b"\xff\xfe\n\n" + line(value=3.0).encode()
    )
    tail = MetricsTail(path)
    assert [r.value for r in tail.read_new()] == [3.0]
    assert tail.bad_lines == 2


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(value=1.0) * 3)
    tail = MetricsTail(path)
    assert len(tail.read_new()) == 3
    path.write_text(line(value=9.0))
    assert [r.value for r in tail.read_new()] == [9.0]


def test_a_step_trained_twice_counts_with_its_last_record():
    records = [
        MetricRecord(1.0, "trainer.0", "value", "train/loss", 1.0, 1),
        MetricRecord(2.0, "trainer.0", "value", "train/loss", 5.0, 0),
        MetricRecord(3.0, "trainer.1", "value", "train/loss", 7.0, 0),
        MetricRecord(4.0, "trainer.0", "value", "train/loss", 2.0, 1),
        MetricRecord(5.0, "trainer.0", "value", "train/loss", None, 2),
        MetricRecord(6.0, "batcher", "value", "batch/rejected", 3.0, None, {"cause": "raised"}),
        MetricRecord(7.0, "batcher", "value", "batch/rejected", 4.0, None, {"cause": "raised"}),
        MetricRecord(8.0, "batcher", "value", "batch/rejected", 1.0, None, {"cause": "timeout"}),
    ]
    assert metrics.series(records, "train/loss", proc="trainer.0") == {0: 5.0, 1: 2.0}
    assert list(metrics.series(records, "train/loss", proc="trainer.0")) == [0, 1]
    assert metrics.last_value(records, "train/loss") == 2.0
    assert metrics.last_value(records, "absent") is None
    assert metrics.last_value(records, "batch/rejected", cause="raised") == 4.0
    assert metrics.last_by_label(records, "batch/rejected", "cause") == {"raised": 4.0, "timeout": 1.0}


def test_importing_metrics_loads_no_heavy_package():
    code = "import sys, areal_dta.metrics; print([m for m in ('torch', 'areal', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"

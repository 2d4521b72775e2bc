"""Who trains, who leads, who stops: the rules with a clock of their own, then over sockets.

Not covered: the training itself (see tests/e2e/test_spot_training.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from areal_dta.drafter import coordinator as coordinator_module
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.coordinator import Coordinator, CoordinatorSettings
from areal_dta.drafter.reporter import ServerReporter
from areal_dta.drafter.states import (
    Assignment,
    Fleet,
    ReportError,
    Rules,
    ServerReport,
    ServerState,
    WorkerReport,
    WorkerState,
    pack,
    read_server,
    read_worker,
    unpack,
)
from areal_dta.metrics import NullPublisher

RULES = Rules(min_idle=2, idle_s=2.0, server_timeout_s=2.0, worker_timeout_s=1.5)


class Clock:
    """A fleet of servers and workers that report every 0.2 s unless they are silent."""

    def __init__(self, count: int, rules: Rules = RULES) -> None:
        self.fleet = Fleet(rules)
        self.now_s = 100.0
        self.busy = dict.fromkeys(range(count), False)
        self.steps = dict.fromkeys(range(count), 0)
        self.samples = dict.fromkeys(range(count), 5)
        self.silent_servers: set[int] = set()
        self.silent_workers: set[int] = set()
        self.refusing: set[int] = set()
        self.released: list[str] = []

    def report(self) -> None:
        for i, busy in self.busy.items():
            if i not in self.silent_servers:
                self.fleet.hear_server(ServerReport(f"s{i}", busy, int(busy), 0, self.now_s), self.now_s)
            if i not in self.silent_workers:
                now = self.fleet.assignment(f"w{i}", self.now_s) or Assignment()
                state = WorkerState.TRAINING if now.train else WorkerState.READY
                address = f"tcp://w{i}"
                report = WorkerReport(
                    f"w{i}", f"s{i}", state, self.steps[i], self.samples[i], address, now.round_id, now.leader
                )
                self.fleet.hear_worker(report, self.now_s)

    def run(self, duration_s: float) -> tuple[str, ...]:
        """Advance; the members at the end."""
        members: tuple[str, ...] = ()
        for _ in range(round(duration_s / 0.1)):
            self.now_s += 0.1
            self.report()
            plan = self.fleet.plan(self.now_s)
            for name in plan.release:
                self.fleet.release_started(name)
                self.released.append(name)
                self.fleet.release_ended(name, int(name[1:]) not in self.refusing, self.now_s)
            members = plan.members
        return members

    def told(self, i: int) -> Assignment:
        found = self.fleet.assignment(f"w{i}", self.now_s)
        assert found is not None
        return found


def test_a_round_needs_enough_servers_idle_for_long_enough() -> None:
    clock = Clock(3)
    clock.busy.update({0: True, 1: True})
    assert clock.run(5) == ()
    clock.busy[1] = False
    assert clock.run(1.8) == ()
    assert clock.run(0.5) == ("w1", "w2")
    assert clock.released == ["s1", "s2"]
    assert clock.fleet.server_states(clock.now_s) == {
        "s0": ServerState.BUSY,
        "s1": ServerState.TRAINING,
        "s2": ServerState.TRAINING,
    }


def test_work_ends_a_members_part_at_once_and_the_others_go_on() -> None:
    clock = Clock(3)
    clock.run(3)
    round_id, leader = clock.told(0).round_id, clock.told(0).leader
    clock.busy[2] = True
    assert clock.run(0.1) == ("w0", "w1")
    assert not clock.told(2).train and clock.told(2).busy_s == pytest.approx(clock.now_s)
    assert (clock.told(0).round_id, clock.told(0).leader) == (round_id, leader)
    clock.busy[2] = False
    assert clock.run(1.5) == ("w0", "w1")
    assert clock.run(1.0) == ("w0", "w1", "w2")
    assert clock.released.count("s2") == 2  # it had taken its memory again


def test_the_member_with_the_furthest_state_leads_and_stays_leader() -> None:
    clock = Clock(3)
    clock.steps.update({0: 3, 1: 8, 2: 8})
    clock.run(3)
    assert clock.told(0).leader == "w1" and clock.told(0).leader_address == "tcp://w1"
    clock.steps[2] = 9
    clock.run(1)
    assert clock.told(0).leader == "w1"
    clock.busy[1] = True
    clock.run(0.2)
    assert clock.told(0).leader == "w2"


@pytest.mark.parametrize("who", ["silent_workers", "silent_servers"])
def test_a_silent_worker_is_gone_and_a_silent_server_counts_as_busy(who: str) -> None:
    clock = Clock(3)
    clock.run(3)
    getattr(clock, who).add(0)
    assert clock.run(1.0) == ("w0", "w1", "w2")
    assert clock.run(1.5) == ("w1", "w2")
    getattr(clock, who).clear()
    assert "w0" in clock.run(3)


def test_the_round_ends_when_nobody_is_left_and_the_next_one_is_another() -> None:
    clock = Clock(2)
    clock.run(3)
    first = clock.told(0).round_id
    clock.busy.update({0: True, 1: True})
    assert clock.run(0.2) == ()
    clock.busy.update({0: False, 1: False})
    clock.run(3)
    assert clock.told(0).round_id not in ("", first)


def test_without_samples_nobody_trains_and_no_memory_is_released() -> None:
    clock = Clock(2)
    clock.samples.update({0: 0, 1: 0})
    assert clock.run(4) == ()
    assert clock.released == []
    clock.samples[1] = 1
    assert clock.run(0.5) == ("w1",)


def test_a_server_that_keeps_its_memory_is_asked_again_later() -> None:
    clock = Clock(2)
    clock.refusing.add(0)
    assert clock.run(3) == ("w1",)
    assert clock.released.count("s0") == 1
    clock.run(2)
    assert clock.released.count("s0") == 2
    clock.refusing.clear()
    assert clock.run(2.5) == ("w0", "w1")


def test_a_new_coordinator_adopts_the_round_it_finds() -> None:
    clock = Clock(3)
    clock.steps[1] = 4
    clock.run(3)
    before = clock.told(0)
    reports = [
        WorkerReport(f"w{i}", f"s{i}", WorkerState.TRAINING, 4, 5, f"tcp://w{i}", before.round_id, before.leader)
        for i in range(3)
    ]
    fleet, now_s = Fleet(RULES), clock.now_s
    for i in range(3):
        fleet.hear_server(ServerReport(f"s{i}", False, 0, 0, now_s), now_s)
        fleet.hear_worker(reports[i], now_s)
        plan = fleet.plan(now_s)
        assert plan.release == ()
    assert fleet.assignment("w2", now_s) == before
    assert fleet.plan(now_s + 10).members == ()


def test_a_leader_that_died_with_the_coordinator_is_replaced() -> None:
    fleet = Fleet(RULES)
    for now_s in (0.0, 0.2, 0.6):
        fleet.hear_server(ServerReport("s0", False, 0, 0, now_s), now_s)
        fleet.hear_worker(WorkerReport("w0", "s0", WorkerState.TRAINING, 4, 5, "tcp://w0", "r", "w1"), now_s)
        assert fleet.plan(now_s).members == ("w0",)
        told = fleet.assignment("w0", now_s)
        assert (told is None) == (now_s < 0.5)
    assert told is not None and (told.leader, told.round_id) == ("w0", "r")


def test_an_old_round_is_not_adopted_later_on() -> None:
    fleet = Fleet(RULES)
    fleet.hear_server(ServerReport("s0", False, 0, 0, 0.0), 0.0)
    fleet.hear_worker(WorkerReport("w0", "s0", WorkerState.READY, 0, 5, "tcp://w0"), 0.0)
    fleet.hear_server(ServerReport("s0", False, 0, 0, 9.0), 9.0)
    fleet.hear_worker(WorkerReport("w0", "s0", WorkerState.TRAINING, 0, 5, "tcp://w0", "old", "w0"), 9.0)
    assert fleet.plan(9.0).members == ()


def test_nothing_is_said_to_a_worker_whose_server_is_unknown() -> None:
    fleet = Fleet(RULES)
    fleet.hear_worker(WorkerReport("w0", "s0", WorkerState.TRAINING, 0, 5, "tcp://w0", "r", "w0"), 0.0)
    assert fleet.assignment("w0", 0.0) is None
    assert fleet.assignment("w9", 0.0) is None


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"[]", pack("server", {})[:-1], bytes(1 << 17), b"\x81\xa4kind\x01"])
def test_malformed_messages_are_refused(frame: bytes) -> None:
    with pytest.raises(ReportError):
        unpack(frame)


def test_malformed_reports_are_refused_with_what_they_hold() -> None:
    worker = {"name": "w", "server": "s", "state": "dancing", "step": 0, "num_samples": 0, "address": ""}
    with pytest.raises(ReportError, match="dancing"):
        read_worker(worker)
    with pytest.raises(ReportError, match="name"):
        read_server({"name": "x" * 200, "busy": False, "num_running": 0, "num_waiting": 0, "sent_s": 0.0})
    with pytest.raises(ReportError, match="leader"):
        Assignment.from_wire({"round_id": "r"})


# Over sockets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings() -> CoordinatorSettings:
    return CoordinatorSettings(
        "tcp://127.0.0.1:*",
        {"server.0": "http://127.0.0.1:1", "server.1": "http://127.0.0.1:2"},
        Rules(min_idle=1, idle_s=0.1, server_timeout_s=1.0, worker_timeout_s=1.0),
        report_interval_s=0.1,
    )


@pytest.fixture
def coordinator(settings: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(coordinator_module, "post_json", lambda *args: {"success": True})
    found = Coordinator(settings, NullPublisher())
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.stop()
    thread.join(3)
    assert not thread.is_alive()


def wait_for(condition: Any, timeout_s: float = 5.0) -> float:
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, f"waited {timeout_s} s"
        time.sleep(0.002)
    return time.monotonic() - start_s


def test_a_worker_is_assigned_when_its_server_idles_and_told_at_once_when_work_arrives(
    coordinator: Coordinator,
) -> None:
    reporter = ServerReporter(coordinator.address, "server.0")
    control = ControlLink(coordinator.address, "w", "server.0", "tcp://127.0.0.1:9")
    try:
        assert not control.wait(0.3).train
        control.report(num_samples=3)
        waits_s = []
        for _ in range(5):
            wait_for(lambda: control.current().train)
            assignment = control.current()
            assert (assignment.leader, assignment.members) == ("w", ("w",))
            reporter.update(1, 0)
            waits_s.append(wait_for(lambda: not control.current().train))
            assert control.current().reason == "work arrived" and control.left(assignment)
            reporter.update(0, 0)
        print(f"from work arriving to the worker knowing: {sorted(waits_s)[2] * 1e3:.1f} ms")
        assert max(waits_s) < 0.5
    finally:
        control.close()
        reporter.close()


def test_a_worker_rests_when_the_coordinator_is_silent_and_the_reporter_never_blocks(
    settings: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "post_json", lambda *args: {"success": True})
    first = Coordinator(settings, NullPublisher())
    thread = threading.Thread(target=first.run)
    thread.start()
    reporter = ServerReporter(first.address, "server.0")
    control = ControlLink(first.address, "w", "server.0", "tcp://127.0.0.1:9", lease_s=0.4)
    control.report(num_samples=3)
    try:
        wait_for(lambda: control.current().train)
        first.stop()
        thread.join(3)
        assert wait_for(lambda: not control.current().train) < 1.0
        assert control.current().reason == "the coordinator is silent"
        times_s = []
        for i in range(2000):
            start_s = time.perf_counter()
            reporter.update(i % 2, 0)
            times_s.append(time.perf_counter() - start_s)
        reporter.update(0, 0)
        print(f"update: median {sorted(times_s)[1000] * 1e6:.1f} us")
        assert sorted(times_s)[1000] < 50e-6
        wait_for(lambda: reporter.num_unsent > 0)
        again = Coordinator(CoordinatorSettings(first.address, settings.servers, settings.rules), NullPublisher())
        thread = threading.Thread(target=again.run)
        thread.start()
        wait_for(lambda: control.current().train)
        again.stop()
        thread.join(3)
    finally:
        control.close()
        reporter.close()


def test_nonsense_and_unknown_servers_are_counted_and_harm_nobody(coordinator: Coordinator) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(coordinator.address)
    stranger = {"name": "server.9", "busy": False, "num_running": 0, "num_waiting": 0, "sent_s": 0.0}
    for frames in ([b"nonsense"], [b""], [pack("king", {})], [pack("server", stranger)], [b"a", b"b"]):
        socket.send_multipart(frames)
    wait_for(lambda: coordinator.counters["malformed"] == 5)
    socket.close(0)


def test_a_refused_release_keeps_the_worker_at_rest(
    settings: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def refuse(*args: Any) -> dict[str, Any]:
        asked.append(args)
        raise ValueError("requests are running")

    monkeypatch.setattr(coordinator_module, "post_json", refuse)
    found = Coordinator(settings, NullPublisher())
    thread = threading.Thread(target=found.run)
    thread.start()
    reporter = ServerReporter(found.address, "server.0")
    control = ControlLink(found.address, "w", "server.0", "tcp://127.0.0.1:9")
    control.report(num_samples=3)
    try:
        wait_for(lambda: found.counters["refused"])
        assert asked[0][:2] == (
            "http://127.0.0.1:1/release_memory_occupation",
            {"tags": ["kv_cache"], "requests": "resume"},
        )
        assert not control.wait(0.3).train
    finally:
        found.stop()
        thread.join(3)
        control.close()
        reporter.close()


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ValueError, match="adress"):
        CoordinatorSettings.from_dict({"adress": "tcp://127.0.0.1:1", "servers": {}})

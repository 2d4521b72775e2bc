"""Supervision with small stand-in processes: starting order, restarts, a trainer's death, time-outs, no orphans.

The stand-ins answer /health and publish metrics as the real processes do; the real ones are started by tests/e2e.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_dta.config import load_config
from areal_dta.metrics import read_metrics
from launcher import ports
from launcher.local import ProcessTable
from launcher.plan import Placement, ProcessSpec
from launcher.progress import Progress
from launcher.rundir import RunDir, RunState
from launcher.store import MetricsStore
from launcher.supervise import LaunchFailed, Stopped, StopSignal, Supervisor, wait_for_end

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TRAINER = """
import sys
from areal_dta import metrics
publisher = metrics.init("trainer.0", sys.argv[1])
for step in range(3):
    publisher.emit("train/loss", 0.5, step=step)
    with publisher.span("time/step", step=step): pass
publisher.close()
"""
WAIT = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


@dataclass
class Bench:
    """A supervisor over a temporary run directory, and the means to look at it."""

    run: RunDir
    table: ProcessTable
    store: MetricsStore
    metrics_address: str
    out: io.StringIO
    stop_signal: StopSignal

    def supervisor(self, *overrides: str) -> Supervisor:
        config = load_config(QUICKSTART, ["runtime.stop_timeout_s=5", "runtime.start_timeout_s=10", *overrides])
        state = self.run.write_state(RunState("running", os.getpid(), total_steps=3))
        progress = Progress(self.out, 3, live=False)
        return Supervisor(config, self.run, state, self.table, self.store, progress, self.stop_signal)

    def pids(self) -> list[int]:
        return [p.popen.pid for p in self.table.processes.values()]

    def events(self, name: str, **labels: object) -> list[str]:
        found = [r.labels for r in read_metrics(self.run.metrics_file) if r.name == name]
        return [str(seen["process"]) for seen in found if all(seen.get(k) == v for k, v in labels.items())]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    run = RunDir(tmp_path)
    [port] = ports.pick_free(1, "127.0.0.1", set())
    address = f"tcp://127.0.0.1:{port}"
    store = MetricsStore(address, run.metrics_file)
    table = ProcessTable(run.log_file, {}, cwd=REPO)
    yield Bench(run, table, store, address, io.StringIO(), StopSignal())
    table.stop(None, 0.0)
    store.close()


def stand_in(name: str, code: str, *args: str, health: str | None = None) -> ProcessSpec:
    role = name.split(".")[0]
    return ProcessSpec(name, role, (sys.executable, "-c", code, *args), Placement("127.0.0.1"), None, health)  # type: ignore[arg-type]


def web_stand_in(name: str) -> ProcessSpec:
    [port] = ports.pick_free(1, "127.0.0.1", set())
    return stand_in(name, SERVER, str(port), health=f"http://127.0.0.1:{port}/health")


def is_gone(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_for_end(fd, 5.0)
    finally:
        os.close(fd)


def test_a_run_starts_in_order_reports_its_steps_and_leaves_nothing_behind(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.run_to_end([
        web_stand_in("server.0"), stand_in("batcher", WAIT), stand_in("trainer.0", TRAINER, bench.metrics_address),
        web_stand_in("router"), stand_in("worker.0", WAIT),
    ])  # fmt: skip
    assert bench.events("process/start") == ["server.0", "batcher", "trainer.0", "router", "worker.0"]
    assert supervisor.state.step == 3
    assert bench.run.read_state().step == 3
    assert "step 3/3" in bench.out.getvalue()
    assert bench.events("process/exit", stopped=None) == ["trainer.0"]
    assert sorted(bench.events("process/exit", stopped=True)) == ["batcher", "router", "server.0", "worker.0"]
    assert all(is_gone(pid) for pid in bench.pids())


def test_death_of_a_trainer_fails_the_run_with_its_last_words(bench: Bench) -> None:
    dying = stand_in("trainer.0", "import sys; print('loss is nan'); sys.exit(3)")
    with pytest.raises(LaunchFailed, match=r"trainer\.0 exited with code 3; last log lines: loss is nan"):
        bench.supervisor().run_to_end([dying, stand_in("trainer.1", WAIT), stand_in("worker.0", WAIT)])
    assert all(is_gone(pid) for pid in bench.pids())


def test_a_killed_trainer_is_named_with_its_signal(bench: Bench) -> None:
    killed = stand_in("trainer.1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(LaunchFailed, match=r"trainer\.1 was killed by signal 9 \(SIGKILL\)"):
        bench.supervisor().run_to_end([stand_in("trainer.0", WAIT), killed])


def test_a_service_that_dies_is_restarted_and_the_run_goes_on(bench: Bench, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    fragile = (
        f"import os, signal\nif not os.path.exists({str(mark)!r}):\n open({str(mark)!r}, 'w'); os._exit(7)\n{WAIT}"
    )
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pause = threading.Event()

    def release_when_restarted() -> None:
        deadline = time.monotonic() + 20
        while "process/restart" not in bench.run.metrics_file.read_text() and time.monotonic() < deadline:
            pause.wait(0.05)
        gate.write_text("go")

    helper = threading.Thread(target=release_when_restarted)
    helper.start()
    bench.supervisor().run_to_end([stand_in("batcher", fragile), stand_in("trainer.0", f"open({str(gate)!r}).read()")])
    helper.join(20)
    assert bench.events("process/restart") == ["batcher"]
    assert "batcher exited with code 7; restart 1/3" in bench.out.getvalue()


def test_restarts_are_bounded(bench: Bench) -> None:
    with pytest.raises(LaunchFailed, match=r"batcher exited with code 7.*restart_limit=1"):
        bench.supervisor("runtime.restart_limit=1").run_to_end([
            stand_in("batcher", "import os; os._exit(7)"), stand_in("trainer.0", WAIT),
        ])  # fmt: skip
    assert bench.events("process/restart") == ["batcher"]


def test_a_drained_worker_is_not_restarted(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    trainer = stand_in("trainer.0", f"open({str(gate)!r}).read()")
    bench.supervisor().run_to_end([trainer, stand_in("worker.0", f"open({str(gate)!r}, 'w').write('done')")])
    assert bench.table.processes["worker.0"].popen.returncode == 0
    assert bench.events("process/restart") == []


def test_a_server_that_never_answers_fails_with_its_name(bench: Bench) -> None:
    silent = stand_in("server.0", WAIT, health="http://127.0.0.1:9/health")
    with pytest.raises(LaunchFailed, match=r"server\.0 did not answer .* within runtime.start_timeout_s=0.5 s"):
        bench.supervisor("runtime.start_timeout_s=0.5").run_to_end([silent])
    assert all(is_gone(pid) for pid in bench.pids())


def test_a_program_that_is_not_there_fails_with_its_name(bench: Bench) -> None:
    absent = ProcessSpec("server.0", "server", ("no-such-python", "-m", "sglang"), Placement("127.0.0.1"))
    with pytest.raises(LaunchFailed, match=r"server\.0 cannot be started: no-such-python"):
        bench.supervisor().run_to_end([absent])


def test_a_silent_trainer_fails_naming_what_was_waited_for(bench: Bench) -> None:
    with pytest.raises(LaunchFailed, match=r"no progress for runtime.step_timeout_s=0.5 s while .*trainer"):
        bench.supervisor("runtime.step_timeout_s=0.5").run_to_end([stand_in("trainer.0", WAIT)])


def test_a_signal_stops_everything_gracefully(bench: Bench) -> None:
    supervisor = bench.supervisor()
    asking = stand_in("worker.0", f"import os, signal; os.kill(os.getppid(), signal.SIGTERM); {WAIT}")
    with bench.stop_signal.installed(), pytest.raises(Stopped, match="SIGTERM"):
        supervisor.run_to_end([stand_in("trainer.0", WAIT), asking])
    assert all(is_gone(pid) for pid in bench.pids())
    assert bench.table.processes["trainer.0"].history == ["was killed by signal 15 (SIGTERM)"]
    assert sorted(bench.events("process/exit", stopped=True)) == ["trainer.0", "worker.0"]


def test_a_second_signal_while_the_counters_are_saved_stops_without_grace(bench: Bench) -> None:
    supervisor = bench.supervisor("runtime.stop_timeout_s=600")

    def asked_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    supervisor._before_stop = asked_twice
    asking = stand_in("worker.0", f"import os, signal; os.kill(os.getppid(), signal.SIGINT); {STUBBORN}")
    with bench.stop_signal.installed(), pytest.raises(Stopped, match="SIGINT"):
        supervisor.run_to_end([stand_in("trainer.0", WAIT), asking])
    assert all(is_gone(pid) for pid in bench.pids())


def test_signals_after_the_end_change_nothing() -> None:
    stop_signal = StopSignal()
    with stop_signal.installed():
        os.kill(os.getpid(), signal.SIGINT)
        stop_signal.disarm()
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Stopped, match="SIGINT"):
        stop_signal.check()


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(bench: Bench) -> None:
    child = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WAIT!r}]).pid); {STUBBORN}"
    process = bench.table.start(stand_in("worker.0", child))
    log = bench.run.log_file("worker.0")
    deadline = time.monotonic() + 10
    while "ready" not in log.read_text() and time.monotonic() < deadline:
        bench.table.wait(0.05)
    grandchild = int(log.read_text().split()[0])
    assert bench.table.stop(None, timeout_s=0.3) == ["worker.0"]
    assert is_gone(process.popen.pid)
    assert is_gone(grandchild)


def test_a_killed_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from launcher.local import ProcessTable
from launcher.plan import Placement, ProcessSpec
table = ProcessTable(lambda name: Path(sys.argv[1]) / name, {{}})
spec = ProcessSpec("w", "worker", (sys.executable, "-c", {WAIT!r}), Placement("h"))
print(table.start(spec).popen.pid, flush=True)
table.wait(60)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate(timeout=10)
    assert is_gone(child)

"""From a run directory to a finished run: prepare, launch, watch, summarise. Used by `run` and `resume`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from areal_dta.config import Config, ConfigError
from launcher import plan as planning
from launcher.drafter_files import write_drafter_settings
from launcher.inputs import prepare_inputs
from launcher.local import ProcessTable
from launcher.progress import Progress
from launcher.rundir import RunDir, RunError, RunState, Status, write_json
from launcher.store import MetricsStore
from launcher.supervise import SECOND_SIGNAL, LaunchFailed, Stopped, StopSignal, Supervisor

__all__ = ["Outcome", "execute"]

EXIT_CODES = {"finished": 0, "stopped": 130}
STATUS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    state: RunState
    run_dir: Path
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.state.status, 1)


def execute(config: Config, run: RunDir, epoch: int, resume_step: int | None, out: TextIO, live: bool) -> Outcome:
    """Run in the foreground to the end of the run. A failed or stopped run is an Outcome, not an exception.

    The run directory exists. Raises RunError while another launcher holds it.
    """
    run.acquire()
    try:
        with StopSignal().installed() as stop_signal:
            return _execute(config, run, epoch, resume_step, stop_signal, out, live)
    finally:
        run.release()


def _execute(
    config: Config, run: RunDir, epoch: int, resume_step: int | None, stop_signal: StopSignal, out: TextIO, live: bool
) -> Outcome:
    first_step = 0 if resume_step is None else resume_step + 1
    state = run.write_state(RunState("preparing", os.getpid(), epoch, first_step, started_at=time.time()))
    # Stays true where a signal gets in between two of the clauses below.
    status: Status = "stopped"
    cause: str | None = SECOND_SIGNAL
    try:
        total = config.total_steps(prepare_inputs(config, run, stop_signal, out))
        run.write_state(replace(state, status="running", total_steps=total))
        _launch(config, run, resume_step, stop_signal, out, live)
        status, cause = "finished", None
    except (LaunchFailed, ConfigError, RunError) as error:
        status, cause = "failed", str(error)
    except Stopped as error:
        status, cause = "stopped", str(error)
    except KeyboardInterrupt:  # a second signal while preparing or stopping
        status, cause = "stopped", SECOND_SIGNAL
    except BaseException as error:
        # Only to leave a true state behind; the error itself goes on.
        status, cause = "failed", f"the launcher itself failed: {type(error).__name__}: {error}"
        raise
    finally:
        stop_signal.disarm()
        state = run.write_state(replace(run.read_state(), status=status, cause=cause))
    return Outcome(state, run.path, _summarise(run))


def _launch(
    config: Config, run: RunDir, resume_step: int | None, stop_signal: StopSignal, out: TextIO, live: bool
) -> None:
    state = run.read_state()
    chosen = planning.choose_ports(config)
    plan = planning.launch_plan(config, run.path, chosen, state.epoch, resume_step)
    run.launch_file.touch(mode=0o600)  # it may hold the API key
    run.launch_file.chmod(0o600)
    plan.write(run.launch_file)
    if plan.coordinator is not None:
        write_drafter_settings(config, plan, run.path / "drafter")
    store = MetricsStore(plan.metrics, run.metrics_file)
    progress = Progress(
        out, state.total_steps, live, step=state.step, num_ranks=plan.trainer_world_size, num_dp_ranks=plan.dp
    )
    try:
        table = ProcessTable(run.log_file, planning.worker_env(config))

        def keep_counters() -> None:
            said = save_batcher_status(plan.batcher, run)
            if said:
                progress.say(said)

        supervisor = Supervisor(config, run, state, table, store, progress, stop_signal, keep_counters)
        supervisor.run_to_end(planning.process_table(config, plan, chosen))
    finally:
        progress.take(store.drain())
        if store.bad_records:
            progress.say(f"{store.bad_records} messages to the metrics socket were no records and are not stored")
        progress.close()
        store.close()


def save_batcher_status(address: str, run: RunDir) -> str | None:
    """Write the batcher's counters to ``batcher_status.json`` for the summary; on failure, what to tell the user."""
    from areal_dta.channel import RpcClient, RpcError, RpcTimeout
    from areal_dta.wire import ChannelError

    client = RpcClient(address, "launcher")
    try:
        write_json(run.path / "batcher_status.json", client.call("status", timeout_s=STATUS_TIMEOUT_S).body)
    except (RpcTimeout, RpcError, ChannelError) as error:
        return f"the batcher's counters are missing from the summary: {error}"
    finally:
        client.close()
    return None


def _summarise(run: RunDir) -> dict[str, Any]:
    from launcher.summary import summarise

    if not run.metrics_file.exists():
        return {}
    summary = summarise(run.path)
    write_json(run.summary_file, summary)
    return summary

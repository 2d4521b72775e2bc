"""The launcher's pure and small parts: ports, process table, metrics store, progress, inputs."""

from __future__ import annotations

import io
import itertools
import os
import socket
import sys
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from areal_dta import metrics
from areal_dta.config import Config, ConfigError, load_config
from areal_dta.metrics import MetricRecord, read_metrics
from areal_dta.rollout.sglang import build_command
from launcher import plan as planning
from launcher import ports
from launcher.inputs import precheck
from launcher.prepare import check_prepared
from launcher.progress import Progress
from launcher.redact import redact_command, redact_values
from launcher.rundir import RunError
from launcher.store import MetricsStore

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
GPU_CONFIG = REPO / "experiments" / "tau2" / "qwen3_8b_airline_8gpu.yaml"


def quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


class TestPorts:
    def test_free_ports_are_distinct_and_avoid_the_taken_ones(self) -> None:
        chosen = ports.pick_free(20, "127.0.0.1", set())
        assert len(set(chosen)) == 20
        again = ports.pick_free(20, "127.0.0.1", set(chosen))
        assert not set(chosen) & set(again)

    @pytest.mark.parametrize("key", ["batcher.port", "runtime.router_port", "embedded.ports"])
    def test_a_taken_fixed_port_is_refused_with_key_and_remedy(self, key: str) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            config = quickstart(f"{key}=[{port}]" if key == "embedded.ports" else f"{key}={port}")
            with pytest.raises(ConfigError, match=rf"{key}.*{port}.*another port"):
                precheck(config)

    def test_fixed_ports_are_kept_and_the_rest_filled(self) -> None:
        [fixed] = ports.pick_free(1, "127.0.0.1", set())
        chosen = planning.choose_ports(quickstart(f"batcher.port={fixed}", "rollout.backend=embedded:d2"))
        everything = [*chosen.servers, chosen.router, chosen.batcher, chosen.metrics, chosen.master]
        assert chosen.batcher == fixed
        assert len(set(everything)) == len(everything) == 6
        assert 0 not in everything


class TestPlan:
    def test_quickstart_has_every_process_once_in_order(self) -> None:
        config = quickstart("rollout.backend=embedded:d2", "runtime.num_workers=2")
        chosen = planning.choose_ports(config)
        plan = planning.launch_plan(config, Path("run"), chosen, epoch=1, resume_step=4)
        table = planning.process_table(config, plan, chosen)
        names = ["server.0", "server.1", "batcher", "trainer.0", "trainer.1", "router", "worker.0", "worker.1"]
        assert [spec.name for spec in table] == names
        assert [spec.name for spec in table if not spec.restartable] == ["trainer.0", "trainer.1"]
        assert table[1].argv == (sys.executable, "-m", "areal_dta.rollout.server", "--run", "run", "--index", "1")
        assert table[1].health == f"http://127.0.0.1:{chosen.servers[1]}/health"
        assert (plan.epoch, plan.resume_step, plan.trainer_world_size) == (1, 4, 2)
        assert len({plan.batcher, plan.metrics, plan.router, *plan.servers}) == 5

    def test_gpu_config_gives_every_device_to_one_process(self) -> None:
        config = load_config(GPU_CONFIG, ["rollout.backend=sglang:d2t2"])
        chosen = planning.planned_ports(config)
        table = planning.process_table(config, planning.launch_plan(config, Path("run"), chosen, 0, None), chosen)
        devices = [spec.placement.devices for spec in table if spec.placement.devices]
        assert devices == [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]
        assert table[0].env == {"CUDA_VISIBLE_DEVICES": "0,1"}
        others = [spec for spec in table if spec.role in ("batcher", "router", "worker")]
        assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in others} == {""}
        assert "CUDA_VISIBLE_DEVICES" not in planning.prepare_env(config)

    def test_with_embedded_servers_no_process_sees_a_gpu_of_the_machine(self) -> None:
        config = quickstart()
        chosen = planning.planned_ports(config)
        table = planning.process_table(config, planning.launch_plan(config, Path("run"), chosen, 0, None), chosen)
        assert [spec.env for spec in table] == [{"CUDA_VISIBLE_DEVICES": ""}] * len(table)
        assert planning.prepare_env(config)["CUDA_VISIBLE_DEVICES"] == ""

    def test_keys_are_shown_neither_in_commands_nor_in_values(self) -> None:
        config = load_config(GPU_CONFIG, ["runtime.api_key=sesame", "stats_logger.wandb.wandb_api_key=tell-me"])
        argv = build_command(config, index=0, port=3000)
        assert "sesame" in argv
        shown = redact_command(argv)
        assert shown[argv.index("sesame")] == "***" and "sesame" not in shown
        values = redact_values(config.raw)
        assert "sesame" not in str(values) and "tell-me" not in str(values)
        assert values["runtime"] == {**config.raw["runtime"], "api_key": "***"}
        assert redact_values(quickstart().raw)["runtime"]["api_key"] is None

    def test_sglang_command_carries_sizes_model_and_flags(self) -> None:
        config = load_config(GPU_CONFIG, ["rollout.backend=sglang:d2t2", "sglang.enable_metrics=true"])
        argv = build_command(config, index=1, port=3000)
        assert argv[1:3] == ["-m", "sglang.launch_server"]
        pairs = dict(itertools.pairwise(argv))
        assert pairs["--model-path"] == "Qwen/Qwen3-8B"
        assert (pairs["--port"], pairs["--tp-size"], pairs["--random-seed"]) == ("3000", "2", "2")
        assert pairs["--mem-fraction-static"] == "0.8"
        assert "--enable-metrics" in argv
        assert "None" not in argv


class TestStore:
    def test_records_of_publishers_are_stored_and_kept_as_last_values(self, tmp_path: Path) -> None:
        [port] = ports.pick_free(1, "127.0.0.1", set())
        address = f"tcp://127.0.0.1:{port}"
        store = MetricsStore(address, tmp_path / "metrics.jsonl")
        publisher = metrics.init("trainer.0", address)
        publisher.emit("train/loss", 0.5, step=0)
        publisher.emit("train/loss", 0.25, step=1)
        store.append(MetricRecord(1.0, "launcher", "event", "run/phase", message="x"))
        publisher.close()
        fresh = wait_for_records(store, 3)
        store.close()
        assert {r.proc for r in fresh} == {"launcher", "trainer.0"}
        assert store.drain() == []
        last = store.last("trainer.0", "train/loss")
        assert last is not None
        assert last.value == 0.25
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3

    def test_a_torn_last_line_does_not_swallow_the_next_record(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"t": 1.0, "proc"')
        [port] = ports.pick_free(1, "127.0.0.1", set())
        store = MetricsStore(f"tcp://127.0.0.1:{port}", path)
        store.append(MetricRecord(1.0, "launcher", "event", "run/phase"))
        store.close()
        assert [r.name for r in read_metrics(path)] == ["run/phase"]

    def test_a_taken_address_is_an_error_and_not_a_hang(self, tmp_path: Path) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
            with pytest.raises(RunError, match=address):
                MetricsStore(address, tmp_path / "metrics.jsonl")

    def test_garbage_is_counted_and_does_no_harm(self, tmp_path: Path) -> None:
        [port] = ports.pick_free(1, "127.0.0.1", set())
        address = f"tcp://127.0.0.1:{port}"
        store = MetricsStore(address, tmp_path / "metrics.jsonl")
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket_:
            socket_.connect(address)
            good = MetricRecord(1.0, "a", "value", "x", 1.0).to_wire()
            for frame in (b"\xc1", b"", msgpack.packb({"t": "no"}), msgpack.packb(good)):
                socket_.send(frame)
        wait_for_records(store, 1)
        store.close()
        assert store.bad_records == 3
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def wait_for_records(store: MetricsStore, count: int) -> list[MetricRecord]:
    deadline, found = time.monotonic() + 10, list[MetricRecord]()
    while len(found) < count and time.monotonic() < deadline:
        found += store.drain()
        os.sched_yield()
    return found


class TestProgress:
    def record(
        self, name: str, value: float, step: int = 0, proc: str = "trainer.0", kind: str = "value"
    ) -> MetricRecord:
        return MetricRecord(0.0, proc, kind, name, value, step)

    def test_a_finished_step_is_one_line_with_its_values(self) -> None:
        out = io.StringIO()
        progress = Progress(out, total_steps=5, live=False)
        progress.take([
            self.record("batch/reward_mean", 0.5, proc="batcher"),
            self.record("train/loss", -0.25),
            self.record("train/loss", 99.0, proc="trainer.1"),
            self.record("time/step", 2.0, kind="span"),
        ])  # fmt: skip
        assert out.getvalue() == "step 1/5  reward 0.500  loss -0.2500  tok/s -  ratio -  staleness -  2.0 s\n"
        assert progress.step == 1

    def test_the_phase_follows_the_trainer_and_is_redrawn_in_place(self) -> None:
        out, now = io.StringIO(), [0.0]
        progress = Progress(out, total_steps=5, live=True, clock=lambda: now[0])
        progress.set_phase("starting")
        now[0] = 9.0
        progress.take([self.record("time/logprob", 1.0, kind="span")])
        assert progress.phase == "advantages"
        assert out.getvalue().endswith("\rstep 1/5: advantages")
        progress.take([self.record("time/step", 1.0, kind="span")])
        assert "\n" in out.getvalue()

    def test_throughput_is_of_all_ranks_and_the_line_waits_for_their_records(self) -> None:
        out = io.StringIO()
        progress = Progress(out, total_steps=5, live=False, num_ranks=2, num_dp_ranks=2)
        for rank, seconds in ((0, 2.0), (1, 4.0)):
            proc = f"trainer.{rank}"
            assert out.getvalue() == ""
            progress.take([
                self.record("train/tokens_per_s", 1.0, proc=proc),
                self.record("train/row_tokens", 500, proc=proc),
                self.record("time/update", seconds, proc=proc, kind="span"),
                self.record("time/step", 5.0 + rank, proc=proc, kind="span"),
            ])  # fmt: skip
        assert "tok/s 250 " in out.getvalue() and out.getvalue().endswith("6.0 s\n")

    def test_what_a_rank_did_not_report_does_not_hide_a_step(self) -> None:
        out = io.StringIO()
        progress = Progress(out, total_steps=2, live=False, num_ranks=2)
        progress.take([self.record("time/step", 1.0, step, kind="span") for step in (0, 1)])
        assert (progress.step, out.getvalue()) == (2, "")
        progress.close()
        assert [line[:8] for line in out.getvalue().splitlines()] == ["step 1/2", "step 2/2"]

    def test_a_step_cut_short_by_an_error_is_not_a_finished_step(self) -> None:
        progress = Progress(io.StringIO(), total_steps=5, live=False)
        progress.take([MetricRecord(0.0, "trainer.0", "span", "time/step", 1.0, 0, {"failed": True})])
        assert progress.step == 0

    def test_after_the_last_step_it_says_finishing_and_leaves_a_clean_line(self) -> None:
        out, now = io.StringIO(), [9.0]
        progress = Progress(out, total_steps=5, live=True, step=4, clock=lambda: now[0])
        progress.take([self.record("time/step", 1.0, step=4, kind="span")])
        assert out.getvalue().endswith("\rstep 5/5: finishing")
        progress.close()
        assert out.getvalue().endswith("\r" + " " * len("step 5/5: finishing") + "\r")
        progress.set_phase("stopping")
        assert "stopping" not in out.getvalue()

    def test_only_trainer_and_finished_episodes_count_as_activity(self) -> None:
        now = [0.0]
        progress = Progress(io.StringIO(), total_steps=5, live=False, clock=lambda: now[0])
        now[0] = 7.0
        progress.take([self.record("server/running", 1.0, proc="server.0")])
        assert progress.last_activity == 0.0
        progress.take([self.record("rollout/reward", 1.0, proc="worker.0")])
        assert progress.last_activity == 7.0


class TestInputs:
    def test_missing_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"actor\.path=.*does not exist"):
            precheck(quickstart(f"actor.path={tmp_path}/none"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            precheck(quickstart(f"actor.path={tmp_path}"))
        with pytest.raises(ConfigError, match="hf download no-such-org/no-such-model"):
            precheck(quickstart("actor.path=no-such-org/no-such-model"))

    def test_neither_data_nor_prepare_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"train_dataset\.path"):
            precheck(quickstart("prepare=null"))

    def test_more_than_one_machine_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"cluster\.n_nodes=2"):
            precheck(quickstart("cluster.n_nodes=2"))

    def test_what_prepare_left_is_checked(self, tmp_path: Path) -> None:
        (tmp_path / "dataset").mkdir()
        with pytest.raises(ConfigError, match=r"train\.jsonl is missing"):
            check_prepared(tmp_path, 2)
        (tmp_path / "dataset" / "train.jsonl").write_text('{"task_id": "a"}\n\n{"task_id": "b"}\n')
        with pytest.raises(ConfigError, match="no model"):
            check_prepared(tmp_path, 2)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        assert check_prepared(tmp_path, 2) == 2
        with pytest.raises(ConfigError, match=r"2 prompts.*batch_size=3.*at most 2"):
            check_prepared(tmp_path, 3)

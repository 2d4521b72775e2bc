"""Speculation on SGLang servers: flags, refusals and drafter updates. No SGLang is needed, and none was tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from areal_dta.config import ConfigError, load_config
from areal_dta.drafter import publish
from areal_dta.drafter.eagle import init_weights
from areal_dta.drafter.eagle_config import EagleConfig, sglang_obstacles
from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.rollout.sglang import TltPlan, build_command
from areal_dta.rollout.sglang_contract import PINNED, contract_of
from areal_dta.rollout.sglang_tlt import SETTINGS_VARIABLE, Speculation, SpeculationRefused, speculation
from tests.unit.eagle_kit import random_target

REPO = Path(__file__).resolve().parents[2]
GPU_CONFIG = REPO / "experiments" / "tau2" / "qwen3_8b_airline_8gpu.yaml"
COMMAND = ["python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B", "--tp-size", "1", "--pp-size", "1"]
NEW = "0.5.23"


def save_drafter(folder: Path, kind: str = "eagle", draft_vocab: int = 0, portable: bool = True) -> Path:
    target = random_target("qwen3", dtype=torch.float32)
    config = EagleConfig.for_target(target.config, kind, draft_vocab, portable=portable)
    ids = torch.arange(draft_vocab) if draft_vocab else None
    write_drafter(folder, init_weights(config, target, torch.Generator().manual_seed(0), ids), "d0")
    return folder


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        "eagle": save_drafter(root / "eagle"),
        "reduced": save_drafter(root / "reduced", draft_vocab=16),
        "eagle3": save_drafter(root / "eagle3", "eagle3", draft_vocab=16),
        "own": save_drafter(root / "own", portable=False),
    }


def planned(drafter: Path, *arms: str, max_batch: int | None = None) -> TltPlan:
    return TltPlan(str(drafter), arms, 0.02, max_batch, 1)


def chosen(plan: TltPlan, version: str, *more: str) -> tuple[dict[str, str], Speculation]:
    found = speculation(plan, contract_of(version), [*COMMAND, *more])
    return dict(zip(found.flags[::2], found.flags[1::2], strict=True)), found


class TestFlags:
    def test_the_pinned_release_gets_the_first_eagle_strategy_and_its_limits_are_said(
        self, drafters: dict[str, Path]
    ) -> None:
        flags, found = chosen(planned(drafters["eagle"], "ngram-d3-k1-v3", "eagle-d4-k2-v7"), PINNED)
        assert flags == {
            "--speculative-algorithm": "EAGLE",
            "--speculative-draft-model-path": str(drafters["eagle"]),
            "--speculative-num-steps": "4",
            "--speculative-eagle-topk": "2",
            "--speculative-num-draft-tokens": "8",
        }
        assert found.env == {}
        said = "\n".join(found.messages)
        assert "no registered algorithm" in said and "needs a new start" in said
        assert "not used of tlt.arms: ngram-d3-k1-v3" in said

    def test_without_strategies_a_chain_of_three_is_drafted(self, drafters: dict[str, Path]) -> None:
        flags, _ = chosen(planned(drafters["eagle"]), PINNED)
        assert [flags[f"--speculative-{k}"] for k in ("num-steps", "eagle-topk", "num-draft-tokens")] == ["3", "1", "4"]

    def test_a_release_with_plugins_gets_the_tuner_over_chains(self, drafters: dict[str, Path]) -> None:
        plan = planned(drafters["eagle"], "eagle-d1-k1-v1", "eagle-d4-k2-v7", "eagle-d5-k1-v5", max_batch=8)
        flags, found = chosen(plan, NEW)
        assert flags["--speculative-algorithm"] == "AREAL_DTA_EAGLE"
        assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("5", "6")
        settings = json.loads(found.env[SETTINGS_VARIABLE])
        assert settings == {
            "arms": ["eagle-d1-k1-v1", "eagle-d5-k1-v5"],
            "max_regret": 0.02,
            "max_batch": 8,
            "seed": 1,
        }
        assert any("steps only" in line for line in found.messages)
        assert "not used of tlt.arms: eagle-d4-k2-v7" in found.messages

    def test_with_several_ranks_the_strategy_is_fixed_and_weights_still_kept_apart(
        self, drafters: dict[str, Path]
    ) -> None:
        flags, found = chosen(planned(drafters["eagle"], max_batch=8), NEW, "--tp-size", "2")
        assert (flags["--speculative-algorithm"], flags["--speculative-num-steps"]) == ("AREAL_DTA_EAGLE", "3")
        assert json.loads(found.env[SETTINGS_VARIABLE])["arms"] == []
        assert any("one GPU per server" in line for line in found.messages)
        assert "tlt.max_batch=8 has no effect without the tuner" in found.messages

    def test_reduced_vocabularies_use_a_token_map_or_their_own_head(self, drafters: dict[str, Path]) -> None:
        flags, found = chosen(planned(drafters["reduced"]), PINNED)
        tokens = torch.load(flags["--speculative-token-map"], weights_only=True)  # as SGLang reads it
        assert torch.tensor(tokens).tolist() == list(range(16))
        assert any("do not follow updates" in line for line in found.messages)
        flags, _ = chosen(planned(drafters["eagle3"]), PINNED)
        assert (flags["--speculative-algorithm"], "--speculative-token-map" in flags) == ("EAGLE3", False)

    def test_flags_of_the_user_win_and_are_named(self, drafters: dict[str, Path]) -> None:
        flags, found = chosen(planned(drafters["eagle"]), NEW, "--speculative-num-steps", "2")
        assert "--speculative-num-steps" not in flags
        assert "sglang.speculative_num_steps is used, not 3 of tlt" in found.messages
        assert json.loads(found.env[SETTINGS_VARIABLE])["arms"] == []
        flags, found = chosen(planned(drafters["eagle"]), NEW, "--speculative-algorithm=EAGLE")
        assert found.env == {} and "--max-running-requests" not in flags
        assert any("loaded into the drafter as well" in line for line in found.messages)


class TestRefusals:
    @pytest.mark.parametrize("version", ["0.5.11", "0.5.12", "0.5.20"])
    def test_releases_that_load_the_policy_into_the_drafter(self, version: str, drafters: dict[str, Path]) -> None:
        with pytest.raises(SpeculationRefused, match=r"into the drafter as well; use a release up to 0\.5\.10"):
            chosen(planned(drafters["eagle"]), version)

    def test_a_drafter_that_sglang_has_no_classes_for(self, drafters: dict[str, Path]) -> None:
        with pytest.raises(SpeculationRefused, match=r"cannot load q/k-norm.*experiments\.drafter --portable"):
            chosen(planned(drafters["own"]), PINNED)
        target = random_target("qwen3", dtype=torch.float32)
        headless = EagleConfig.for_target(target.config, "eagle3", 16, portable=True, trains_head=False)
        assert "without a head of its own" in sglang_obstacles(headless)[0]

    def test_a_folder_without_a_drafter_and_a_drafter_of_another_model(
        self, drafters: dict[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(SpeculationRefused, match="tlt.drafter="):
            chosen(planned(tmp_path), PINNED)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = {"model_type": "llama", "vocab_size": 9, "rms_norm_eps": 1e-5, "max_position_embeddings": 9, **sizes}
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(SpeculationRefused, match="drafter made for"):
            chosen(planned(drafters["eagle"]), PINNED, "--model-path", str(tmp_path / "model"))

    def test_two_drafters(self, drafters: dict[str, Path]) -> None:
        with pytest.raises(SpeculationRefused, match=r"sglang\.speculative_draft_model_path name two drafters"):
            chosen(planned(drafters["eagle"]), NEW, "--speculative-draft-model-path", "other")

    @pytest.mark.parametrize(
        ("arm", "message"), [("eagle-d1-k2-v7", "more than the 2"), ("eagle-d2-k1-v3", "more than the 2")]
    )
    def test_strategies_that_sglang_cannot_draft(self, arm: str, message: str, drafters: dict[str, Path]) -> None:
        with pytest.raises(SpeculationRefused, match=message):
            chosen(planned(drafters["eagle"], arm), PINNED)

    def test_settings_without_effect_and_strategies_without_eagle(self, drafters: dict[str, Path]) -> None:
        drafter = f"tlt.drafter={drafters['eagle']}"
        assert load_config(GPU_CONFIG, [drafter, "tlt.arms=[eagle-d3-k1-v3]", "tlt.max_batch=8"]).tlt.max_batch == 8
        for overrides, message in (
            (["tlt.max_batch=8"], r"tlt\.max_batch has no effect.*without tlt\.drafter"),
            ([drafter, "tlt.train=true"], r"tlt\.train has no effect.*sglang\.speculative_"),
            ([drafter, "tlt.arms=[ngram-d3-k1-v3]"], "no eagle strategy"),
            ([drafter, "tlt.arms=[eagle-d4-k2]"], "eagle-d4-k2-v7"),
        ):
            with pytest.raises(ConfigError, match=message):
                load_config(GPU_CONFIG, overrides)


def test_a_run_passes_its_plan_and_the_start_makes_flags_of_it(drafters: dict[str, Path], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {NEW}; else echo "started $*"; echo "path $PYTHONPATH"; fi\n'
    )
    python.chmod(0o755)
    config = load_config(GPU_CONFIG, [f"tlt.drafter={drafters['eagle']}", f"runtime.sglang_python={python}"])
    command = build_command(config, 1, 3000)
    assert command[0] == "--tlt" and TltPlan.from_json(command[1]) == TltPlan.of(config, 1)
    assert TltPlan.of(load_config(GPU_CONFIG, [f"tlt.drafter={drafters['eagle']}", "tlt.enabled=false"]), 1) is None
    done = subprocess.run(
        [sys.executable, "-m", "areal_dta.rollout.sglang", *command],
        capture_output=True, text=True, timeout=60, cwd=REPO, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--speculative-algorithm AREAL_DTA_EAGLE" in done.stdout
    assert f"SGLang {NEW}: the tuner chooses between off and" in done.stdout
    site = done.stdout.split("path ")[-1].split(os.pathsep)[0].strip()
    assert sorted(p.name for p in Path(site).iterdir()) == ["areal_dta", "areal_dta_sglang-1.dist-info"]
    broken = TltPlan(str(tmp_path), (), 0.02, None, 1).to_json()
    done = subprocess.run(
        [sys.executable, "-m", "areal_dta.rollout.sglang", "--tlt", broken, *command[2:]],
        capture_output=True, text=True, timeout=60, cwd=REPO,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and f"cannot serve: tlt.drafter={tmp_path}" in done.stderr
    # The plugin is found from there by an interpreter that has nothing else of this environment.
    code = (
        "import importlib.metadata as m, sys; (e,) = m.entry_points(group='sglang.srt.plugins'); e.load()(); "
        "print(e.name, sorted({'torch', 'numpy', 'zmq'} & set(sys.modules)), sys.modules['areal_dta'].__file__)"
    )
    bare = getattr(sys, "_base_executable", sys.executable)
    found = subprocess.run(
        [bare, "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"PYTHONPATH": site}
    )
    assert found.stdout.split()[:2] == ["areal_dta", "[]"], found.stderr
    assert found.stdout.split()[2].startswith(site)


class SGLangServer(ThreadingHTTPServer):
    """Answers what `put_drafter` asks; ``algorithm`` is what its `/server_info` tells."""

    def __init__(self, algorithm: str | None, fails: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), SGLangHandler)
        self.algorithm, self.fails = algorithm, fails
        self.asked: list[tuple[str, dict[str, Any]]] = []
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class SGLangHandler(BaseHTTPRequestHandler):
    server: SGLangServer

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.answer(200, {"version": NEW, "speculative_algorithm": self.server.algorithm})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path == "/update_drafter_from_disk":
            self.answer(404, {"detail": "Not Found"})
        elif self.path == "/update_weights_from_disk" and self.server.fails:
            self.answer(400, {"success": False, "message": "torn"})
        else:
            self.answer(200, {"success": True})

    def log_message(self, format: str, *args: Any) -> None: ...


def test_an_sglang_with_the_plugin_takes_a_drafter_between_pause_and_continue(
    drafters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    servers = SGLangServer("AREAL_DTA_EAGLE"), SGLangServer("EAGLE"), SGLangServer("AREAL_DTA_EAGLE3", fails=True)
    try:
        folder = str(drafters["eagle"])
        assert publish.main([folder, *(server.url for server in servers)]) == 1
        assert publish.main([str(drafters["eagle"].parent), servers[0].url]) == 2
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    taken, plain, failed = servers
    update = ("/update_weights_from_disk", {"model_path": folder, "flush_cache": False})
    expected = [("/pause_generation", {"mode": "in_place"}), update, ("/continue_generation", {})]
    assert taken.asked[1:] == failed.asked[1:] == expected
    assert len(plain.asked) == 1  # would load the drafter into the policy
    output = capsys.readouterr()
    assert output.out == f"{taken.url} has d0\n"
    assert "at its start only" in output.err and "torn" in output.err and "holds no drafter" in output.err

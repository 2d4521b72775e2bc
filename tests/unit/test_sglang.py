"""SGLang's releases as `sglang_contract` has them, and what happens before a server starts. No SGLang is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_dta.rollout.sglang import SGLangMissing, installed_version
from areal_dta.rollout.sglang_contract import EMBEDDED, PINNED, contract_of, contract_of_info


@pytest.mark.parametrize(
    ("version", "spans", "token_ids", "sessions", "pause"),
    [
        (PINNED, False, False, False, "abort"),
        ("0.5.16", False, False, False, "abort"),
        ("0.5.17", False, True, False, "abort"),
        ("0.5.19", True, True, False, "abort"),
        ("0.5.21", True, True, True, "retract"),
        ("0.5.23", True, True, True, "retract"),
        ("0.6.0rc1", True, True, True, "retract"),
        ("a private build", False, False, False, "abort"),
    ],
)
def test_releases_differ_where_their_sources_do(version: str, spans: bool, token_ids: bool, sessions: bool, pause: str):
    contract = contract_of(version)
    assert (contract.version_spans, contract.chat_token_ids, contract.update_sessions) == (spans, token_ids, sessions)
    assert contract.update_pause == pause
    assert len(contract.limits()) == [pause == "retract", spans, token_ids, not sessions].count(False)


def test_a_server_is_known_by_its_info():
    assert contract_of_info({"instance": "abc"}) == EMBEDDED
    assert contract_of_info({"version": "0.5.23"}) == contract_of("0.5.23")
    assert contract_of_info({}).update_pause == "abort"
    assert EMBEDDED.limits() == []


def stand_in(folder: Path, version: str) -> Path:
    """An interpreter that has SGLang ``version`` and shows how it was started."""
    path = folder / "python"
    health = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    shown = f'echo "started $*"; echo "plain health: ${health}"; exit 7'
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; else {shown}; fi\n')
    path.chmod(0o755)
    return path


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_dta.rollout.sglang", *command], capture_output=True, text=True, timeout=60
    )


def test_a_server_starts_as_itself_after_its_limits_were_said(tmp_path: Path):
    done = start(str(stand_in(tmp_path, PINNED)), "-m", "sglang.launch_server", "--port", "1")
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-2]) == (f"starting SGLang {PINNED}", "started -m sglang.launch_server --port 1")
    assert lines[-1] == "plain health: false"  # of generation: a paused server is alive
    assert any("weight updates answer running requests" in line for line in lines)
    assert done.returncode == 7  # its own


def test_a_flag_that_the_release_has_no_more_is_named(tmp_path: Path):
    python = str(stand_in(tmp_path, "0.5.23"))
    done = start(python, "-m", "sglang.launch_server", "--cuda-graph-max-bs", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "remove sglang.cuda_graph_max_bs" in done.stderr
    assert start(python, "-m", "sglang.launch_server").returncode == 7
    assert contract_of(PINNED).removed_flags == ()


def test_an_environment_without_sglang_is_named():
    with pytest.raises(SGLangMissing, match=r"has no sglang .*sglang=="):
        installed_version(sys.executable)
    done = start("/nowhere/python", "-m", "sglang.launch_server")
    assert done.returncode == 2
    assert "runtime.sglang_python=/nowhere/python cannot be run" in done.stderr
    assert start().returncode == 2

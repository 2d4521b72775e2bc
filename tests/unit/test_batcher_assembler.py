"""The process that puts large batches together: one that hangs is ended, and said so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_dta.batcher import assembler
from areal_dta.batcher.assembler import Assembler, AssemblyError, Order


def test_a_process_that_never_answers_is_killed_and_the_batch_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def hang(self: Assembler) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(self._process)
        return self._process

    monkeypatch.setattr(Assembler, "_started", hang)
    monkeypatch.setattr(assembler, "_LIMIT_S", 0.2)
    order = Order(SimpleNamespace(step=7, num_tokens=5), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(AssemblyError, match=r"step 7 .*died twice"):
        asyncio.run(asyncio.wait_for(Assembler(small_tokens=0).run(order), 30))
    assert len(started) == 2 and all(process.poll() is not None for process in started)

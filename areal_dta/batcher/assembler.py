"""Puts batches together beside the event loop: small ones in a thread, large ones in a process of their own, because a
sort holds Python's lock.

The process (``python -m areal_dta.batcher.assembler``) is started when it is first needed. It reads the arrays from the
log itself, so what goes there is a list of places and what comes back are the shards, over its own pipes. It ends when
its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal_dta.batcher.dispatch import Assembly, Batch
from areal_dta.batcher.leases import Place
from areal_dta.batcher.spool_format import read_at
from areal_dta.records import Trajectory, unpack, write_trace

__all__ = ["Assembler", "AssemblyError", "Order"]

log = logging.getLogger(__name__)

SMALL_TOKENS = 1 << 18  # up to here a process costs more than it saves
_LIMIT_S, _LIMIT_S_PER_TOKEN = 120.0, 5e-6  # of an assembly; thirty times what an idle machine takes
_FAULTS = (OSError, LookupError, ValueError)  # of `Order.run`: arrays that are gone, damaged or of no use


class AssemblyError(RuntimeError):
    """A batch could not be put together; the text says why."""


@dataclass(frozen=True)
class Order:
    """An assembly, the log its arrays are in, and where its trace goes (None: nowhere)."""

    assembly: Assembly
    spool_dir: Path
    trace: Path | None = None
    domain: str = ""

    def run(self) -> Batch:
        """Raises OSError for arrays that cannot be read or a trace that cannot be written, LookupError for arrays that
        are gone, ValueError for such as make no batch.
        """
        trajectories = self.assembly.trajectories(partial(_read, self.spool_dir))
        batch = self.assembly.run(trajectories)
        if self.trace is not None:
            write_trace(self.trace, [t for group in trajectories for t in group], self.domain, self.assembly.step)
        return batch


class Assembler:
    """One assembly at a time; others queue."""

    def __init__(self, small_tokens: int = SMALL_TOKENS) -> None:
        self._small_tokens = small_tokens
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def run(self, order: Order) -> Batch:
        """Raises AssemblyError."""
        async with self._one_at_a_time:
            if order.assembly.num_tokens <= self._small_tokens:
                try:
                    return await asyncio.to_thread(order.run)
                except _FAULTS as error:
                    raise AssemblyError(f"step {order.assembly.step}: {error}") from error
            return await asyncio.to_thread(self._exchange, order)

    def _exchange(self, order: Order) -> Batch:
        died_before = False
        while True:
            process = self._started()
            if process.stdin is None or process.stdout is None:
                raise AssemblyError("the assembling process has no pipes")
            limit_s = _LIMIT_S + _LIMIT_S_PER_TOKEN * order.assembly.num_tokens
            watch = threading.Timer(limit_s, self._overdue, (process, order.assembly.step, limit_s))
            watch.start()
            try:
                pickle.dump(order, process.stdin, pickle.HIGHEST_PROTOCOL)
                process.stdin.flush()
                result = pickle.load(process.stdout)  # noqa: S301  our own child's, over a pipe
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                self._kill()
                log.error("the assembling process died (exit code %s): %s", process.returncode, error)
                if died_before:
                    raise AssemblyError(
                        f"the process that puts step {order.assembly.step} together "
                        f"({order.assembly.num_tokens} tokens) died twice, exit code {process.returncode}; "
                        "it may have run out of memory, or its disk may hang"
                    ) from error
                died_before = True
                continue
            finally:
                watch.cancel()
            if isinstance(result, Batch):
                return result
            raise AssemblyError(str(result))

    @staticmethod
    def _overdue(process: subprocess.Popen[bytes], step: int, limit_s: float) -> None:
        """End a process that hangs (a stuck disk), so that whoever reads its answer learns of it."""
        log.error("no answer from the assembling process for step %d in %.0f s; it is killed", step, limit_s)
        process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "areal_dta.batcher.assembler"]
            root = Path(__file__).resolve().parents[2]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

    async def close(self) -> None:
        async with self._one_at_a_time:
            self._kill()


def _read(spool_dir: Path, place: Place) -> Trajectory:
    event = read_at(spool_dir, place)
    return unpack(Trajectory, event.body, event.arrays)


def _serve() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the batcher decides when to end
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            order = pickle.load(sys.stdin.buffer)  # noqa: S301  the batcher's, over a pipe
        except EOFError:
            return 0
        try:
            result: Batch | str = order.run()
        except _FAULTS as error:
            result = f"step {order.assembly.step}: {error}"
        try:
            pickle.dump(result, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
        except BrokenPipeError:
            return 0


if __name__ == "__main__":
    from areal_dta.batcher import assembler  # under its own name, so that both sides mean the same classes

    sys.exit(assembler._serve())

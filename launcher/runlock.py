"""The lock of a run directory: held by a living launcher, freed by the kernel when it dies.

The file names its holder by pid and start time, because a pid alone may belong to another process by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Holder", "RunLock"]

RETRY_S = 0.02
_START_TIME = 19  # field 22 of /proc/PID/stat, counted from the field after the command's name


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. ``started`` is the process's start in clock ticks since boot."""

    pid: int
    started: int

    def open(self) -> int | None:
        """A descriptor (`os.pidfd_open`) of exactly this process, or None when it is gone; the caller closes it."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if _start_time(self.pid) == self.started:  # read after opening: from here on the descriptor means this process
            return fd
        os.close(fd)
        return None


class RunLock:
    """A lock file. Probing takes a shared lock for an instant, so that concurrent probes don't see each other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    @property
    def is_mine(self) -> bool:
        return self._fd is not None

    def acquire(self, timeout_s: float = 1.0) -> bool:
        """Take the lock and write down who holds it; False when another process keeps it.

        The time is for those who probe at this moment: a probe ends by itself, a launcher does not.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + timeout_s
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(fd)
                return False
            time.sleep(RETRY_S)  # flock has no time-out of its own
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {_start_time(os.getpid())}\n".encode(), 0)
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def is_held(self) -> bool:
        """Whether a living process holds the lock, this one included."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def holder(self) -> Holder | None:
        """Who wrote itself into the file last; the holder if `is_held`, but for the instant in which it gets there."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: nobody has written yet
            pid, started = map(int, self.path.read_text().split())
            return Holder(pid, started)
        return None


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start_time(pid: int) -> int | None:
    """None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])

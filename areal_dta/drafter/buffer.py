"""The DataBuffer between rollout servers and drafter training: a folder of samples with a byte budget.

The server's model thread only puts a sample into a queue; a thread of its own writes, drops and counts. When the disk
is slower than the rollouts the queue is full and samples are dropped, never waited for.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

from areal_dta.drafter.buffer_files import (
    DEFAULT_TAIL_SHARE,
    Entry,
    Sample,
    TornSample,
    choose_drops,
    list_entries,
    read_sample,
    usable,
    write_sample,
)

__all__ = ["Batch", "BufferReader", "BufferWriter", "is_held_out"]

log = logging.getLogger(__name__)
HELD_OUT_EVERY = 8


class BufferWriter:
    """Writes to ``folder`` (one writer per folder; put it on a tmpfs to keep samples off the disk).

    ``counters``: ``written``, ``dropped_full`` (queue full), ``dropped_budget``, ``refused`` (malformed sample), and
    ``failed`` (disk); to be read from any thread.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        queue_samples: int = 64,
        queue_bytes: int = 256 << 20,
        tail_share: float = DEFAULT_TAIL_SHARE,
    ) -> None:
        if budget_bytes < 1 or not 0 < tail_share <= 1:
            raise ValueError(f"budget_bytes={budget_bytes} must be positive, tail_share={tail_share} in (0, 1]")
        folder.mkdir(parents=True, exist_ok=True)
        for debris in folder.glob(".*.partial"):
            debris.unlink(missing_ok=True)
        self._folder, self._budget_bytes, self._tail_share = folder, budget_bytes, tail_share
        self._queue: queue.Queue[Sample | None] = queue.Queue(queue_samples)
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._lock = threading.Lock()
        self._entries = list_entries(folder)
        self._next = 1 + max((e.sequence for e in self._entries), default=0)
        self._use_bytes = sum(e.num_bytes for e in self._entries)
        self.counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="drafter-buffer", daemon=True)
        self._thread.start()

    @property
    def use_share(self) -> float:
        """Bytes on disk over the budget."""
        return self._use_bytes / self._budget_bytes

    def append(self, sample: Sample) -> bool:
        """Hand over a sample, whose tensors must not be changed afterwards; False: dropped. Takes microseconds."""
        num_bytes = sample.num_bytes
        if self._queued_bytes + num_bytes <= self._queue_bytes:
            with self._lock:
                self._queued_bytes += num_bytes
            try:
                self._queue.put_nowait(sample)
                return True
            except queue.Full:
                self._taken(num_bytes)
        self.counters["dropped_full"] += 1
        return False

    def _taken(self, num_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= num_bytes

    def flush(self, timeout_s: float) -> None:
        """Wait until everything appended so far is on disk; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    raise TimeoutError(f"{self._queue.unfinished_tasks} samples were not written in {timeout_s:g} s")
                self._queue.all_tasks_done.wait(min(left_s, 0.5))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and end the thread; what does not make it in time is lost."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            sample = self._queue.get()  # ended by close(); the thread is a daemon
            try:
                if sample is None:
                    return
                self._store(sample)
            finally:
                if sample is not None:
                    self._taken(sample.num_bytes)
                self._queue.task_done()

    def _store(self, sample: Sample) -> None:
        try:
            sample.check()
            entry = write_sample(self._folder, sample, self._next)
        except ValueError as error:
            self._count("refused", "a sample was refused", error)
            return
        except OSError as error:
            self._count("failed", "a sample could not be written", error)
            return
        self._next += 1
        self._entries.append(entry)
        self.counters["written"] += 1
        self._use_bytes += entry.num_bytes
        if self._use_bytes > self._budget_bytes:
            self._drop(choose_drops(self._entries, self._budget_bytes, self._tail_share))

    def _count(self, what: str, message: str, error: Exception) -> None:
        self.counters[what] += 1
        if self.counters[what] in (1, 10, 100, 1000):
            log.warning("%s (%d so far): %s", message, self.counters[what], error)

    def _drop(self, drops: list[Entry]) -> None:
        gone = {e.path for e in drops}
        for path in gone:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._count("failed", "a sample could not be removed", error)
        self._entries = [e for e in self._entries if e.path not in gone]
        self._use_bytes -= sum(e.num_bytes for e in drops)
        self.counters["dropped_budget"] += len(drops)


@dataclass(frozen=True)
class Batch:
    """Samples of one policy version, whose embedding and head belong to them."""

    policy_version: str
    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.samples)


def is_held_out(entry: Entry) -> bool:
    """Every eighth sample is for measuring accuracy, never for training; the same ones for every worker."""
    return entry.sequence % HELD_OUT_EVERY == 0


class BufferReader:
    """Draws batches from the folders below ``root`` (one per server) or ``root`` itself.

    A sample is drawn with weight ``recency ** (steps behind the latest)``. ``counters``: ``torn``, ``gone`` (dropped
    between listing and reading). Verified samples stay in memory up to ``cache_bytes``.
    """

    def __init__(
        self,
        root: Path,
        seed: int,
        tail_share: float = DEFAULT_TAIL_SHARE,
        recency: float = 0.7,
        cache_bytes: int = 512 << 20,
    ) -> None:
        self._root, self._tail_share, self._recency = root, tail_share, recency
        self._rng = random.Random(seed)
        self._torn: set[Path] = set()
        self._cache: OrderedDict[Path, Sample] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self.entries: list[Entry] = []
        self.num_bytes = 0
        self.counters: Counter[str] = Counter()

    def refresh(self) -> int:
        """List again; returns how many samples may be used now. Opens no file."""
        folders = [self._root]
        with contextlib.suppress(FileNotFoundError):
            folders += [p for p in self._root.iterdir() if p.is_dir()]
        found = [e for folder in folders for e in list_entries(folder)]
        self.num_bytes = sum(e.num_bytes for e in found)
        self.entries = usable((e for e in found if e.path not in self._torn), self._tail_share)
        return len(self.entries)

    def versions(self) -> list[str]:
        """Policy versions of the usable samples, the latest step's first."""
        return list(dict.fromkeys(e.policy_version for e in reversed(self.entries)))

    def sample(
        self,
        max_tokens: int,
        versions: set[str] | None = None,
        held_out: bool = False,
        rng: random.Random | None = None,
    ) -> Batch | None:
        """Samples of one version with up to ``max_tokens`` tokens, or a single longer one; None: there are none.

        ``versions``: those whose head can be had.
        """
        rng = rng or self._rng
        left = [
            e for e in self.entries if is_held_out(e) == held_out and (versions is None or e.policy_version in versions)
        ]
        while left:
            weights = self._weights(left)
            version = rng.choices(left, weights)[0].policy_version
            chosen = self._fill([e for e in left if e.policy_version == version], max_tokens, rng)
            if chosen:
                return Batch(version, tuple(chosen))
            left = [e for e in left if e.policy_version != version]
        return None

    def _weights(self, entries: list[Entry]) -> list[float]:
        latest = max(e.step for e in entries)
        return [self._recency ** min(latest - e.step, 64) for e in entries]

    def _fill(self, entries: list[Entry], max_tokens: int, rng: random.Random) -> list[Sample]:
        """Weighted draws without replacement (exponential keys), until the budget is used up."""
        weights = self._weights(entries)
        keyed = sorted(zip((rng.expovariate(w) for w in weights), entries, strict=True))
        chosen: list[Sample] = []
        num_tokens = 0
        for _, entry in keyed:
            if chosen and num_tokens + entry.num_tokens > max_tokens:
                continue
            sample = self._read(entry)
            if sample is not None:
                chosen.append(sample)
                num_tokens += sample.num_tokens
        return chosen

    def _read(self, entry: Entry) -> Sample | None:
        cached = self._cache.get(entry.path)
        if cached is not None:
            self._cache.move_to_end(entry.path)
            return cached
        try:
            sample = read_sample(entry)
        except FileNotFoundError:
            self.counters["gone"] += 1
            return None
        except TornSample as error:
            self.counters["torn"] += 1
            self._torn.add(entry.path)
            if self.counters["torn"] in (1, 10, 100, 1000):
                log.warning("sample skipped (%d so far): %s", self.counters["torn"], error)
            return None
        self._cache[entry.path] = sample
        self._cached_bytes += sample.num_bytes
        while self._cached_bytes > self._cache_bytes:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return sample

"""Simulated time: an event queue in which work shares the cores of a machine.

Two kinds of events: after so many seconds, whatever else happens (`after`), and when so many processor seconds have
been worked (`work`). All work in progress advances at the same rate: 1 while there are cores enough, else the cores
divided by those that want one, as a fair scheduler gives to processes of one thread. So one more clock, the processor
time that each piece of work has received since the start, orders all ends of work in a second queue, and nothing has to
be scheduled anew when the rate changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Clock", "Station", "Work"]

Callback = Callable[[], None]


@dataclass(order=True)
class Work:
    """A piece of work in progress; ``due_s`` on the processor clock. `Clock.cancel` ends it early."""

    due_s: float
    number: int
    done: Callback = field(compare=False)
    live: bool = field(default=True, compare=False)


class Clock:
    """``cores`` None: every piece of work has a processor of its own. ``background`` threads of other programs
    compete for the cores all the time.
    """

    def __init__(self, cores: float | None = None, background: float = 0.0) -> None:
        if cores is not None and cores <= 0:
            raise ValueError(f"cores is {cores}; it must be positive, or None for no bound")
        if background < 0:
            raise ValueError(f"background is {background}; it must not be negative")
        self.now_s = 0.0
        self.cores, self.background = cores, background
        self._worked_s = 0.0
        self.wanted_s = self.got_s = 0.0  # processor seconds that work asked for, and had, in all
        self._active = 0
        self._timers: list[tuple[float, int, Callback]] = []
        self._works: list[Work] = []
        self._count = itertools.count()

    @property
    def rate(self) -> float:
        """Processor seconds that each piece of work gets per second."""
        if self.cores is None or self._active == 0:
            return 1.0
        return min(1.0, self.cores / (self._active + self.background))

    def after(self, seconds: float, done: Callback) -> None:
        """Call ``done`` in so many seconds."""
        heapq.heappush(self._timers, (self.now_s + _duration(seconds), next(self._count), done))

    def work(self, seconds: float, done: Callback) -> Work:
        """Call ``done`` when one process has worked so many seconds from now on."""
        work = Work(self._worked_s + _duration(seconds), next(self._count), done)
        heapq.heappush(self._works, work)
        self._active += 1
        return work

    def cancel(self, work: Work) -> float:
        """Stop a piece of work; returns the processor seconds that were left of it."""
        if not work.live:
            raise ValueError("this work has ended already")
        work.live = False
        self._active -= 1
        return max(0.0, work.due_s - self._worked_s)

    def step(self) -> bool:
        """Go to the next event and run it; False when there is none."""
        while self._works and not self._works[0].live:
            heapq.heappop(self._works)
        timer_s = self._timers[0][0] if self._timers else math.inf
        work_s = self.now_s + (self._works[0].due_s - self._worked_s) / self.rate if self._works else math.inf
        if timer_s == work_s == math.inf:
            return False
        at_s = max(self.now_s, min(timer_s, work_s))
        passed_s = at_s - self.now_s
        self._worked_s += passed_s * self.rate
        self.wanted_s += passed_s * self._active
        self.got_s += passed_s * self._active * self.rate
        self.now_s = at_s
        if timer_s <= work_s:
            heapq.heappop(self._timers)[2]()
            return True
        work = heapq.heappop(self._works)
        self._worked_s = max(self._worked_s, work.due_s)  # what rounding left of it
        work.live = False
        self._active -= 1
        work.done()
        return True


class Station:
    """A process that does one job after the other, in order of arrival."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[tuple[float, Callback]] = deque()
        self._busy = False
        self.busy_s = 0.0  # wall
        self._since_s = 0.0

    def submit(self, seconds: float, done: Callback) -> None:
        """Work ``seconds`` after everything submitted before; a job without work is done at once when none waits."""
        if seconds == 0 and not self._busy:
            done()
            return
        self._queue.append((seconds, done))
        if not self._busy:
            self._busy, self._since_s = True, self._clock.now_s
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._busy = False
            self.busy_s += self._clock.now_s - self._since_s
            return
        seconds, done = self._queue.popleft()

        def end() -> None:
            done()
            self._next()

        self._clock.work(seconds, end)


def _duration(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"an event in {seconds} s; seconds must be finite and not negative")
    return seconds

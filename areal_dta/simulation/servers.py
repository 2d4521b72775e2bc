"""A rollout server: continuous batching as a fluid. All running sequences advance together, one token per decoding
step; prompts that are not cached are computed first. The cost of a step changes only when a sequence comes or goes, so
a server needs one event per request, not per token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_dta.simulation.clock import Clock, Work
from areal_dta.simulation.speeds import ServerSpeed

__all__ = ["Request", "Server", "ServerTimes"]


@dataclass(eq=False)
class Request:
    """One turn: ``tokens`` to generate after a prompt. ``episode`` and ``group`` say what is cached: the prompt's first
    ``system_tokens`` are everybody's, the first ``shared_tokens`` the group's, all of the last turn the episode's.
    ``done`` gets the tokens by policy version.
    """

    prompt: int
    tokens: int
    system_tokens: int
    shared_tokens: int
    group: int
    episode: object
    done: Callable[[dict[int, int]], None]
    by_version: dict[int, int] = field(default_factory=dict)
    started: float = 0.0  # on the server's count of steps, when it joined or was last counted
    counted: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.counted


@dataclass
class ServerTimes:
    """Seconds (wall) by what a server did, and what it made."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    paused_s: float = 0.0
    idle_closed_s: float = 0.0  # nothing to do, and admission is closed: it waits for the trainer
    idle_open_s: float = 0.0  # nothing to do because episodes are elsewhere
    tokens: int = 0
    prefill_tokens: int = 0
    sequence_s: float = 0.0  # running sequences integrated over decoding time

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s


class Server:
    """``factor`` scales its seconds; ``closed`` tells whether admission is closed, when it has nothing to do."""

    def __init__(self, clock: Clock, speed: ServerSpeed, factor: float, closed: Callable[[], bool]) -> None:
        self._clock, self._speed, self._factor, self._closed = clock, speed, factor, closed
        self.version = 0
        self.times = ServerTimes()
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # by the count of steps at which they end
        self._context = 0
        self._steps = 0.0  # decoding steps made so far
        self._work: Work | None = None
        self._prefilling: Request | None = None
        self._paused = False
        self._since_s, self._state = 0.0, "idle_open_s"
        self._tie = itertools.count()
        self._target = self._step_s = 0.0
        self._cached: dict[object, int] = {}
        self._has_system = False

    @property
    def load(self) -> int:
        """Requests not answered."""
        return len(self._waiting) + len(self._running) + (self._prefilling is not None)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._turn()

    def pause(self) -> None:
        """Stop computing; everything keeps its place."""
        self._paused = True
        self._halt()
        self._account()

    def resume(self, version: int) -> None:
        """Go on with new weights: all KV is computed again, so running sequences queue before the waiting ones."""
        self._count_tokens()
        self.version = version
        again = [request for _, _, request in sorted(self._running)]
        if self._prefilling is not None:
            again.append(self._prefilling)
        self._running, self._prefilling, self._context = [], None, 0
        self._cached.clear()
        self._has_system = False
        self._waiting.extendleft(reversed(again))
        self._paused = False
        self._turn()

    # -- work

    def account(self) -> None:
        """Bring `times` up to now."""
        self._halt()
        self._account()
        self._turn()

    def touch(self) -> None:
        """Admission may have opened or closed: of that time spent idle is told apart."""
        if self._state in ("idle_open_s", "idle_closed_s"):
            self._account()

    def _account(self) -> None:
        now_s = self._clock.now_s
        spent_s = now_s - self._since_s
        setattr(self.times, self._state, getattr(self.times, self._state) + spent_s)
        if self._state == "decode_s":
            self.times.sequence_s += spent_s * len(self._running)
        self._since_s = now_s
        if self._paused:
            self._state = "paused_s"
        elif self._prefilling is not None:
            self._state = "prefill_s"
        elif self._running:
            self._state = "decode_s"
        else:
            self._state = "idle_closed_s" if self._closed() else "idle_open_s"

    def _halt(self) -> None:
        """Stop the work in progress, crediting decoding steps made."""
        if self._work is None:
            return
        if self._prefilling is None:
            left_s = self._clock.cancel(self._work)
            self._work = None
            if self._step_s > 0:
                self._steps = self._target - left_s / self._step_s
        elif self._paused:
            self._clock.cancel(self._work)  # the prompt is computed anew with the new weights
            self._work = None

    def _turn(self) -> None:
        """Decide what to do next: admit a waiting request, else decode."""
        if self._paused:
            return
        if self._prefilling is not None and self._work is not None:
            return
        self._halt()
        self._account()
        if self._waiting and len(self._running) < self._speed.max_batch:
            self._prefill(self._waiting.popleft())
        elif self._running:
            self._target = self._running[0][0]
            self._step_s = self._speed.decode_step_s(len(self._running), self._context) * self._factor
            self._work = self._clock.work(max(0.0, self._target - self._steps) * self._step_s, self._decoded)
        self._account()

    def _prefill(self, request: Request) -> None:
        fresh = request.context - self._known(request)
        self._remember(request, request.context)
        self.times.prefill_tokens += fresh
        self._prefilling = request
        seconds = (fresh * self._speed.prefill_token_s + self._speed.request_s) * self._factor
        self._work = self._clock.work(seconds, self._prefilled)

    def _prefilled(self) -> None:
        request, self._prefilling, self._work = self._prefilling, None, None
        assert request is not None
        request.started = self._steps
        left = request.tokens - request.counted
        heapq.heappush(self._running, (self._steps + left, next(self._tie), request))
        self._context += request.context
        self._turn()

    def _decoded(self) -> None:
        self._work = None
        self._account()
        self._steps = self._target
        ended = []
        while self._running and self._running[0][0] <= self._steps:
            request = heapq.heappop(self._running)[2]
            self._context -= request.context
            self._add(request, request.tokens - request.counted)
            self._remember(request, request.prompt + request.tokens)
            ended.append(request)
        self._turn()
        for request in ended:
            request.done(request.by_version)

    def _count_tokens(self) -> None:
        """Attribute what running sequences have generated to the version they did it with."""
        for end, _, request in self._running:
            made = int(self._steps - request.started)
            self._add(request, min(made, request.tokens - request.counted))
            assert end >= self._steps - 1e-6

    def _add(self, request: Request, tokens: int) -> None:
        if tokens:
            request.by_version[self.version] = request.by_version.get(self.version, 0) + tokens
            request.counted += tokens
            self.times.tokens += tokens

    # -- prefix cache: unbounded, forgotten at every change of weights

    def _known(self, request: Request) -> int:
        own = self._cached.get(request.episode, 0)
        group = request.shared_tokens if ("group", request.group) in self._cached else 0
        system = request.system_tokens if self._has_system else 0
        return min(max(own, group, system), request.context - 1)

    def _remember(self, request: Request, tokens: int) -> None:
        self._cached[request.episode] = tokens
        self._cached["group", request.group] = 1
        self._has_system = True

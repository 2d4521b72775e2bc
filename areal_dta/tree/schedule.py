"""The order in which each stage of a pipeline runs a walk's forwards and backwards; pure, and a simulator to judge it.

A walk program is one list of operations for the whole model. A pipeline stage holds some layers of it: it runs the
forward of every block (input from the stage before) and the backward of every block (gradient from the stage after).
All stages run their forwards in program order and their backwards in program order. The last stage follows the program
exactly, since there a backward can start as soon as its forward is done. An earlier stage would idle while its
successors work on a block, so it runs forwards ahead of backwards: up to as many further VISITs as there are stages
after it, with the pushes on the way to them. A forward needs only the path above it, whose forwards come earlier, so
running ahead of backwards (pops included) is always legal; it costs memory, the graphs of the blocks in flight, which
a limit can bound.

Counting VISITs rather than forwards matters: the next VISIT often lies below several pushes. On plans of recorded agent
turns two stages idle for 31% of the time in program order, for 22% one forward ahead and for 6 to 7% one VISIT ahead,
which takes the memory of the second (`scripts/bench.py pipeline`).

A list is fixed before the walk begins: no rank decides anything while others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from areal_dta.tree.plan import Op, OpKind

__all__ = [
    "ScheduleError",
    "Task",
    "TaskKind",
    "Timeline",
    "most_in_flight",
    "most_unread",
    "program_tasks",
    "simulate",
    "stage_tasks",
]


class TaskKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Task:
    """Forward or backward of an operation's block on one stage."""

    kind: TaskKind
    op: Op

    @property
    def block(self) -> int:
        return self.op.block


class ScheduleError(RuntimeError):
    """Lists of tasks that cannot run together: they wait for each other, or exchange blocks in different orders."""


def program_tasks(ops: Sequence[Op]) -> tuple[Task, ...]:
    """A program as forwards and backwards: PUSH is a forward, POP a backward, VISIT a forward and its backward."""
    tasks = []
    for op in ops:
        if op.kind is not OpKind.POP:
            tasks.append(Task(TaskKind.FORWARD, op))
        if op.kind is not OpKind.PUSH:
            tasks.append(Task(TaskKind.BACKWARD, op))
    return tuple(tasks)


def stage_tasks(
    ops: Sequence[Op],
    stage: int,
    num_stages: int,
    graph_tokens_B: Sequence[int] | None = None,
    max_graph_tokens: float = math.inf,
) -> tuple[Task, ...]:
    """The list of one stage: before each backward, the forwards that the program puts before it, and those up to and
    including the ``num_stages - 1 - stage`` VISITs that follow.

    Of these later ones only so many that the tokens in flight stay at ``max_graph_tokens``; ``graph_tokens_B[b]`` of
    block b keep a graph from its forward to its backward. All stages of a pipeline must be given the same limit.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} is not one of {num_stages}")
    program = program_tasks(ops)
    forwards = [task for task in program if task.kind is TaskKind.FORWARD]
    visit_end = [i + 1 for i, task in enumerate(forwards) if task.op.kind is OpKind.VISIT]
    ahead = num_stages - 1 - stage
    tasks: list[Task] = []
    num_run = num_due = visits_due = 0
    room = max_graph_tokens  # in the list as it stands
    for task in program:
        if task.kind is TaskKind.FORWARD:
            num_due += 1
            visits_due += task.op.kind is OpKind.VISIT
            continue
        last = min(visits_due + ahead, len(visit_end))
        reach = visit_end[last - 1] if ahead and last else num_due
        while num_run < max(reach, num_due):
            tokens = 0 if graph_tokens_B is None else graph_tokens_B[forwards[num_run].block]
            if num_run >= num_due and tokens > room:
                break
            room -= tokens
            tasks.append(forwards[num_run])
            num_run += 1
        room += 0 if graph_tokens_B is None else graph_tokens_B[task.block]
        tasks.append(task)
    return (*tasks, *forwards[num_run:])


def most_in_flight(tasks: Sequence[Task]) -> int:
    """The largest number of blocks whose forward has run and whose backward, if they have one, has not."""
    with_backward = {task.block for task in tasks if task.kind is TaskKind.BACKWARD}
    most = now = 0
    for task in tasks:
        if task.block in with_backward:
            now += 1 if task.kind is TaskKind.FORWARD else -1
            most = max(most, now)
    return most


def most_unread(sender: Sequence[Task], receiver: Sequence[Task], kind: TaskKind) -> int:
    """How many messages of ``kind`` may be sent and, for all the sender knows, not taken yet; at least 1.

    The sender knows what its neighbour has done from what it last received from it. Sending with no more than this many
    messages open never waits.
    """
    taken = 0
    taken_before: dict[int, int] = {}  # other kind's block: messages the receiver has taken when it sends that one
    for task in receiver:
        if task.kind is kind:
            taken += 1
        else:
            taken_before[task.block] = taken
    most = sent = known = 0
    for task in sender:
        if task.kind is kind:
            sent += 1
            most = max(most, sent - known)
        else:
            known = taken_before[task.block]
    return max(most, 1)


# ---- simulator ----


@dataclass(frozen=True)
class Timeline:
    """What a simulated walk costs, in the unit of the given costs: until all stages are done, and by stage at work."""

    total: float
    busy_P: tuple[float, ...]  # by stage

    @property
    def idle_share(self) -> float:
        """Share of all stages' time in which they compute nothing (the bubble)."""
        return 1.0 - sum(self.busy_P) / (len(self.busy_P) * self.total) if self.total else 0.0


@dataclass
class _Channel:
    """One direction between two neighbours, unbuffered: the n-th message moves when both sides have come to it."""

    limit: int  # messages that may be open
    sent: list[tuple[int, float]] = field(default_factory=list)  # (block, when posted)
    awaited: list[tuple[int, float]] = field(default_factory=list)

    def moved_at(self, index: int) -> float | None:
        """When message ``index`` changes hands; None while one side has not posted it."""
        if index >= min(len(self.sent), len(self.awaited)):
            return None
        (sent, posted), (awaited, ready) = self.sent[index], self.awaited[index]
        if sent != awaited:
            raise ScheduleError(f"message {index} carries block {sent}, its receiver waits for block {awaited}")
        return max(posted, ready)


class _Stage:
    """One stage that blocks in every receive, and in a send while as many as the channel's limit are open."""

    def __init__(
        self,
        stage: int,
        tasks: Sequence[Task],
        channels: dict[tuple[int, int], _Channel],
        cost: Callable[[int, Task], float],
    ) -> None:
        self.stage, self.tasks, self.channels, self.cost = stage, tasks, channels, cost
        self.now = self.busy = 0.0
        self.waits_for = ""

    def run(self) -> Iterator[None]:
        """Yields whenever it cannot go on."""
        for task in self.tasks:
            step = 1 if task.kind is TaskKind.FORWARD else -1
            inbound = self.channels.get((self.stage - step, self.stage))
            if inbound is not None:
                inbound.awaited.append((task.block, self.now))
                yield from self._until(inbound, len(inbound.awaited) - 1, f"input of {task}")
            cost = self.cost(self.stage, task)
            self.now, self.busy = self.now + cost, self.busy + cost
            outbound = self.channels.get((self.stage, self.stage + step))
            if outbound is not None:
                oldest = len(outbound.sent) - outbound.limit
                if oldest >= 0:
                    yield from self._until(outbound, oldest, f"room to send {task}")
                outbound.sent.append((task.block, self.now))
        for (sender, receiver), channel in self.channels.items():
            if sender == self.stage and channel.sent:
                yield from self._until(channel, len(channel.sent) - 1, f"stage {receiver} to take the last message")

    def _until(self, channel: _Channel, index: int, what: str) -> Iterator[None]:
        while (moved := channel.moved_at(index)) is None:
            self.waits_for = what
            yield
        self.now = max(self.now, moved)


def simulate(
    stages: Sequence[Sequence[Task]], cost: Callable[[int, Task], float], max_open_sends: int | None = None
) -> Timeline:
    """Run the stages' lists against each other: ``cost(stage, task)`` each, transfers free but unbuffered.

    A stage waits in a receive until the message is posted; a send is posted and left alone, unless ``max_open_sends``
    (None: `most_unread`) earlier ones of that direction have not been taken yet. Raises ScheduleError naming what every
    stage waits for when none can go on, and when two neighbours do not exchange the same blocks in the same order.
    """
    channels = {}
    for upper in range(len(stages) - 1):
        for a, b, kind in ((upper, upper + 1, TaskKind.FORWARD), (upper + 1, upper, TaskKind.BACKWARD)):
            channels[a, b] = _Channel(max_open_sends or most_unread(stages[a], stages[b], kind))
    workers = [_Stage(p, tasks, channels, cost) for p, tasks in enumerate(stages)]
    running = {p: worker.run() for p, worker in enumerate(workers)}
    while running:
        before = [(len(c.sent), len(c.awaited)) for c in channels.values()]
        running = {p: run for p, run in running.items() if next(run, run) is None}
        if running and before == [(len(c.sent), len(c.awaited)) for c in channels.values()]:
            waits = "; ".join(f"stage {p} waits for {workers[p].waits_for}" for p in running)
            raise ScheduleError(f"no stage can go on: {waits}")
    return Timeline(max((w.now for w in workers), default=0.0), tuple(w.busy for w in workers))

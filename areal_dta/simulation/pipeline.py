"""The whole pipeline in simulated time: batcher, workers, router, servers, trainer, and weights back to servers.

Step k trains with weights version k and publishes version k+1, as `areal_dta.trainer` does. Everything follows from the
arguments; nothing reads a clock or draws an unseeded number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from areal_dta.rollout.router_affinity import Affinity, RequestKeys
from areal_dta.simulation.clock import Clock, Station
from areal_dta.simulation.pool import Counts, Finished, Grant, Pool
from areal_dta.simulation.servers import Request, Server, ServerTimes
from areal_dta.simulation.settings import SimulationError, SimulationSettings
from areal_dta.simulation.speeds import Speeds
from areal_dta.simulation.workload import EpisodeScript, Workload, gamma
from areal_dta.tree.cost import lower_bound

__all__ = ["SimulatedStep", "Simulation"]

MAX_EVENTS = 20_000_000


@dataclass(frozen=True)
class SimulatedStep:
    """One training step: seconds from the request for its batch to the next one's, and their parts. ``staleness``
    counts trained tokens by steps between their version and this one.
    """

    step: int
    start_s: float
    wait_s: float
    work_s: float  # of compute_s on a core of its own
    episodes: int
    tokens: int  # generated
    row_tokens: int
    tree_tokens: int
    staleness: dict[int, int]
    compute_s: float = 0.0
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    step_s: float = 0.0

    @property
    def staleness_mean(self) -> float:
        total = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / total if total else 0.0


@dataclass
class RunningEpisode:
    """A running episode."""

    grant: Grant
    script: EpisodeScript
    worker: int
    fails_at: int  # turn, or -1
    start_s: float
    turn: int = 0
    by_version: Counter[int] = field(default_factory=Counter)


class Simulation:
    """`run` once; then `steps`, `counts` and `server_times` tell what happened."""

    def __init__(self, settings: SimulationSettings, speeds: Speeds, workload: Workload) -> None:
        self.settings, self.speeds, self.workload = settings, speeds, workload
        self.clock = Clock(settings.cores, settings.background)
        self.pool = Pool(settings)
        self.steps: list[SimulatedStep] = []
        self.episode_s: list[float] = []
        self.server_times: list[ServerTimes] = []  # of the time after the warm-up
        self.worker_busy_s: list[float] = []
        self.work_s = 0.0  # of all processes, likewise
        self._workers = [Station(self.clock) for _ in range(settings.workers)]
        self._batcher, self._router = Station(self.clock), Station(self.clock)
        factor = speeds.server_factor(settings.server_tp)
        self._servers = [Server(self.clock, speeds.server, factor, self._is_closed) for _ in range(settings.servers)]
        self._affinity = Affinity()
        self._running = [0] * settings.workers
        self._scripts: dict[int, list[EpisodeScript]] = {}
        self.num_in_training = 0  # episodes of the batch that is being trained
        self._asked_s: float | None = None  # since when the trainer waits for a batch
        self._worker_mark = [0.0] * settings.workers
        self._work_mark_s = 0.0

    @property
    def counts(self) -> Counts:
        return self.pool.counts

    def run(self) -> None:
        """Simulate all steps. Raises SimulationError when nothing can happen any more before they are done."""
        self._lease()
        self._ask()
        for _ in range(MAX_EVENTS):
            if len(self.steps) == self.settings.steps:
                break
            if not self.clock.step():
                raise SimulationError(
                    f"step {self.pool.next_step} never gets a batch: {self.counts}; lower failure_rate, or choose "
                    "another staleness policy"
                )
        else:
            raise SimulationError(f"more than {MAX_EVENTS} events; simulate fewer steps or smaller batches")
        for server in self._servers:
            server.account()
        self.server_times = [server.times for server in self._servers]
        self.work_s = self.clock.got_s - self._work_mark_s
        self.worker_busy_s = [w.busy_s - m for w, m in zip(self._workers, self._worker_mark, strict=True)]

    # -- episodes

    def _is_closed(self) -> bool:
        return self.pool.closed

    def _lease(self) -> None:
        """Workers with free places take what admission gives, in turn."""
        share = -(-self.settings.concurrent // self.settings.workers)
        for worker in range(self.settings.workers):
            free = share - self._running[worker]
            grants = self.pool.grant(free) if free > 0 else []
            self._running[worker] += len(grants)
            for grant in grants:
                self._start(grant, worker)
        for server in self._servers:
            server.touch()

    def _start(self, grant: Grant, worker: int) -> None:
        if grant.group_id not in self._scripts:
            self._scripts[grant.group_id] = self.workload.group(grant.group_id, self.settings.group_size)
        script = self._scripts[grant.group_id][grant.sample]
        rng = np.random.default_rng([self.settings.seed, 2, grant.group_id, grant.sample, grant.attempt])
        fails = rng.random() < self.settings.failure_rate
        fails_at = int(rng.integers(script.num_turns)) if fails else -1
        episode = RunningEpisode(grant, script, worker, fails_at, self.clock.now_s)
        self._workers[worker].submit(self.speeds.environment.turn_s, partial(self._wait, episode, rng))

    def _wait(self, episode: RunningEpisode, rng: np.random.Generator) -> None:
        """The environment's latency, then the turn's request."""
        if episode.turn == episode.fails_at:
            self._leave(episode)
            self.pool.fail(episode.grant)
            self._changed()
            return
        if episode.turn == episode.script.num_turns:
            self._batcher.submit(self.speeds.environment.delivery_s, partial(self._finish, episode))
            return
        env = self.speeds.environment
        latency_s = gamma(rng, env.latency_s, env.latency_spread)
        self.clock.after(latency_s, lambda: self._router.submit(env.relay_s, partial(self._request, episode, rng)))

    def _request(self, episode: RunningEpisode, rng: np.random.Generator) -> None:
        script, turn, group = episode.script, episode.turn, episode.grant.group_id
        loads = {str(i): server.load for i, server in enumerate(self._servers)}
        server = self._servers[int(self._affinity.pick(RequestKeys(f"group-{group}"), loads))]
        server.submit(
            Request(
                prompt=script.prompts[turn],
                tokens=script.generated[turn],
                system_tokens=script.system_tokens,
                shared_tokens=script.shared_tokens,
                group=group,
                episode=(group, episode.grant.sample, episode.grant.attempt),
                done=partial(self._answer, episode, rng),
            )
        )

    def _answer(self, episode: RunningEpisode, rng: np.random.Generator, by_version: dict[int, int]) -> None:
        episode.by_version.update(by_version)
        episode.turn += 1
        self._workers[episode.worker].submit(self.speeds.environment.turn_s, partial(self._wait, episode, rng))

    def _finish(self, episode: RunningEpisode) -> None:
        self._leave(episode)
        self.episode_s.append(self.clock.now_s - episode.start_s)
        self.pool.finish(Finished(episode.grant, dict(episode.by_version)))
        self._changed()

    def _leave(self, episode: RunningEpisode) -> None:
        self._running[episode.worker] -= 1

    def _changed(self) -> None:
        self._lease()
        self._try_batch()

    # -- training

    def _ask(self) -> None:
        self._asked_s = self.clock.now_s
        self._try_batch()

    def _try_batch(self) -> None:
        if self._asked_s is None:
            return
        batch = self.pool.batch()
        if batch is None:
            return
        asked_s, self._asked_s = self._asked_s, None
        self.num_in_training = sum(map(len, batch))
        self._lease()  # what was consumed makes room
        self.clock.work(self.speeds.trainer.assemble_s, partial(self._train, asked_s, batch))

    def _train(self, asked_s: float, batch: list[list[Finished]]) -> None:
        s, trainer = self.settings, self.speeds.trainer
        step = self.pool.next_step - 1
        scripts = [[self._scripts[done.grant.group_id][done.grant.sample] for done in group] for group in batch]
        for group in batch:
            self._scripts.pop(group[0].grant.group_id, None)
        rows = self.workload.rows(scripts)
        cost = lower_bound(rows, s.dp, trainer.cost_model)[0]
        seconds = (trainer.fixed_s + cost * trainer.seconds_per_cost) * self.speeds.trainer_factor(s.tp, s.pp)
        staleness: Counter[int] = Counter()
        for group in batch:
            for done in group:
                for version, tokens in done.tokens_by_version.items():
                    staleness[abs(step - version)] += tokens
        if s.policy == "mask":
            staleness = Counter({age: n for age, n in staleness.items() if age <= s.eta})
        figures = SimulatedStep(
            step=step,
            start_s=asked_s,
            wait_s=self.clock.now_s - asked_s,
            work_s=seconds,
            episodes=sum(map(len, batch)),
            tokens=sum(done.num_tokens for group in batch for done in group),
            row_tokens=rows.row_tokens,
            tree_tokens=rows.tree_tokens,
            staleness=dict(sorted(staleness.items())),
        )
        began_s, left = self.clock.now_s, s.trainer_gpus

        def rank_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._publish(replace(figures, compute_s=self.clock.now_s - began_s))

        for _ in range(left):
            self.clock.work(seconds, rank_done)

    def _publish(self, figures: SimulatedStep) -> None:
        began_s = self.clock.now_s
        version = self.pool.version + 1

        def served() -> None:
            for server in self._servers:
                server.resume(version)
            self.pool.published(version)
            self._lease()
            self._checkpoint(replace(figures, publish_s=self.clock.now_s - began_s))

        def written() -> None:
            for server in self._servers:
                server.pause()
            self.clock.after(self.speeds.server.update_s, served)

        self.clock.work(self.speeds.trainer.publish_s, written)

    def _checkpoint(self, figures: SimulatedStep) -> None:
        trainer, began_s = self.speeds.trainer, self.clock.now_s
        count = len(self.steps) + 1
        due = count == self.settings.total_steps or (trainer.checkpoint_every and count % trainer.checkpoint_every == 0)

        def done() -> None:
            now_s = self.clock.now_s
            self.num_in_training = 0
            self.steps.append(replace(figures, checkpoint_s=now_s - began_s, step_s=now_s - figures.start_s))
            if count == self.settings.warmup_steps:
                self._mark()
            self._ask()

        self.clock.work(trainer.checkpoint_s if due else 0.0, done)

    def _mark(self) -> None:
        """Server and worker times count from here."""
        for server in self._servers:
            server.account()
            server.times = ServerTimes()
        self._worker_mark = [w.busy_s for w in self._workers]
        self._work_mark_s = self.clock.got_s

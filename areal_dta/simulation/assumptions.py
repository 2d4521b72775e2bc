"""Speeds and lengths given as ``name=value``: instead of measurements, or to change some of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_dta.simulation.settings import SimulationError, SimulationSettings
from areal_dta.simulation.speeds import EnvironmentSpeed, Scaling, ServerSpeed, Speeds, TrainerSpeed
from areal_dta.simulation.workload import LengthWorkload
from areal_dta.tree.cost import TREE_TOKENS, CostModel

__all__ = ["NAMES", "Assumptions"]

NAMES = {
    "server.tokens_per_s": "tokens per second by running sequences, as 1:60,64:2400",
    "server.prefill_tokens_per_s": "prompt tokens per second",
    "server.context_token_s": "seconds a decoding step takes longer per token of all contexts",
    "server.request_s": "seconds per request",
    "server.update_s": "seconds that servers pause for new weights",
    "server.max_batch": "sequences that run at once on a server",
    "env.latency_s": "seconds a turn waits for tools and users",
    "env.latency_spread": "relative deviation of that",
    "env.turn_s": "seconds a turn occupies its worker process",
    "env.relay_s": "seconds a turn occupies the router",
    "trainer.tokens_per_s": "distinct (tree) tokens per second of a data-parallel rank",
    "trainer.tflops": "10^12 FLOP per second of a data-parallel rank; needs --model",
    "trainer.fixed_s": "seconds of a step whatever its rows",
    "trainer.publish_s": "seconds to write a version",
    "trainer.checkpoint_s": "seconds of a checkpoint",
    "lengths.prompt_tokens": "tokens of the first prompt",
    "lengths.system_tokens": "of them common to all tasks",
    "lengths.turns": "turns of an episode",
    "lengths.generated_tokens": "tokens generated in a turn",
    "lengths.observation_tokens": "tokens that come back after it",
    "lengths.generated_spread": "relative deviation of generated_tokens",
    "lengths.turns_spread": "relative deviation of turns",
    "lengths.task_spread": "the same, common to the samples of a task",
    "scaling.tp_efficiency": "kept share of speed-up per doubling of tensor parallelism",
    "scaling.pp_efficiency": "the same for pipeline stages",
    "scaling.server_tp_efficiency": "the same for servers",
    "run.failure_rate": "share of episode attempts that fail",
    "machine.cores": "cores shared by all processes",
    "machine.background": "threads of other programs that compete for them",
    "gpu.memory_gib": "memory of a GPU, for --search with --model",
}
_LENGTHS_NEEDED = ("lengths.prompt_tokens", "lengths.generated_tokens")


@dataclass(frozen=True)
class Assumptions:
    """Parsed ``name=value`` pairs."""

    values: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()  # (running sequences, tokens per second)

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Assumptions:
        """Raises SimulationError naming the pair and the nearest valid name."""
        values: dict[str, float] = {}
        curve: list[tuple[float, float]] = []
        for pair in pairs:
            name, sep, text = pair.partition("=")
            if not sep or name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMES)}"
                raise SimulationError(f"--assume {pair}: {'no such name; ' if sep else 'give name=value; '}{hint}")
            try:
                if name == "server.tokens_per_s":
                    curve = [(float(a), float(b)) for a, _, b in (p.partition(":") for p in text.split(","))]
                else:
                    values[name] = float(text)
            except ValueError as error:
                raise SimulationError(f"--assume {pair}: {NAMES[name]}; {text!r} is not of that form") from error
        return cls(values, tuple(curve))

    def __contains__(self, name: str) -> bool:
        return name in self.values or (name == "server.tokens_per_s" and bool(self.curve))

    def of(self, section: str, names: Mapping[str, str] | None = None) -> dict[str, float]:
        """Values of a section by their last names, those in ``names`` renamed or left out (empty)."""
        out: dict[str, float] = {}
        for name, value in self.values.items():
            prefix, _, last = name.partition(".")
            if prefix == section and (last := (names or {}).get(last, last)):
                out[last] = value
        return out

    def has_lengths(self) -> bool:
        return any(name.startswith("lengths.") for name in self.values)

    def workload(self, max_tokens: int, seed: int) -> LengthWorkload:
        """A distribution of lengths. Raises SimulationError when what it needs is missing."""
        for name in _LENGTHS_NEEDED:
            if name not in self.values:
                raise SimulationError(
                    f"nothing says how long episodes are: give --from-run RUN, --trace FILE, or --assume {name}=N"
                )
        lengths: dict[str, Any] = self.of("lengths")
        return LengthWorkload(**lengths, max_tokens=max_tokens, seed=seed)

    def settings(self, settings: SimulationSettings) -> SimulationSettings:
        given: dict[str, Any] = {**self.of("machine"), **self.of("run")}
        return dataclasses.replace(settings, **given)

    def speeds(
        self,
        measured: Speeds | None,
        trainer: TrainerSpeed | None,
        flops: CostModel | None,
        degrees: tuple[int, int, int],
        max_batch: int,
    ) -> Speeds:
        """All speeds: the measured ones changed, or new ones. ``trainer``: a calibration's, in place of the measured
        one; ``degrees``: (tp, pp, server tp) that given numbers hold for. Raises SimulationError for what nobody says.
        """
        tp, pp, server_tp = degrees
        server = self._server(None if measured is None else measured.server, max_batch)
        environment = measured.environment if measured else EnvironmentSpeed()
        chosen = self._trainer(trainer or (measured.trainer if measured else None), flops)
        scaling: Any = self.of("scaling")
        return Speeds(
            server=server,
            environment=dataclasses.replace(environment, **self.of("env")),
            trainer=chosen,
            scaling=Scaling(**scaling),
            tp=measured.tp if measured and trainer is None else tp,
            pp=measured.pp if measured and trainer is None else pp,
            server_tp=measured.server_tp if measured else server_tp,
            basis=measured.basis if measured else "given by options",
        )

    def _server(self, measured: ServerSpeed | None, max_batch: int) -> ServerSpeed:
        given: dict[str, Any] = self.of("server", {"prefill_tokens_per_s": ""})
        if self.curve:
            try:
                given["step_s"], given["sequence_s"] = ServerSpeed.fit_steps(*zip(*self.curve, strict=True))
            except ValueError as error:
                raise SimulationError(f"--assume server.tokens_per_s: {error}") from error
        if (rate := self.values.get("server.prefill_tokens_per_s")) is not None:
            given["prefill_token_s"] = _inverse("server.prefill_tokens_per_s", rate)
        if "max_batch" in given:
            given["max_batch"] = int(given["max_batch"])
        if measured is not None:
            return dataclasses.replace(measured, **{"max_batch": max_batch, **given})
        for name in ("server.tokens_per_s", "server.prefill_tokens_per_s"):
            if name not in self:
                raise SimulationError(
                    f"nothing says how fast servers are: give --from-run RUN, or --assume {name}=... ({NAMES[name]})"
                )
        return ServerSpeed(**{"max_batch": max_batch, **given})

    def _trainer(self, known: TrainerSpeed | None, flops: CostModel | None) -> TrainerSpeed:
        given: dict[str, Any] = self.of("trainer", {"tokens_per_s": "", "tflops": ""})
        if (rate := self.values.get("trainer.tokens_per_s")) is not None:
            given |= {"cost_model": TREE_TOKENS, "seconds_per_cost": _inverse("trainer.tokens_per_s", rate)}
        elif (tflops := self.values.get("trainer.tflops")) is not None:
            if flops is None:
                raise SimulationError("--assume trainer.tflops needs --model FOLDER to count FLOP")
            given |= {"cost_model": flops, "seconds_per_cost": _inverse("trainer.tflops", tflops) * 1e-12}
        if known is not None:
            return dataclasses.replace(known, **given)
        if "cost_model" not in given:
            raise SimulationError(
                "nothing says how fast the trainer is: give --from-run RUN, --calibration FILE, "
                "--assume trainer.tokens_per_s=N, or --model FOLDER and --assume trainer.tflops=N"
            )
        return TrainerSpeed(**given)


def _inverse(name: str, rate: float) -> float:
    if not rate > 0:
        raise SimulationError(f"--assume {name}={rate:g}: it must be positive")
    return 1.0 / rate

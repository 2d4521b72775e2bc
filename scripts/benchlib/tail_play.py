"""The strategies of `bench.py tail` taking turns on their servers."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from areal_dta.drafter.arms import Arm
from areal_dta.nn import DecoderConfig, DecoderWeights, load_decoder
from scripts.benchlib.report import progress
from scripts.benchlib.spec_check import NEAR
from scripts.benchlib.spec_check import Differences as Outputs
from scripts.benchlib.tail_load import (
    Answer,
    Ask,
    Conversation,
    idle_spans,
    overlap_s,
    play,
    score_gap,
    talk,
    training_spans,
)
from scripts.benchlib.tail_model import TailModel, write_next
from scripts.benchlib.tail_server import TailServer
from scripts.benchlib.tail_site import Group, TrainerPlan, Trainers, machine_seconds

__all__ = ["Bench", "Outputs", "Sizes", "Turn"]

TRAIN_WAIT_S = 15.0
SETTLE_S = 0.3  # the records of the last moments arrive


@dataclass(frozen=True)
class Sizes:
    """Of one server."""

    max_batch: int
    max_total_tokens: int


@dataclass(frozen=True)
class Turn:
    """One strategy's step or pool. ``cpu_s`` by server; ``idle_s`` of all servers until the last answer."""

    num_tokens: int
    wall_s: float
    cpu_s: tuple[float, ...]
    idle_s: float = 0.0
    trained_s: float = 0.0  # of the idle time
    worker_cpu_s: float = 0.0
    coordinator_cpu_s: float = 0.0
    others_cpu_s: float = 0.0  # of processes that are not the benchmark's


@dataclass
class _Turns:
    steps: list[Turn] = field(default_factory=list)
    pools: list[Turn] = field(default_factory=list)
    outputs: Outputs = field(default_factory=Outputs)


class Bench:
    """All processes; a context manager that ends them."""

    def __init__(
        self, args: argparse.Namespace, model: TailModel, root: Path, cores: Sequence[int], arm: Arm, sizes: Sizes
    ) -> None:
        self._args, self._model, self._cores = args, model, cores
        self.turns = {name: _Turns() for name in args.strategies}
        self.pairs: list[tuple[Turn, Turn]] = []  # alone, beside training
        self._target = _load(model.folder)
        self._current, self._versions = model.folder, root / "versions"
        self._versions.mkdir(exist_ok=True)
        self.trainers: Trainers | None = None
        self.groups: dict[str, Group] = {}
        buffers = tuple(root / f"buffer.{i}" for i in range(len(cores)))
        words = {"plain": "off", "static": arm.name, "tlt": "auto"}
        try:
            for name in args.strategies:
                is_tlt = name == "tlt"
                if is_tlt:
                    self.trainers = Trainers(root / "training")
                servers = [
                    TailServer(
                        name=f"server.{i}",
                        model=str(model.folder),
                        strategy=words[name],
                        cores=(core,),
                        max_batch=sizes.max_batch,
                        max_total_tokens=sizes.max_total_tokens,
                        dtype=args.dtype,
                        drafter=None if name == "plain" or model.drafter is None else str(model.drafter),
                        buffer=str(buffers[i]) if is_tlt else None,
                        record_share=args.record_share,
                        coordinator=self.trainers.address if self.trainers and is_tlt else None,
                        seed=args.seed + i,
                    )
                    for i, core in enumerate(cores)
                ]
                self.groups[name] = Group(servers, root / name)
            for group in self.groups.values():
                group.wait_ready()
            if self.trainers is not None:
                plan = TrainerPlan(
                    (model.folder, self._versions),
                    model.drafter,
                    buffers,
                    tuple(cores),
                    args.step_tokens,
                    args.publish_steps,
                    args.seed,
                )
                self.trainers.start(self.groups["tlt"].urls, plan)
        except BaseException:
            self.close()
            raise
        progress(f"{', '.join(args.strategies)}: servers are up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.trainers is not None:
            self.trainers.close()
        for group in self.groups.values():
            group.close()

    def step(self, number: int, asks: Sequence[Ask]) -> None:
        """One synchronous step by every strategy, in an order that rotates."""
        said: dict[str, list[Answer]] = {}
        for name in self._order(number):
            said[name], turn = self._timed(name, asks)
            self.turns[name].steps.append(turn)
            progress(f"step {number + 1}, {name}: {turn.wall_s:.2f} s, cpu {max(turn.cpu_s):.2f} s")
        for name, answers in said.items():
            if name != "plain":
                self._compare(name, asks, said["plain"], answers)

    def update(self, number: int) -> None:
        """The target's next version, for all servers."""
        version = f"0:{number}"
        folder = self._versions / f"v{number}"
        write_next(self._current, folder, version, self._args.update_noise, self._args.seed + number)
        for group in self.groups.values():
            group.update(folder, version)
        self._current, self._target = folder, _load(folder)

    def pool(self, number: int, conversations: Sequence[Conversation], in_flight: int) -> None:
        """One pool by every strategy."""
        said: dict[str, list[list[Answer]]] = {}
        for name in self._order(number):
            group = self.groups[name]
            group.flush()
            self._halt(name, False)
            start_s, cpu_s = time.time(), group.cpu_s()
            said[name], full_s = asyncio.run(talk(group.urls, conversations, in_flight, self._args.temperature))
            wall_s = time.time() - start_s
            used = tuple(b - a for a, b in zip(cpu_s, group.cpu_s(), strict=True))
            self._halt(name, True)
            turn = Turn(sum(sum(c.lengths) for c in conversations), wall_s, used)
            self.turns[name].pools.append(turn)
            progress(
                f"pool {number + 1}, {name}: {turn.num_tokens / wall_s:.0f} tokens/s, full for {full_s - start_s:.1f} s"
            )
        for name, answers in said.items():
            if name != "plain":
                self._compare_talks(name, conversations, said["plain"], answers)

    def beside(self, rounds: int, asks: Sequence[Ask]) -> None:
        """A plain server on the last core, alone and while a worker trains on the first; nothing where there is no
        data to train on."""
        trainers = self.trainers
        if trainers is None:
            return
        for number in range(rounds):
            turns: dict[bool, Turn] = {}
            for training in (False, True) if number % 2 == 0 else (True, False):
                if training and not self._train_alone(trainers):
                    progress("nothing was trained on, so nothing could be measured beside it")
                    trainers.halt(True)
                    return
                turns[training] = self._timed("plain", asks)[1]
                trainers.halt(True)
            self.pairs.append((turns[False], turns[True]))
            alone, with_training = (t.num_tokens / t.wall_s for t in self.pairs[-1])
            progress(f"beside {number + 1}: {alone:.0f} tokens/s alone, {with_training:.0f} beside training")

    def _train_alone(self, trainers: Trainers) -> bool:
        """Let the first worker go on and wait until it trains."""
        mark = len(trainers.sink.records)
        trainers.halt(False, 0)
        deadline_s = time.monotonic() + TRAIN_WAIT_S
        while time.monotonic() < deadline_s:
            if any(r.name == "drafter/loss" for r in trainers.sink.records[mark:]):
                return True
            time.sleep(0.02)
        return False

    def _order(self, number: int) -> list[str]:
        names = list(self.turns)
        return names[number % len(names) :] + names[: number % len(names)]

    def _halt(self, name: str, on: bool) -> None:
        if self.trainers is not None and name == "tlt":
            self.trainers.halt(on)

    def _timed(self, name: str, asks: Sequence[Ask]) -> tuple[list[Answer], Turn]:
        group, trainers = self.groups[name], self.trainers
        group.flush()
        mark = len(trainers.sink.records) if trainers is not None else 0
        self._halt(name, False)
        start_s, machine_s, own_s = time.time(), machine_seconds(), time.process_time()
        cpu_s, spent_s = group.cpu_s(), trainers.cpu_s() if trainers is not None else [0.0]
        answers = asyncio.run(play(group.urls, asks, self._args.temperature))
        end_s = max(a.end_s for a in answers)
        cpu_s = [after - before for before, after in zip(cpu_s, group.cpu_s(), strict=True)]
        after_s = trainers.cpu_s() if trainers is not None else [0.0]
        spent_s = [after - before for before, after in zip(spent_s, after_s, strict=True)]
        others_s = machine_seconds() - machine_s - (time.process_time() - own_s) - sum(cpu_s) - sum(spent_s)
        self._halt(name, True)
        idle, trained_s = idle_spans(start_s, asks, answers, len(self._cores)), 0.0
        if trainers is not None and name == "tlt":
            time.sleep(SETTLE_S)
            records = trainers.sink.records[mark:]
            for i, spans in enumerate(idle):
                trained_s += overlap_s(training_spans(records, f"drafter.{i}", end_s), spans)
        return answers, Turn(
            sum(a.length for a in asks),
            end_s - start_s,
            tuple(cpu_s),
            sum(b - a for spans in idle for a, b in spans),
            trained_s,
            sum(spent_s[:-1]),
            spent_s[-1],
            max(0.0, others_s),
        )

    def _compare(self, name: str, asks: Sequence[Ask], plain: Sequence[Answer], others: Sequence[Answer]) -> None:
        turns = self.turns[name]
        for ask, expected, other in zip(asks, plain, others, strict=True):
            if expected.ids == other.ids:
                turns.outputs += Outputs(answers=1, same=1)
            elif score_gap(self._target, ask, self._args.temperature, expected.ids, other.ids) < NEAR:
                turns.outputs += Outputs(answers=1, near_ties=1)
            else:
                turns.outputs += Outputs(answers=1, different=1)

    def _compare_talks(
        self,
        name: str,
        conversations: Sequence[Conversation],
        plain: Sequence[Sequence[Answer]],
        others: Sequence[Sequence[Answer]],
    ) -> None:
        """Turn by turn until the first that differs: what follows has another prompt."""
        for conversation, expected, found in zip(conversations, plain, others, strict=True):
            tokens = list(conversation.prompt)
            for turn, length in enumerate(conversation.lengths):
                ask = Ask(tuple(tokens), length, conversation.seed + turn, conversation.server)
                self._compare(name, [ask], [expected[turn]], [found[turn]])
                if expected[turn].ids != found[turn].ids:
                    break
                tokens += expected[turn].ids
                if turn < len(conversation.observations):
                    tokens += conversation.observations[turn]

    def tuner_notes(self) -> list[dict[str, Any]]:
        """What TLT's servers say of their speculation."""
        group = self.groups.get("tlt")
        return [] if group is None else [info["speculation"] for info in group.info()]


def _load(folder: Path) -> DecoderWeights:
    return load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)

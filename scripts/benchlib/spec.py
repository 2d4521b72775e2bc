"""``bench.py spec``: speculative decoding against plain decoding, on prompts nobody was trained on.

Every strategy decodes the same prompts with the same seeds in one process: *plain* (a scheduler that knows nothing of
speculation), every arm by itself, *cold* (the tuner, knowing a calibration and nothing else) and *tuned* (a tuner that
has seen every arm's steps and one group of its own). They take turns, group after group, in an order that rotates. The
clock runs over decoding steps only; answers end where the model ends them, so a group of B gets smaller towards its
end, for all alike.

Speeds are tokens per second of wall time; those under ``cpu`` are per second of processor time, which is what counts on
a machine that others use. ``efficiency`` is the speed by processor time over what the accept length and separately
measured costs of forward pass, drafting and drawing predict. Arms that could not reach ``--skip-below`` of plain speed
even by prediction are not run, but listed. Not measured: HTTP, a GPU, half precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import Tuner, TunerSettings
from areal_dta.rollout.server.sequence import GenerationRequest, SamplingParams
from scripts.benchlib.report import UsageError, at_least, commit, counts, finite, progress
from scripts.benchlib.spec_check import Differences, compare
from scripts.benchlib.spec_cost import StepTable, measure_table
from scripts.benchlib.spec_model import SpecModel, folder_model, tiny_model
from scripts.benchlib.spec_play import FixedArm, Played, Player, Totals

__all__ = ["add_arguments", "run"]

PLAIN, COLD, TUNED = "plain", "cold", "tuned"
TINY_ARMS = (Arm("ngram", 3, 1, 3), Arm("eagle", 3, 1, 3), Arm("eagle", 3, 2, 7))
WIDEST = 15  # arms that verify more are left to --arms


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(finite(word) for word in text.split(","))


def _arms(text: str) -> tuple[Arm, ...]:
    try:
        return tuple(Arm.parse(word.strip()) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=["tiny", "smollm2"], default="tiny", help="tiny is taught a grammar on the spot"
    )
    parser.add_argument("--folder", type=Path, help="the model's folder (smollm2)")
    parser.add_argument("--drafter", type=Path, help="its drafter's folder; without one the n-gram arms play alone")
    parser.add_argument("--batch", type=counts, default=(1, 2, 4, 8, 16, 32), help="requests at once")
    parser.add_argument("--temperature", type=_temperatures, default=(0.0, 1.0))
    parser.add_argument("--arms", type=_arms, help="for example eagle-d3-k1-v3,ngram-d7-k1-v7; default: a selection")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--sequences", type=int, default=4, help="answers per strategy at least, in groups of --batch")
    parser.add_argument("--max-prompt", type=int, default=1024, help="bound of the prompts' tokens; 0: whole prompts")
    parser.add_argument(
        "--skip-below", type=finite, default=0.75, help="predicted speed-up below which an arm is not run"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the measurements of costs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    at_least(args, 1, "tokens", "sequences", "repeats", "threads")
    if min(args.temperature) < 0:
        raise UsageError(f"--temperature {min(args.temperature)} must not be negative")
    torch.set_num_threads(args.threads)
    num_prompts = max(*args.batch, args.sequences)
    if args.model == "tiny":
        model = tiny_model(num_prompts, args.seed)
    elif args.folder is None:
        raise UsageError("--model smollm2 needs --folder; make one with python -m experiments.models.smollm2 FOLDER")
    else:
        model = folder_model(args.folder, args.drafter, num_prompts, args.max_prompt)
    arms = args.arms or (TINY_ARMS if args.model == "tiny" else [a for a in DEFAULT_ARMS if a.num_verify <= WIDEST])
    if args.arms and model.drafter is None and any(a.drafter == "eagle" for a in args.arms):
        raise UsageError("--arms names eagle arms, which need --drafter")
    arms = [a for a in arms if a != OFF and (a.drafter == "ngram" or model.drafter is not None)]
    bench = _Bench(args, model, arms)
    parts = {temperature: bench.batches(temperature) for temperature in args.temperature}
    first, *others = parts
    return {
        "commit": commit(),
        "model": model.note,
        "drafter": None
        if model.drafter is None
        else f"{model.drafter.config.kind}, {model.drafter.config.num_draft_tokens} tokens",
        "prompt_tokens": sum(map(len, model.prompts)) / len(model.prompts),
        "tokens": args.tokens,
        "costs": bench.table.to_json(),
        "temperature": first,
        "batches": parts[first],
        "other_temperatures": {str(t): {"batches": parts[t]} for t in others},
    }


@dataclass
class _Cell:
    """One batch size and temperature under way."""

    totals: dict[str, Totals] = field(default_factory=dict)
    differences: dict[str, Differences] = field(default_factory=dict)

    def add(self, name: str, played: Played) -> None:
        self.totals.setdefault(name, Totals()).add(played)


class _Bench:
    def __init__(self, args: argparse.Namespace, model: SpecModel, arms: Sequence[Arm]) -> None:
        self._args, self._model, self._arms = args, model, list(arms)
        progress(f"{model.note}: computing {len(model.prompts)} prompts")
        self._player = Player(model.target, model.drafter, model.prompts, max(args.batch), args.tokens)
        progress("measuring costs")
        self.table: StepTable = measure_table(
            self._player.scheduler, model.drafter, model.prompts, args.batch, self._arms, args.temperature, args.repeats
        )
        self._accept_lengths: dict[tuple[float, str], float] = {}  # of an arm at the batch size before

    def batches(self, temperature: float) -> dict[str, Any]:
        return {str(batch): self._batch(batch, temperature) for batch in self._args.batch}

    def _tuner(self, arms: Sequence[Arm]) -> Tuner:
        return Tuner(StepCosts(self.table.points()), (OFF, *arms), TunerSettings(seed=self._args.seed))

    def _batch(self, batch: int, temperature: float) -> dict[str, Any]:
        args, cell = self._args, _Cell()
        predicted = {arm.name: self._speedup(arm, batch, temperature) for arm in self._arms}
        arms = [arm for arm in self._arms if predicted[arm.name] >= args.skip_below]
        cold, tuned, is_warm = self._tuner(arms), self._tuner(arms), False
        prompts = self._model.prompts[: max(batch, args.sequences // batch * batch)]
        for number, start in enumerate(range(0, len(prompts), batch)):
            group = self._requests(prompts[start : start + batch], start, temperature)
            plain = self._player.play(group, None)
            cell.add(PLAIN, plain)
            turns = [*arms, None]
            turns = turns[number % len(turns) :] + turns[: number % len(turns)]
            for arm in turns:
                name, chooser = (COLD, cold) if arm is None else (arm.name, FixedArm(arm))
                played = self._player.play(group, chooser)
                self._note(cell, name, plain, played)
                if arm is not None:
                    for note in played.notes:
                        note.replay(tuned)
            off = self._player.play(group, FixedArm(OFF))
            for note in off.notes:
                note.replay(tuned)
            cell.add(OFF.name, off)
        for start in (0, *range(0, len(prompts), batch)):
            group = self._requests(prompts[start : start + batch], start, temperature)
            plain = self._player.play(group, None)  # once more, so that both are of the same minute
            played = self._player.play(group, tuned)
            if is_warm:
                cell.add(PLAIN, plain)
                self._note(cell, TUNED, plain, played)
            is_warm = True
        for arm in arms:
            self._accept_lengths[temperature, arm.name] = cell.totals[arm.name].accept_length
        report = self._report(cell, arms, temperature)
        report["skipped"] = {name: round(value, 3) for name, value in predicted.items() if name not in report["arms"]}
        progress(f"T={temperature:g} batch {batch}: " + _line(report))
        return report

    def _requests(self, prompts: Sequence[tuple[int, ...]], start: int, temperature: float) -> list[GenerationRequest]:
        sampling = SamplingParams(max_new_tokens=self._args.tokens, temperature=temperature)
        seed = self._args.seed * 1_000_003 + start
        return [GenerationRequest(str(i), prompt, sampling, seed + i) for i, prompt in enumerate(prompts)]

    def _note(self, cell: _Cell, name: str, plain: Played, played: Played) -> None:
        cell.add(name, played)
        found = cell.differences.setdefault(name, Differences())
        cell.differences[name] = found + compare(self._model.target, plain.outputs, played.outputs)

    def _speedup(self, arm: Arm, batch: int, temperature: float) -> float:
        """Predicted from the accept length at the batch size before; for the first one, from the best possible."""
        length = self._accept_lengths.get((temperature, arm.name), 1.0 + arm.depth)
        plain_s = self.table.arm_s(OFF, batch, batch, temperature)
        return length * plain_s / self.table.arm_s(arm, batch, batch * length, temperature)

    def _report(self, cell: _Cell, arms: Sequence[Arm], temperature: float) -> dict[str, Any]:
        totals = cell.totals
        plain, fixed = totals[PLAIN], {arm.name: totals[arm.name] for arm in arms}
        by_ngram = [t for name, t in fixed.items() if name.startswith("ngram")]
        best_cpu = max([plain.cpu_tps, *(t.cpu_tps for t in fixed.values())])
        predicted = {name: self._prediction(t, temperature) for name, t in fixed.items()}
        steps: dict[str, int] = {}
        for note in totals[TUNED].notes:
            steps[note.arm.name] = steps.get(note.arm.name, 0) + 1
        return {
            "plain_tps": plain.tps,
            "ngram_tps": max((t.tps for t in by_ngram), default=None),
            "arms": {name: t.tps for name, t in fixed.items()},
            "tuned_tps": totals[TUNED].tps,
            "cold_tps": totals[COLD].tps,
            "accept_length": {name: t.accept_length for name, t in fixed.items()},
            "acceptance": {name: t.acceptance for name, t in fixed.items()},
            "predicted_tps": predicted,
            "efficiency": {name: t.cpu_tps / predicted[name] for name, t in fixed.items()},
            "tuner_loss": 1 - totals[TUNED].cpu_tps / best_cpu,
            "tuned_steps": steps,
            "mean_batch": totals[OFF.name].mean_batch,
            "cpu": {
                "plain_tps": plain.cpu_tps,
                "off_tps": totals[OFF.name].cpu_tps,
                "ngram_tps": max((t.cpu_tps for t in by_ngram), default=None),
                "arms": {name: t.cpu_tps for name, t in fixed.items()},
                "tuned_tps": totals[TUNED].cpu_tps,
                "cold_tps": totals[COLD].cpu_tps,
                "speedup": {name: t.cpu_tps / plain.cpu_tps for name, t in fixed.items()},
                "tuned_speedup": totals[TUNED].cpu_tps / plain.cpu_tps,
                "plain_efficiency": plain.cpu_tps / self._prediction(totals[OFF.name], temperature),
            },
            "outputs": {name: found.to_json() for name, found in cell.differences.items()},
        }

    def _prediction(self, totals: Totals, temperature: float) -> float:
        """Tokens per processor second that the steps should have had."""
        return totals.num_tokens / sum(self.table.predict_s(note, temperature) for note in totals.notes)


def _line(report: dict[str, Any]) -> str:
    cpu = report["cpu"]
    arms = ", ".join(f"{n} {s:.2f}x ({report['accept_length'][n]:.2f})" for n, s in cpu["speedup"].items())
    return f"plain {cpu['plain_tps']:.1f} tokens per cpu-s; {arms}; tuned {cpu['tuned_speedup']:.2f}x"

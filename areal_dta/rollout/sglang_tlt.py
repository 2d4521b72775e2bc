"""Speculation on SGLang servers with a drafter from here: flags, environment, and what a release cannot do.

``python -m areal_dta.rollout.sglang`` becomes this program for a command with a plan, and this one becomes the command.

What the releases' sources say, and what follows:

- up to 0.5.10.post1 an update of the policy from disk leaves a drafter alone, and no call reaches the drafter only: one
  fixed strategy, and a new drafter needs a new start;
- 0.5.11 to 0.5.20 load the policy's files into the drafter as well: a drafter from here is refused;
- from 0.5.21 `sglang_plugin` registers an algorithm of ours, which separates the two and lets the tuner set the number
  of drafting steps. If SGLang did not load the plugin it does not know the algorithm and ends at its start.

None of this has run with a real SGLang.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import areal_dta
from areal_dta.drafter.arms import DEFAULT_ARMS, Arm
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig, sglang_obstacles
from areal_dta.nn.model_config import DecoderConfig, UnsupportedModel
from areal_dta.rollout.sglang import SGLangMissing, TltPlan, become, installed_version
from areal_dta.rollout.sglang_contract import Contract, contract_of
from areal_dta.rollout.sglang_plugin import SETTINGS_VARIABLE
from areal_dta.weights import TornWeights, verify

__all__ = ["SETTINGS_VARIABLE", "Speculation", "SpeculationRefused", "algorithm_name", "main", "speculation"]

TOKEN_MAP = "token_map.pt"  # written beside a drafter with a reduced vocabulary and the policy's head
DEFAULT_ARM = Arm("eagle", 3, 1, 3)
MAX_RUNNING = 48  # SGLang's own limit for EAGLE, which it does not apply to registered algorithms
_ALGORITHM = "--speculative-algorithm"
_SHAPE = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
_PATH = ("--speculative-draft-model-path", "--speculative-draft-model")
_PLUGIN = "areal_dta.rollout.sglang_plugin:register"


class SpeculationRefused(ValueError):
    """The drafter, the release and the flags do not go together; the message has the remedy."""


@dataclass(frozen=True)
class Speculation:
    """``flags`` to append to the command, ``env`` for the plugin (empty: none), and the lines to say at the start."""

    flags: tuple[str, ...]
    env: Mapping[str, str]
    messages: tuple[str, ...]


def algorithm_name(builtin: str) -> str:
    """Name of our registered algorithm over SGLang's EAGLE or EAGLE3."""
    return f"AREAL_DTA_{builtin}"


def speculation(plan: TltPlan, contract: Contract, command: Sequence[str]) -> Speculation:
    """How ``command`` must be started to speculate with the plan's drafter; raises SpeculationRefused.

    Flags that ``command`` already has win over those of the plan and are named.
    """
    given = {word.partition("=")[0] for word in command}
    drafter = _checked_drafter(plan, command, given)
    builtin = "EAGLE3" if drafter.is_eagle3 else "EAGLE"
    if contract.disk_reaches_drafter and not contract.plugins:
        raise SpeculationRefused(
            f"{contract.name} loads every update of the policy from disk into the drafter as well; use a release up to "
            "0.5.10.post1 or from 0.5.21, or leave tlt.drafter out"
        )
    messages = []
    own_shape = [flag for flag in _SHAPE if flag in given]
    own_algorithm = _ALGORITHM in given
    fixed, tuned, left_out = _strategies(plan, contract, command, bool(own_shape) or own_algorithm)
    _check_tree(fixed)
    shape = (str(fixed.depth), str(fixed.top_k), str(fixed.num_verify + 1))  # SGLang counts the pending token
    algorithm = algorithm_name(builtin) if contract.plugins else builtin
    ours = {_ALGORITHM: algorithm, _PATH[0]: plan.drafter} | dict(zip(_SHAPE, shape, strict=True))
    if drafter.draft_vocab_size and not drafter.trains_head:
        ours["--speculative-token-map"] = str(Path(plan.drafter) / TOKEN_MAP)
        messages.append(
            "the drafter's head rows are those of the policy it starts with; they do not follow updates, so fewer "
            "drafts are right later on (EAGLE-3 has a head of its own)"
        )
    messages += [f"{_key(flag)} is used, not {value} of tlt" for flag, value in ours.items() if flag in given]
    if contract.plugins and not own_algorithm:
        ours["--max-running-requests"] = str(MAX_RUNNING)
    flags = [word for flag, value in ours.items() if flag not in given for word in (flag, value)]
    env = {}
    if contract.plugins and not own_algorithm:
        settings = {"arms": [arm.name for arm in tuned], "max_regret": plan.max_regret}
        env[SETTINGS_VARIABLE] = json.dumps(settings | {"max_batch": plan.max_batch, "seed": plan.seed})
    if not tuned and plan.max_batch is not None:
        messages.append(f"tlt.max_batch={plan.max_batch} has no effect without the tuner")
    messages += _limits(contract, fixed, tuned, left_out, own_algorithm)
    return Speculation(tuple(flags), env, tuple(messages))


def _checked_drafter(plan: TltPlan, command: Sequence[str], given: set[str]) -> EagleConfig:
    for flag in _PATH:
        if flag in given:
            raise SpeculationRefused(f"tlt.drafter={plan.drafter} and {_key(flag)} name two drafters; remove one")
    folder = Path(plan.drafter)
    try:
        verify(folder)
        drafter = EagleConfig.read(folder)
        model = Path(_value(command, "--model-path") or "")
        if (model / "config.json").is_file():
            drafter.check_target(DecoderConfig.from_folder(model))
    except (TornWeights, DrafterMismatch, UnsupportedModel, OSError) as error:
        raise SpeculationRefused(f"tlt.drafter={plan.drafter}: {error}") from error
    obstacles = sglang_obstacles(drafter)
    if obstacles:
        raise SpeculationRefused(
            f"tlt.drafter={plan.drafter}: SGLang's EAGLE classes cannot load {', '.join(obstacles)}; train one with "
            "python -m experiments.drafter --portable, or use rollout.backend=embedded:dN"
        )
    return drafter


def _strategies(
    plan: TltPlan, contract: Contract, command: Sequence[str], own: bool
) -> tuple[Arm, tuple[Arm, ...], list[str]]:
    """The strategy of the flags, those the tuner may choose from (none: it is not used), and what is left out."""
    named = [Arm.parse(name) for name in plan.arms]
    eagle = [arm for arm in named or DEFAULT_ARMS if arm.drafter == "eagle"]
    if named and not eagle:
        raise SpeculationRefused(f"tlt.arms={list(plan.arms)} has no eagle strategy, the only ones SGLang can run")
    chains = sorted(arm for arm in eagle if arm.top_k == 1 and arm.num_verify == arm.depth)
    one_rank = all(_value(command, flag) in (None, "1") for flag in ("--tp-size", "--pp-size"))
    if contract.plugins and one_rank and chains and not own:
        left_out = [arm.name for arm in named if arm not in chains and arm.drafter != "off"]
        return chains[-1], tuple(chains), left_out  # buffers are laid out for the longest
    fixed = next(iter(eagle)) if named else DEFAULT_ARM
    return fixed, (), [arm.name for arm in named if arm not in (fixed, Arm("off"))]


def _check_tree(arm: Arm) -> None:
    most = arm.top_k + (arm.depth - 1) * arm.top_k**2
    if arm.num_verify > most:
        raise SpeculationRefused(f"tlt.arms: {arm.name} verifies more than the {most} tokens that SGLang drafts for it")
    if arm.top_k == 1 and arm.num_verify != arm.depth:
        raise SpeculationRefused(f"tlt.arms: {arm.name}: SGLang verifies all of a chain; write v{arm.depth}")


def _limits(
    contract: Contract, fixed: Arm, tuned: tuple[Arm, ...], left_out: list[str], own_algorithm: bool
) -> list[str]:
    found = []
    if tuned:
        found.append(
            f"the tuner chooses between off and {', '.join(arm.name for arm in tuned)}: SGLang changes the number of "
            "steps only, never topk or trees; off still keeps the drafter's cache up to date"
        )
    elif contract.plugins:
        found.append(
            f"one strategy for all steps, {fixed.name}; the tuner needs chains (eagle-dN-k1-vN), no flags "
            "sglang.speculative_* for them, and one GPU per server (ranks would measure and choose differently)"
        )
    else:
        found.append(f"one strategy for all steps, {fixed.name}; this release takes no registered algorithm")
    if left_out:
        found.append(f"not used of tlt.arms: {', '.join(left_out)}")
    if not contract.plugins:
        found.append("the drafter stays the one of the start; a new one needs a new start of the server")
    elif own_algorithm:
        found.append(
            "with sglang.speculative_algorithm an update of the policy from disk is loaded into the drafter as well; "
            "leave it out"
        )
    found.append("drafted tokens are verified by SGLang's sampling: a seed gives other tokens than plain decoding")
    found.append("hidden states are not recorded and no drafter is trained here; the summary shows no accept length")
    return found


def _key(flag: str) -> str:
    return "sglang." + flag.removeprefix("--").replace("-", "_")


def _value(command: Sequence[str], flag: str) -> str | None:
    """The value of ``flag``, the last one as argparse has it."""
    found = None
    for i, word in enumerate(command):
        if word == flag and i + 1 < len(command):
            found = command[i + 1]
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found


def _plugin_site() -> Path:
    """A folder for ``PYTHONPATH``: this package alone (a link), and metadata that announces the plugin.

    SGLang's environment needs nothing installed, and nothing else of this one becomes visible there.
    """
    site = Path(tempfile.mkdtemp(prefix="areal-dta-sglang-"))
    (site / "areal_dta").symlink_to(Path(areal_dta.__file__).resolve().parent, target_is_directory=True)
    info = site / "areal_dta_sglang-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-dta-sglang\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nareal_dta = {_PLUGIN}\n")
    return site


def main(argv: list[str]) -> int:
    """``argv``: a plan, then the command that is to speculate; exit code 2 where that cannot be."""
    plan, command = TltPlan.from_json(argv[0]), argv[1:]
    try:
        contract = contract_of(installed_version(command[0]))
        chosen = speculation(plan, contract, command)
    except (SGLangMissing, SpeculationRefused) as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 2
    os.environ.update(chosen.env)
    if chosen.env:
        present = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_plugin_site()), present)))
    return become([*command, *chosen.flags], contract, chosen.messages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Keys of AReaL files that are spelled otherwise here: older names, names of its tree-training branch, other backends.

`migrate` rewrites a parsed file before it is checked and says in a notice what it changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from areal_dta.config_schema_alloc import MAPPED, parse_allocation, split_allocation_mode
from areal_dta.config_schema_check import ConfigError
from areal_dta.config_schema_tau2 import TAU2_PREPARE, TAU2_WORKFLOW

__all__ = ["migrate"]

MODELS = ("actor", "ref", "critic")


def migrate(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The mapping with every key under its present name, and one notice per change. `given` is left alone."""
    raw: dict[str, Any] = copy.deepcopy(dict(given))
    notices: list[str] = []
    _allocation_mode(raw, notices)
    for name in MODELS:
        if isinstance(raw.get(name), dict):
            _backend(raw[name], name, notices)
    _agent_section(raw, notices)
    if isinstance(raw.get("actor"), dict):
        _importance_cap(raw["actor"], notices)
        _dynamic_sampling(raw, notices)
        _move_up(raw, "tree_training_mode", notices)
        _move_up(raw, "packing_algorithm", notices)
    _tree_switch(raw, notices)
    if "econfig" in raw and not raw.get("workflow"):
        raw["workflow"] = TAU2_WORKFLOW
        raw.setdefault("prepare", TAU2_PREPARE)
        notices.append(f"workflow is not set; the file has econfig, so {TAU2_WORKFLOW} is used")
    return raw, notices


def _allocation_mode(raw: dict[str, Any], notices: list[str]) -> None:
    mode = raw.get("allocation_mode")
    if not mode:
        return
    rollout, train = split_allocation_mode(str(mode))
    for name, spec in (("rollout", rollout), ("actor", train)):
        section = raw.setdefault(name, {})
        if spec and isinstance(section, dict) and not section.get("backend"):
            section["backend"] = spec
            notices.append(f"allocation_mode={mode}: {name}.backend is {spec}")
    raw["allocation_mode"] = ""


def _backend(section: dict[str, Any], name: str, notices: list[str]) -> None:
    spec = section.get("backend")
    if not isinstance(spec, str) or not spec.strip():
        return
    alloc = parse_allocation(spec, f"{name}.backend")
    if alloc.backend in MAPPED:
        section["backend"] = "megatron" + str(alloc)[len(alloc.backend) :]
        notices.append(f"{name}.backend={spec} runs on Megatron-core here: {section['backend']}")


def _agent_section(raw: dict[str, Any], notices: list[str]) -> None:
    rollout = raw.get("rollout")
    if not isinstance(rollout, dict) or "openai" not in rollout:
        return
    if "agent" in rollout:
        raise ConfigError("rollout.openai and rollout.agent are the same section; keep rollout.agent")
    rollout["agent"] = rollout.pop("openai")
    notices.append("rollout.openai is called rollout.agent in AReaL 1.0")


def _importance_cap(actor: dict[str, Any], notices: list[str]) -> None:
    for stem in ("behav_imp_weight", "behave_imp_weight"):
        cap, mode = actor.pop(f"{stem}_cap", None), actor.pop(f"{stem}_mode", "token_mask")
        if cap is None or mode == "disabled":
            continue
        if actor.get("rejection_sampling"):
            raise ConfigError(f"actor.{stem}_cap={cap} and actor.rejection_sampling are both set; keep the latter")
        level, _, kind = str(mode).partition("_")
        action = {"mask": "mask", "truncate": "clamp"}.get(kind)
        if level not in ("token", "sequence") or action is None:
            raise ConfigError(f"actor.{stem}_mode={mode} is unknown; set actor.rejection_sampling instead")
        actor["rejection_sampling"] = {"level": level, "action": action, "metric": "ratio", "upper": cap}
        notices.append(f"actor.{stem}_cap={cap} is called actor.rejection_sampling.upper in AReaL 1.0")


def _dynamic_sampling(raw: dict[str, Any], notices: list[str]) -> None:
    """AReaL's older switch masks groups of equal reward out of a batch; the batcher's filter replaces them."""
    if "dynamic_sampling" not in raw["actor"]:
        return
    switch, batcher = raw["actor"].pop("dynamic_sampling"), raw.setdefault("batcher", {})
    if not isinstance(switch, bool):
        raise ConfigError(f"actor.dynamic_sampling={switch!r} must be true or false")
    if not isinstance(batcher, dict):  # told as such when the sections are checked
        return
    if batcher.setdefault("filter_equal_rewards", switch) != switch:
        raise ConfigError(
            f"actor.dynamic_sampling={str(switch).lower()} contradicts batcher.filter_equal_rewards="
            f"{str(batcher['filter_equal_rewards']).lower()}; keep the latter"
        )
    does = "groups whose episodes all have one reward are replaced by other prompts, so that batches stay whole"
    notices.append(
        f"actor.dynamic_sampling={str(switch).lower()} is called batcher.filter_equal_rewards here"
        + (f": {does}" if switch else "")
    )


def _move_up(raw: dict[str, Any], key: str, notices: list[str]) -> None:
    if key not in raw["actor"]:
        return
    value = raw["actor"].pop(key)
    if raw.get(key, value) != value:
        raise ConfigError(f"{key}={raw[key]} and actor.{key}={value} differ; keep one")
    raw[key] = value
    notices.append(f"actor.{key}={value} is a top-level key here")


def _tree_switch(raw: dict[str, Any], notices: list[str]) -> None:
    """`enable_tree_training` (AReaL: under actor; or at the top) decides where `tree_training_mode` is not set."""
    actor = raw.get("actor")
    given = [(raw, "enable_tree_training")]
    if isinstance(actor, dict):
        given.append((actor, "actor.enable_tree_training"))
    for section, where in given:
        switch = section.pop("enable_tree_training", None)
        if switch is None:
            continue
        if not isinstance(switch, bool):
            raise ConfigError(f"{where}={switch!r} must be true or false")
        mode = raw.setdefault("tree_training_mode", "dta" if switch else "disabled")
        if switch != (mode != "disabled"):
            raise ConfigError(
                f"{where}={str(switch).lower()} contradicts tree_training_mode={mode}; remove one of them"
            )
        notices.append(f"{where}={str(switch).lower()} selects tree_training_mode={mode}")

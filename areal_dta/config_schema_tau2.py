"""What the configuration knows of the tau2 environment, without importing it: names, and which `econfig` values run."""

from __future__ import annotations

from typing import Any

from areal_dta.config_schema import PPOConfig
from areal_dta.config_schema_check import ConfigError, nearest

__all__ = ["DOMAINS", "TAU2_PREPARE", "TAU2_WORKFLOW", "check_tau2", "use_scripted_user"]

TAU2_WORKFLOW = "experiments.tau2.workflow.Tau2Workflow"
TAU2_PREPARE = "experiments.tau2.prepare.prepare"
DOMAINS = ("mock", "airline", "retail", "telecom")
_USER_MODEL = ("user_llm", "user_llm_base_url", "user_llm_args")
_OTHER_TASKS = ("solo_mode", "add_thinking_tool")


def use_scripted_user(raw: dict[str, Any], notices: list[str]) -> None:
    """Switch off AReaL's keys of a language model that plays tau2's user: the user is scripted here, and that is said.

    Changes `raw["econfig"]` in place where the workflow is tau2's; other workflows may read these keys.
    """
    econfig = raw.get("econfig")
    if raw.get("workflow") != TAU2_WORKFLOW or not isinstance(econfig, dict):
        return
    given = [key for key in _USER_MODEL if econfig.get(key) is not None]
    if not given:
        return
    shown = econfig.get("user_llm") or econfig[given[0]]
    notices.append(
        f"econfig.{given[0]}={shown}: tau2's user is scripted here, not played by a language model; "
        f"{', '.join(f'econfig.{key}' for key in given)} {'is' if len(given) == 1 else 'are'} ignored"
    )
    for key in given:
        econfig[key] = None


def check_tau2(config: PPOConfig) -> None:
    """Raise ConfigError for an `econfig` that tau2's workflow or `prepare` would refuse once the run has begun."""
    econfig = config.econfig
    if config.workflow != TAU2_WORKFLOW and config.prepare != TAU2_PREPARE:
        return
    if econfig.domain not in DOMAINS:
        hint = nearest(econfig.domain, list(DOMAINS))
        raise ConfigError(f"econfig.domain={econfig.domain} is unknown; choose one of {', '.join(DOMAINS)}{hint}")
    for key in _OTHER_TASKS:
        if getattr(econfig, key):
            raise ConfigError(f"econfig.{key}=true changes the tasks and is not supported; set econfig.{key}=false")
    if not 0.0 < econfig.turn_discount <= 1.0:
        raise ConfigError(f"econfig.turn_discount={econfig.turn_discount} must be above 0 and at most 1")

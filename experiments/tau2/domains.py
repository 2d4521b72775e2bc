"""tau2 domains behind a cache: environments, tasks and splits, without parsing the same database file for every
episode.

tau2's own constructors read and validate a database from disk each time (about half a second for airline), and its
evaluator builds two more per episode. The constructors registered here keep one parsed copy per domain and rebuild the
models from it, so tau2's evaluator, called with `cached_name(domain)`, runs unmodified but several times faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from tau2.data_model.tasks import Task
from tau2.domains.airline.environment import get_environment as make_airline
from tau2.domains.mock.environment import get_environment as make_mock
from tau2.domains.retail.environment import get_environment as make_retail
from tau2.domains.telecom.environment import get_environment_manual_policy as make_telecom
from tau2.environment.db import DB
from tau2.environment.environment import Environment
from tau2.registry import registry

__all__ = ["DOMAINS", "cached_name", "get_task", "make_environment", "task_ids", "tool_schemas"]

_MAKERS: dict[str, Callable[..., Environment]] = {
    "mock": make_mock,
    "airline": make_airline,
    "retail": make_retail,
    "telecom": make_telecom,
}
DOMAINS = tuple(_MAKERS)
_lock = threading.Lock()


class _Snapshot:
    """The initial databases of one domain as plain data, from which a fresh environment is built."""

    def __init__(self, domain: str) -> None:
        self._make = _MAKERS[domain]
        pristine = self._make()
        self._agent_type: type[DB] = type(pristine.tools.db)
        self._agent_data: dict[str, Any] = pristine.tools.db.model_dump()
        user_db = pristine.user_tools.db if pristine.user_tools is not None else None
        self._user_type: type[DB] | None = type(user_db) if user_db is not None else None
        self._user_data: dict[str, Any] | None = user_db.model_dump() if user_db is not None else None
        self.schemas: list[dict[str, Any]] = [tool.openai_schema for tool in pristine.get_tools()]
        self.policy: str = pristine.get_policy()

    def build(self, solo_mode: bool = False) -> Environment:
        databases: dict[str, DB] = {"db": self._agent_type.model_validate(self._agent_data)}
        if self._user_type is not None:
            databases["user_db"] = self._user_type.model_validate(self._user_data)
        return self._make(solo_mode=solo_mode, **databases)


def cached_name(domain: str) -> str:
    """The name under which the cached constructor of ``domain`` is registered with tau2 (registered by
    `make_environment`).
    """
    return f"areal_dta-{domain}"


@cache
def _snapshot(domain: str) -> _Snapshot:
    if domain not in _MAKERS:
        raise ValueError(f"unknown tau2 domain {domain!r}; choose one of {', '.join(DOMAINS)} (econfig.domain)")
    snapshot = _Snapshot(domain)
    with _lock:
        if cached_name(domain) not in registry.get_domains():
            registry.register_domain(snapshot.build, cached_name(domain))
    return snapshot


def make_environment(domain: str) -> Environment:
    """A fresh environment of ``domain`` in its initial state; raises ValueError for an unknown domain."""
    return _snapshot(domain).build()


def tool_schemas(domain: str) -> list[dict[str, Any]]:
    """OpenAI function schemas of the agent's tools (shared list: do not mutate)."""
    return _snapshot(domain).schemas


def domain_policy(domain: str) -> str:
    """The policy text the agent must follow."""
    return _snapshot(domain).policy


@cache
def _tasks(domain: str) -> dict[str, Task]:
    _snapshot(domain)
    return {task.id: task for task in registry.get_tasks_loader(domain)("base")}


def get_task(domain: str, task_id: str) -> Task:
    """The task (shared object: copy before changing); raises ValueError when the domain has no such task."""
    tasks = _tasks(domain)
    if task_id not in tasks:
        raise ValueError(
            f"tau2 domain {domain!r} has no task {task_id!r}; it has {len(tasks)}, e.g. {next(iter(tasks))!r}"
        )
    return tasks[task_id]


def task_ids(domain: str, split: str = "base") -> list[str]:
    """Task ids of a split: base | train | test. The mock domain has no split of its own: all nine tasks serve for
    each.
    """
    tasks = _tasks(domain)
    if split == "base" or domain == "mock":
        return list(tasks)
    load_splits = registry.get_task_splits_loader(domain)
    splits = load_splits() if load_splits is not None else {}
    if split not in splits:
        raise ValueError(f"tau2 domain {domain!r} has no split {split!r}; it has {', '.join(sorted(splits)) or 'none'}")
    return [task_id for task_id in splits[split] if task_id in tasks]

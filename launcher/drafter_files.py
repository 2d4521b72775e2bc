"""Settings of the processes that train the drafter, written into the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_dta.config import Config
from areal_dta.records import LaunchPlan

__all__ = ["write_drafter_settings"]


def write_drafter_settings(config: Config, plan: LaunchPlan, folder: Path) -> None:
    """``coordinator.json`` and ``worker.json``; readable for the owner only, since the first may hold the API key."""
    folder.mkdir(exist_ok=True)
    tlt = config.tlt
    coordinator: dict[str, Any] = {
        "address": plan.coordinator,
        "servers": {f"server.{i}": url for i, url in enumerate(plan.servers)},
        "api_key": plan.api_key,
        "metrics_address": plan.metrics,
        "report_interval_s": config.telemetry.interval_s,
        "rules": {"min_idle": tlt.min_idle_servers, "idle_s": tlt.idle_s},
    }
    worker: dict[str, Any] = {
        "coordinator": plan.coordinator,
        "drafter": tlt.drafter,
        "kind": tlt.kind,
        "draft_ids": tlt.draft_ids,
        "learning_rate": tlt.learning_rate,
        "seed": config.seed,
        "cores": [[core] for core in tlt.cores],
        "spot": {"publish_steps": tlt.publish_steps},
    }
    for name, settings in (("coordinator", coordinator), ("worker", worker)):
        path = folder / f"{name}.json"
        path.touch(mode=0o600)
        path.chmod(0o600)  # before anything is in it; a rename over it would bring the usual mode back
        path.write_text(json.dumps(settings, indent=1))

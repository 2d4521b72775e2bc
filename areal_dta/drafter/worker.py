"""``python -m areal_dta.drafter.worker --settings FILE.json`` or ``--run RUN --index i``: trains the drafter in the
idle time of one rollout server.

It rests until the coordinator assigns it, and again when work arrives. Nothing waits for it: killed at any moment it
leaves at most a step that the others do without, and a checkpoint to go on from.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from areal_dta import metrics
from areal_dta.drafter.averaging import Hub
from areal_dta.drafter.buffer import BufferReader
from areal_dta.drafter.buffer_files import FrozenTarget
from areal_dta.drafter.checkpoint import AsyncCheckpoint
from areal_dta.drafter.control import ControlLink
from areal_dta.drafter.eagle import EagleWeights, init_weights
from areal_dta.drafter.eagle_config import DrafterMismatch, EagleConfig
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.drafter.learner import Learner, LearnerSettings
from areal_dta.drafter.publish import DrafterPublisher
from areal_dta.drafter.spot_state import SpotSettings
from areal_dta.drafter.spot_trainer import SpotTrainer
from areal_dta.drafter.trainer_step import DrafterTrainer
from areal_dta.nn import DecoderWeights, UnsupportedModel, WeightsMismatch
from areal_dta.process_log import set_up_logging
from areal_dta.records import LaunchPlan

__all__ = ["WorkerSettings", "build", "settings_from_run"]

log = logging.getLogger(__name__)
REST_S = 0.25


@dataclass(frozen=True)
class WorkerSettings:
    """Paths are folders. ``drafter``: where to start from; without it, or when it is of another model, a fresh one of
    ``kind`` whose reduced vocabulary, if any, is in the file ``draft_ids`` (npy, ascending target ids).
    ``target_folders``: the model first, then where its published versions appear. The seed makes fresh drafters equal;
    what a worker draws from the buffer depends on its name as well.
    """

    name: str
    server: str
    coordinator: str
    buffer: str
    target_folders: tuple[str, ...]
    checkpoints: str
    drafters: str
    servers: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    metrics_address: str | None = None
    drafter: str | None = None
    kind: str = "eagle"
    draft_ids: str | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    threads: int = 1
    nice: int = 10
    cores: tuple[int, ...] = ()
    start_version: str = ""  # what servers call the model in the first of the folders, which has no manifest
    lease_s: float = 1.0
    tail_share: float = 0.25
    recency: float = 0.7
    cache_bytes: int = 512 << 20
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    spot: SpotSettings = field(default_factory=SpotSettings)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WorkerSettings:
        """Raises ValueError naming an unknown key, TypeError for a missing one."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(f"unknown worker settings {unknown}; known: {sorted(known)}")
        values = dict(raw)
        values["learner"] = LearnerSettings(**values.get("learner", {}))
        values["spot"] = SpotSettings(**values.get("spot", {}))
        for name in ("target_folders", "cores"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


def settings_from_run(run_dir: Path, index: int) -> WorkerSettings:
    """Worker ``index`` of a run: addresses from launch.json, the rest from drafter/worker.json; ``cores`` is there a
    list of lists, one per worker."""
    plan = LaunchPlan.read(run_dir / "launch.json")
    if not 0 <= index < len(plan.servers):
        raise ValueError(f"--index {index} but {run_dir / 'launch.json'} names {len(plan.servers)} servers")
    folder = run_dir / "drafter"
    raw: dict[str, Any] = json.loads((folder / "worker.json").read_text())
    cores = raw.pop("cores", [])
    own = {
        "name": f"drafter.{index}",
        "server": f"server.{index}",
        "servers": {f"server.{i}": url for i, url in enumerate(plan.servers)},
        "api_key": plan.api_key,
        "metrics_address": plan.metrics,
        "buffer": str(folder / f"buffer.{index}"),
        "checkpoints": str(folder / "checkpoints"),
        "drafters": str(folder / "versions"),
        "target_folders": [str(run_dir / "model"), str(run_dir / "weights")],
        "start_version": f"{plan.epoch}:0",
        "cores": cores[index] if index < len(cores) else [],
    }
    return WorkerSettings.from_dict({**own, **raw})


def build(settings: WorkerSettings, publisher: metrics.Publisher) -> tuple[SpotTrainer, ControlLink, Hub]:
    """Load the drafter and connect; raises when the target model is missing or not supported."""
    model = Path(settings.target_folders[0])
    reader = BufferReader(
        Path(settings.buffer),
        settings.seed * 7919 + sum(settings.name.encode()),
        settings.tail_share,
        settings.recency,
        settings.cache_bytes,
    )
    target = FrozenTarget.load(model, "start").weights
    trainer = DrafterTrainer(_first_weights(settings, target, publisher), target, settings.learning_rate)
    folders = [Path(f) for f in settings.target_folders]
    learner = Learner(trainer, reader, folders, settings.learner, settings.seed, settings.start_version)
    checkpoint = AsyncCheckpoint(Path(settings.checkpoints))
    checkpoint.prepare(trainer.state_dict(copy=False))
    drafters = DrafterPublisher(Path(settings.drafters), settings.servers, publisher, settings.api_key)
    hub = Hub(settings.name)
    control = ControlLink(settings.coordinator, settings.name, settings.server, hub.address, settings.lease_s)
    spot = SpotTrainer(control, hub, learner, settings.spot, publisher, checkpoint, drafters)
    spot.resume()
    return spot, control, hub


def _first_weights(settings: WorkerSettings, target: DecoderWeights, publisher: metrics.Publisher) -> EagleWeights:
    if settings.drafter is not None:
        try:
            return read_drafter(Path(settings.drafter), target)[0]
        except DrafterMismatch as error:
            log.warning("starting with a fresh drafter: %s", error)
            publisher.event("drafter/start_refused", str(error))
    ids = None if settings.draft_ids is None else torch.from_numpy(np.load(settings.draft_ids).astype(np.int64))
    shape = EagleConfig.for_target(target.config, settings.kind, 0 if ids is None else len(ids))
    generator = torch.Generator().manual_seed(settings.seed)
    return init_weights(shape, target, generator, ids)


def _warm_up() -> None:
    """Torch loads part of itself in the first optimiser step: seconds in which nobody could be preempted."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.grad = torch.zeros(1)
    optimizer.step()


def run(settings: WorkerSettings, publisher: metrics.Publisher) -> None:
    """Until SIGTERM or SIGINT."""
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    os.nice(settings.nice)
    torch.set_num_threads(settings.threads)
    _warm_up()
    spot, control, hub = build(settings, publisher)

    def end(number: int, frame: FrameType | None) -> None:
        control.halt()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    print(f"READY {settings.name}", flush=True)
    while not control.halted:
        if spot.rest(REST_S).train:
            spot.train()
    spot.close(timeout_s=10.0)
    control.close()
    hub.close()


def main(argv: list[str] | None = None) -> int:
    """Process entry; start-up errors are one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m areal_dta.drafter.worker", description=__doc__)
    parser.add_argument("--settings", type=Path, help="JSON file with the worker's settings")
    parser.add_argument("--run", type=Path, help="run directory; takes every setting from it")
    parser.add_argument("--index", type=int, default=0, help="which server's idle time to use")
    args = parser.parse_args(argv)
    if (args.run is None) == (args.settings is None):
        parser.error("give either --run RUN or --settings FILE.json")
    set_up_logging()
    try:
        if args.run is not None:
            settings = settings_from_run(args.run, args.index)
        else:
            settings = WorkerSettings.from_dict(json.loads(args.settings.read_text()))
        publisher = metrics.init(settings.name, settings.metrics_address)
        run(settings, publisher)
        publisher.close()
    except (OSError, ValueError, TypeError, UnsupportedModel, WeightsMismatch) as error:
        log.error("cannot train: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

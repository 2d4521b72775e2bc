"""``python -m scripts.benchlib.tail_server SETTINGS.json``: one pinned rollout server for `bench.py tail`.

It is the server of the project, started with settings that its command line has no words for: part of a coordinated
group without a run directory, or bound to one arm whatever that costs (``static``).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from areal_dta import metrics
from areal_dta.drafter.arms import DEFAULT_ARMS, OFF, Arm
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import Tuner, TunerSettings
from areal_dta.rollout.server import __main__ as server
from areal_dta.rollout.server import spec_control
from areal_dta.rollout.server.feature_recorder import RecorderSettings
from areal_dta.rollout.server.scheduler import SchedulerLimits
from areal_dta.rollout.server.spec_control import SpecSettings

__all__ = ["FixedTuner", "TailServer"]


@dataclass(frozen=True)
class TailServer:
    """``strategy``: ``off``, ``auto`` or the name of the arm that every step uses."""

    name: str
    model: str
    strategy: str
    cores: tuple[int, ...]
    max_batch: int
    max_total_tokens: int
    dtype: str = "auto"
    drafter: str | None = None
    buffer: str | None = None
    record_share: float = 1.0
    coordinator: str | None = None
    seed: int = 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> TailServer:
        raw = json.loads(path.read_text())
        return cls(**{**raw, "cores": tuple(raw["cores"])})

    def settings(self) -> server.ServerSettings:
        return server.ServerSettings(
            name=self.name,
            model=Path(self.model),
            host="127.0.0.1",
            port=0,
            dtype=self.dtype,
            limits=SchedulerLimits(self.max_batch, self.max_total_tokens),
            initial_version="0:0",
            seed=self.seed,
            speculation=self._speculation(),
            coordinator=self.coordinator,
        )

    def _speculation(self) -> SpecSettings | None:
        if self.strategy == OFF.name:
            return None
        return SpecSettings(
            arms=DEFAULT_ARMS if self.strategy == "auto" else (Arm.parse(self.strategy),),
            drafter=None if self.drafter is None else Path(self.drafter),
            tuner=TunerSettings(seed=self.seed),
            buffer=None if self.buffer is None else Path(self.buffer),
            recorder=RecorderSettings(self.record_share),
        )


class FixedTuner(Tuner):
    """Books what every step was and chooses the same arm whatever it says."""

    def __init__(self, arm: Arm, costs: StepCosts, arms: tuple[Arm, ...], settings: TunerSettings) -> None:
        super().__init__(costs, arms, settings)
        self._fixed = arm

    def choose(self, batch: int, context_tokens: int) -> Arm:
        self._bucket(batch, context_tokens).best = self._fixed  # drafts are as long as pays at its speed
        return self._fixed


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    wanted = TailServer.read(Path(argv[0]))
    os.sched_setaffinity(0, wanted.cores)
    sys.setswitchinterval(server.SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    if wanted.strategy not in (OFF.name, "auto"):
        # A server never binds itself to one arm; here it has to, to be compared with.
        setattr(spec_control, Tuner.__name__, partial(FixedTuner, Arm.parse(wanted.strategy)))
    publisher = metrics.init(wanted.name, None)
    with server.uvloop_runner() as runner:
        return runner.run(server.serve(wanted.settings(), publisher))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A batcher with its log and its socket but without a run's configuration, so that it starts quickly.

python -m tests.e2e.batcher_light ADDRESS FOLDER
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from areal_dta.batcher.core import BatcherCore
from areal_dta.batcher.service import BatcherService, ServiceSettings
from areal_dta.metrics import NullPublisher
from tests.unit.batcher_kit import items, settings

SEGMENT_BYTES = 8000  # small, so that the log is shortened often


async def _serve(address: str, folder: Path) -> None:
    core = BatcherCore(
        settings(num_items=7, eta=1, max_attempts=50, lease_timeout_s=2, num_eval_items=0), items(7), [], time.monotonic
    )
    shell = ServiceSettings(address=address, spool_dir=folder, epoch=0, tick_s=0.05, segment_bytes=SEGMENT_BYTES)
    service = BatcherService(core, shell, NullPublisher("batcher"))
    await service.start()
    await service.run()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2])))

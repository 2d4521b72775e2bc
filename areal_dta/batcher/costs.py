"""What a partition balances: counted from the model's shape, or measured by the trainer of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from areal_dta.batcher.settings import SettingsError
from areal_dta.tree.calibration import Calibration, CalibrationError
from areal_dta.tree.cost import TREE_TOKENS, CostModel
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.timing import FEATURES

__all__ = ["CALIBRATION_FILE", "cost_from_model", "measured_cost", "soon"]

CALIBRATION_FILE = "calibration.json"  # in the run directory, written by the trainer before it asks for a batch

_SOON_S, _POLL_S = 2.0, 0.1  # another rank may ask for a batch while the first one still writes the file


def cost_from_model(kind: str, model_dir: Path) -> CostModel:
    """``tree_tokens``, or ``flops`` of the model whose HF ``config.json`` lies in `model_dir`; raises SettingsError.

    ``time`` is not known before the trainer has measured: `measured_cost` replaces this at every batch.
    """
    if kind in ("tree_tokens", "time"):
        return TREE_TOKENS
    try:
        return ModelSizes.from_folder(model_dir).flops()
    except ValueError as error:
        raise SettingsError(
            f"batcher.cost={kind} needs the model's sizes: {error}; or set it to tree_tokens"
        ) from error


def measured_cost(run_dir: Path, max_block_tokens: int) -> CostModel:
    """Seconds per tree token and attention pair, forward and backward, of the run's calibration; what a block costs is
    spread over the tokens of a full one. Raises SettingsError where there is none that can be used.
    """
    try:
        seconds = Calibration.read(run_dir / CALIBRATION_FILE).time
    except FileNotFoundError as error:
        raise SettingsError(
            f"batcher.cost=time needs measured costs and {run_dir / CALIBRATION_FILE} does not exist; a run with "
            "dta.calibrate=true writes it when its trainer starts (`areal-dta run CONFIG dta.calibrate=true`), or set "
            "batcher.cost=flops"
        ) from error
    except CalibrationError as error:
        raise SettingsError(f"batcher.cost=time: {error}; or set batcher.cost=flops") from error
    base, block = seconds.cost_model(), FEATURES.index("blocks")
    per_token = base.per_token + (seconds.forward_F[block] + seconds.backward_F[block]) / max_block_tokens
    if not per_token > 0:
        raise SettingsError(
            f"batcher.cost=time: {run_dir / CALIBRATION_FILE} says that tokens cost nothing; remove it, so that the "
            "trainer measures anew, or set batcher.cost=flops"
        )
    return CostModel(per_token, base.per_pair)


async def soon(read: Callable[[], CostModel]) -> CostModel:
    """What `read` gives, tried again for a moment; then its SettingsError."""
    give_up_s = time.monotonic() + _SOON_S
    while True:
        try:
            return read()
        except SettingsError:
            if time.monotonic() > give_up_s:
                raise
        await asyncio.sleep(_POLL_S)

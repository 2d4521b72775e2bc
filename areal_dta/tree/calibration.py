"""Measured coefficients as a JSON file, with the circumstances they hold for. Reads without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.timing import TimeModel

__all__ = ["Calibration", "CalibrationError"]

_FORMAT = 1
_MAX_BYTES = 1e15  # of a coefficient; sums of more would overflow
_AT_LEAST_ONE = ("bytes_per_kept_token", "bytes_per_working_token")  # the planner divides by them
EXTRAPOLATION = 2.0  # blocks so many times the largest measured one are predicted without a word


class CalibrationError(ValueError):
    """A calibration file that cannot be used; the message names it and the remedy."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, on what (``fingerprint``: device, model, dtype, versions, parallel sizes), and how well the
    linear models fit their own samples (relative errors by name; ``largest_block``: tokens of the largest one).
    """

    fingerprint: Mapping[str, str]
    time: TimeModel
    memory: MemoryModel
    fit: Mapping[str, float]

    def mismatch(self, fingerprint: Mapping[str, str]) -> str | None:
        """Why these numbers do not hold under `fingerprint`, or None when they do."""
        for name in sorted({*self.fingerprint, *fingerprint}):
            then, now = self.fingerprint.get(name, "not recorded"), fingerprint.get(name, "not recorded")
            if then != now:
                return f"{name} was {then}, is {now}"
        return None

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the run that measured; the models are those of one stage."""
        words = self.fingerprint.get("parallel", "").split()
        count = words[words.index("pp") + 1] if "pp" in words[:-1] else ""
        return int(count) if count.isdecimal() and int(count) else 1

    def extrapolation(self, block_tokens: int) -> str | None:
        """What to say about blocks far larger than the measured ones; None where nothing need be said."""
        largest = self.fit.get("largest_block", 0.0)
        if not largest or block_tokens <= EXTRAPOLATION * largest:
            return None
        return f"blocks of {block_tokens:,} tokens are predicted from measurements up to {largest:,.0f}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "fingerprint": dict(self.fingerprint),
            "time": dataclasses.asdict(self.time),
            "memory": dataclasses.asdict(self.memory),
            "fit": dict(self.fit),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        staging.write_text(self.to_json())
        staging.replace(path)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_dict`; raises CalibrationError."""
        try:
            if raw["format"] != _FORMAT:
                raise CalibrationError(f"format {raw['format']!r} is not {_FORMAT}")
            fingerprint = {str(k): str(v) for k, v in raw["fingerprint"].items()}
            fit = {str(k): float(v) for k, v in raw["fit"].items()}
            return cls(fingerprint, TimeModel(**raw["time"]), _memory_model(raw["memory"]), fit)
        except CalibrationError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(f"not a calibration: {type(error).__name__}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Inverse of `to_json`; raises ValueError (CalibrationError)."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises FileNotFoundError, or CalibrationError for a damaged file."""
        try:
            return cls.from_json(path.read_text())
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: {error}; a run with dta.calibrate=true writes a new one") from error


def _memory_model(raw: Mapping[str, Any]) -> MemoryModel:
    for name, value in raw.items():
        least = 1 if name in _AT_LEAST_ONE else 0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= _MAX_BYTES:
            raise CalibrationError(f"memory.{name} is {value!r}, not a number of bytes from {least} to {_MAX_BYTES:g}")
    return MemoryModel(**raw)

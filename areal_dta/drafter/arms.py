"""Strategies a step may be decoded with. Pure data, free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DEFAULT_ARMS", "DRAFTERS", "OFF", "Arm", "available_arms"]

DRAFTERS = ("off", "ngram", "eagle")


@dataclass(frozen=True, order=True)
class Arm:
    """One strategy: how far a drafter drafts and how many of its nodes the target verifies.

    ``depth`` bounds the drafted tokens on one path, ``top_k`` the nodes expanded per level (and candidates per node),
    ``num_verify`` the drafted tokens verified per sequence: the target computes ``num_verify + 1`` rows. N-gram drafts
    are chains, each as long as it is promising, up to ``depth``.
    """

    drafter: str
    depth: int = 0
    top_k: int = 0
    num_verify: int = 0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ValueError(f"unknown drafter {self.drafter!r}; choose one of {', '.join(DRAFTERS)}")
        if self.drafter == "off":
            if (self.depth, self.top_k, self.num_verify) != (0, 0, 0):
                raise ValueError(f"{self!r}: arm off drafts nothing; leave depth, top_k and num_verify at 0")
        elif self.top_k < 1 or not 1 <= self.depth <= self.num_verify:
            raise ValueError(f"{self!r}: needs top_k >= 1 and 1 <= depth <= num_verify")
        elif self.drafter == "ngram" and (self.top_k, self.num_verify) != (1, self.depth):
            raise ValueError(f"{self!r}: n-gram drafts are chains; write ngram-d{self.depth}-k1-v{self.depth}")

    @property
    def name(self) -> str:
        """``off`` or for example ``eagle-d4-k2-v7``; `Arm.parse` reads it back."""
        return "off" if self.drafter == "off" else f"{self.drafter}-d{self.depth}-k{self.top_k}-v{self.num_verify}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        if name == "off":
            return OFF
        match = re.fullmatch(r"(\w+)-d(\d+)-k(\d+)-v(\d+)", name)
        if match is None:
            raise ValueError(f"arm {name!r} is not off or DRAFTER-dDEPTH-kTOPK-vVERIFY, for example eagle-d4-k2-v7")
        return cls(match[1], *(int(g) for g in match.groups()[1:]))


OFF = Arm("off")

# Rows verified (num_verify + 1) are powers of two: matrix products cost the same up to the next one, and captured
# graphs are shared between arms of the same width.
DEFAULT_ARMS = (
    OFF,
    Arm("ngram", 7, 1, 7),
    Arm("ngram", 15, 1, 15),
    Arm("eagle", 1, 1, 1),
    Arm("eagle", 3, 1, 3),
    Arm("eagle", 3, 2, 7),
    Arm("eagle", 5, 1, 5),
    Arm("eagle", 5, 4, 15),
    Arm("eagle", 7, 4, 31),
)


def available_arms(arms: Iterable[Arm], drafters: Iterable[str]) -> tuple[Arm, ...]:
    """The arms whose drafter is there, *off* first whether listed or not."""
    there = set(drafters)
    return (OFF, *sorted({a for a in arms if a != OFF and a.drafter in there}))

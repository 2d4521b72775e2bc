"""The n-gram index as the server uses it: every answer is kept for its siblings, and while nothing is speculated the
index is tried out on paper, so that the tuner knows beforehand what it would yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.draft_tree import DraftTree
from areal_dta.drafter.ngram import NgramIndex
from areal_dta.drafter.tuner import Tuner
from areal_dta.rollout.server.sequence import Sequence as Request

__all__ = ["NgramDrafter"]

GUESSES = 4  # on paper at a time
PAPER_STEPS = 4  # between two looks at them: they cost where nothing is gained
GUESS_TOKENS = 15


@dataclass(frozen=True)
class _Guess:
    """What would have been drafted for ``seq`` when it had ``at`` tokens."""

    seq: Request
    at: int
    tokens: tuple[int, ...]


class NgramDrafter:
    """On the model thread."""

    def __init__(self, index: NgramIndex) -> None:
        self._index = index
        self._names: dict[Request, str] = {}
        self._known: dict[Request, int] = {}  # tokens of a sequence that the index has seen
        self._next = self._turn = self._plain_steps = 0
        self._guesses: list[_Guess] = []

    def draft(self, seqs: Sequence[Request], arm: Arm, least_chance: float = 0.0) -> list[DraftTree]:
        """Chains of up to ``arm.depth`` tokens that are accepted with a chance of at least ``least_chance``."""
        return [self._index.propose(self._open(seq), arm.depth, least_chance) for seq in seqs]

    def _open(self, seq: Request) -> str:
        """Bring the index up to date with ``seq``."""
        name = self._names.get(seq)
        if name is None:
            name = self._names[seq] = str(self._next)
            self._next += 1
            self._index.open(name, seq.tokens)
        elif self._known[seq] < len(seq.tokens):
            self._index.extend(name, seq.tokens[self._known[seq] :])
        self._known[seq] = len(seq.tokens)
        return name

    def try_on_paper(self, seqs: Sequence[Request], tuner: Tuner, least_chance: float) -> None:
        """A plain step of ``seqs`` begins. A few of them at a time: guess, wait until their tokens are there, and tell
        how many were right."""
        self._plain_steps += 1
        if self._plain_steps % PAPER_STEPS:
            return
        waiting = []
        for guess in self._guesses:
            if len(guess.seq.tokens) - guess.at >= len(guess.tokens):
                tuner.on_paper("ngram", len(guess.tokens), _num_right(guess))
            elif guess.seq in self._names:
                waiting.append(guess)
        self._guesses = waiting
        for seq in seqs[self._turn : self._turn + GUESSES - len(waiting)]:
            if all(guess.seq is not seq for guess in waiting):
                tree = self._index.propose(self._open(seq), GUESS_TOKENS, least_chance)
                self._guesses.append(_Guess(seq, len(seq.tokens), tree.tokens))
        self._turn = self._turn + GUESSES if self._turn + GUESSES < len(seqs) else 0

    def finish(self, seq: Request) -> None:
        """``seq`` is answered; its siblings may draw on it."""
        name = self._open(seq)
        del self._names[seq], self._known[seq]
        self._index.close(name)


def _num_right(guess: _Guess) -> int:
    num_right = 0
    for drafted, token in zip(guess.tokens, guess.seq.tokens[guess.at :], strict=False):
        if drafted != token:
            break
        num_right += 1
    return num_right

"""The n-gram index as the server uses it: every answer is kept for its siblings, and while nothing is speculated the
index is tried out on paper, so that the tuner knows beforehand what it would yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.drafter.arms import Arm
from areal_dta.drafter.draft_tree import DraftTree
from areal_dta.drafter.ngram import NgramIndex
from areal_dta.drafter.step_model import Acceptance
from areal_dta.rollout.server.sequence import Sequence as Request

__all__ = ["NgramDrafter"]

ON_PAPER = Arm("ngram", 7, 1, 7)


@dataclass
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
        self._next = self._turn = 0
        self._guess: _Guess | None = None

    def draft(self, seqs: Sequence[Request], arm: Arm) -> list[DraftTree]:
        return [self._index.propose(self._open(seq), arm.depth, arm.num_verify) for seq in seqs]

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

    def try_on_paper(self, seqs: Sequence[Request], acceptance: Acceptance) -> None:
        """One sequence at a time: guess, wait until its tokens are there, and tell how many were right."""
        guess = self._guess
        if guess is not None:
            is_whole = len(guess.seq.tokens) - guess.at >= ON_PAPER.depth
            if not is_whole and guess.seq in self._names:
                return
            if is_whole:
                self._tell(guess, acceptance)
        self._turn += 1
        seq = seqs[self._turn % len(seqs)]
        tree = self.draft([seq], ON_PAPER)[0]
        self._guess = _Guess(seq, len(seq.tokens), tree.tokens)

    def _tell(self, guess: _Guess, acceptance: Acceptance) -> None:
        num_right = 0
        for drafted, token in zip(guess.tokens, guess.seq.tokens[guess.at :], strict=False):
            if drafted != token:
                break
            num_right += 1
        acceptance.learn(ON_PAPER, 1, [int(num_right > depth) for depth in range(ON_PAPER.depth)])

    def finish(self, seq: Request) -> None:
        """``seq`` is answered; its siblings may draw on it."""
        name = self._open(seq)
        del self._names[seq], self._known[seq]
        self._index.close(name)

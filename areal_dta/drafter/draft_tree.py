"""Draft trees: which tokens one target forward verifies after the last token of a sequence. Pure numpy.

A tree hangs below the sequence's *pending* token (sampled, not yet in the KV cache). Node ``i`` follows its parent;
parents come before children, ``ROOT`` (-1) stands for the pending token. Arrays of a forward have the pending token
at index 0 and node ``i`` at index ``i + 1``.

Legend of shape suffixes: B sequences, F frontier nodes, K candidates per frontier node, C candidates of a tree, E nodes
expanded so far, R rows of a forward (nodes + 1).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["EMPTY", "ROOT", "DraftTree", "Frontier", "TreeBuilder", "best_nodes"]

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """``tokens[i]`` is drafted to follow ``tokens[parents[i]]``; parents before children, -1 is the pending token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents; a tree needs one per node")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come before children, {ROOT} is the root")

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> DraftTree:
        """One continuation without alternatives."""
        tokens = tuple(tokens)
        return cls(tokens, _chain_parents(len(tokens)))

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Tokens from the pending one to the node: 1 for a child of the root."""
        if self.is_chain:
            return tuple(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.parents == _chain_parents(len(self.parents))

    def below(self, node: int) -> Sequence[int]:
        """All nodes that descend from ``node``."""
        if self.is_chain:
            return range(node + 1, len(self.tokens))
        found = {node}
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] in found:
                found.add(other)
        return sorted(found - {node})

    @functools.cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        edges = zip(self.parents, self.tokens, strict=True)
        return {edge: node for node, edge in reversed(list(enumerate(edges)))}  # the first of equal siblings wins

    def child(self, node: int, token: int) -> int | None:
        """The node drafted to follow ``node`` (-1: the pending token) with ``token``, None if none was."""
        if self.is_chain:
            return node + 1 if node + 1 < len(self.tokens) and self.tokens[node + 1] == token else None
        return self._children.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from a child of the root down to ``node``; empty for the root."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def visible(self) -> np.ndarray:
        """Read-only bool (R, R): row i may see column j, which is itself, its ancestors and the pending token."""
        return _visible(self.parents)

    def trimmed(self, max_depth: int) -> DraftTree:
        """Without the nodes deeper than ``max_depth`` (a sequence about to end needs no more)."""
        if len(self.tokens) <= max_depth or max(self.depths) <= max_depth:
            return self
        return self._only([node for node, depth in enumerate(self.depths) if depth <= max_depth])

    def _only(self, nodes: Sequence[int]) -> DraftTree:
        new = {old: i for i, old in enumerate(nodes)} | {ROOT: ROOT}
        return DraftTree(tuple(self.tokens[i] for i in nodes), tuple(new[self.parents[i]] for i in nodes))


EMPTY = DraftTree((), ())


@functools.lru_cache(maxsize=256)
def _chain_parents(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(ROOT, num_nodes - 1))


@functools.lru_cache(maxsize=1024)  # chains and small trees repeat their shape; 1024 of 64 nodes are 4 MB
def _visible(parents: tuple[int, ...]) -> np.ndarray:
    mask_RR = np.eye(len(parents) + 1, dtype=bool)
    mask_RR[:, 0] = True
    for node, parent in enumerate(parents):
        mask_RR[node + 1] |= mask_RR[parent + 1]
    mask_RR.setflags(write=False)
    return mask_RR


def best_nodes(tokens_C: np.ndarray, parents_C: np.ndarray, path_log_probs_C: np.ndarray, num_tokens: int) -> DraftTree:
    """The ``num_tokens`` likeliest nodes of a tree by path log-prob, as a tree of its own.

    Nodes come parents first. A path log-prob never exceeds its parent's, so the best N contain their parents; equal
    values are taken in order, which is parents first as well. Nodes of probability 0 (-inf) or NaN are never taken.
    """
    values_C = np.where(np.isnan(path_log_probs_C), -np.inf, path_log_probs_C)
    order = np.argsort(-values_C, kind="stable")[:num_tokens]
    chosen = np.sort(order[values_C[order] > -np.inf])
    new_C = np.full(len(tokens_C) + 1, ROOT)  # one more so that parent -1 finds ROOT
    new_C[chosen] = np.arange(len(chosen))
    return DraftTree(tuple(tokens_C[chosen].tolist()), tuple(new_C[parents_C[chosen]].tolist()))


@dataclass(frozen=True)
class Frontier:
    """The nodes a drafter expands next: for every sequence F of them, likeliest first."""

    tokens_BF: np.ndarray
    rows_BF: np.ndarray  # row of the previous frontier each one follows (0 after the first level: the pending token)
    seen_BFE: np.ndarray  # which expanded nodes (level after level, this level last) each one sees, itself included


class TreeBuilder:
    """Grows the trees of a batch level by level (EAGLE-2, Li et al. 2024): only the best ``top_k`` nodes of a level by
    path probability are expanded, and the best nodes of all levels are verified.

    ``grow`` takes, for every frontier node, its K likeliest next tokens; the first frontier is the pending token.
    """

    def __init__(self, num_sequences: int, top_k: int) -> None:
        if num_sequences < 1 or top_k < 1:
            raise ValueError(f"num_sequences={num_sequences}, top_k={top_k}; both must be at least 1")
        self._top_k = top_k
        self._seq_B1 = np.arange(num_sequences)[:, None]
        self._paths_BF = np.zeros((num_sequences, 1))  # path log-probs of the frontier
        self._nodes_BF = np.full((num_sequences, 1), ROOT)
        self._seen_BFE = np.zeros((num_sequences, 1, 0), dtype=bool)
        self._num_nodes = 0
        self._tokens: list[np.ndarray] = []  # per level (B, F K)
        self._parents: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def grow(self, tokens_BFK: np.ndarray, log_probs_BFK: np.ndarray) -> Frontier:
        """Add one level; returns what to expand for the next one."""
        B, F, K = tokens_BFK.shape
        if self._paths_BF.shape != (B, F) or log_probs_BFK.shape != (B, F, K):
            raise ValueError(
                f"candidates {tokens_BFK.shape} with log-probs {log_probs_BFK.shape} for a frontier of "
                f"{self._paths_BF.shape}; give (sequences, frontier nodes, candidates) for both"
            )
        # Rounding may lift a log-prob above 0; a path must not become likelier than its start.
        step_BFK = np.minimum(np.nan_to_num(log_probs_BFK.astype(np.float64), nan=-np.inf, neginf=-np.inf), 0.0)
        values_BC = (self._paths_BF[:, :, None] + step_BFK).reshape(B, F * K)
        tokens_BC = tokens_BFK.reshape(B, F * K)
        self._tokens.append(tokens_BC)
        self._values.append(values_BC)
        self._parents.append(np.repeat(self._nodes_BF, K, axis=1))

        picked_BF = np.argsort(-values_BC, axis=1, kind="stable")[:, : self._top_k]
        rows_BF = picked_BF // K
        self._paths_BF = values_BC[self._seq_B1, picked_BF]
        self._nodes_BF = self._num_nodes + picked_BF
        self._num_nodes += F * K
        own_BFF = np.broadcast_to(np.eye(picked_BF.shape[1], dtype=bool), (B, *[picked_BF.shape[1]] * 2))
        self._seen_BFE = np.concatenate((self._seen_BFE[self._seq_B1, rows_BF], own_BFF), axis=2)
        return Frontier(tokens_BC[self._seq_B1, picked_BF], rows_BF, self._seen_BFE)

    def best_nodes(self, num_verify: int) -> list[DraftTree]:
        """For every sequence the tree of its ``num_verify`` likeliest nodes, parents first."""
        if not self._tokens:
            return [EMPTY] * len(self._seq_B1)
        tokens_BC, parents_BC, values_BC = (
            np.concatenate(part, axis=1) for part in (self._tokens, self._parents, self._values)
        )
        return [
            best_nodes(tokens_C, parents_C, values_C, num_verify)
            for tokens_C, parents_C, values_C in zip(tokens_BC, parents_BC, values_BC, strict=True)
        ]

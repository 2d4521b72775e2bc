"""Which KV pages hold which tokens: a pool of page numbers and a radix tree over page-sized token blocks.

Pure bookkeeping; the tensors live in `paged_attention`. A page in the tree is immutable and may be read by any number
of sequences; a page outside it belongs to one sequence. The tree holds one weight version only: an update resets it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["CacheFull", "KVCache", "Node"]

RUN_PAGES = 32  # prompts of more pages are worth sorting the free ones for
NULL_PAGE = 0  # never allocated: pads page tables, always zero


class CacheFull(RuntimeError):
    """Not enough free or evictable pages; the scheduler waits or retracts a sequence."""


@dataclass(eq=False)
class Node:
    """One full page of tokens below its parent's."""

    parent: Node | None
    key: bytes
    page: int
    children: dict[bytes, Node] = field(default_factory=dict)
    num_users: int = 0  # running sequences whose prefix goes through this node
    last_used: int = 0
    dead: bool = False


class KVCache:
    """Page allocator with a prefix tree; least recently used leaves are evicted when pages run out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(
                f"{num_pages} KV pages of {page_size} tokens; at least 2 are needed (raise max_total_tokens)"
            )
        self.page_size = page_size
        self.num_pages = num_pages - 1  # usable: the null page is not
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._clock = itertools.count(1)
        self._tie = itertools.count()
        self._root = Node(None, b"", NULL_PAGE)
        self._leaves: list[tuple[int, int, Node]] = []  # eviction candidates, checked when popped
        self._num_nodes = self._num_used_nodes = 0

    def reset_tree(self) -> None:
        """Forget every cached prefix. No sequence may hold pages of the tree."""
        if self._num_used_nodes:
            raise RuntimeError(f"{self._num_used_nodes} cached pages are in use; retract the sequences first")
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            node.dead = True
            self._free.append(node.page)
            stack.extend(node.children.values())
        self._root.children.clear()
        self._leaves.clear()
        self._num_nodes = 0

    def forget(self) -> None:
        """Like `reset_tree`, also under running sequences: pages in use are freed when their last user unlocks them."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()
            node.dead = True
            if node.num_users == 0:
                self._free.append(node.page)
        self._root.children.clear()
        self._leaves.clear()
        self._num_nodes = self._num_used_nodes = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out, evicting if need be."""
        return len(self._free) + self._num_nodes - self._num_used_nodes

    @property
    def num_cached(self) -> int:
        """Pages held by the tree."""
        return self._num_nodes

    def block_key(self, tokens: Sequence[int], block: int) -> bytes:
        """Identity of the ``block``-th page of ``tokens``."""
        return np.asarray(tokens[block * self.page_size : (block + 1) * self.page_size], np.int32).tobytes()

    def match(self, tokens: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest cached prefix of ``tokens`` in whole pages, at most ``max_tokens`` tokens."""
        path: list[Node] = []
        node = self._root
        for block in range(min(len(tokens), max_tokens) // self.page_size):
            child = node.children.get(self.block_key(tokens, block))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, path: Sequence[Node]) -> None:
        """Protect a matched path from eviction until `unlock`."""
        for node in path:
            node.num_users += 1
            self._num_used_nodes += node.num_users == 1

    def unlock(self, path: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_used = now
            node.num_users -= 1
            if not node.dead:
                self._num_used_nodes -= node.num_users == 0
            elif node.num_users == 0:
                self._free.append(node.page)
        if path:
            self._offer(path[-1])

    def allocate(self, count: int) -> list[int]:
        """``count`` pages, evicting cached prefixes as needed; raises CacheFull and changes nothing if impossible."""
        if count > self.num_available:
            raise CacheFull(f"{count} KV pages needed, {self.num_available} of {self.num_pages} available")
        while len(self._free) < count:
            self._evict_one()
        if count > RUN_PAGES:
            self._free.sort(reverse=True)  # long prompts in consecutive pages are read in place
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def child(self, path: Sequence[Node], key: bytes) -> Node | None:
        """The node below ``path`` for the next block, None if it is not cached."""
        return (path[-1] if path else self._root).children.get(key)

    def adopt(self, parent: Node | None, key: bytes, page: int, locked: bool) -> Node:
        """Put a sequence's own page into the tree (``parent`` None: at the root); the tree owns it from now on."""
        parent = parent or self._root
        node = Node(parent, key, page, last_used=next(self._clock))
        parent.children[key] = node
        self._num_nodes += 1
        if locked:
            self.lock([node])
        else:
            self._offer(node)
        return node

    def store(self, tokens: Sequence[int], path: list[Node], own_pages: Sequence[int], num_computed: int) -> None:
        """End of a sequence's use: keep its full computed pages for later prefix hits, free the rest, unlock its path.

        ``path`` covers the first pages of ``tokens``, ``own_pages`` the following; ``num_computed`` tokens have KV.
        """
        node: Node | None = path[-1] if path else None
        num_full = num_computed // self.page_size
        for index, page in enumerate(own_pages, start=len(path)):
            if index >= num_full:
                self.give_back([page])
                continue
            key = self.block_key(tokens, index)
            existing = (node or self._root).children.get(key)
            if existing is None:
                node = self.adopt(node, key, page, locked=False)
            else:
                self.give_back([page])
                existing.last_used = next(self._clock)
                node = existing
                self._offer(existing)
        self.unlock(path)

    def _offer(self, node: Node) -> None:
        if not node.children and node.num_users == 0 and not node.dead:
            heapq.heappush(self._leaves, (node.last_used, next(self._tie), node))

    def _evict_one(self) -> None:
        while True:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.dead or node.children or node.num_users or node.last_used != last_used:
                continue
            node.dead = True
            self._num_nodes -= 1
            self._free.append(node.page)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            if parent is not self._root:
                self._offer(parent)
            return

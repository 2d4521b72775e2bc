"""From a trie to the program of its walk: the plan kinds.

``auto``: a subtree of at most ``cap`` tokens is *light*. Light subtrees are visited in bundles; what is heavier grows a
*trunk*, its heavy path up to the next branching into several heavy subtrees, pushed in chunks. The light subtrees along
a trunk are bundled whatever depth they leave it at. The last chunk of a trunk is visited together with all that hangs
on it, as far as it fits one block.

Which pushed graphs are kept: a block is kept if it and the hungriest way below it fit the budget. Blocks near the root
are given up first: each costs one recomputation of itself wherever it lies, and one near the root relieves most paths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from areal_dta.tree.forest import ChainBuilder, Forest, live_forest
from areal_dta.tree.memory import MemoryModel, default_budget
from areal_dta.tree.plan import ON_PATH, Block, Op, OpKind, PlanSettings, WalkPlan
from areal_dta.tree.planner_classic import classic_plan
from areal_dta.tree.trie import Trie

__all__ = ["BUDGET_SHARE", "plan_walk"]

_MIN_BLOCK_TOKENS = 64
BUDGET_SHARE = 0.95  # of the budget is planned for: predictions are good to a few percent


def plan_walk(
    trie: Trie, settings: PlanSettings, memory: MemoryModel | None = None, need_U: np.ndarray | None = None
) -> WalkPlan:
    """The program for a trie.

    ``need_U`` (bool [U]) marks tokens whose hidden state is wanted; subtrees without one are left out. Without
    ``memory`` no budget applies and every graph is kept. Raises ValueError if ``activation_budget`` is too small for
    any block, or for a kind that has no choice.
    """
    forest = live_forest(trie, need_U, settings.order)
    if settings.kind == "auto":
        return _AutoPlanner(forest, _Budget.of(forest, settings, memory)).run()
    if settings.kind == "classic":
        plan = classic_plan(forest, settings.max_block_tokens, settings.cut_tail)
    elif settings.kind == "sparse":
        plan = _single_visits([forest.roots] if forest.roots else [], forest)
    else:
        bins = _bins([(root, forest.tokens[root]) for root in forest.roots], settings.max_block_tokens)
        plan = _single_visits(bins, forest)
    if memory is not None and settings.activation_budget and memory.peak(plan) > settings.activation_budget:
        raise ValueError(
            f"dta.plan={settings.kind} needs about {memory.peak(plan):.0f} bytes for these rows, which exceeds "
            f"dta.activation_budget={settings.activation_budget}; raise it or set dta.plan=auto, which keeps to it"
        )
    return plan


def _single_visits(bins: list[list[int]], forest: Forest) -> WalkPlan:
    blocks = []
    for roots in bins:
        builder = ChainBuilder(forest)
        for root in roots:
            builder.add_subtree(root, ON_PATH, forest.depth[root])
        blocks.append(builder.build())
    ops = tuple(Op(OpKind.VISIT, b) for b in range(len(blocks)))
    return WalkPlan(tuple(blocks), ops, (False,) * len(blocks))


def _bins(units: list[tuple[int, int]], cap: int) -> list[list[int]]:
    """Cut (item, tokens) in order into the fewest runs of at most ``cap`` tokens, the largest as small as possible.

    An item above ``cap`` is alone.
    """
    if not units:
        return []
    sizes = [tokens for _, tokens in units]
    low, high = max(sizes), max(cap, max(sizes))
    fewest = len(_runs(sizes, high, cap))
    while low < high:
        middle = (low + high) // 2
        if len(_runs(sizes, middle, cap)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return [[units[i][0] for i in range(a, b)] for a, b in _runs(sizes, high, cap)]


def _runs(sizes: list[int], limit: int, cap: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > min(limit, cap):
            runs.append((first, i))
            first, total = i, 0
        total += size
    runs.append((first, len(sizes)))
    return runs


@dataclass(frozen=True)
class _Budget:
    """Bytes for graphs and the block at work; ``cap``: largest block in tokens."""

    cap: int
    graph_bytes: float
    memory: MemoryModel | None

    @classmethod
    def of(cls, forest: Forest, settings: PlanSettings, memory: MemoryModel | None) -> _Budget:
        if memory is None or not forest.num_segments:
            return cls(settings.max_block_tokens, math.inf, None)
        longest = max(depth + forest.length(v) for v, depth in enumerate(forest.depth))
        budget = settings.activation_budget or default_budget(memory, longest, settings.max_block_tokens)
        free = BUDGET_SHARE * budget - memory.bytes_fixed - memory.row_bytes() * longest
        affordable = int(free / memory.bytes_per_working_token)
        cap = min(settings.max_block_tokens, affordable)
        smallest = min(_MIN_BLOCK_TOKENS, math.ceil(settings.max_block_tokens / 4))
        if cap < smallest:
            least = memory.bytes_fixed + memory.row_bytes() * longest + memory.bytes_per_working_token * smallest
            raise ValueError(
                f"dta.activation_budget={budget} bytes is too small for a longest row of {longest} tokens; at least "
                f"{math.ceil(least / BUDGET_SHARE)} are needed (stack rows, a chunk of logits and one small block)"
            )
        return cls(cap, free, memory)

    def kept(self, num_tokens: int) -> float:
        return self.memory.bytes_per_kept_token * num_tokens if self.memory else 0.0

    def working(self, num_tokens: int) -> float:
        return self.memory.bytes_per_working_token * num_tokens if self.memory else 0.0


@dataclass(frozen=True)
class _Unit:
    """A light subtree that leaves the path after ``cut`` tokens."""

    segment: int
    cut: int
    tokens: int


@dataclass
class _Trunk:
    """Path segments at positions ``depth .. end - 1``, from a heavy segment to the next branching into several heavy
    ones (``ends``), or to a leaf.
    """

    depth: int
    end: int
    segments: list[int]
    units: list[_Unit]
    ends: list[int]


@dataclass(frozen=True)
class _Grow:
    """To do: push the trunk that starts at a heavy segment, and what follows from it."""

    segment: int


@dataclass(frozen=True)
class _Bundle:
    """To do: visit light subtrees and pop the pushed blocks (``chunks``) below them."""

    units: list[_Unit]
    chunks: list[int]


class _AutoPlanner:
    """Emits blocks and operations with an explicit stack of actions, since trees may be thousands of levels deep."""

    def __init__(self, forest: Forest, budget: _Budget) -> None:
        self.forest, self.budget, self.cap = forest, budget, budget.cap
        self.blocks: list[Block] = []
        self.ops: list[Op] = []
        self.above: list[int] = []  # per block the pushed block it lies on, -1 at the bottom
        self.pushed: list[int] = []

    def run(self) -> WalkPlan:
        forest = self.forest
        heavy = [root for root in forest.roots if forest.tokens[root] > self.cap]
        light = [_Unit(root, 0, forest.tokens[root]) for root in forest.roots if forest.tokens[root] <= self.cap]
        actions: list[_Grow | _Bundle] = [_Bundle(light, []), *(_Grow(root) for root in reversed(heavy))]
        while actions:
            action = actions.pop()
            if isinstance(action, _Grow):
                actions += reversed(self._grow(action.segment))
            else:
                self._bundles(action.units, action.chunks)
        return WalkPlan(tuple(self.blocks), tuple(self.ops), self._keep())

    # ---- structure ----

    def _trunk(self, segment: int) -> _Trunk:
        forest, trunk = self.forest, _Trunk(self.forest.depth[segment], 0, [], [], [])
        cut = trunk.depth
        while True:
            trunk.segments.append(segment)
            cut += forest.length(segment)
            heavy = [child for child in forest.children[segment] if forest.tokens[child] > self.cap]
            light = [child for child in forest.children[segment] if forest.tokens[child] <= self.cap]
            trunk.units += [_Unit(child, cut, forest.tokens[child]) for child in light]
            if len(heavy) != 1:
                trunk.end, trunk.ends = cut, heavy
                return trunk
            segment = heavy[0]

    def _grow(self, segment: int) -> list[_Grow | _Bundle]:
        trunk = self._trunk(segment)
        tokens = self.forest.path_tokens(trunk.segments, trunk.depth, trunk.end)
        tail = 0 if trunk.ends else self._tail_length(len(tokens), trunk)
        split = trunk.depth + len(tokens) - tail
        chunks = self._push_chunks(tokens[: len(tokens) - tail], trunk.depth)
        if tail:
            self._visit_tail(trunk, tokens[len(tokens) - tail :], split)
        units = [unit for unit in trunk.units if not tail or unit.cut <= split]
        return [*(_Grow(end) for end in trunk.ends), _Bundle(units, chunks)]

    def _tail_length(self, length: int, trunk: _Trunk) -> int:
        """Tokens at a trunk's end to visit with all that hangs on them: at most ``cap`` together, balanced against the
        chunks that are pushed.
        """
        end = trunk.depth + length
        cuts = sorted(((unit.cut, unit.tokens) for unit in trunk.units), reverse=True)
        longest, hanging = self._fit(end, length, cuts, self.cap)
        num_chunks = math.ceil((length - longest) / self.cap)
        if not num_chunks or not longest:
            return longest
        share = math.ceil((length + hanging) / (num_chunks + 1))
        balanced, _ = self._fit(end, length, cuts, max(share, hanging + 1))
        fits = balanced and math.ceil((length - balanced) / self.cap) == num_chunks
        return balanced if fits else longest

    @staticmethod
    def _fit(end: int, length: int, cuts: list[tuple[int, int]], cap: int) -> tuple[int, int]:
        """(tail, tokens hanging in it): the longest tail within ``cap`` with what leaves the path after its start."""
        hanging = 0
        for cut, tokens in cuts:
            # including this unit means that the tail starts before its cut
            if hanging + (end - cut) + 1 + tokens > cap:
                tail = min(end - cut, cap - hanging)
                return (max(tail, 0), hanging)
            hanging += tokens
        return min(length, cap - hanging), hanging

    def _push_chunks(self, tokens: np.ndarray, depth: int) -> list[int]:
        """Push path tokens in chunks of at most ``cap``, about equal; returns their blocks."""
        chunks = []
        for part in np.array_split(tokens, math.ceil(len(tokens) / self.cap)) if len(tokens) else []:
            chunks.append(self._emit(OpKind.PUSH, Block.chain(part, depth)))
            self.pushed.append(chunks[-1])
            depth += len(part)
        return chunks

    def _visit_tail(self, trunk: _Trunk, tokens: np.ndarray, split: int) -> None:
        builder = ChainBuilder(self.forest)
        chain = builder.open_chain(ON_PATH, split, split)
        builder.add_tokens(tokens)
        for unit in sorted((unit for unit in trunk.units if unit.cut > split), key=lambda unit: unit.cut):
            builder.add_subtree(unit.segment, chain, unit.cut - split)
        self._emit(OpKind.VISIT, builder.build())

    def _bundles(self, units: list[_Unit], chunks: list[int]) -> None:
        """Visit light subtrees, those that leave the path last first, and pop each chunk once nothing needs it."""
        units = sorted(units, key=lambda unit: -unit.cut)  # stable: siblings stay together
        left = list(chunks)
        for bundle in _bins([(i, unit.tokens) for i, unit in enumerate(units)], self._bundle_cap(chunks)):
            needed = units[bundle[0]].cut
            while left and self.blocks[left[-1]].depth >= needed:
                self._pop(left.pop())
            builder = ChainBuilder(self.forest)
            for i in bundle:
                builder.add_subtree(units[i].segment, ON_PATH, units[i].cut)
            self._emit(OpKind.VISIT, builder.build())
        while left:
            self._pop(left.pop())

    def _bundle_cap(self, chunks: list[int]) -> int:
        """Bundles shrink, by half at most, if that lets the trunk below them keep its graph."""
        if self.budget.memory is None or not chunks:
            return self.cap
        path = sum(self.blocks[b].num_tokens for b in chunks)
        room = int((self.budget.graph_bytes - self.budget.kept(path)) / self.budget.memory.bytes_per_working_token)
        return min(self.cap, room) if room >= self.cap // 2 else self.cap

    def _emit(self, kind: OpKind, block: Block) -> int:
        self.ops.append(Op(kind, len(self.blocks)))
        self.blocks.append(block)
        self.above.append(self.pushed[-1] if self.pushed else -1)
        return len(self.blocks) - 1

    def _pop(self, block: int) -> None:
        assert self.pushed.pop() == block, "pushed blocks are popped last in, first out"
        self.ops.append(Op(OpKind.POP, block))

    # ---- what to keep ----

    def _keep(self) -> tuple[bool, ...]:
        is_push = [False] * len(self.blocks)
        for op in self.ops:
            is_push[op.block] |= op.kind is OpKind.PUSH
        below = [0.0] * len(self.blocks)  # hungriest way through blocks on top of this one
        height = [0.0] * len(self.blocks)
        for b in range(len(self.blocks) - 1, -1, -1):
            tokens = self.blocks[b].num_tokens
            height[b] = self.budget.kept(tokens) + below[b] if is_push[b] else self.budget.working(tokens)
            if self.above[b] >= 0:
                below[self.above[b]] = max(below[self.above[b]], height[b])
        keep = [False] * len(self.blocks)
        for b in range(len(self.blocks)):
            below_kept = self.above[b] >= 0 and keep[self.above[b]]
            keep[b] = is_push[b] and (below_kept or height[b] <= self.budget.graph_bytes)
        return tuple(keep)

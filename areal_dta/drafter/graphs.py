"""Which CUDA graphs to capture, and what they take: a pure plan, free of torch.

A target graph depends on the batch and the rows verified per sequence only, a drafter's on the batch and the nodes
expanded per level only, so arms share captures. Target and drafter are captured apart: a step replays one target graph
and one drafter graph per level, whatever the depth. Batches are rounded up to a bucket. What does not fit into the
byte budget is run eagerly, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_dta.drafter.arms import Arm

__all__ = ["GraphKey", "GraphPlan", "GraphSizes", "PlannedGraph", "batch_buckets", "plan_graphs"]

KINDS = ("target", "draft")


@dataclass(frozen=True, order=True)
class GraphKey:
    """``num_rows`` per sequence: verified tokens and the pending one (target), expanded nodes (draft)."""

    kind: str
    batch: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}x{self.num_rows}"


@dataclass(frozen=True)
class GraphSizes:
    """Bytes of a capture. Activations lie in one pool that all graphs share, since no two replay at once: it is as
    large as the largest graph needs. The rest is each graph's own."""

    target_layers: int
    draft_layers: int
    row_activation_bytes: int  # intermediate tensors of one row that live at once, logits not included
    row_static_bytes: int  # inputs of one row, and its outputs but the logits
    logit_bytes: int  # of one row over the target's vocabulary
    draft_logit_bytes: int  # of one row over the drafter's
    layer_node_bytes: int = 256 * 1024  # kernels of one layer as graph nodes

    @classmethod
    def of_model(
        cls,
        num_layers: int,
        hidden: int,
        ffn: int,
        vocabulary: int,
        draft_vocabulary: int,
        element_bytes: int = 2,
        draft_layers: int = 1,
    ) -> GraphSizes:
        """Upper estimates from a model's shape; logits are kept in fp32."""
        return cls(
            target_layers=num_layers,
            draft_layers=draft_layers,
            row_activation_bytes=element_bytes * (8 * hidden + 3 * ffn),
            row_static_bytes=element_bytes * 2 * hidden + 64,
            logit_bytes=4 * vocabulary,
            draft_logit_bytes=4 * draft_vocabulary,
        )

    def own_bytes(self, key: GraphKey) -> int:
        layers = self.target_layers if key.kind == "target" else self.draft_layers
        logits = self.logit_bytes if key.kind == "target" else self.draft_logit_bytes
        return layers * self.layer_node_bytes + key.batch * key.num_rows * (self.row_static_bytes + logits)

    def pool_bytes(self, key: GraphKey) -> int:
        return key.batch * key.num_rows * self.row_activation_bytes


@dataclass(frozen=True)
class PlannedGraph:
    """One capture and the arms that replay it."""

    key: GraphKey
    own_bytes: int
    arms: tuple[str, ...]


@dataclass(frozen=True)
class GraphPlan:
    """Captures in the order in which they are worth their memory; ``eager`` is what was left out."""

    graphs: tuple[PlannedGraph, ...]
    eager: tuple[PlannedGraph, ...]
    pool_bytes: int
    budget_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.pool_bytes + sum(g.own_bytes for g in self.graphs)

    def find(self, kind: str, batch: int, num_rows: int) -> GraphKey | None:
        """The captured graph with the fewest rows that holds such a step; None: run it eagerly."""
        fitting = [
            g.key for g in self.graphs if g.key.kind == kind and g.key.batch >= batch and g.key.num_rows >= num_rows
        ]
        return min(fitting, key=lambda k: (k.batch * k.num_rows, k), default=None)

    def describe(self) -> list[str]:
        """What is captured, what it takes, and what runs eagerly, in lines for the log."""
        num_wanted = sum(len(g.arms) for g in (*self.graphs, *self.eager))
        num_distinct = len(self.graphs) + len(self.eager)
        lines = [
            f"{len(self.graphs)} CUDA graphs, {self.num_bytes / 2**20:.0f} of {self.budget_bytes / 2**20:.0f} MiB "
            f"({self.pool_bytes / 2**20:.0f} shared); arms share {num_distinct} captures for {num_wanted} uses"
        ]
        if self.eager:
            names = ", ".join(str(g.key) for g in self.eager)
            lines.append(f"run eagerly for want of memory: {names}; raise the graph budget to capture them")
        return lines


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two up to ``max_batch``, and ``max_batch`` itself."""
    if max_batch < 1:
        raise ValueError(f"max_batch={max_batch}; it must be at least 1")
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)


def plan_graphs(
    arms: Iterable[Arm],
    max_batch: int,
    sizes: GraphSizes,
    budget_bytes: int,
    max_spec_batch: int | None = None,
) -> GraphPlan:
    """Captures for every arm at every batch bucket, as far as ``budget_bytes`` goes.

    Plain decoding comes first, then small batches: there a step is short and launching its kernels weighs most. Arms
    other than *off* are planned for batches up to ``max_spec_batch``.
    """
    users: dict[GraphKey, list[str]] = {}
    arms = tuple(arms)
    for batch in batch_buckets(max_batch):
        for arm in arms:
            if arm.num_verify and max_spec_batch is not None and batch > max_spec_batch:
                continue
            for key in _keys(arm, batch):
                users.setdefault(key, []).append(arm.name)
    graphs: list[PlannedGraph] = []
    eager: list[PlannedGraph] = []
    pool_bytes = own_bytes = 0
    for key in sorted(users, key=_urgency):
        wanted = PlannedGraph(key, sizes.own_bytes(key), tuple(users[key]))
        larger_pool = max(pool_bytes, sizes.pool_bytes(key))
        if own_bytes + wanted.own_bytes + larger_pool <= budget_bytes:
            graphs.append(wanted)
            own_bytes, pool_bytes = own_bytes + wanted.own_bytes, larger_pool
        else:
            eager.append(wanted)
    return GraphPlan(tuple(graphs), tuple(eager), pool_bytes, budget_bytes)


def _keys(arm: Arm, batch: int) -> list[GraphKey]:
    keys = [GraphKey("target", batch, arm.num_verify + 1)]
    if arm.drafter == "eagle":
        # The first level expands the pending token alone, the others top_k nodes.
        keys += [GraphKey("draft", batch, rows) for rows in sorted({1, arm.top_k} if arm.depth > 1 else {1})]
    return keys


def _urgency(key: GraphKey) -> tuple[bool, int, int, int]:
    plain = key.kind == "target" and key.num_rows == 1
    return not plain, key.batch, key.num_rows, KINDS.index(key.kind)

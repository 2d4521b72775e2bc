"""Seconds of a plan: a linear model on the shapes of its blocks, fitted to measured ones.

A pass over a block costs so much per block, per token, per attention pair of each kind of tile and per tile; the
vocabulary head so much per projected position. Coefficients are seconds, never negative, so that no plan is ever
predicted cheaper for doing more.

Legend: F features, B blocks of a plan, N measured samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_dta.tree.cost import CostModel
from areal_dta.tree.plan import Block, OpKind, WalkPlan
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.tiles import TileKind, block_tiles, tile_pairs

__all__ = ["FEATURES", "Fit", "Sample", "TimeModel", "block_features", "fit_times", "nnls"]

FEATURES = ("blocks", "tokens", "full_pairs", "causal_pairs", "masked_pairs", "tiles")
# Of an unmeasured device. Only ratios between plans mean something then.
_NOMINAL_FLOPS_PER_S = 5e10
_NOMINAL_LAYER_S = 2e-4
_NOMINAL_TILE_S = 5e-5
_CAUSAL_KEYS = 512  # computed at a time by flash kernels on the CPU (128 on GPUs, where it matters less)
_ROBUST_ROUNDS = 6
_USUAL_ERROR = 0.02  # of a clean measurement
_TOLERANCE = 1e-11  # of a gradient of columns of length 1, relative to the right-hand side
_MAX_ROUNDS = 10  # columns entering, per column; a handful suffices


def block_features(block: Block) -> np.ndarray:
    """``[F]`` float64. Pairs are those that kernels compute: all of a rectangle or masked square; of a triangle also
    what is hidden in the blocks of keys along its diagonal.
    """
    tiles = block_tiles(block)
    pairs = dict.fromkeys(TileKind, 0)
    for tile in tiles:
        rows = tile.q_end - tile.q_start
        causal = tile.kind is TileKind.CAUSAL
        pairs[tile.kind] += rows * (rows + min(rows, _CAUSAL_KEYS)) // 2 if causal else tile_pairs(tile)
    by_kind = (pairs[kind] for kind in (TileKind.FULL, TileKind.CAUSAL, TileKind.MASKED))
    return np.asarray([1, block.num_tokens, *by_kind, len(tiles)], np.float64)


@dataclass(frozen=True)
class TimeModel:
    """Seconds per feature of a forward and of a backward pass of the layers. The head costs seconds per block that has
    projected positions and per such position (``head_forward_H`` for log-probs, ``head_backward_H`` with gradient).

    ``keys_share`` is the part of a pass that remains where nobody reads the block's output: the last layer then stops
    after its keys and values.
    """

    forward_F: tuple[float, ...]
    backward_F: tuple[float, ...]
    head_forward_H: tuple[float, float]
    head_backward_H: tuple[float, float]
    keys_share: float = 1.0
    measured: bool = False

    def __post_init__(self) -> None:
        count = len(FEATURES)
        for name, size in (("forward_F", count), ("backward_F", count), ("head_forward_H", 2), ("head_backward_H", 2)):
            coefficients = tuple(float(c) for c in getattr(self, name))
            object.__setattr__(self, name, coefficients)
            if len(coefficients) != size:
                raise ValueError(f"{name} has {len(coefficients)} coefficients, there are {size} features")
        for c in (*self.forward_F, *self.backward_F, *self.head_forward_H, *self.head_backward_H, self.keys_share):
            if not (np.isfinite(c) and c >= 0):
                raise ValueError(f"a coefficient of the time model is {c}; it must be finite and not negative")

    @classmethod
    def of_shape(cls, sizes: ModelSizes, tp: int = 1, flops_per_s: float = _NOMINAL_FLOPS_PER_S) -> TimeModel:
        """Nominal coefficients from FLOP counts (2 per weight and token, 4 per head dimension, head and pair; a
        backward is twice a forward) and fixed costs per layer and tile.
        """
        layers, per_rank_s = sizes.num_layers, 1.0 / (flops_per_s * tp)
        pair_s = 4.0 * layers * sizes.num_heads * sizes.head_dim * per_rank_s
        forward = np.asarray([
            _NOMINAL_LAYER_S * layers, 2.0 * layers * sizes.layer_weights * per_rank_s,
            pair_s, pair_s, pair_s, _NOMINAL_TILE_S * layers,
        ])  # fmt: skip
        head_s = 2.0 * sizes.hidden_size * sizes.vocab_size * per_rank_s
        queries_and_keys = sizes.hidden_size * sizes.head_dim * (sizes.num_heads + 2 * sizes.num_kv_heads)
        keys_share = 1 - (1 - queries_and_keys / sizes.layer_weights) / layers
        return cls(tuple(forward), tuple(2 * forward), (0.0, head_s), (0.0, 3 * head_s), keys_share)

    def cost_model(self) -> CostModel:
        """Seconds of forward and backward per tree token (its projection included) and per attention pair, for
        balancing ranks: what blocks and tiles cost depends on the plan and is left out.
        """
        tokens, pairs = FEATURES.index("tokens"), FEATURES.index("full_pairs")
        per_token = self.forward_F[tokens] + self.backward_F[tokens] + self.head_backward_H[1]
        return CostModel(per_token, self.forward_F[pairs] + self.backward_F[pairs])

    def seconds(self, plan: WalkPlan, need_U: np.ndarray | None = None, *, backward: bool = True) -> float:
        """Predicted seconds of a walk: forward and backward with recomputations, or forward only.

        ``need_U`` (bool per trie token) marks the positions that the head projects; None: all.
        """
        num_blocks = len(plan.blocks)
        features_BF = np.asarray([block_features(block) for block in plan.blocks]).reshape(num_blocks, len(FEATURES))
        heads = [b.num_tokens if need_U is None else int(need_U[b.tokens_S].sum()) for b in plan.blocks]
        forwards_B, backwards_B, projected_H = np.zeros(num_blocks), np.zeros(num_blocks), np.zeros(2)
        for op in plan.ops:
            b, is_push, is_pop = op.block, op.kind is OpKind.PUSH, op.kind is OpKind.POP
            share = self.keys_share if heads[b] == 0 else 1.0  # of a pass, where no output is read
            if backward and not is_push:
                backwards_B[b] += share
            if is_push and backward and not plan.keep_B[b]:
                forwards_B[b] += self.keys_share
            elif not is_pop or (backward and not plan.keep_B[b]):
                forwards_B[b] += share
            if not (is_push if backward else is_pop):
                projected_H += (heads[b] > 0, heads[b])
        forward_s = float(forwards_B @ features_BF @ np.asarray(self.forward_F))
        backward_s = float(backwards_B @ features_BF @ np.asarray(self.backward_F))
        head_H = self.head_backward_H if backward else self.head_forward_H
        return forward_s + backward_s + float(projected_H @ np.asarray(head_H))


# ---- fitting ----


@dataclass(frozen=True)
class Sample:
    """Seconds of one measured block; ``head_tokens`` of its positions were projected."""

    features_F: np.ndarray
    head_tokens: int
    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float
    keys_s: float  # a forward that stops at the last layer's keys and values


@dataclass(frozen=True)
class Fit:
    """A fitted model and what it gets wrong: relative errors of its own samples' passes, root mean square and largest
    (layers and head, forward and backward together).
    """

    model: TimeModel
    rms_error: float
    max_error: float


def fit_times(samples: Sequence[Sample]) -> Fit:
    """Non-negative least squares of relative errors; a sample that stands out (another process had the core) counts
    less.

    Raises ValueError without samples or for times that are not positive.
    """
    if not samples:
        raise ValueError("no block was measured; give at least one sample")
    features_NF = np.stack([s.features_F for s in samples])
    heads_NH = np.asarray([[1.0, s.head_tokens] for s in samples])
    errors: list[np.ndarray] = []

    def fit(design: np.ndarray, name: str) -> tuple[float, ...]:
        times_N = np.asarray([getattr(s, name) for s in samples], np.float64)
        if not (np.isfinite(times_N).all() and (times_N > 0).all()):
            raise ValueError(f"{name} of a measured block is {times_N.min()}; times must be positive")
        relative, weight_N = design / times_N[:, None], np.ones(len(times_N))
        for _ in range(_ROBUST_ROUNDS):
            coefficients = nnls(relative * weight_N[:, None], weight_N)
            error_N = relative @ coefficients - 1
            usual = max(2 * float(np.median(np.abs(error_N))), _USUAL_ERROR)
            weight_N = 1 / np.sqrt(1 + (error_N / usual) ** 2)
        errors.append(error_N)
        return tuple(coefficients.tolist())

    shares_N = np.asarray([min(1.0, s.keys_s / s.forward_s) for s in samples if s.forward_s > 0])
    model = TimeModel(
        forward_F=fit(features_NF, "forward_s"),
        backward_F=fit(features_NF, "backward_s"),
        head_forward_H=fit(heads_NH, "head_forward_s"),  # type: ignore[arg-type]
        head_backward_H=fit(heads_NH, "head_backward_s"),  # type: ignore[arg-type]
        keys_share=float(np.median(shares_N)),
        measured=True,
    )
    all_errors = np.concatenate(errors)
    return Fit(model, float(np.sqrt(np.mean(all_errors**2))), float(np.abs(all_errors).max()))


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``argmin |a x - b|`` over ``x >= 0``: Lawson and Hanson's active set method (1974,
    Solving Least Squares Problems, chapter 23).

    The solution fulfils the Karush-Kuhn-Tucker conditions: the gradient is 0 where x is positive and not negative
    elsewhere. Columns may differ by many orders of magnitude; a column of zeros gets 0.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, passive, refused = (np.zeros(a.shape[1], kind) for kind in (float, bool, bool))

    def solve() -> np.ndarray:
        solution = np.zeros_like(x)
        solution[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
        return solution

    for _ in range(_MAX_ROUNDS * (a.shape[1] + 1)):
        gain = a.T @ (b - a @ x)
        gain[passive | refused] = 0.0
        if not (gain > _TOLERANCE * np.linalg.norm(b)).any():
            break
        entering = int(gain.argmax())
        passive[entering] = True
        target = solve()
        if target[entering] <= 0:  # rounding only: the column depends on those in use
            passive[entering], refused[entering] = False, True
            continue
        while (blocking := passive & (target <= 0)).any():
            steps = np.where(blocking, x / np.where(blocking, x - target, 1.0), np.inf)
            x = x + steps.min() * (target - x)
            passive[int(steps.argmin())] = False
            passive &= x > 0
            x[~passive] = 0.0
            target = solve()
        x, refused = target, np.zeros_like(refused)
    return x / scale

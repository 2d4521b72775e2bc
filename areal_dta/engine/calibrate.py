"""Measures what blocks of several shapes cost on this device with this model, in seconds and in bytes.

All ranks run the same blocks at the same time, as in training: tensor-parallel ranks need each other for a block, and
data-parallel ranks on one machine compete for it. Of every number the largest over all ranks counts (a pipeline is as
slow as its slowest stage), and all ranks fit the same numbers: different models would give different plans, and ranks
with different plans wait for each other for ever. Keys and values of the path are random numbers: nothing of it is
computed.

Legend: L layers, G key/value heads, S rows of a block, P rows of the path, H head dim, D hidden, N measured blocks.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_dta.engine.attention import BlockContext
from areal_dta.engine.block_heads import BlockGradient, BlockSink, Coefficients, LogprobGradient, LogprobSink
from areal_dta.engine.block_runner import BlockRunner
from areal_dta.engine.block_values import ValueGradient, ValueSink
from areal_dta.engine.groups import broadcast_text
from areal_dta.engine.kernels import AttentionKernel, kernel_for, wide_dtype
from areal_dta.engine.megatron import MegatronPolicy
from areal_dta.engine.memory_meter import MemoryMeter
from areal_dta.engine.rows import Rows
from areal_dta.engine.tree_batch import TreeBatch
from areal_dta.tree.calibration import Calibration, CalibrationError
from areal_dta.tree.memory import MemoryModel
from areal_dta.tree.plan import ON_PATH, Block, PlanSettings
from areal_dta.tree.timing import Sample, block_features, fit_times, nnls

__all__ = ["Shape", "calibrate", "calibrated", "fingerprint", "shapes_for"]

log = logging.getLogger(__name__)
_REPEATS = 3  # of a block; the fastest counts, after one that does not
_SMALLEST = 32
_PATH_ROWS = 4096
_LIMIT_S = 90.0
_MIN_SHAPES = 5  # measured whatever it takes: fewer would not tell the features apart


@dataclass(frozen=True)
class Shape:
    """A block of branches, each ``tokens`` long, that leave a path of ``path_rows`` rows after ``cut`` of them."""

    path_rows: int
    branches: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.branches)


def shapes_for(max_block_tokens: int, path_rows: int, vocab: int) -> list[Shape]:
    """Chains and bundles up to the size of a block, below nothing and below paths, the cheapest first."""
    largest, long = max(max_block_tokens, _SMALLEST), max(path_rows, _SMALLEST)
    sizes = sorted({min(64, largest), min(256, largest), max(_SMALLEST, largest // 2), largest})
    shapes = [Shape(0, ((0, size),)) for size in sizes]
    shapes += [Shape(rows, ((rows, size),)) for rows in (long // 4, long) for size in (sizes[0], sizes[-1])]
    for count, size, rows in ((8, largest, long // 2), (24, largest // 2, long // 2), (48, largest // 2, long // 8)):
        count = max(1, min(count, vocab // 2 - 1, size // 4))
        each = max(1, size // count)
        shapes.append(Shape(rows, ((rows, each),) * count))
        shapes.append(Shape(rows, tuple((rows * (i + 1) // count, each) for i in reversed(range(count)))))
    return sorted(set(shapes), key=lambda shape: shape.num_tokens * (1000 + shape.path_rows))


def fingerprint(policy: MegatronPolicy, settings: PlanSettings, kernel: AttentionKernel) -> dict[str, str]:
    """What the measurements hold for."""
    on_cuda, sizes = policy.device.type == "cuda", policy.sizes
    return {
        "device": torch.cuda.get_device_name(policy.device) if on_cuda else _cpu_name(),
        "threads": "" if on_cuda else str(torch.get_num_threads()),
        "model": " ".join(map(str, astuple(policy.shape))),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "kernel": type(kernel).__name__,
        "parallel": f"dp {sizes.dp} tp {sizes.tp} pp {sizes.pp} sequence_parallel {sizes.sequence_parallel}",
        "max_block_tokens": str(settings.max_block_tokens),
        "measured_block_tokens": str(_largest_block(policy, settings)),
    }


def _largest_block(policy: MegatronPolicy, settings: PlanSettings) -> int:
    """Tokens of the largest block to measure: the limit of a block, or what an ``activation_budget`` can hold."""
    if not settings.activation_budget:
        return settings.max_block_tokens
    affordable = int(settings.activation_budget / policy.memory_model().bytes_per_working_token)
    return min(settings.max_block_tokens, affordable)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(info) if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def calibrated(
    policy: MegatronPolicy, settings: PlanSettings, file: Path, kernel: AttentionKernel | None = None, *,
    path_rows: int = _PATH_ROWS, limit_s: float = _LIMIT_S,
) -> Calibration:  # fmt: skip
    """The calibration in ``file`` if it holds here, else what `calibrate` finds, written there; the same on all ranks.

    All ranks of the grid must call it, before the first gradient of a step.
    """
    kernel = kernel or kernel_for(policy.device, policy.dtype, policy.shape.head_dim)
    found = _usable(file, fingerprint(policy, settings, kernel)) if dist.get_rank() == 0 else None
    text = broadcast_text("" if found is None else found.to_json(), 0, policy.device)
    if not text:
        measured = calibrate(policy, settings, kernel, path_rows=path_rows, limit_s=limit_s)
        text = broadcast_text(measured.to_json(), 0, policy.device)  # their last digits may differ
        if dist.get_rank() == 0:
            measured.write(file)
    costs = Calibration.from_json(text)
    beyond = costs.extrapolation(settings.max_block_tokens)
    if beyond is not None and dist.get_rank() == 0:
        log.warning("%s; times and peaks of such blocks may be far off", beyond)
    return costs


def _usable(file: Path, now: dict[str, str]) -> Calibration | None:
    try:
        found = Calibration.read(file)
    except FileNotFoundError:
        log.info("no calibration in %s yet; measuring block shapes", file)
        return None
    except CalibrationError as error:
        log.warning("%s; measuring block shapes anew", error)
        return None
    why = found.mismatch(now)
    if why is not None:
        log.warning("the calibration in %s does not hold: %s; measuring block shapes anew", file, why)
        return None
    log.info("block costs from %s, measured on %s", file, found.fingerprint.get("device", "?"))
    return found


def calibrate(
    policy: MegatronPolicy, settings: PlanSettings, kernel: AttentionKernel | None = None, *,
    path_rows: int = _PATH_ROWS, limit_s: float = _LIMIT_S, clock: Callable[[], float] = time.perf_counter,
) -> Calibration:  # fmt: skip
    """Measure blocks up to ``settings.max_block_tokens`` (and what ``activation_budget`` can hold) below paths up to
    ``path_rows``, the cheapest shapes first.

    Shapes that would exceed ``limit_s`` are left out. Gradient buffers are cleared at the end. ``clock`` gives seconds;
    with `time.process_time` other processes on the same cores count less. Raises ValueError for a forward-only policy.
    """
    began = time.perf_counter()
    bench = _Bench(policy, kernel or kernel_for(policy.device, policy.dtype, policy.shape.head_dim), settings, clock)
    largest = _largest_block(policy, settings)
    shapes = shapes_for(largest, path_rows, policy.shape.vocab)
    bench.times(shapes[0])  # the first block of a process pays for much that later ones don't
    samples: list[Sample] = []
    left_out = measured_tokens = 0
    for number, shape in enumerate(shapes):
        elapsed_s, last_s = bench.largest(np.asarray([time.perf_counter() - began, bench.last_s]))
        if number >= _MIN_SHAPES and elapsed_s + 2 * last_s > limit_s:
            left_out = len(shapes) - number
            break
        samples.append(bench.times(shape))
        measured_tokens = max(measured_tokens, shape.num_tokens)
    fit = fit_times(samples)
    memory, memory_error = _fit_memory(bench, largest, path_rows)
    policy.zero_grad()
    errors = {
        "time_rms": fit.rms_error, "time_max": fit.max_error, "memory_max": memory_error, "shapes": float(len(samples)),
        "seconds": time.perf_counter() - began, "largest_block": float(measured_tokens),
    }  # fmt: skip
    log.info(
        "measured %d block shapes in %.1f s%s: times fit within %.0f%% (root mean square %.1f%%), memory within %.0f%%",
        len(samples), errors["seconds"], f" ({left_out} left out, over {limit_s:g} s)" if left_out else "",
        100 * fit.max_error, 100 * fit.rms_error, 100 * memory_error,
    )  # fmt: skip
    return Calibration(fingerprint(policy, settings, bench.kernel), fit.model, memory, errors)


@dataclass(frozen=True)
class _Case:
    """A block of one shape on a fresh path."""

    batch: TreeBatch
    block: Block
    trunk: Block | None  # the path as one pushed block


class _Bench:
    """Runs single blocks as a walk would."""

    def __init__(
        self, policy: MegatronPolicy, kernel: AttentionKernel, settings: PlanSettings, clock: Callable[[], float]
    ) -> None:
        policy.check_accumulating()
        self.policy, self.kernel, self.settings, self._clock = policy, kernel, settings, clock
        self.last_s = 0.0
        self._noise = torch.Generator(policy.device).manual_seed(0)  # the run's own generator stays where it is
        self._wide = wide_dtype(policy.dtype)

    def largest(self, values_N: np.ndarray) -> np.ndarray:
        """The largest over all ranks."""
        tensor = torch.from_numpy(values_N.astype(np.float64)).to(self.policy.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.cpu().numpy()

    # ---- a block ----

    def case(self, shape: Shape) -> _Case:
        """Random tokens; branches differ in their first token, so that each is one chain."""
        rng, half = np.random.default_rng(shape.num_tokens + shape.path_rows), self.policy.shape.vocab // 2
        trunk = rng.integers(0, half, shape.path_rows).tolist()
        rows = [
            trunk[:cut] + [half + i] + rng.integers(0, half, tokens - 1).tolist()
            for i, (cut, tokens) in enumerate(shape.branches)
        ]
        batch = TreeBatch.of(Rows.from_lists([*rows, trunk] if trunk else rows), replace(self.settings, kind="auto"))
        cut_C = np.asarray([cut for cut, _ in shape.branches])
        lens_C = np.asarray([tokens for _, tokens in shape.branches])
        tokens_S = np.concatenate([batch.trie.path(i)[cut:] for i, cut in enumerate(cut_C)])
        block = Block(tokens_S, np.cumsum(lens_C) - lens_C, np.full(len(cut_C), ON_PATH), cut_C, cut_C)
        return _Case(batch, block, Block.chain(batch.trie.path(len(rows)), 0) if trunk else None)

    def runner(self, case: _Case, with_grad: bool = True) -> BlockRunner:
        """A runner whose path holds random keys and values."""
        rows = 0 if case.trunk is None else case.trunk.num_tokens
        runner = BlockRunner(self.policy, self.kernel, case.batch, rows, with_grad)
        if case.trunk is not None:
            path = runner.push(case.trunk).path
            for layer in range(path.k_LGCH.shape[0]):
                path.write(layer, 0, *(self.noise(*path.k_LGCH.shape[1:]) for _ in range(2)))
        return runner

    def stage_input(self, block: Block) -> torch.Tensor | None:
        if self.policy.stage == 0:
            return None
        return self.noise(*self.policy.stage_shape(block.num_tokens)).requires_grad_()

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.policy.dtype, device=self.policy.device, generator=self._noise)

    def sink(self, case: _Case) -> BlockSink:
        """The head's forward: log-probs, or values for a critic."""
        policy = self.policy
        if policy.shape.value_head:
            return ValueSink(case.batch, policy.value_head(), None, self._wide, policy.device)
        return LogprobSink(case.batch, policy.vocab_head(), 1.0, False, None, self._wide, policy.device)

    def gradient_job(self, case: _Case) -> BlockGradient:
        if self.policy.shape.value_head:
            ones_T = torch.ones(case.batch.rows.num_tokens)
            return ValueGradient(case.batch, self.policy.value_head(), ones_T, None, self._wide)
        coef = Coefficients(np.ones(case.batch.num_tokens), None)
        return LogprobGradient(case.batch, self.policy.vocab_head(), 1.0, coef, self._wide)

    def differentiate(self, job: BlockGradient, case: _Case, output: torch.Tensor) -> torch.Tensor:
        """dL/doutput: the head's on the last stage, any on others."""
        if self.policy.is_last_stage:
            return job.gradient(case.block, output.detach())
        return torch.ones_like(output)

    # ---- seconds ----

    def times(self, shape: Shape) -> Sample:
        """The fastest of some runs of each part, the largest of that over all ranks."""
        began, case = time.perf_counter(), self.case(shape)
        runner = self.runner(case)
        best = np.min([self._once(runner, case) for _ in range(1 + _REPEATS)][1:], axis=0)
        self.last_s = time.perf_counter() - began
        forward_s, backward_s, head_forward_s, head_backward_s, keys_s = self.largest(best).tolist()
        heads = len(np.unique(case.batch.block_pairs(case.block)[0]))
        heads = case.block.num_tokens if self.policy.shape.value_head else heads
        features = block_features(case.block)
        return Sample(features, heads, forward_s, backward_s, head_forward_s, head_backward_s, keys_s)

    def _once(self, runner: BlockRunner, case: _Case) -> np.ndarray:
        """[forward, backward, head forward, head backward, forward of keys only] in seconds."""
        job, block, last = self.gradient_job(case), case.block, self.policy.is_last_stage
        sink, stage_input = self.sink(case), self.stage_input(block)
        with torch.no_grad():
            keys_s, _ = self._timed(
                lambda: (runner.keys_only if last else runner.hidden)(block, runner.visit(block, False), stage_input)
            )
        forward_s, output = self._timed(lambda: runner.hidden(block, runner.visit(block, False), stage_input))
        head_s = 0.0
        if last:
            head_s, _ = self._timed(lambda: sink.take(block, output.detach()))
        head_back_s, grad = self._timed(lambda: self.differentiate(job, case, output))
        backward_s, _ = self._timed(lambda: output.backward(grad))
        return np.asarray([forward_s, backward_s, head_s, head_back_s if last else 0.0, keys_s])

    def _timed(self, call: Callable[[], torch.Tensor | None]) -> tuple[float, torch.Tensor]:
        self._synchronise()
        began = self._clock()
        result = call()
        self._synchronise()
        return self._clock() - began, result

    def _synchronise(self) -> None:
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)

    # ---- bytes ----

    def peak(self, shape: Shape) -> float:
        """Peak of one block's forward and backward, the path's rows and their gradients included."""
        case = self.case(shape)
        stage_input = self.stage_input(case.block)
        job = self.gradient_job(case)
        gc.collect()
        with MemoryMeter(self.policy.device) as meter:
            runner = self.runner(case)
            output = runner.hidden(case.block, runner.visit(case.block, False), stage_input)
            output.backward(self.differentiate(job, case, output))
        return float(meter.peak_bytes)

    def kept(self, shape: Shape) -> float:
        """Bytes of one block's graph."""
        case = self.case(shape)
        stage_input, runner = self.stage_input(case.block), self.runner(case)
        alive: list[BlockContext | torch.Tensor] = []
        gc.collect()
        with MemoryMeter(self.policy.device) as meter:
            alive.append(runner.visit(case.block, False))
            alive.append(runner.hidden(case.block, alive[0], stage_input))
        return float(meter.end_bytes)

    def forward(self, shape: Shape) -> float:
        """Peak of one block's forward without a graph."""
        case = self.case(shape)
        stage_input, runner = self.stage_input(case.block), self.runner(case)
        run = runner.keys_only if self.policy.is_last_stage else runner.hidden
        gc.collect()
        with torch.no_grad(), MemoryMeter(self.policy.device) as meter:
            run(case.block, runner.visit(case.block, False), stage_input)
        return float(meter.peak_bytes)


def _fit_memory(bench: _Bench, max_block_tokens: int, path_rows: int) -> tuple[MemoryModel, float]:
    """(Measured model, its largest relative error on the peaks it was fitted to)."""
    policy = bench.policy
    guess = policy.memory_model()
    largest = max(max_block_tokens, 4 * _SMALLEST)
    small, half = Shape(0, ((0, largest // 4),)), Shape(0, ((0, largest // 2),))
    chains = [small, half, Shape(0, ((0, largest),)), Shape(path_rows, ((path_rows, largest // 2),))]
    chains.append(Shape(path_rows, ((path_rows, largest // 4),)))
    peaks_N = bench.largest(np.asarray([bench.peak(shape) for shape in chains]))
    design = np.asarray([[1.0, shape.num_tokens, shape.path_rows] for shape in chains])
    coefficients = nnls(design / peaks_N[:, None], np.ones(len(chains)))
    fixed, working, rows = coefficients.tolist()
    tokens = half.num_tokens - small.num_tokens
    kept, forward = (
        float(np.diff(bench.largest(np.asarray([measure(small), measure(half)])))[0]) / tokens
        for measure in (bench.kept, bench.forward)
    )
    error = float(np.abs(design @ coefficients / peaks_N - 1).max())
    measured = MemoryModel(
        bytes_per_kept_token=kept,
        bytes_per_working_token=max(working, kept),
        bytes_per_forward_token=max(forward, 0.0),
        bytes_per_stack_row=max(rows - guess.bytes_per_grad_row, guess.bytes_per_stack_row),
        bytes_per_grad_row=guess.bytes_per_grad_row,
        bytes_per_checkpoint_token=guess.bytes_per_checkpoint_token,
        bytes_fixed=fixed,
    )
    return measured, error

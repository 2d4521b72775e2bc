"""Norm, attention kernels, masks, head and rows against plain autograd in fp64; no model, no process group."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_dta.engine import OptimizerSettings, ParallelSizes, Rows
from areal_dta.engine.head import HeadPairs, VocabHead
from areal_dta.engine.kernels import AttentionKernel, FlashCPUKernel, ProductKernel, merge_tile
from areal_dta.engine.norm import RMSNorm
from areal_dta.engine.stack import Frame, PathStack
from areal_dta.tree.tiles import TileKind

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_norm_equals_autograd_of_its_formula() -> None:
    config = SimpleNamespace(params_dtype=torch.float64, sequence_parallel=True)
    norm = RMSNorm(config, 6, eps=1e-3)
    assert norm.weight.sequence_parallel
    torch.nn.init.normal_(norm.weight)
    x = random(4, 1, 6).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,))
    weight = norm.weight.detach().clone().requires_grad_()
    want = torch.nn.functional.rms_norm(x, (6,), weight, 1e-3)
    upstream = random(4, 1, 6, seed=1)
    want_grads = torch.autograd.grad(want, (x, weight), upstream)
    got = norm(x)
    torch.testing.assert_close(got, want)
    for grad, reference in zip(torch.autograd.grad(got, (x, norm.weight), upstream), want_grads, strict=True):
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("kernel", [FlashCPUKernel(), ProductKernel()])
@pytest.mark.parametrize(("rows", "path"), [(1, 0), (7, 0), (1, 5), (6, 9)])
def test_merged_tiles_equal_autograd_of_plain_attention(kernel: AttentionKernel, rows: int, path: int) -> None:
    """A causal (or masked) tile and a rectangle, merged, against one softmax over all keys."""
    groups, repeats, dim = 2, 3, 8
    q = random(groups, rows, repeats, dim).requires_grad_()
    k, v = (random(groups, path + rows, dim, seed=s).requires_grad_() for s in (1, 2))
    hidden = torch.ones(rows, path + rows, dtype=torch.bool).triu(path + 1)
    scores = (q.transpose(1, 2) @ k.unsqueeze(1).transpose(-1, -2) * 0.3).masked_fill(hidden, float("-inf"))
    want = (scores.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2)
    upstream = random(groups, rows, repeats, dim, seed=3)
    want_grads = torch.autograd.grad(want, (q, k, v), upstream)
    square = torch.zeros(rows, rows, dtype=torch.float64).masked_fill_(hidden[:, path:], float("-inf"))
    for kind, mask in ((TileKind.CAUSAL, None), (TileKind.MASKED, square)):
        with torch.no_grad():
            own = (k[:, path:], v[:, path:])
            out, lse = (x.clone() for x in kernel.forward(kind, q, *own, mask, 0.3))
            if path:
                merge_tile(out, lse, *kernel.forward(TileKind.FULL, q, k[:, :path], v[:, :path], None, 0.3))
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(lse.double(), scores.logsumexp(-1).transpose(1, 2))
            grad_q, grad_k, grad_v = kernel.backward(kind, upstream, q, *own, out, lse, mask, 0.3)
            if path:
                rest = (k[:, :path], v[:, :path], out, lse, None, 0.3)
                more_q, path_k, path_v = kernel.backward(TileKind.FULL, upstream, q, *rest)
                grad_q = grad_q + more_q
                grad_k, grad_v = torch.cat((path_k, grad_k), 1), torch.cat((path_v, grad_v), 1)
        for grad, reference in zip((grad_q, grad_k, grad_v), want_grads, strict=True):
            torch.testing.assert_close(grad, reference)


def collected(frame: Frame) -> list[float]:
    """Gradients left on a frame's keys, layer 0."""
    return [float(x) for _, grad_k_GSH, _ in frame.grads(0, frame.depth, frame.end) for x in grad_k_GSH.flatten()]


def test_a_push_over_rows_in_use_takes_a_new_buffer_and_shares_the_prefix() -> None:
    stack = PathStack(1, 1, 2, 6, torch.float32, CPU, with_grad=True)
    rows = torch.arange(12.0).view(1, 6, 2)
    trunk = stack.push(0, 3)
    stack.view(3).write(0, 0, rows[:, :3], rows[:, :3])
    first = stack.push(3, 2)
    first_view = stack.view(5)
    first_view.write(0, 3, rows[:, 3:5], rows[:, 3:5])
    second = stack.push(3, 3)  # the first branch has not been popped
    second_view = stack.view(6)
    second_view.write(0, 3, -rows[:, :3], -rows[:, :3])
    assert torch.equal(first_view.rows(0, 0, 5)[0], rows[:, :5])
    assert torch.equal(second_view.rows(0, 0, 3)[1], rows[:, :3])
    assert second_view.frames == (trunk, second) and first_view.frames == (trunk, first)
    first_view.add_grad(0, torch.ones(1, 5, 2), torch.ones(1, 5, 2))
    second_view.add_grad(0, torch.ones(1, 6, 2), torch.ones(1, 6, 2))
    assert collected(trunk) == [2.0] * 6
    for frame in (first, second):
        assert collected(frame) == [1.0] * 2 * frame.num_rows


def test_releasing_part_of_a_frame_keeps_its_upper_rows() -> None:
    stack = PathStack(1, 1, 2, 8, torch.float64, CPU, with_grad=True)
    frame = stack.push(0, 6)
    stack.release(stack.frames_from(4), 4)
    assert (frame.depth, frame.end) == (0, 4)
    again = stack.push(4, 2)
    view = stack.view(6)
    view.add_grad(0, torch.ones(1, 6, 2), torch.ones(1, 6, 2))
    assert collected(frame) == [1.0] * 8 and collected(again) == [1.0] * 4
    stack.release((frame, again), 0)
    assert stack.frames_from(0) == () and collected(frame) == []


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_equals_autograd_of_log_softmax(
    temperature: float, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_dta.engine.head.head_chunk_rows", lambda local_vocab: 3)  # three positions at a time
    hidden, weight = random(8, 5).requires_grad_(), random(23, 5, seed=1).requires_grad_()
    row = np.asarray([0, 0, 0, 2, 3, 3, 6, 7])
    label = np.asarray([4, 9, 4, 1, 22, 0, 7, 7])
    coef, entropy_coef = random(8, seed=2), random(8, seed=3)
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    logp, entropy = log_p[row, label], -(log_p.exp() * log_p).sum(-1)
    loss = (coef * logp).sum() + ((entropy_coef * entropy).sum() if with_entropy else 0)
    want_hidden, want_weight = torch.autograd.grad(loss, (hidden, weight))
    buffer = random(23, 5, seed=4)
    head = VocabHead(weight, buffer.clone(), 0, None)
    pairs = HeadPairs(row, label)
    got_logp, got_entropy = head.values(hidden.detach(), pairs, temperature, True)
    torch.testing.assert_close(got_logp, logp.detach())
    torch.testing.assert_close(got_entropy, entropy.detach())
    grad = head.gradient(hidden.detach(), pairs, coef, entropy_coef if with_entropy else None, temperature)
    torch.testing.assert_close(grad, want_hidden)
    torch.testing.assert_close(head.grad_VD - buffer, want_weight)


def test_rows_reject_what_is_not_ragged_token_rows() -> None:
    with pytest.raises(ValueError, match="row 1 is empty"):
        Rows(np.asarray([1, 2], np.int32), np.asarray([0, 2, 2]))
    with pytest.raises(ValueError, match="must run from 0 to 2"):
        Rows(np.asarray([1, 2], np.int32), np.asarray([0, 3]))
    with pytest.raises(ValueError, match="integer array"):
        Rows(np.asarray([1.0, 2.0]), np.asarray([0, 2]))
    assert Rows.from_lists([]).num_rows == 0


def test_settings_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="sequence_parallel needs tp > 1"):
        ParallelSizes(sequence_parallel=True)
    with pytest.raises(ValueError, match=r"optimizer\.type='lion'"):
        OptimizerSettings(type="lion")
    with pytest.raises(ValueError, match=r"optimizer\.beta2=1"):
        OptimizerSettings(beta2=1.0)

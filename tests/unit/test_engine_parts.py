"""Norm, attention kernels, masks, head and rows against plain autograd in fp64; no model, no process group."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_dta.engine import OptimizerSettings, ParallelSizes, Rows
from areal_dta.engine.attention import chain_mask, forest_mask
from areal_dta.engine.head import HeadPairs, VocabHead
from areal_dta.engine.kernels import AttentionKernel, FlashCPUKernel, ProductKernel
from areal_dta.engine.norm import RMSNorm
from areal_dta.tree.plan import subtree_ends
from areal_dta.tree.trie import build_trie

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
def test_kernels_equal_autograd_of_plain_attention(kernel: AttentionKernel, rows: int, path: int) -> None:
    groups, repeats, dim = 2, 3, 8
    q = random(groups, repeats, rows, dim).requires_grad_()
    k, v = (random(groups, path + rows, dim, seed=s).requires_grad_() for s in (1, 2))
    mask = chain_mask(rows, path, torch.float64, CPU)
    hidden = torch.ones(rows, path + rows, dtype=torch.bool).triu(path + 1)
    scores = (q @ k.unsqueeze(1).transpose(-1, -2) * 0.3).masked_fill(hidden, float("-inf"))
    want = scores.softmax(-1) @ v.unsqueeze(1)
    upstream = random(groups, repeats, rows, dim, seed=3)
    want_grads = torch.autograd.grad(want, (q, k, v), upstream)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, mask, 0.3)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1))
        for grad, reference in zip(kernel.backward(upstream, q, k, v, out, lse, mask, 0.3), want_grads, strict=True):
            torch.testing.assert_close(grad, reference)


def test_forest_mask_shows_each_row_its_ancestors() -> None:
    trie = build_trie(np.asarray([1, 2, 3, 1, 2, 4, 1, 5], np.int32), np.asarray([0, 3, 6, 8]))
    mask = forest_mask(torch.from_numpy(subtree_ends(trie)), 2, torch.float64, CPU)
    for row in range(trie.num_tokens):
        ancestors, token = set(), row
        while token >= 0:
            ancestors.add(token)
            token = int(trie.parent_U[token])
        visible = set(torch.nonzero(mask[row, 2:] == 0)[:, 0].tolist())
        assert visible == ancestors
    assert not mask[:, :2].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_equals_autograd_of_log_softmax(
    temperature: float, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_dta.engine.head._CHUNK_ELEMENTS", 23 * 3)  # three positions at a time
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
    with pytest.raises(ValueError, match="pp=2.*use pp=1"):
        ParallelSizes(pp=2)
    with pytest.raises(ValueError, match="sequence_parallel needs tp > 1"):
        ParallelSizes(sequence_parallel=True)
    with pytest.raises(ValueError, match=r"optimizer\.type='lion'"):
        OptimizerSettings(type="lion")
    with pytest.raises(ValueError, match=r"optimizer\.beta2=1"):
        OptimizerSettings(beta2=1.0)

"""The noise behind sampling: exact in the tail, independent between positions and seeds."""

from __future__ import annotations

import math

import torch

from areal_dta.rollout.server.sampler import _noise, _noise_on_cpu, _splitmix, _uniform, gumbel_noise

V = 512


def test_uniforms_keep_all_32_bits_where_they_decide() -> None:
    words = torch.arange(0, 256, dtype=torch.int32)  # the smallest words: the largest Gumbel values
    expected = (torch.arange(0, 256, dtype=torch.float64) + 0.5) * 2.0**-32
    torch.testing.assert_close(_uniform(words).double(), expected, rtol=1e-6, atol=0)
    assert 0 < float(_uniform(torch.tensor([-1], dtype=torch.int32))) < 1


def test_draws_follow_the_softmax_and_do_not_depend_on_the_draw_before() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2
    keys = [(seed, position) for seed in range(400) for position in range(700, 750)]
    tokens = (logits + gumbel_noise(keys, V)).argmax(-1)
    expected = torch.softmax(logits, 0) * len(keys)
    counts = torch.bincount(tokens, minlength=V)
    often = expected > 5
    chi_square = float(((counts - expected) ** 2 / expected)[often].sum())
    freedom = int(often.sum())
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)
    top = expected.topk(4).indices
    kind = torch.where((tokens[:, None] == top).any(1), (tokens[:, None] == top).float().argmax(1), 4)
    pairs = torch.bincount(kind[:-1] * 5 + kind[1:], minlength=25).view(5, 5).double()
    independent = pairs.sum(1, keepdim=True) * pairs.sum(0, keepdim=True) / pairs.sum()
    assert float(((pairs - independent) ** 2 / independent).sum()) < 16 + 4 * math.sqrt(2 * 16)


def test_the_noise_made_on_a_cpu_is_that_of_other_devices_bit_for_bit() -> None:
    words = [_splitmix(seed) for seed in range(40)] + [0, (1 << 64) - 1]
    for ids_V in (torch.arange(5001, dtype=torch.int32), torch.tensor([0, 7, 151_000], dtype=torch.int32)):
        assert torch.equal(_noise_on_cpu(words, ids_V), _noise(words, ids_V))
    assert torch.equal(gumbel_noise([(3, 5)], 9, tokens_V=torch.tensor([2, 8])), gumbel_noise([(3, 5)], 9)[:, [2, 8]])

"""Attention over pages against dense attention over each token's own path, in fp64.

Not covered: a GPU. Scheduling on top of it is tested with the server's engine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.nn import DecoderConfig, DecoderWeights, Rotary, load_decoder
from areal_dta.nn.decoder import decode_layer, sequence_logits
from areal_dta.rollout.server import attention_plan, paged_attention
from areal_dta.rollout.server.attention_plan import Span, find_shared
from areal_dta.rollout.server.runner import ModelRunner
from tests.unit.tiny_models import save_tiny_model

PAGE = 4
NUM_PAGES = 200


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> DecoderWeights:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(folder)
    return load_decoder(folder, DecoderConfig.from_folder(folder), torch.float64)


@pytest.fixture
def runner(weights: DecoderWeights) -> ModelRunner:
    return ModelRunner(weights, NUM_PAGES, PAGE)


@dataclass
class Kept:
    """A sequence whose first tokens are in the cache."""

    tokens: list[int]
    table: list[int]


@dataclass
class Pages:
    """Hands out pages in random order, or as they lie."""

    rng: random.Random
    in_order: bool
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))

    def take(self, num_tokens: int) -> list[int]:
        if not self.in_order:
            self.rng.shuffle(self.free)
        return [self.free.pop(0) for _ in range(-(-num_tokens // PAGE))]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 300) for _ in range(count)]


def random_tree(rng: random.Random, size: int) -> list[int]:
    """Parents, each before its children; -1 is the last known token."""
    return [rng.randrange(-1, node) for node in range(size)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def visibility(parents: Sequence[int]) -> np.ndarray:
    visible = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in range(len(parents)):
        visible[node, path_to(parents, node)] = True
    return visible


def prefill(runner: ModelRunner, kept: Sequence[Kept], lens: Sequence[int], first: int = 0) -> None:
    spans = [Span(k.table, first, n) for k, n in zip(kept, lens, strict=True) if n > first]
    ids = [t for k, n in zip(kept, lens, strict=True) if n > first for t in k.tokens[first:n]]
    runner.forward(spans, ids)


def expected_logits(weights: DecoderWeights, tokens: Sequence[int]) -> torch.Tensor:
    return sequence_logits(weights, tokens)[-1]


def shared_sequences(
    rng: random.Random, runner: ModelRunner, count: int, num_shared: int, room: int, in_order: bool = False
) -> list[Kept]:
    """Sequences that share whole pages, computed up to all their tokens, with pages for ``room`` tokens more."""
    pages = Pages(rng, in_order)
    trunk, trunk_pages = random_tokens(rng, num_shared), pages.take(num_shared)
    own = [random_tokens(rng, rng.randrange(1, 14)) for _ in range(count)]
    kept = [Kept(trunk + o, trunk_pages + pages.take(len(o) + room)) for o in own]
    if num_shared:
        prefill(runner, kept[:1], [num_shared])
    prefill(runner, kept, [len(k.tokens) for k in kept], num_shared)
    return kept


@pytest.mark.parametrize("kernel", ["_attend", "_attend_plain"])
@pytest.mark.parametrize("overhead", [0, 2048], ids=["own-passes", "one-pass"])
@pytest.mark.parametrize("seed", range(4))
def test_every_node_of_a_tree_sees_its_own_path_only(
    seed: int, overhead: int, kernel: str, weights: DecoderWeights, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(paged_attention, "_attend", getattr(paged_attention, kernel))
    monkeypatch.setattr(attention_plan, "PASS_OVERHEAD_KEYS", overhead)
    rng = random.Random(seed)
    kept = shared_sequences(rng, runner, 5, 3 * PAGE * (seed % 3), room=12, in_order=seed > 1)
    spans, ids, paths = [], [], []
    for index, k in enumerate(kept):
        known = len(k.tokens)
        size = rng.randrange(1, 12)
        parents = list(range(-1, size - 1)) if index % 3 == 2 else random_tree(rng, size)
        tokens = random_tokens(rng, size)
        nodes = [path_to(parents, node) for node in range(size)]
        depths = [known + len(path) - 1 for path in nodes]
        plain = index % 3 == 2  # a chain given as such in the same batch
        spans.append(
            Span(k.table, known, known + size)
            if plain
            else Span(k.table, known, known + size, known, visibility(parents), depths)
        )
        ids += tokens
        paths += [k.tokens + [tokens[n] for n in path] for path in nodes]
    shared = find_shared(spans, PAGE)
    assert any(len(s.members) > 1 for s in shared) == (overhead == 0 and seed % 3 > 0)
    assert bool(shared) == (overhead == 0)
    logits = runner.logits(runner.forward(spans, ids), range(len(ids)))
    for row, path in enumerate(paths):
        assert (logits[row] - expected_logits(weights, path)).abs().max() < 1e-10


def test_a_tree_grows_level_by_level_below_tokens_drafted_before(weights: DecoderWeights, runner: ModelRunner):
    rng = random.Random(7)
    kept = shared_sequences(rng, runner, 3, 2 * PAGE, room=20)
    trees = [random_tree(rng, 15) for _ in kept]
    tokens = [random_tokens(rng, 15) for _ in kept]
    for start, end in itertools.pairwise((0, 1, 4, 9, 15)):
        spans, ids, paths = [], [], []
        for k, parents, drafted in zip(kept, trees, tokens, strict=True):
            known = len(k.tokens)
            nodes = [path_to(parents, node) for node in range(start, end)]
            depths = [known + len(path) - 1 for path in nodes]
            visible = visibility(parents)[start:end, :end]
            spans.append(Span(k.table, known + start, known + end, known, visible, depths))
            ids += drafted[start:end]
            paths += [k.tokens + [drafted[n] for n in path] for path in nodes]
        logits = runner.logits(runner.forward(spans, ids), range(len(ids)))
        for row, path in enumerate(paths):
            assert (logits[row] - expected_logits(weights, path)).abs().max() < 1e-10


def test_an_accepted_path_is_moved_together_and_decoding_goes_on(weights: DecoderWeights, runner: ModelRunner):
    rng = random.Random(3)
    (kept,) = shared_sequences(rng, runner, 1, PAGE, room=12)
    known = len(kept.tokens)
    parents, drafted = [-1, -1, 1, 0, 2, 4], random_tokens(rng, 6)  # the path 1, 2, 4, 5 overlaps its target
    depths = [known + len(path_to(parents, n)) - 1 for n in range(6)]
    runner.forward([Span(kept.table, known, known + 6, known, visibility(parents), depths)], drafted)
    slots = [kept.table[(known + n) // PAGE] * PAGE + (known + n) % PAGE for n in range(6)]
    path = path_to(parents, 5)
    runner.kv.move(torch.tensor([slots[n] for n in path]), torch.tensor(slots[: len(path)]))
    tokens = kept.tokens + [drafted[n] for n in path]
    for _ in range(3):
        tokens.append(rng.randrange(2, 300))
        hidden = runner.forward([Span(kept.table, len(tokens) - 1, len(tokens))], tokens[-1:])
        assert (runner.logits(hidden, [0])[0] - expected_logits(weights, tokens)).abs().max() < 1e-10


def test_move_reads_everything_before_it_writes(weights: DecoderWeights):
    kv = ModelRunner(weights, NUM_PAGES, PAGE, extra_layers=[(1, 6)]).kv
    num_layers = weights.config.num_layers
    shapes = [(weights.config.num_kv_heads, weights.config.head_dim)] * num_layers + [(1, 6)]
    values = [(torch.randn(5, *s).double(), torch.randn(5, *s).double()) for s in shapes]
    for layer, (k, v) in enumerate(values):
        kv.write(torch.arange(4, 9), layer, k, v)
    kv.move(torch.tensor([4, 5, 6, 7]), torch.tensor([5, 6, 7, 4]), layers=range(num_layers))
    for layer, (k, v) in enumerate(values):
        order = [3, 0, 1, 2, 4] if layer < num_layers else [0, 1, 2, 3, 4]
        stored_k, stored_v = kv.read(torch.arange(4, 9), layer)
        assert torch.equal(stored_k, k[order])
        assert torch.equal(stored_v, v[order])


def test_an_extra_layer_of_another_shape_shares_slots_and_page_tables(weights: DecoderWeights, tmp_path: Path):
    save_tiny_model(
        tmp_path, "llama", seed=5, num_attention_heads=6, num_key_value_heads=3, head_dim=8, num_hidden_layers=1
    )
    other = load_decoder(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float64)
    runner = ModelRunner(weights, NUM_PAGES, PAGE, extra_layers=[(3, 8)])
    rng = random.Random(1)
    kept = shared_sequences(rng, runner, 2, 2 * PAGE, room=4)
    index = weights.config.num_layers
    rotary = Rotary(other.config, other.dtype, other.device)
    for k in kept:
        ids = torch.tensor(k.tokens)
        plan = attention_plan.plan_attention([Span(k.table, 0, len(ids))], PAGE, weights.device)
        x = torch.nn.functional.embedding(ids, other.embed_VD)
        o = decode_layer(
            other.config,
            other.layers[0],
            index,
            x,
            rotary(plan.positions_T, len(ids)),
            lambda layer, q, key, v, plan=plan: runner.kv.attend(plan, layer, q, key, v),
        )
        expected = sequence_logits(other, k.tokens)
        norm = torch.nn.functional.rms_norm(o, other.final_norm_D.shape, other.final_norm_D, other.config.norm_eps)
        assert (norm @ other.head_VD.T - expected).abs().max() < 1e-10
        hidden = runner.forward([Span(k.table, len(ids), len(ids) + 1)], [9])
        assert (runner.logits(hidden, [0])[0] - expected_logits(weights, [*k.tokens, 9])).abs().max() < 1e-10


def test_features_are_the_outputs_of_the_chosen_layers(weights: DecoderWeights):
    runner = ModelRunner(weights, NUM_PAGES, PAGE, hidden_layers=(1, 0))
    tokens = random_tokens(random.Random(0), 9)
    hidden, features = runner.forward_features([Span([3, 1, 2], 0, 9)], tokens)
    both = features.view(9, 2, -1)
    assert torch.equal(both[:, 0], hidden)  # the last of two layers
    first = DecoderWeights(weights.config, weights.embed_VD, weights.layers[:1], weights.final_norm_D, weights.head_VD)
    assert (runner.logits(both[:, 1], range(9)) - sequence_logits(first, tokens)).abs().max() < 1e-10
    hidden, features = ModelRunner(weights, NUM_PAGES, PAGE).forward_features([Span([3, 1, 2], 0, 9)], tokens)
    assert features is hidden


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_the_kernel_for_cpus_equals_plain_attention(dtype: torch.dtype, limit: float):
    torch.manual_seed(0)
    q, kv = torch.randn(3, 2, 7, 16, dtype=dtype), torch.randn(3, 70, 4, 16, dtype=dtype).transpose(1, 2)
    bias = torch.zeros(3, 1, 7, 70, dtype=dtype).masked_fill_(torch.rand(3, 1, 7, 70) < 0.7, float("-inf"))
    bias[..., 0] = 0
    bias[1, :, :, 1:] = float("-inf")  # one key is enough, which is what padded rows see
    for mask in (None, bias, bias[:, :, :1]):
        fast = paged_attention._attend(q, kv[:, :2], kv[:, 2:], mask)
        plain = paged_attention._attend_plain(q, kv[:, :2], kv[:, 2:], mask)
        for a, b in zip(fast, plain, strict=True):
            assert a.dtype == b.dtype
            assert (a - b).abs().max() < limit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 4, "end": 4}, "start < end"),
        ({"start": 4, "end": 6, "context": 5}, "context <= start"),
        ({"start": 4, "end": 6, "visible": np.ones((2, 3), dtype=bool)}, r"\(2, 3\)"),
        ({"start": 4, "end": 6, "depths": [4]}, "1 depths for 2"),
    ],
)
def test_spans_that_do_not_fit_together_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Span(table=[1, 2], **settings)  # type: ignore[arg-type]

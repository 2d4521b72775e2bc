"""The buffer of drafter training: what is kept, what is drawn, what a full queue and torn files do.

Not covered: several hosts writing to one shared file system.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.drafter import buffer as buffer_module
from areal_dta.drafter.buffer import BufferReader, BufferWriter, is_held_out
from areal_dta.drafter.buffer_files import (
    Entry,
    FrozenTarget,
    Sample,
    TornSample,
    choose_drops,
    find_version,
    list_entries,
    read_sample,
    tail_threshold,
    usable,
    write_sample,
)
from areal_dta.drafter.learner import crop
from areal_dta.nn import WeightsMismatch
from tests.unit.spot_samples import load_target, write_target


def sample(
    length: int = 20, step: int = 1, version: str = "0:3", finished: bool = True, dtype: torch.dtype = torch.float16
) -> Sample:
    ids_T = torch.arange(length, dtype=torch.int32)
    return Sample(ids_T, torch.randn(length, 8).to(dtype), 4, length, version, 4, length - 4, finished, step)


def entry(step: int, sequence: int, length: int, finished: bool = True, num_bytes: int = 100) -> Entry:
    return Entry(step, sequence, length + 4, length, finished, "0:1", num_bytes, Path(f"/b/{step}-{sequence}"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sample_comes_back_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    one = sample(version="epoch/2:7 ü", dtype=dtype, finished=False)
    written = write_sample(tmp_path, one, 5)
    (found,) = list_entries(tmp_path)
    assert found == written
    back = read_sample(found)
    assert back.features_TF.dtype == dtype
    assert torch.equal(back.features_TF, one.features_TF) and torch.equal(back.ids_T, one.ids_T)
    for name in ("loss_start", "loss_end", "policy_version", "prompt_tokens", "response_tokens", "finished", "step"):
        assert getattr(back, name) == getattr(one, name)
    assert back.hidden_TD is None


def test_hidden_states_travel_with_features_of_three_layers(tmp_path: Path) -> None:
    one = sample()
    both = Sample(**{**vars(one), "hidden_TD": torch.randn(20, 4)})
    back = read_sample(write_sample(tmp_path, both, 1))
    assert back.hidden_TD is not None and torch.equal(back.hidden_TD, both.hidden_TD)


@pytest.mark.parametrize("damage", ["cut", "altered", "empty", "nan"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    one = sample(dtype=torch.float32)
    if damage == "nan":
        one.features_TF[3, 2] = float("nan")
    found = write_sample(tmp_path, one, 1)
    data = found.path.read_bytes()
    change = {"cut": data[:-9], "altered": data[:-4] + b"abcd", "empty": b"", "nan": data}
    found.path.write_bytes(change[damage])
    with pytest.raises(TornSample, match="sample"):
        read_sample(found)


def test_usable_is_the_finished_part_of_this_step_and_the_long_tail_of_the_one_before() -> None:
    old = [entry(1, i, 100) for i in range(4)]
    previous = [entry(3, 10 + i, length) for i, length in enumerate((10, 80, 30, 40, 70, 20, 60, 50))]
    current = [entry(4, 20, 15), entry(4, 21, 5), entry(4, 22, 90, finished=False)]
    chosen = usable([*old, *current, *previous], 0.25)
    assert [e.sequence for e in chosen] == [11, 14, 20, 21]
    assert usable([]) == []


@pytest.mark.parametrize(("lengths", "share", "expected"), [([5], 0.25, 5), ([1, 2, 3, 4], 0.25, 4), ([4, 4], 1.0, 4)])
def test_the_tail_is_rounded_up_to_whole_samples(lengths: list[int], share: float, expected: int) -> None:
    assert tail_threshold(lengths, share) == expected


def test_dropping_takes_the_oldest_and_spares_the_previous_steps_tail() -> None:
    previous = [entry(2, 2 + i, length) for i, length in enumerate((90, 10, 80, 20, 15))]
    entries = [entry(1, 1, 10), *previous, entry(3, 9, 30)]
    assert [e.sequence for e in choose_drops(entries, 400, 0.4)] == [1, 3, 5]
    assert choose_drops(entries, 700, 0.4) == []


def test_a_tail_larger_than_half_the_budget_leaves_room_for_the_new_step() -> None:
    entries = [*(entry(2, i, 10 + i) for i in range(10)), *(entry(3, 20 + i, 5) for i in range(4))]
    kept = {e.sequence for e in entries} - {e.sequence for e in choose_drops(entries, 600, 1.0)}
    assert kept == {7, 8, 9, 21, 22, 23}  # the longest of the tail, the latest of the new step


def test_the_writer_keeps_to_its_budget_and_continues_in_an_existing_folder(tmp_path: Path) -> None:
    size = write_sample(tmp_path / "x", sample(), 1).num_bytes if (tmp_path / "x").mkdir() is None else 0
    for step in (1, 2):
        writer = BufferWriter(tmp_path / "b", budget_bytes=5 * size)
        for _ in range(6):
            writer.append(sample(step=step))
        writer.flush(5)
        writer.close()
        assert sum(e.num_bytes for e in list_entries(tmp_path / "b")) <= 5 * size
        assert writer.use_share <= 1
    found = list_entries(tmp_path / "b")
    assert writer.counters["dropped_budget"] == 6
    assert len({e.sequence for e in found}) == len(found) and max(e.sequence for e in found) == 12


def test_a_full_queue_drops_at_once_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_write(folder: Path, one: Sample, sequence: int) -> Entry:
        time.sleep(0.05)
        return write_sample(folder, one, sequence)

    monkeypatch.setattr(buffer_module, "write_sample", slow_write)
    writer = BufferWriter(tmp_path, 1 << 20, queue_samples=3)
    start_s = time.perf_counter()
    accepted = [writer.append(sample()) for _ in range(50)]
    assert time.perf_counter() - start_s < 0.05
    assert 3 <= sum(accepted) <= 5
    assert writer.counters["dropped_full"] == 50 - sum(accepted)
    writer.flush(5)
    assert writer.counters["written"] == sum(accepted)
    writer.close()


def test_bytes_in_the_queue_are_bounded_too(tmp_path: Path) -> None:
    writer = BufferWriter(tmp_path, 1 << 20, queue_bytes=100)
    assert not writer.append(sample())
    assert writer.counters["dropped_full"] == 1
    writer.close()


def test_appending_costs_microseconds(tmp_path: Path) -> None:
    writer = BufferWriter(tmp_path, 1 << 24, queue_samples=5000)
    samples = [sample() for _ in range(1000)]
    times_s = []
    for one in samples:
        start_s = time.perf_counter()
        writer.append(one)
        times_s.append(time.perf_counter() - start_s)
    median_us = sorted(times_s)[500] * 1e6
    print(f"append: median {median_us:.1f} us")
    assert median_us < 50
    writer.flush(10)
    writer.close()


def test_malformed_samples_and_a_lost_folder_do_not_end_the_writer(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    writer = BufferWriter(folder, 1 << 20)
    writer.append(Sample(**{**vars(sample()), "loss_end": 99}))
    writer.flush(5)
    folder.rmdir()
    writer.append(sample())
    writer.flush(5)
    folder.mkdir()
    writer.append(sample())
    writer.flush(5)
    assert writer.counters == Counter(refused=1, failed=1, written=1)
    writer.close()


def fill(folder: Path, samples: list[Sample]) -> None:
    folder.mkdir(parents=True)
    for i, one in enumerate(samples):
        write_sample(folder, one, i + 1)


def test_a_batch_is_of_one_version_within_its_tokens_and_repeatable_by_seed(tmp_path: Path) -> None:
    fill(tmp_path / "server.0", [sample(20 + i, 2, "0:2") for i in range(12)])
    fill(tmp_path / "server.1", [sample(60, 2, "0:3") for i in range(12)])

    def draw(seed: int) -> list[tuple[str, list[int]]]:
        reader = BufferReader(tmp_path, seed)
        assert reader.refresh() == 24
        batches = [reader.sample(130) for _ in range(20)]
        return [(b.policy_version, [s.num_tokens for s in b.samples]) for b in batches if b is not None]

    drawn = draw(7)
    assert len(drawn) == 20 and {v for v, _ in drawn} == {"0:2", "0:3"}
    assert all(sum(lengths) <= 130 for _, lengths in drawn)
    assert draw(7) == drawn != draw(8)


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    fill(tmp_path / "s", [sample(20 + i) for i in range(32)])
    reader = BufferReader(tmp_path, 0)
    reader.refresh()
    held_out = {e.num_tokens for e in reader.entries if is_held_out(e)}
    assert len(held_out) == 4
    trained = [reader.sample(100) for _ in range(50)]
    assert not held_out & {s.num_tokens for b in trained if b for s in b.samples}
    measured = reader.sample(1000, held_out=True, rng=random.Random(0))
    assert measured is not None and {s.num_tokens for s in measured.samples} == held_out


def test_later_steps_are_drawn_more_often(tmp_path: Path) -> None:
    fill(tmp_path / "s", [sample(20, 1, "0:1") for _ in range(8)] + [sample(20, 2, "0:2") for _ in range(8)])
    reader = BufferReader(tmp_path, 0, tail_share=1.0, recency=0.25)
    reader.refresh()
    assert reader.versions() == ["0:2", "0:1"]
    drawn = Counter(b.policy_version for b in (reader.sample(20) for _ in range(200)) if b)
    assert 130 < drawn["0:2"] < 190
    assert {b.policy_version for b in (reader.sample(20, {"0:1"}) for _ in range(5)) if b} == {"0:1"}
    assert reader.sample(20, {"0:9"}) is None


def test_torn_and_vanished_files_are_skipped_and_counted(tmp_path: Path) -> None:
    fill(tmp_path / "s", [sample() for _ in range(6)])
    reader = BufferReader(tmp_path, 0)
    reader.refresh()
    first, second = reader.entries[:2]
    first.path.write_bytes(first.path.read_bytes()[:50])
    second.path.unlink()
    batch = reader.sample(1000)
    assert batch is not None and len(batch.samples) == 4
    assert reader.counters == Counter(torn=1, gone=1)
    assert reader.refresh() == 4


def test_a_long_sample_is_cropped_to_a_window_over_its_loss(tmp_path: Path) -> None:
    one = Sample(torch.arange(500, dtype=torch.int32), torch.randn(500, 8), 200, 480, "0:1", 200, 300, True, 1)
    for seed in range(50):
        window = crop(one, 64, random.Random(seed))
        start = int(window.ids_T[0])
        assert window.num_tokens == 64 and window.loss_end > window.loss_start >= (1 if start else 0)
        covered = range(start + window.loss_start, start + window.loss_end)
        assert covered[0] >= 200 and covered[-1] < 480
    whole = crop(one, 500, random.Random(0))
    assert (whole.num_tokens, whole.loss_start, whole.loss_end) == (500, 200, 480)


@pytest.mark.parametrize("tied", [True, False])
def test_the_frozen_target_is_the_versions_embedding_norm_and_head(tmp_path: Path, tied: bool) -> None:
    for i in range(3):
        write_target(tmp_path / f"e0_v{i}", f"0:{i}", seed=i, tie_word_embeddings=tied)
    folder = find_version([tmp_path], "0:2")
    assert folder == tmp_path / "e0_v2"
    assert find_version([tmp_path], "0:7") is None
    frozen, whole = FrozenTarget.load(folder, "0:2"), load_target(folder)
    assert torch.equal(frozen.weights.embed_VD, whole.embed_VD)
    assert torch.equal(frozen.weights.head_VD, whole.head_VD)
    assert torch.equal(frozen.weights.final_norm_D, whole.final_norm_D)
    assert frozen.weights.layers == ()


def test_a_frozen_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "m", "0:1")
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"vocab_size": 96', '"vocab_size": 90')
    )
    with pytest.raises(WeightsMismatch, match="embed_tokens"):
        FrozenTarget.load(folder, "0:1")


def test_recency_weights_do_not_depend_on_absolute_steps(tmp_path: Path) -> None:
    fill(tmp_path / "s", [sample(20, 10**6, "0:1") for _ in range(4)])
    reader = BufferReader(tmp_path, 0)
    reader.refresh()
    batch = reader.sample(1000)
    assert batch is not None and batch.num_tokens == 20 * 4
    assert np.isfinite([s.features_TF.float().sum() for s in batch.samples]).all()

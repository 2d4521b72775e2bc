"""The log on disk: round trip, torn tails, damage, segments, group commit. Not covered: a disk that lies about
fsync.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.batcher import spool as spool_module
from areal_dta.batcher.ledger import Event
from areal_dta.batcher.spool import Spool, SpoolError
from areal_dta.batcher.spool_commit import GroupCommit
from areal_dta.batcher.spool_format import read_at


def event(n: int, size: int = 3) -> Event:
    return Event("traj", {"n": n}, {"x": np.full(size, n, np.int32)})


def write(directory, events, **options) -> None:
    spool = Spool(directory, **options)
    list(spool.replay())
    for e in events:
        spool.append(e)
        spool.flush()
    spool.close()


def read(directory) -> list[int]:
    spool = Spool(directory)
    try:
        events = [stored.event for stored in spool.replay()]
    finally:
        spool.close()
    for e in events:
        assert (e.arrays["x"] == e.body["n"]).all() if e.arrays else True
    return [e.body["n"] for e in events]


def test_what_was_flushed_comes_back_in_order_over_several_segments(tmp_path):
    write(tmp_path, [event(n, size=50) for n in range(20)], segment_bytes=1000)
    assert len(list(tmp_path.glob("*.log"))) > 3
    assert read(tmp_path) == list(range(20))
    write(tmp_path, [event(20)], segment_bytes=1000)
    assert read(tmp_path) == list(range(21))


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tail_torn_at_any_byte_loses_only_the_record_it_tears(data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("spool")
    ends = []
    for n in range(4):
        write(directory, [event(n)])
        ends.append((directory / "00000001.log").stat().st_size)
    path = directory / "00000001.log"
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    if cut >= 8 and data.draw(st.booleans()):  # the magic itself is synced before any record
        with path.open("ab") as file:
            file.write(b"\xa5" * data.draw(st.integers(0, 40)))
    whole = sum(end <= cut for end in ends)
    assert read(directory) == list(range(whole))
    write(directory, [event(9)])
    assert read(directory) == [*range(whole), 9]


def test_a_torn_tail_is_reported(tmp_path, caplog, monkeypatch):
    # Of its own, since libraries that were imported before may have replaced the root logger that caplog listens to.
    monkeypatch.setattr(spool_module, "log", logging.Logger("spool"))
    spool_module.log.addHandler(caplog.handler)
    write(tmp_path, [event(0), event(1)])
    path = tmp_path / "00000001.log"
    os.truncate(path, path.stat().st_size - 1)
    assert read(tmp_path) == [0]
    assert "dropped a torn tail" in caplog.text and "never acknowledged" in caplog.text


def test_damage_before_the_last_segment_is_an_error_with_the_place(tmp_path):
    write(tmp_path, [event(n, size=100) for n in range(6)], segment_bytes=500)
    path = tmp_path / "00000002.log"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpoolError, match=r"00000002\.log is damaged at byte 8; restore"):
        read(tmp_path)
    path.write_bytes(b"something else")
    with pytest.raises(SpoolError, match="no spool segment of this version"):
        read(tmp_path)


def test_two_processes_cannot_share_a_spool(tmp_path):
    first = Spool(tmp_path)
    with pytest.raises(SpoolError, match="in use by another batcher"):
        Spool(tmp_path)
    first.close()
    Spool(tmp_path).close()


def numbered(n: int, size: int = 200) -> Event:
    return Event("traj", {"n": n, "group_id": n, "sample": 0}, {"x": np.full(size, n, np.int32)})


def filled(directory, count: int) -> tuple[Spool, dict]:
    """A spool of small segments with `count` events, and their places."""
    spool = Spool(directory, segment_bytes=1500)
    list(spool.replay())
    places = {}
    for n in range(count):
        spool.append(numbered(n), (n, 0))
        places.update(spool.flush())
    return spool, places


def test_what_was_written_is_read_at_its_place(tmp_path):
    spool, places = filled(tmp_path, 6)
    assert [read_at(tmp_path, places[n, 0]).body["n"] for n in range(6)] == list(range(6))
    spool.close()
    spool = Spool(tmp_path)
    assert {(s.event.body["n"], 0): s.place for s in spool.replay()} == places
    spool.close()
    path = tmp_path / places[2, 0].segment
    data = bytearray(path.read_bytes())
    data[places[2, 0].offset + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpoolError, match="is damaged at byte"):
        read_at(tmp_path, places[2, 0])


def compacted(directory):
    spool, places = filled(directory, 10)
    spool.roll()
    spool.append(numbered(10), (10, 0))
    spool.flush()
    before = spool.size_bytes
    moved = spool.compact(Event("snapshot", {"state": 1}), {key: places[key] for key in [(3, 0), (8, 0)]})
    return spool, moved, before


def test_compaction_leaves_a_snapshot_what_is_needed_and_what_came_later(tmp_path):
    spool, moved, before = compacted(tmp_path)
    assert spool.size_bytes < before / 2
    assert spool.size_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.log"))
    assert {key: read_at(tmp_path, place).body["n"] for key, place in moved.items()} == {(3, 0): 3, (8, 0): 8}
    spool.append(numbered(11), (11, 0))
    spool.close()
    spool = Spool(tmp_path)
    events = [s.event for s in spool.replay()]
    assert [(e.kind, e.body.get("n")) for e in events] == [
        ("snapshot", None),
        ("held", 3),
        ("held", 8),
        ("traj", 10),
        ("traj", 11),
    ]
    assert spool.size_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.log"))
    spool.close()


@pytest.mark.parametrize("killed_at", ["before the rename", "after the rename"])
def test_a_kill_during_compaction_leaves_the_old_log_or_the_new_one(tmp_path, monkeypatch, killed_at):
    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(type(tmp_path), "replace" if killed_at == "before the rename" else "unlink", kill)
    with pytest.raises(Killed):
        compacted(tmp_path)
    monkeypatch.undo()
    for lock in list(tmp_path.glob("lock")):
        lock.unlink()  # of the process that is no more
    spool = Spool(tmp_path)
    kinds = [s.event.kind for s in spool.replay()]
    assert kinds == (["traj"] * 11 if killed_at == "before the rename" else ["snapshot", "held", "held", "traj"])
    assert spool.size_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.log"))
    spool.close()


def test_group_commit_shares_one_fsync_and_answers_after_it(tmp_path, monkeypatch):
    syncs, real = [], os.fsync

    def counting(fd):
        syncs.append(fd)
        real(fd)

    async def main():
        spool = Spool(tmp_path)
        commit = GroupCommit(spool)
        commit.append(event(0))
        await commit.durable()
        monkeypatch.setattr(os, "fsync", counting)

        async def one(n):
            commit.append(event(n))
            await commit.durable()
            assert (tmp_path / "00000001.log").read_bytes().count(b"traj") > n

        await asyncio.gather(*[one(n) for n in range(1, 21)])
        assert len(syncs) <= 3
        commit.append(event(21))
        await commit.close()

    asyncio.run(main())
    assert read(tmp_path) == list(range(22))


@pytest.mark.parametrize("failing", ["writev", "fsync", "write"])
def test_a_full_disk_is_waited_out_with_nothing_torn_left_behind(tmp_path, monkeypatch, failing):
    real = getattr(os, failing)

    def full(fd, *args):
        if failing == "writev":
            real(fd, [memoryview(args[0][0])[:3]])  # what still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main():
        commit = GroupCommit(Spool(tmp_path), retry_s=0.01)
        if failing != "write":  # that one fails at the start of a segment
            commit.append(event(0))
            await commit.durable()
        monkeypatch.setattr(os, failing, full)
        commit.append(event(1))
        first = asyncio.create_task(commit.durable())
        async with asyncio.timeout(20):
            while commit.full is None:
                await asyncio.sleep(0)
        commit.append(event(2))
        second = asyncio.create_task(commit.durable())
        await asyncio.sleep(0.05)
        assert not first.done() and not second.done() and commit.failure is None
        monkeypatch.setattr(os, failing, real)
        async with asyncio.timeout(20):
            await asyncio.gather(first, second)
        assert commit.full is None
        await commit.close()

    asyncio.run(main())
    assert read(tmp_path) == ([0, 1, 2] if failing != "write" else [1, 2])


def test_a_broken_disk_fails_the_waiters_and_everyone_after(tmp_path, monkeypatch):
    async def main():
        commit = GroupCommit(Spool(tmp_path))

        def broken(fd, data):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "writev", broken)
        commit.append(event(0))
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                await asyncio.wait_for(commit.durable(), 5)

    asyncio.run(main())

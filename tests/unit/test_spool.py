"""The log on disk: round trip, torn tails, damage, segments, group commit. Not covered: a disk that lies about
fsync.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from areal_dta.batcher import spool as spool_module
from areal_dta.batcher.ledger import Event
from areal_dta.batcher.spool import GroupCommit, Spool, SpoolError


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
        events = list(spool.replay())
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


def test_strip_shrinks_closed_segments_and_keeps_order(tmp_path):
    write(tmp_path, [event(n, size=200) for n in range(6)], segment_bytes=1500)
    spool = Spool(tmp_path, segment_bytes=1500)
    list(spool.replay())
    num_segments = len(spool.segments())
    saved = spool.strip(lambda e: Event(e.kind, e.body) if e.body["n"] != 1 else None)
    assert saved > 1000
    assert spool.strip(lambda e: None) == 0
    spool.close()
    assert len(list(tmp_path.glob("*.log"))) == num_segments
    assert read(tmp_path) == list(range(6))
    spool = Spool(tmp_path)
    assert [len(e.arrays) for e in spool.replay()][:3] == [0, 1, 0]
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


def test_a_full_disk_fails_the_waiters_and_everyone_after(tmp_path, monkeypatch):
    async def main():
        commit = GroupCommit(Spool(tmp_path))

        def full(fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        commit.append(event(0))
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(commit.durable(), 5)
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(commit.durable(), 5)

    asyncio.run(main())


def test_two_strips_at_once_leave_a_readable_spool(tmp_path):
    for trial in range(20):
        directory = tmp_path / str(trial)
        write(directory, [event(n, size=200) for n in range(30)], segment_bytes=1000)
        spool = Spool(directory, segment_bytes=1000)
        reducers = [lambda e: Event(e.kind, e.body), lambda e: Event(e.kind, e.body) if e.body["n"] % 2 else None]
        threads = [threading.Thread(target=spool.strip, args=(reduce,)) for reduce in reducers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        spool.close()
        assert read(directory) == list(range(30))

"""A range of a local shard that other threads read says what the file says, whatever happens."""

import os
import random
import threading
from concurrent.futures import wait
from contextlib import ExitStack

import numpy as np
import pytest

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import open, open_late, open_shard
from dask_image_ingest.storage.listing import find_shards
from dask_image_ingest.storage.reader import request_threads

PIECE, SIZE = 1000, 10_500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(open, "_PIECE", PIECE)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    return path


def memory(nbytes):
    return np.full(nbytes + 3, 0xEE, np.uint8)


@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (777, 9001), (5, 6), (2000, 3000)])
def test_any_slice_is_that_of_the_file(shard, start, stop):
    data = shard.read_bytes()
    random_ = random.Random(start)
    with open_shard(str(shard)) as content:
        content.prefetch_into(start, stop, memory)
        for _ in range(400):
            begin = random_.randrange(SIZE + 10)
            end = begin + random_.choice((0, 1, 512, 2500, SIZE))
            assert bytes(content[begin:end]) == data[begin:end]
            ready = content.in_memory()
            assert bytes(ready) == data[: len(ready)]
    assert len(content) == SIZE


def test_a_shard_that_is_opened_late_is_read_ahead_too(shard):
    (listed,) = find_shards(str(shard))
    with open_late(listed, None) as content:
        content.prefetch_into(100, SIZE, memory)
        assert isinstance(content[200:300], memoryview)
        assert bytes(content[200:300]) == shard.read_bytes()[200:300]


def test_slices_outlive_the_shard_and_keep_their_bytes(shard):
    with open_shard(str(shard)) as content:
        content.prefetch_into(0, SIZE, memory)
        part = content[3000:4000]
    assert bytes(part) == shard.read_bytes()[3000:4000]


def test_without_memory_nothing_is_read_ahead(shard):
    with open_shard(str(shard)) as content:
        content.prefetch_into(0, SIZE, lambda _: None)
        assert isinstance(content[0:100], bytes)


def test_what_cannot_be_read_ahead_is_the_error_of_who_asks_for_it(shard, monkeypatch):
    data = shard.read_bytes()

    def fails(number, buffers, offset):
        if 3000 <= offset < 5000:
            raise OSError(5, "Input/output error")
        return preadv(number, buffers, offset)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", fails)
    with open_shard(str(shard)) as content:
        content.prefetch_into(0, SIZE, memory)
        assert bytes(content[0:3000]) == data[:3000]
        assert bytes(content[2900:3100]) == data[2900:3100]  # read by itself, and there it works
        assert bytes(content[9000:9100]) == data[9000:9100]


def test_a_shard_that_is_cut_short_meanwhile_is_an_error_that_names_it(shard):
    with ExitStack() as opened:
        content = opened.enter_context(open_shard(str(shard)))
        os.truncate(shard, 4000)
        content.prefetch_into(0, SIZE, memory)
        with pytest.raises(ShardError, match=r"a\.tar has changed while it was read: it had 10500"):
            content[0:SIZE]
        with pytest.raises(ShardError, match=r"a\.tar has changed while it was read"):
            opened.close()


def test_whoever_waits_reads_it_where_all_threads_are_busy(shard):
    release = threading.Event()
    threads = request_threads(2)
    busy = [threads.submit(release.wait, 60) for _ in range(2)]
    try:
        with open_shard(str(shard)) as content:
            content.prefetch_into(0, SIZE, memory)
            assert bytes(content[0:SIZE]) == shard.read_bytes()
    finally:
        release.set()
        wait(busy)


def test_no_thread_reads_once_the_shard_is_closed(shard, monkeypatch):
    reading, preadv = [], os.preadv

    def slow(number, buffers, offset):
        reading.append(offset)
        threading.Event().wait(0.05)
        count = preadv(number, buffers, offset)
        reading.remove(offset)
        return count

    monkeypatch.setattr(os, "preadv", slow)
    with open_shard(str(shard)) as content:
        content.prefetch_into(0, SIZE, memory)
    assert not reading
    with pytest.raises(ShardError):
        content[0:10]

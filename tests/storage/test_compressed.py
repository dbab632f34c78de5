"""What a compressed shard unpacks to may be of any size: memory holds the beginning of it."""

from __future__ import annotations

import errno
import gzip
import os
import random
from contextlib import suppress

import dask
import pytest
from tars import samples_of, tar, zstd

import dask_image_ingest as dii
from dask_image_ingest.storage import open_shard, streams
from dask_image_ingest.tar import index_tar

NAMES = [f"{n:02}.{kind}" for n in range(9) for kind in "ab"]
FILES = {name: random.Random(name).randbytes(30_000) for name in NAMES}
# Zeros are a hole of the file that has them.
FILES |= {"zeros.a": bytes(400_000), "zeros.b": b"behind them"}
SHARD = tar(FILES)


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(streams, "_IN_MEMORY", 100_000)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize("cut", [None, 400_000])
def test_what_memory_does_not_hold_is_read_from_a_file(tmp_path, compress, cut, small_memory):
    (tmp_path / "x").write_bytes(compress(SHARD)[:cut])
    with open_shard(str(tmp_path / "x")) as content:
        size = len(content)
        assert (size == len(SHARD)) == (cut is None)
        for start, stop in [(0, 9), (99_990, 100_010), (100_000, 100_001), (150_000, size), (5, 5)]:
            assert bytes(content[start:stop]) == SHARD[start : min(stop, size)]
        index = index_tar(content)
        found = samples_of(content, index)
    assert (index.damage is None) == (cut is None)
    whole = samples_of(SHARD, index_tar(SHARD))
    assert len(found) == 10 if cut is None else 5 < len(found) < 10
    assert all(whole[key].items() >= sample.items() for key, sample in found.items())


def test_a_disk_without_room_is_an_error_that_names_the_shard(tmp_path, small_memory, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(SHARD))
    monkeypatch.setattr(streams.os, "pwrite", full)
    said = r"x\.tar\.gz decompresses to more than .* no room: .*Set temporary-directory"
    with pytest.raises(dii.ShardError, match=said):
        dii.read_webdataset_images(tmp_path / "x.tar.gz", backend="pandas")


def test_nothing_of_it_is_left_behind(tmp_path, small_memory):
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(SHARD))
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def spilled() -> list[str]:
        return [file for file in open_files() if file.startswith(str(scratch))]

    with (
        dask.config.set({"temporary-directory": str(scratch)}),
        open_shard(str(tmp_path / "x.tar.gz")) as content,
    ):
        assert len(content) == len(SHARD)
        assert len(spilled()) == 1
        assert not os.listdir(scratch)
    assert not spilled()


def open_files() -> list[str]:
    """What this process has open, files without a name included."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found

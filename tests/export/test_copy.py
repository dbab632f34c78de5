"""How members are copied: with few files open, little in memory, and whatever the kernel does."""

from __future__ import annotations

import errno
import os
import tracemalloc

import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ShardError
from dask_image_ingest.export import copy


@pytest.fixture
def many(tmp_path):
    """300 samples in 100 shards."""
    folder = tmp_path / "in"
    folder.mkdir()
    samples = {}
    for shard in range(100):
        part = {f"{shard:02d}{n}": {"jpg": os.urandom(700 * n), "txt": b"t" * n} for n in range(3)}
        members = {f"{key}.{e}": data for key, m in part.items() for e, data in m.items()}
        (folder / f"{shard:02d}.tar").write_bytes(tar(members))
        samples |= part
    frame = dii.read_webdataset_images(folder, backend="pandas")
    return frame.drop(columns=["image", "error"]).compute(), samples


def test_a_shuffle_over_many_shards_keeps_few_files_open(many, tmp_path, monkeypatch):
    rows, samples = many
    opened = []
    write = copy._Output.write

    def counting(self, member, content):
        opened.append(len(os.listdir("/proc/self/fd")))
        write(self, member, content)

    monkeypatch.setattr(copy._Output, "write", counting)
    before = len(os.listdir("/proc/self/fd"))
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=1)
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == samples
    assert max(opened) <= before + 8


@pytest.mark.parametrize("shuffle", [None, 1])
def test_writes_that_the_kernel_cuts_short_are_gone_on_with(shuffle, many, tmp_path, monkeypatch):
    rows, samples = many
    pwritev = os.pwritev

    def short(file, buffers, position):
        whole = b"".join(buffers)
        return pwritev(file, [whole[: max(1, len(whole) * 2 // 3)]], position)

    monkeypatch.setattr(os, "pwritev", short)
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=shuffle)
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == samples


def test_a_source_that_is_cut_while_it_is_mapped_is_an_error(many, tmp_path, monkeypatch):
    rows, _ = many

    def gone(file, buffers, position):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(os, "pwritev", gone)
    with pytest.raises(ShardError, match="changed while it was copied"):
        dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar")
    assert not shards_in(tmp_path / "out")


def test_a_shard_is_not_in_memory_while_it_is_written(tmp_path):
    members = {f"{number:03d}.jpg": os.urandom(1 << 20) for number in range(64)}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    rows = frame.drop(columns=["image", "error"]).compute()
    del members
    tracemalloc.start()
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20

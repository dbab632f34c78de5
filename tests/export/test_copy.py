"""How members are copied: with few files open, little in memory, and whatever the kernel does."""

from __future__ import annotations

import hashlib
import os
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ShardError
from dask_image_ingest.export import write_shards
from dask_image_ingest.export.write_shards import TarWriter

# Members of random bytes, whatever their extension: as columns they have no text.
pytestmark = pytest.mark.filterwarnings("ignore:.*became null")


KINDS = {"jpg": b"none", "flag": b""}


@pytest.fixture
def many(tmp_path):
    """300 samples in 100 shards."""
    folder = tmp_path / "in"
    folder.mkdir()
    samples = {}
    for shard in range(100):
        part = {
            f"{shard:02d}{n}": {"jpg": random.randbytes(700 * n), "txt": b"t" * n} for n in range(3)
        }
        members = {f"{key}.{e}": data for key, m in part.items() for e, data in m.items()}
        (folder / f"{shard:02d}.tar").write_bytes(tar(members))
        samples |= part
    frame = dii.read_webdataset_images(folder, backend="pandas")
    return frame.drop(columns=["image", "error"]).compute(), samples


@pytest.mark.slow
def test_a_shuffle_over_many_shards_keeps_few_files_open(many, tmp_path, monkeypatch):
    rows, samples = many
    opened = []
    write = TarWriter.write

    def counting(self, member, pieces):
        opened.append(len(os.listdir("/proc/self/fd")))
        write(self, member, pieces)

    monkeypatch.setattr(TarWriter, "write", counting)
    before = len(os.listdir("/proc/self/fd"))
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=1)
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == samples
    assert max(opened) <= before + 8


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 1])
def test_writes_that_the_kernel_cuts_short_are_gone_on_with(shuffle, many, tmp_path, monkeypatch):
    rows, samples = many
    pwrite = os.pwrite

    def short(file, data, position):
        return pwrite(file, data[: max(1, len(data) * 2 // 3)], position)

    monkeypatch.setattr(os, "pwrite", short)
    written = dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=shuffle)
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == samples
    assert_sha256(written)


@pytest.mark.slow
def test_a_source_that_is_cut_while_it_is_read_is_an_error(many, tmp_path, monkeypatch):
    rows, _ = many
    pwrite = os.pwrite

    def cut(file, data, position):
        os.truncate(tmp_path / "in" / "50.tar", 1024)
        return pwrite(file, data, position)

    monkeypatch.setattr(os, "pwrite", cut)
    with pytest.raises(ShardError, match="changed"):
        dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar")
    assert not shards_in(tmp_path / "out")


@pytest.mark.slow
def test_a_shard_is_not_in_memory_while_it_is_written(tmp_path):
    members = {f"{number:03d}.jpg": random.randbytes(1 << 20) for number in range(64)}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    rows = frame.drop(columns=["image", "error"]).compute()
    del members
    tracemalloc.start()
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar", shuffle=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.slow
@pytest.mark.rounds(4, nightly=60)
def test_members_of_any_size_in_any_order_with_anything_between(seed, rng, tmp_path, monkeypatch):
    """Few bytes at once, so that runs, pieces and blocks end in all places."""
    at_once = rng.choice([1, 700, 5000])
    monkeypatch.setattr(write_shards, "AT_ONCE", at_once)
    monkeypatch.setattr(write_shards, "AT_ONCE", at_once)
    monkeypatch.setattr(write_shards, "_BEHIND", rng.choice([1, 5000, 4 << 20]))
    monkeypatch.setattr(write_shards, "_GAP", rng.choice([0, 512, 2000]))
    monkeypatch.setattr(write_shards, "_LARGE", rng.choice([6000, 20_000]))
    sizes = [0, 0, 0, 1, 511, 512, 513, 3000, 6001, 30_000]
    samples = {}
    for shard in range(3):
        part = {}
        for number in range(rng.randrange(1, 12)):
            others = rng.sample(["txt", "json", "cls", "a.b"], rng.choice([0, 1, 4]))
            extensions = rng.sample(["jpg", *others], 1 + len(others))
            part[f"{shard}{number:02d}"] = {e: rng.randbytes(rng.choice(sizes)) for e in extensions}
        members = {f"{key}.{e}": data for key, m in part.items() for e, data in m.items()}
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{shard}.tar").write_bytes(tar(members))
        samples |= part
    frame = dii.read_webdataset_images(tmp_path / "in", backend="pandas").drop(
        columns=["image", "error"]
    )
    for name, shuffle in (("sorted", None), ("shuffled", seed)):
        path = tmp_path / name / "{shard}.tar"
        written = dii.to_webdataset(frame, path, samples_per_shard=7, shuffle=shuffle)
        assert dict(by_webdataset(shards_in(tmp_path / name))) == samples
        assert_sha256(written)


def test_neighbours_are_read_together(tmp_path, monkeypatch):
    members = {f"{n:03d}.{e}": random.randbytes(900) for n in range(200) for e in ("jpg", "txt")}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    rows = frame.drop(columns=["image", "error"]).compute()
    reads = []
    coalesce = write_shards._coalesce
    monkeypatch.setattr(
        write_shards,
        "_coalesce",
        lambda *args: (reads.append(one) or one for one in coalesce(*args)),
    )
    dii.to_webdataset(rows, tmp_path / "out" / "{shard}.tar")
    assert 1 < len(reads) <= 4  # of 600 kB


def assert_sha256(written) -> None:
    for url, sha256 in zip(written.url, written.sha256, strict=True):
        assert hashlib.sha256(Path(url).read_bytes()).hexdigest() == sha256


def test_empty_members_are_written_without_their_sources(tmp_path, monkeypatch):
    members = {f"{n}.{kind}": data for n in range(3) for kind, data in KINDS.items()}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    frame = frame.drop(columns=["image", "error"])
    monkeypatch.setattr(write_shards, "open_shard", None)  # of the copy; the plan opens them
    dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", members=["flag"], sidecar=None)
    with tarfile.open(tmp_path / "out" / "0.tar") as written:
        assert [(m.name, m.size) for m in written] == [(f"{n}.flag", 0) for n in range(3)]

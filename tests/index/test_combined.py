"""One index file for all shards of a folder: used as a shard's own, and counted without a task."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from faulty_server import faulty_server
from s3 import empty_bucket, s3_options
from synthetic import write_shards
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.index import discovery
from dask_image_ingest.storage.output.store import LocalStore

SHARDS, SAMPLES = 6, 8
ALL = [f"picture {number}" for number in range(SHARDS * SAMPLES)]


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "shards").mkdir()
    return write_shards(tmp_path / "shards", SHARDS, per_shard=SAMPLES, size=(60, 80))


@pytest.fixture
def combined(shards):
    dii.write_index(shards, combined=True)
    return Path(shards[0]).parent / "_index.parquet"


@contextmanager
def nothing_indexed():
    """Whoever scans a tar for its index fails."""

    def fail(*args):
        raise AssertionError("a tar was scanned")

    with pytest.MonkeyPatch.context() as patch:
        # The function has the name of its module.
        patch.setattr(sys.modules["dask_image_ingest.index.write_index"], "index_tar", fail)
        yield


def read(paths, **options):
    return dii.read_webdataset_images(paths, backend="pandas", **options)


def captions(paths, **options):
    return read(paths, **options)["txt"].compute().tolist()


def repaint(shard):
    """Change the captions of a shard; its size stays."""
    path = Path(shard)
    path.write_bytes(path.read_bytes().replace(b"picture", b"painter"))


def painted(*numbers):
    """The captions of all shards after some were repainted."""
    return [
        text.replace("picture", "painter") if place // SAMPLES in numbers else text
        for place, text in enumerate(ALL)
    ]


def test_what_it_tells_and_where_it_lies(shards):
    folder = Path(shards[0]).parent
    told = dii.write_index(shards, combined=True)
    assert told["shard"].tolist() == shards
    assert set(told["index"]) == {f"{folder}/_index.parquet"}
    assert told["samples"].tolist() == [SAMPLES] * SHARDS
    assert told["state"].tolist() == ["written"] * SHARDS
    assert sorted(os.listdir(folder)) == ["_index.parquet", *map(os.path.basename, shards)]


def test_other_tools_can_read_it(shards, combined):
    found = pd.read_parquet(combined)
    assert found["__shard__"].tolist() == [Path(s).name for s in shards for _ in range(SAMPLES)]
    row = found[found["txt/content"] == b"picture 21"].iloc[0]
    data = Path(shards[2]).read_bytes()
    assert data[row["txt/offset"] :][: row["txt/size"]] == b"picture 21"


def test_rows_are_counted_without_a_look_at_a_file(shards, combined):
    ddf = read(shards, partition_size=40_000)
    assert ddf.npartitions > SHARDS
    lengths = [len(part.compute()) for part in ddf["txt"].partitions]
    shutil.rmtree(combined.parent)
    assert len(ddf) == len(ddf["txt"]) == len(ddf[["cls", "image"]]) == len(ALL)
    assert [len(part) for part in ddf.partitions] == lengths
    assert len(ddf.partitions[[2, 2, 0]]) == 2 * lengths[2] + lengths[0]
    with pytest.raises(dii.ShardNotFoundError):
        len(ddf[ddf.error.isna()])


def test_what_it_has_needs_no_scan(shards, combined, no_scan):
    for options in ({}, {"index": True}, {"shards_per_partition": "auto"}):
        assert captions(shards, **options) == ALL
    with pytest.raises(AssertionError, match="scanned"):
        captions(shards, index=False)


@pytest.mark.parametrize("together", [1, 4])
def test_a_shard_that_has_changed_is_told_and_read_without(shards, combined, together):
    repaint(shards[3])
    stale = r"_index\.parquet is not used: it is stale.*shard-0003\.tar is read without it"
    ddf = read(shards, shards_per_partition=together)
    for number in {*range(SHARDS)} - {3}:
        os.unlink(shards[number])
    with pytest.warns(UserWarning, match=stale) as said:
        assert ddf["txt"].compute().tolist() == painted(3)
    assert len(said) == 1
    assert len(ddf) == len(ALL), "it is not told again"


def test_a_shard_has_its_own_index_where_the_other_is_stale(shards, combined, no_scan):
    repaint(shards[0])
    repaint(shards[3])
    dii.write_index([shards[0], shards[3]])
    assert captions(shards) == captions(shards, index=True) == painted(0, 3)
    # Where both hold, its own is not opened.
    dii.write_index(shards, combined=True)
    for path in combined.parent.glob("*.tar.index.parquet"):
        path.write_bytes(b"")
    assert captions(shards) == painted(0, 3)


def test_a_shard_that_it_does_not_have_is_read_without_a_word(shards):
    dii.write_index(shards[1:4], combined=True)
    assert captions(shards) == ALL
    assert len(read(shards)) == len(ALL)
    with pytest.raises(dii.ShardError, match=r"shard-0000\.tar\.index\.parquet can't be used"):
        captions(shards, index=True)


def test_what_holds_is_taken_over_and_not_scanned(shards):
    dii.write_index(shards[:2], combined=True)
    dii.write_index(shards[2:4])
    with nothing_indexed():
        with pytest.raises(AssertionError, match="scanned"):
            dii.write_index(shards, combined=True)
        told = dii.write_index(shards[:4], combined=True)
    assert told["state"].tolist() == ["kept"] * 4
    told = dii.write_index(shards[4:], combined=True)
    assert told["state"].tolist() == ["written"] * 2
    with nothing_indexed():
        told = dii.write_index(shards, combined=True)
    assert told["state"].tolist() == ["kept"] * SHARDS
    assert captions(shards, index=True) == ALL


def test_overwrite_scans_again_what_was_asked_for(shards, combined):
    assert dii.write_index(shards, combined=True)["state"].tolist() == ["kept"] * SHARDS
    repaint(shards[2])
    told = dii.write_index(shards[2], combined=True, overwrite=True)
    assert told["state"].tolist() == ["written"]
    assert captions(shards, index=True) == painted(2)


def test_a_call_that_was_interrupted_goes_on(shards):
    folder = Path(shards[0]).parent
    commit = LocalStore.commit

    def full(self, file, name, *args):
        if name == "_index.parquet":
            raise dii.ExportError("the disk is full")
        commit(self, file, name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "commit", full)
        with pytest.raises(dii.ExportError, match="full"):
            dii.write_index(shards, combined=True)
    assert captions(shards) == ALL
    with nothing_indexed():
        assert dii.write_index(shards, combined=True)["samples"].sum() == len(ALL)
    assert sorted(os.listdir(folder)) == ["_index.parquet", *map(os.path.basename, shards)]


@pytest.mark.parametrize("fails_from", [1, 2, 3])
def test_a_disk_that_fails_loses_no_shard_of_an_existing_one(shards, combined, fails_from):
    """Whether its footer cannot be read, or rows that are copied from it."""
    before = combined.read_bytes()
    repaint(shards[0])
    pread, reads = os.pread, []

    def fail(descriptor, *args):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(combined):
            reads.append(1)
            if len(reads) >= fails_from:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, *args)

    discovery._tables.clear()
    discovery._recent.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(dii.ShardError, match=r"_index\.parquet .*Input/output error"):
            dii.write_index(shards[0], combined=True)
    assert combined.read_bytes() == before
    dii.write_index(shards[0], combined=True)
    with nothing_indexed():
        assert captions(shards) == painted(0)


def test_staged_files_of_a_call_that_failed_last_are_removed(shards):
    folder = Path(shards[0]).parent

    def fail(self):
        raise dii.ExportError("the disk has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "fsync", fail)
        with pytest.raises(dii.ExportError, match="failed"):
            dii.write_index(shards, combined=True)
    dii.write_index(shards, combined=True)
    assert sorted(os.listdir(folder)) == ["_index.parquet", *map(os.path.basename, shards)]


def test_a_shard_that_is_no_tar_does_not_stop_the_others(shards):
    bad = Path(shards[0]).with_name("shard-0000a.tar")
    bad.write_bytes(b"<html>" * 200)
    with pytest.raises(dii.ShardError, match=r"1 of 7 shards .*shard-0000a\.tar is no tar"):
        dii.write_index(bad.parent, combined=True)
    told = dii.write_index(bad.parent, combined=True, shard_errors="drop")
    assert told["state"].tolist() == ["kept", "failed", *["kept"] * 5]
    assert captions(shards, index=True) == ALL


def test_a_damaged_one_costs_a_scan_and_no_row(shards, combined):
    whole = combined.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b'"samples":8', b'"samples":9')):
        combined.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"_index\.parquet is not used: it is damaged") as said:
            assert captions(shards) == ALL
        assert len(said) == 1
        assert said[0].filename == __file__
    assert dii.write_index(shards, combined=True)["state"].tolist() == ["written"] * SHARDS


def test_a_damaged_column_costs_a_scan_and_no_row(shards, combined):
    group = pq.ParquetFile(combined).metadata.row_group(0)
    (column,) = (
        column
        for column in map(group.column, range(group.num_columns))
        if column.path_in_schema == "txt/content"
    )
    whole = bytearray(combined.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    whole[start + column.total_compressed_size - 1] ^= 255
    combined.write_bytes(whole)
    with pytest.warns(UserWarning, match=r"_index\.parquet is not used: its column 'txt/content'"):
        assert captions(shards) == ALL
    with pytest.raises(dii.ShardError, match=r"_index\.parquet is not written.*delete it"):
        dii.write_index(shards[:2], combined=True, overwrite=True)
    combined.unlink()
    told = dii.write_index(shards[:2], combined=True)
    assert told["state"].tolist() == ["kept"] * 2  # by the call before
    assert captions(shards[:2], index=True) == ALL[: 2 * SAMPLES]


def test_one_that_is_replaced_during_a_job_costs_no_row(shards, combined):
    ddf = read(shards)
    dii.write_index(shards, combined=True, overwrite=True)
    discovery._recent.clear()
    with pytest.warns(UserWarning, match=r"_index\.parquet has changed since it was listed"):
        assert ddf["txt"].compute().tolist() == ALL
    assert captions(shards, index=True) == ALL


def test_shards_without_samples_are_in_it_too(shards, no_scan):
    folder = Path(shards[0]).parent
    for name in ("a", "shard-0002b", "z"):
        (folder / f"{name}.tar").write_bytes(tar({}))
    dii.write_index(folder, combined=True)
    for together in (1, "auto"):
        ddf = read(folder, shards_per_partition=together)
        assert ddf["txt"].compute().tolist() == ALL
        assert len(ddf) == len(ALL)


@pytest.mark.filterwarnings("ignore:the first shard")
@pytest.mark.more
def test_shards_of_other_kinds_share_it(tmp_path, no_scan):
    """Members that few shards have, in more kinds than one shard may have."""
    for number in range(90):
        members = {"a.txt": b"%d" % number, f"a.{number}.txt": b"own", "a.jpg": b""}
        (tmp_path / f"{number}.tar").write_bytes(tar(members))
    dii.write_index(tmp_path, combined=True)
    kinds = {"txt": "int64"} | {f"{number}.txt": "string" for number in range(90)}
    frame = read(tmp_path, members=kinds).compute()
    assert frame["txt"].tolist() == [*range(90)]
    assert all(frame[f"{number}.txt"].tolist()[number] == "own" for number in range(90))


def test_indexes_of_several_folders(shards, tmp_path, no_scan):
    for number, path in enumerate(shards):
        folder = tmp_path / f"part-{number % 2}"
        folder.mkdir(exist_ok=True)
        shutil.move(path, folder)
    told = dii.write_index(f"{tmp_path}/part-*/*.tar", combined=True)
    assert told["index"].nunique() == 2
    assert sorted(captions(f"{tmp_path}/part-*/*.tar", index=True)) == sorted(ALL)
    with pytest.raises(dii.ArgumentError, match=r"index=.*there is no such folder"):
        captions(tmp_path / "part-0", index=tmp_path / "nowhere")
    dii.write_index(f"{tmp_path}/part-*", folder=tmp_path / "all", combined=True)
    assert os.listdir(tmp_path / "all") == ["_index.parquet"]
    assert len(captions(f"{tmp_path}/part-*/*.tar", index=tmp_path / "all")) == len(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [True, False])
def test_a_web_server_is_asked_for_it_alone(shards, tmp_path, pages):
    files = {f"/d/{Path(path).name}": Path(path).read_bytes() for path in shards}
    with faulty_server(files=files) as server:
        urls = [f"{server.url}{name}" for name in files]
        dii.write_index(urls, folder=tmp_path / "here", combined=True)
        server.files["/d/_index.parquet"] = (tmp_path / "here/_index.parquet").read_bytes()
        server.pages = pages
        ddf = read(urls, index="auto" if pages else True)
        server.reset()
        assert len(ddf) == len(ALL)
        assert not server.seen
        assert ddf["txt"].compute().tolist() == ALL
        grouped = read(urls, index="auto" if pages else True, shards_per_partition="auto")
        server.reset()
        discovery._recent.clear()
        discovery._tables.clear()  # as in another process
        assert grouped["txt"].compute().tolist() == ALL
        assert [path for _, path, _ in server.seen] == ["/d/_index.parquet"]


@pytest.mark.slow
@pytest.mark.more
def test_a_bucket_is_listed_for_few_shards_too(shards, s3_server):
    fs, options = empty_bucket(s3_server, "combined"), s3_options(s3_server)
    for path in shards:
        fs.put_file(path, f"combined/train/{Path(path).name}")
    urls = [f"s3://combined/train/{Path(path).name}" for path in shards]
    told = dii.write_index(urls, combined=True, storage_options=options)
    assert set(told["index"]) == {"s3://combined/train/_index.parquet"}
    assert len(fs.ls("combined/train", refresh=True)) == SHARDS + 1
    with faulty_server(upstream=s3_server) as server:
        ddf = read(urls[2:4], storage_options=s3_options(server.url))
        assert len(ddf) == 2 * SAMPLES
        assert ddf["txt"].compute().tolist() == ALL[2 * SAMPLES : 4 * SAMPLES]
        read_tars = [path for _, path, _ in server.seen if re.search(r"\.tar\?x-id=GetObj", path)]
        assert not read_tars


@pytest.mark.slow
def test_tasks_of_a_cluster_use_it(shards, client):
    told = dii.write_index(shards, combined=True)
    assert told["state"].tolist() == ["written"] * SHARDS
    ddf = read(shards, shards_per_partition=2)
    assert len(ddf) == len(ALL)
    counts = ddf.groupby("cls").size().compute()
    pd.testing.assert_series_equal(
        counts.sort_index(),
        read(shards, index=False).groupby("cls").size().compute().sort_index(),
    )

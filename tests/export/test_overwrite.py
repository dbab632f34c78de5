"""``overwrite=True`` removes no shard that is read, and no export for nothing."""

from __future__ import annotations

import os

import dask.dataframe as dd
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tars import tar
from witnesses import contents

import dask_image_ingest as dii
from dask_image_ingest.errors import ExportError

READS = r"the frame reads .*000\.(tar|parquet), which this export would"


@pytest.fixture
def source(tmp_path):
    """Two shards of four samples."""
    folder = tmp_path / "in"
    folder.mkdir()
    for shard in range(2):
        members = {f"{shard}{n}.{e}": b"%d" % n for n in range(4) for e in ("jpg", "txt")}
        (folder / f"{shard:03d}.tar").write_bytes(tar(members))
    return folder


@pytest.fixture
def out(source, tmp_path):
    """An export of these."""
    export(read(source), tmp_path / "out")
    return tmp_path / "out"


def read(paths, **options):
    frame = dii.read_webdataset_images(paths, backend="pandas", **options)
    return frame.drop(columns=["image", "error"])


def export(frame, out, **options):
    return dii.to_webdataset(frame, f"{out}/{{shard:03d}}.tar", samples_per_shard=4, **options)


def none(frame):
    return frame[frame["txt"] == "no such text"]


# Each reads from the folder, and keeps no row of it.
KEEPING_NONE = {
    "filter": lambda out, _: none(read(out)),
    "partition": lambda out, _: none(read(out).partitions[[1]]),
    "join": lambda out, source: read(source).merge(
        read(out)[["__key__", "txt"]].rename(columns={"txt": "other"}), on="__key__"
    ),
    "checkpoint": lambda out, source: none(dii.checkpoint(read(out), source.parent / "stored")),
    "stored twice": lambda out, source: none(
        dii.checkpoint(dii.checkpoint(read(out), source.parent / "stored"), source.parent / "again")
    ),
}


@pytest.mark.parametrize("keeping", KEEPING_NONE)
def test_shards_that_are_read_stay_whatever_rows_are_kept(keeping, source, out):
    before = contents(out)
    frame = KEEPING_NONE[keeping](out, source)
    with pytest.raises(ExportError, match=READS):
        export(frame, out, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("row_errors", ["raise", "drop"])
def test_shards_of_rows_that_are_left_out_stay(row_errors, source, out):
    """A frame that is computed tells by its rows alone what it reads."""
    before = contents(out)
    frame = dd.concat([read(out).partitions[[0]], read(source)]).compute()
    frame["__key__"] = ["a.b"] * 4 + [f"{n}" for n in range(8)]
    with pytest.raises(Exception, match=READS if row_errors == "drop" else "bad-key"):
        export(frame, out, overwrite=True, row_errors=row_errors)
    assert contents(out) == before


@pytest.mark.parametrize("link", ["folder", "shard", "file://"])
def test_shards_that_are_read_by_another_name_stay(link, out, tmp_path):
    before = contents(out)
    if link == "folder":
        (tmp_path / "link").symlink_to(out)
        frame = read(tmp_path / "link")
    elif link == "shard":
        (tmp_path / "000.tar").symlink_to(out / "000.tar")
        frame = read(tmp_path / "000.tar")
    else:
        frame = read(f"file://{out}/*.tar")
    with pytest.raises(ExportError, match=READS):
        export(frame, out, overwrite=True)
    assert contents(out) == before


def test_shards_on_another_file_system_stay(source):
    fs = MemoryFileSystem()
    fs.store.clear()
    export(read(source), "memory://out")
    before = {name: fs.cat_file(name) for name in fs.find("/out")}
    again = read("memory://out/*.tar")
    with pytest.raises(ExportError, match=READS):
        export(again, "memory://out", overwrite=True)
    assert {name: fs.cat_file(name) for name in fs.find("/out")} == before


def test_an_export_is_not_replaced_by_none(source, out):
    before = contents(out)
    with pytest.raises(ExportError, match=r"an export of 8 samples, .* no row to take its place"):
        export(none(read(source)), out, overwrite=True)
    assert contents(out) == before
    # Nothing is lost where there was nothing.
    assert len(export(none(read(source)), out.parent / "new")) == 0
    assert len(export(none(read(source)), out.parent / "new", overwrite=True)) == 0


def test_an_export_is_not_replaced_while_shards_cannot_be_read(source, out):
    before = contents(out)
    frame = read(source).compute()
    os.rename(source / "001.tar", source / "away")
    with pytest.raises(
        ExportError, match=r"8 samples, .* 4 rows of the frame .*be read now: .*001\.tar"
    ):
        export(frame, out, overwrite=True, row_errors="drop")
    assert contents(out) == before
    os.rename(source / "away", source / "001.tar")
    assert export(frame, out, overwrite=True, row_errors="drop")["samples"].sum() == 8

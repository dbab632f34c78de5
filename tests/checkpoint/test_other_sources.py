"""Files and tables of images are computed once, and again only where they have changed."""

from __future__ import annotations

import os
from functools import partial

import dask
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dask_image_ingest as dii
from dask_image_ingest.dataset import image_files, parquet_images


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch):
    monkeypatch.setattr(image_files, "_MOST_FILES", 4)
    monkeypatch.setattr(parquet_images, "MOST_ENCODED", 60_000)
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture
def calls(tmp_path):
    """How often a function was called since this was asked last."""
    file = tmp_path / "calls"

    def count():
        number = len(file.read_text().splitlines()) if file.exists() else 0
        file.write_text("")
        return number

    return count


def means(frame, file):
    def mean(images):
        with open(file, "a") as calls:
            calls.write("called\n")
        return [float(image.mean()) for image in images]

    return frame.images.map_batches(mean, {"mean": "float32"}, batch_size=1000)


def write_files(folder, photos):
    for number, photo in enumerate(photos):
        path = folder / ("cat", "dog")[number % 2] / f"{number:02}.{photo.extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo.encoded)
    return sorted(folder.rglob("*.*"))


def write_tables(folder, photos):
    folder.mkdir()
    paths = []
    for part in range(2):
        rows = photos[part * 8 : part * 8 + 8]
        table = pa.table({"image": [photo.encoded for photo in rows], "n": range(8)})
        paths.append(folder / f"{part}.parquet")
        pq.write_table(table, paths[-1], row_group_size=2)
    return paths


SOURCES = {
    "files": (write_files, partial(dii.read_images, label="folder")),
    "tables": (write_tables, dii.read_parquet_images),
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_has_not_changed_is_never_computed_again(source, photos, tmp_path, calls):
    write, read = SOURCES[source]
    paths = write(tmp_path / "in", photos[:16])

    def job():
        return means(read(tmp_path / "in", size=16, backend="pandas"), tmp_path / "calls")

    def stored():
        return dii.checkpoint(job(), tmp_path / "out")

    want = job().compute()
    partitions = job().npartitions
    assert calls() == partitions > 2
    first = stored()
    pd.testing.assert_frame_equal(first.compute(), want)
    assert (first.npartitions, calls()) == (partitions, partitions)
    assert len(first) == 16
    pd.testing.assert_frame_equal(stored().compute(), want)
    assert calls() == 0
    # A later time is another file; the other partitions stay.
    os.utime(paths[-1], ns=(0, 10**18))
    pd.testing.assert_frame_equal(stored().compute(), want)
    again = calls()
    assert 0 < again < partitions
    with pytest.raises(dii.ExportError, match="has the results of other work"):
        dii.checkpoint(read(tmp_path / "in", size=32, backend="pandas"), tmp_path / "out")


def test_files_behind_the_others_leave_theirs_as_they_were(photos, tmp_path, calls):
    write_files(tmp_path / "in", photos[:8])

    def job():
        frame = dii.read_images(tmp_path / "in", size=16, backend="pandas")
        return means(frame[frame["nbytes"] > 0], tmp_path / "calls")

    dii.checkpoint(job(), tmp_path / "out")
    assert calls() == 2
    (tmp_path / "in" / "zebra.png").write_bytes(photos[2].encoded)
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert (stored.npartitions, calls()) == (3, 1)
    want = job().compute()
    pd.testing.assert_frame_equal(stored.compute(), want)
    # One that comes before moves all rows, whose labels number the files.
    (tmp_path / "in" / "ant.png").write_bytes(photos[2].encoded)
    stored = dii.checkpoint(job(), tmp_path / "out")
    pd.testing.assert_frame_equal(stored.compute(), job().compute())


def test_files_and_tables_that_changed_meanwhile_are_refused(photos, tmp_path):
    (path, *_) = write_files(tmp_path / "in", photos[:4])
    ddf = dii.read_images(tmp_path / "in", size=16, backend="pandas")
    path.write_bytes(photos[5].encoded)
    with pytest.raises(dii.ShardError, match="changed"):
        dii.checkpoint(ddf, tmp_path / "out")

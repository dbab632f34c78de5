"""Whatever is written wherever: what a frame reads stays as it is, byte for byte."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import suppress

import dask.dataframe as dd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import curate
from dask_image_ingest.errors import DaskImageIngestError
from dask_image_ingest.storage import find_shards, searches_of


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16 + number), (number * 20, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of tars with all that can lie beside them, parquet files, photographs, a table."""
    top = tmp_path_factory.mktemp("made")
    for folder in ("tars", "photos/a", "parquet"):
        (top / folder).mkdir(parents=True)
    for shard in range(2):
        members = {f"{shard}{n}.png": png(n) for n in range(2)}
        (top / "tars" / f"{shard:03d}.tar").write_bytes(tar(members))
        keys = [f"{shard}{n}" for n in range(2)]
        pq.write_table(pa.table({"__key__": keys, "n": [1, 2]}), top / f"tars/{shard:03d}.parquet")
        images = pa.table({"image": [png(0), png(1)], "n": [1, 2]})
        pq.write_table(images, top / "parquet" / f"part.{shard}.parquet")
        (top / "photos" / "a" / f"{shard:03d}.png").write_bytes(png(shard))
    dii.write_index(str(top / "tars"))
    return top


# The folder with the files that are read, and how.
SOURCES = {
    "tars": ("tars", lambda at: dii.read_webdataset_images(at, sidecar="parquet")),
    "some tars": ("tars", lambda at: dii.read_webdataset_images(at).partitions[[0]]),
    "no row": ("tars", lambda at: none(dii.read_webdataset_images(at, columns=KEYS))),
    "parquet": ("parquet", lambda at: dii.read_parquet_images(at)),
    "references": ("parquet", lambda at: dii.read_parquet_images(at, decode=False)),
    "photos": ("photos/a", lambda at: dii.read_images(at)),
    "folders": ("photos", lambda at: dii.read_images(at, decode=False)),
    "checkpoint": ("stored", lambda at: stored(at)),
    "persisted": ("photos/a", lambda at: dii.read_images(at, decode=False).persist()),
    "computed": ("photos/a", lambda at: dii.read_images(at, decode=False).compute()),
    "table": ("photos", lambda at: dd.read_parquet(table(at))),
    "table by Arrow": ("photos", lambda at: dd.read_parquet(table(at), **ARROW)),
    "link": ("photos/a", lambda at: dii.read_images(linked(at))),
    "file://": ("photos/a", lambda at: dii.read_images(f"file://{at}/*.png")),
    "optimized": ("photos/a", lambda at: dii.read_images(at).optimize()),
    "merged": ("parquet", lambda at: merged(at)),
}
KEYS = ["__key__", "__url__", "offset", "nbytes"]
ARROW = {"filesystem": "arrow"}


def table(at):
    references = dii.read_images(at, decode=False, backend="pandas").compute()
    references.to_parquet(at / "table.parquet")
    return at / "table.parquet"


def none(frame):
    return frame[frame["nbytes"] < 0]


def stored(at):
    frame = dii.read_images(at.parent / "photos" / "a", decode=False)
    return dii.checkpoint(frame, at)


def merged(at):
    photos = dii.read_images(at.parent / "photos" / "a", decode=False)
    numbers = dii.read_parquet_images(at, columns=["n"])[["n"]]
    return photos.merge(numbers, left_index=True, right_index=True)


def linked(at):
    (at.parent / "link").symlink_to(at)
    return at.parent / "link"


WRITERS = {
    "webdataset": lambda frame, at: dii.to_webdataset(
        frame.drop(columns=[n for n in ("image", "error") if n in frame.columns]),
        f"{at.parent}/{{shard:03d}}.tar",
        overwrite=True,
    ),
    "parquet": lambda frame, at: dii.to_parquet_images(frame, at.parent, overwrite=True),
    "checkpoint": lambda frame, at: dii.checkpoint(frame, at.parent, overwrite=True, version="1"),
    "gallery": lambda frame, at: dii.gallery(frame, at, n=1),
    "report": lambda frame, at: curate.write_report(frame.assign(**{"quality.dark": 0.5}), at),
    "thumbnails": lambda frame, at: dii.gallery(frame, at.parent.parent / "page.html").save(at),
}


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Each writer with a third of the sources, each source with a third of the writers.
PAIRS = [
    pytest.param(writer, source, marks=[] if (row + column) % 3 == 0 else [pytest.mark.nightly])
    for row, writer in enumerate(WRITERS)
    for column, source in enumerate(SOURCES)
]


@pytest.mark.parametrize(("writer", "source"), PAIRS)
def test_no_writer_harms_what_is_read(writer, source, made, tmp_path):
    top = tmp_path / "top"
    shutil.copytree(made, top, copy_function=shutil.copy2)  # as an index says of its shard
    folder, read = top / SOURCES[source][0], SOURCES[source][1]
    frame = read(folder)
    before = contents(folder)
    for name in (min(before), max(before)):
        with suppress(DaskImageIngestError):
            WRITERS[writer](frame, folder / name)
        after = contents(folder)
        kept = {name: data for name, data in before.items() if not name.startswith("_index")}
        assert {name: after.get(name) for name in kept} == kept


# How a frame is read, and how its query is written.
ADDED = {
    "tars": (
        lambda top: dii.read_webdataset_images(top),
        lambda frame, at: dii.to_webdataset(frame, f"{at}/{{shard:03d}}.tar"),
    ),
    "optimized": (
        lambda top: dii.read_webdataset_images(f"file://{top}/**").optimize(),
        lambda frame, at: dii.to_webdataset(frame, f"{at}/{{shard:03d}}.tar"),
    ),
    "sidecars": (
        lambda top: dii.read_parquet_images(top, decode=False),
        lambda frame, at: dii.to_webdataset(
            frame[frame["n"] < 2].partitions[[0]], f"{at}/{{shard:03d}}.tar", sidecar="parquet"
        ),
    ),
    "parquet": (
        lambda top: dii.read_parquet_images(f"{top}/*", decode=False),
        lambda frame, at: dii.to_parquet_images(frame, at),
    ),
    "checkpoint": (
        lambda top: dii.read_parquet_images(top, decode=False),
        lambda frame, at: dii.checkpoint(frame, at),
    ),
    "of a checkpoint": (
        lambda top: dii.checkpoint(
            dii.read_parquet_images(top, decode=False), top.parent / f"stored{os.urandom(4).hex()}"
        ),
        lambda frame, at: dii.checkpoint(frame, at),
    ),
}


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's read_parquet
@pytest.mark.parametrize("case", ADDED)
def test_nothing_is_written_where_the_next_read_would_find_it(case, made, tmp_path):
    read, write = ADDED[case]
    top = tmp_path / "top"
    shutil.copytree(made / ("tars" if case in ("tars", "optimized") else "parquet"), top)
    found = len(read(top))
    for target in ("new", "a/new"):
        with pytest.raises(DaskImageIngestError, match="where its next read would find"):
            write(read(top), top / target)
        assert len(read(top)) == found
    for target in (".new", "../new"):
        write(read(top), top / target)
        assert len(read(top)) == found


# A glob or folder, a file that appears, and whether the glob or folder then has it.
FOUND = [
    ("top/*.tar", "top/b.tar", True),
    ("top/*.tar", "top/a/b.tar", False),
    ("top/?.tar", "top/bb.tar", False),
    ("top/**/*.tar", "top/b.tar", True),
    ("top/**/*.tar", "top/_a/b.tar", True),
    ("top/**/*.tar", "top/.a/b.tar", False),
    ("top/**/a/**/*.tar", "top/x/a/y/b.tar", True),
    ("top/**", "top/x/b.parquet", False),
    ("top/**", "top/x/b.tgz", True),
    ("top/*", "top/x/y/b.tar", True),
    ("top/*", "top/_x/y/b.tar", False),
    ("top/x*", "top/y/b.tar", False),
    ("top/[ab].*r", "top/b.parquer", True),
    ("top", "top/x/y/b.tar.zst", True),
    ("top", "top/x/_y/b.tar", False),
    ("top/", "topper/b.tar", False),
    ("top/{a,x}", "top/x/b.tar", True),
    ("link/**/*.tar", "top/x/b.tar", True),
    ("top/**/*.tar", "link/b/b.tar", True),
    ("top/**/*.tar*", "top/b.tar.index.parquet", False),
    ("top/**/*.parquet", "top/_index.parquet", False),
]


@pytest.mark.parametrize(("pattern", "new", "found"), FOUND)
def test_a_search_knows_what_it_would_find(pattern, new, found, tmp_path):
    (tmp_path / "top").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "top")
    for name in ("top/a.tar", "top/a/a.tar", "top/x/a.tar", "top/x/a/a.tar", "top/a.parquet", new):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / new).unlink()
    searches = searches_of(f"{tmp_path}/{pattern}", find_shards(f"{tmp_path}/{pattern}"))
    url = f"{tmp_path}/{new}"
    told = [search.first_found([url]) for search in searches]
    (tmp_path / new).touch()
    listed = {os.path.realpath(s.url) for s in find_shards(f"{tmp_path}/{pattern}")}  # the witness
    assert (os.path.realpath(url) in listed) == (url in told) == found

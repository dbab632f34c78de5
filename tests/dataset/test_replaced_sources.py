"""A source that is replaced while a frame is read: rows of the listed version, or an error."""

import gzip
import io
import os

import dask
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_server import faulty_server
from PIL import Image
from tars import tar

import dask_image_ingest as dii

ROWS = range(4)


def image(version, row):
    """Of the same size in bytes, whatever it shows."""
    file = io.BytesIO()
    Image.new("L", (16, 16), 16 * version + row).save(file, "BMP")
    return file.getvalue()


def shard(version):
    members = {}
    for row in ROWS:
        members |= {f"{row}.bmp": image(version, row), f"{row}.txt": b"%d" % version}
    return tar(members)


def table(version, **columns):
    file = io.BytesIO()
    columns = {"__key__": [*map(str, ROWS)], "of": [version] * len(ROWS), **columns}
    pq.write_table(pa.table(columns), file, row_group_size=1)
    return file.getvalue()


def images(version):
    return table(version, image=[image(version, row) for row in ROWS])


def read_tar(paths, **options):
    return dii.read_webdataset_images(paths, **({"partition_size": 256, "mode": "L"} | options))


def read_two(paths, **options):
    return read_tar(paths, shards_per_partition=2, partition_size=None, **options)


def read_indexed(paths, storage_options, folder):
    dii.write_index(paths, folder=folder, storage_options=storage_options)
    return read_tar(paths, index=folder, storage_options=storage_options)


def read_sidecar(paths, **options):
    return read_tar(paths, sidecar="parquet", **options)[["of"]]


# Name → bytes of a version; how it is read.
SOURCES = {
    "split tar": ({"a.tar": shard}, read_tar),
    "tars of one task": ({f"{n}.tar": shard for n in range(4)}, read_two),
    "compressed tar": ({"a.tar.gz": lambda version: gzip.compress(shard(version))}, read_tar),
    "indexed tar": ({"a.tar": shard}, read_indexed),
    "sidecar": ({"a.tar": lambda _: shard(0), "a.parquet": table}, read_sidecar),
    "parquet": ({"a.parquet": images}, dii.read_parquet_images),
    "image files": ({f"{n}.bmp": lambda v: image(v, 0) for n in range(2)}, dii.read_images),
}


@pytest.fixture(params=["local", "http", "memory"])
def place(request, tmp_path):
    """Its URL, and a function that writes or replaces a file there."""
    if request.param == "http":
        with faulty_server() as server:
            yield server.url, lambda name, data: server.files.update({f"/{name}": data})
    elif request.param == "memory":
        fs = fsspec.filesystem("memory")
        yield "memory://replaced", lambda name, data: fs.pipe_file(f"/replaced/{name}", data)
        fs.rm("/replaced", recursive=True)
    else:
        count = iter(range(1, 1000))

        def put(name, data):
            (tmp_path / name).write_bytes(data)
            os.utime(tmp_path / name, ns=(0, next(count)))  # a clock is too coarse for a test

        yield str(tmp_path), put


@pytest.mark.parametrize("source", SOURCES)
def test_no_frame_has_rows_of_two_versions(source, place, tmp_path, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.dataset.parquet_images.MOST_ENCODED", 1 << 10)
    monkeypatch.setattr("dask_image_ingest.dataset.image_files._MOST_FILES", 1)
    files, read = SOURCES[source]
    url, put = place
    for name, version in files.items():
        put(name, version(1))
    options = {"folder": tmp_path / "indexes"} if source == "indexed tar" else {}
    paths = [f"{url}/{name}" for name in files if source != "sidecar" or name == "a.tar"]
    with dask.config.set(scheduler="synchronous"):
        frame = read(paths, storage_options=None, **options)
        assert frame.npartitions > 1
        assert len(frame.partitions[0].compute())
        for name, version in files.items():
            if version(2) != version(1):
                put(name, version(2))
        changed = r"\.\w+ has changed since it was listed: it was [\d,]+ bytes.*read it again"
        with pytest.raises(dii.ShardError, match=changed):
            frame.partitions[frame.npartitions - 1].compute()
        assert len(read(paths, storage_options=None, **options).compute())


def test_parts_that_are_skipped_since_the_shard_has_changed_are_told(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(shard(1))
    frame = read_tar(path, shard_errors="drop")
    assert len(frame.partitions[0].compute()) == 1
    path.write_bytes(shard(2) + bytes(512))
    with pytest.warns(UserWarning, match=r"skipped: .*a\.tar has changed since it was listed"):
        assert not len(frame.partitions[1].compute())


def test_members_of_another_version_are_not_exported(tmp_path):
    """The rows come from an index, which is of the version that was listed."""
    path = tmp_path / "a.tar"
    path.write_bytes(shard(1))
    dii.write_index(path)
    frame = dii.read_webdataset_images(path)
    path.write_bytes(shard(2) + bytes(512))
    with pytest.raises(dii.DaskImageIngestError, match=r"a\.tar has changed since it was listed"):
        dii.to_webdataset(frame, f"{tmp_path}/out/{{shard:03d}}.tar")

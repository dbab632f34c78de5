"""Shards that can have no index: of copies, and of what commands write, no version is known."""

from __future__ import annotations

import io
import zipfile

import fsspec
import pytest
from faulty_server import faulty_server
from PIL import Image
from tars import tar

import dask_image_ingest as dii

FOLDER = "/unindexed"
URL = f"memory:/{FOLDER}/a.tar"

# fsspec's block cache leaves its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s).*FileIO name=.*copies/:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm(FOLDER, recursive=True)


def numbered(numbers):
    """A shard of grey squares, each of its own number, as key, caption and pixel."""
    members = {}
    for n in numbers:
        picture = io.BytesIO()
        Image.new("RGB", (8, 8), (n, n, n)).save(picture, "BMP")
        members |= {f"{n:03d}.bmp": picture.getvalue(), f"{n:03d}.txt": b"%d" % n}
    return tar(members)


def numbers(paths, **options):
    """What keys, captions and pixels say, row by row."""
    frame = dii.read_webdataset_images(paths, backend="pandas", **options).compute()
    pixels = [int(image[0, 0, 0]) for image in frame.images.arrays()]
    return [int(key) for key in frame["__key__"]], [int(txt) for txt in frame["txt"]], pixels


@pytest.mark.parametrize("cache", ["filecache", "simplecache"])
def test_rows_of_a_copy_are_of_one_version(memory, tmp_path, cache):
    options = {cache: {"cache_storage": str(tmp_path / "copies")}}
    old, new = numbered(range(4)), numbered(range(200, 204))
    assert len(old) == len(new)
    memory.pipe_file(f"{FOLDER}/a.tar", old)
    read = {"storage_options": options}
    assert numbers(f"{cache}::{URL}", **read) == ([*range(4)],) * 3
    memory.pipe_file(f"{FOLDER}/a.tar", new)
    dii.write_index(URL)
    assert numbers(f"{cache}::{URL}", **read) == ([*range(4)],) * 3
    assert numbers(URL, index=True) == ([*range(200, 204)],) * 3


@pytest.mark.parametrize("cache", ["filecache", "simplecache", "blockcache"])
def test_an_index_is_refused_where_copies_are_read(memory, tmp_path, cache):
    options = {cache: {"cache_storage": str(tmp_path / "copies")}}
    memory.pipe_file(f"{FOLDER}/a.tar", numbered(range(4)))
    paths = [f"{cache}::{URL}"]
    with pytest.raises(dii.ArgumentError, match=r"copies of a cache.*without the cache"):
        dii.write_index(paths, folder=tmp_path / "indexes", storage_options=options)
    assert not (tmp_path / "indexes").exists()
    for index in (True, str(tmp_path)):
        with pytest.raises(dii.ArgumentError, match=r"index=.*a\.tar can have no index"):
            numbers(paths, storage_options=options, index=index)


def test_a_server_that_tells_no_version_has_no_indexes(tmp_path):
    with faulty_server(files={"/a.tar": numbered(range(4))}) as server:
        url = f"{server.url}/a.tar"
        dii.write_index(url, folder=tmp_path)
        server.tags = False
        server.files["/a.tar"] = numbered(range(200, 204))
        with pytest.warns(UserWarning, match="is not used: the server of .* tells neither an ETag"):
            assert numbers(url, index=tmp_path) == ([*range(200, 204)],) * 3
        server.reset()
        with pytest.raises(dii.ShardError, match=r"1 of 1 shards have no index.*neither an ETag"):
            dii.write_index(url, folder=tmp_path, overwrite=True)
        assert not server.sent


def test_a_shard_in_a_zip_is_known_by_its_checksum(tmp_path):
    for name, first in (("old", 0), ("new", 200)):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            info = zipfile.ZipInfo("a.tar", (2026, 1, 1, 0, 0, 0))
            archive.writestr(info, numbered(range(first, first + 4)))
    url = f"zip://*.tar::{tmp_path}/old.zip"
    dii.write_index(url, folder=tmp_path)
    assert numbers(url, index=tmp_path) == ([*range(4)],) * 3
    (tmp_path / "new.zip").replace(tmp_path / "old.zip")
    fsspec.get_filesystem_class("zip").clear_instance_cache()
    with pytest.warns(UserWarning, match="is not used: it is stale"):
        assert numbers(url, index=tmp_path) == ([*range(200, 204)],) * 3


def test_no_command_runs_that_nobody_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").write_bytes(numbered(range(4)))
    command = "pipe:cat a.tar | tee copy.tar"
    with pytest.raises(dii.ArgumentError, match=r"index=True: pipe:cat .* it is a command"):
        numbers(command, allow_pipes=True, index=True)
    for folder in (None, "indexes"):
        with pytest.raises(dii.ArgumentError, match="it is a command"):
            dii.write_index(command, folder=folder, storage_options={"allow_pipes": True})
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    assert numbers(command, allow_pipes=True) == ([*range(4)],) * 3


def test_what_takes_no_files_is_refused_before_a_shard_is_read(tmp_path):
    with faulty_server(files={"/d/a.tar": numbered(range(4))}) as server:
        url = f"{server.url}/d/a.tar"
        for folder in (None, f"{server.url}/indexes"):
            with pytest.raises(dii.ArgumentError, match=r"web server.* pass folder="):
                dii.write_index(url, folder=folder)
        assert {method for method, _, _ in server.seen} == {"HEAD"}
        assert dii.write_index(url, folder=tmp_path)["state"].tolist() == ["written"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.tar", numbered(range(4)))
    with pytest.raises(dii.ArgumentError, match=r"archive or a cache.* pass folder="):
        dii.write_index(f"zip://*.tar::{tmp_path}/a.zip")

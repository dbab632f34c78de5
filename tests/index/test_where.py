"""A folder that ``index=`` names is there, and what is in it now is seen."""

from __future__ import annotations

import warnings
from pathlib import Path

import fsspec
import pytest
from faulty_server import faulty_server
from s3 import empty_bucket, s3_options
from synthetic import write_shards

import dask_image_ingest as dii

FOLDER = "/where"


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "shards").mkdir()
    return write_shards(tmp_path / "shards", shards=9, per_shard=2, size=(60, 80))


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm(FOLDER, recursive=True)


def count(paths, index, **options):
    return len(dii.read_webdataset_images(paths, backend="pandas", index=index, **options))


def assert_told(paths, nowhere, empty, **options):
    """That a folder is not there, and that nothing of these shards is in one."""
    with pytest.raises(dii.ArgumentError, match=r"index=.*nowhere.*there is no such folder"):
        count(paths, nowhere, **options)
    with pytest.warns(UserWarning, match=r"index=.*empty.* of none of the \d shards") as said:
        assert count(paths, empty, **options) == 2 * len(paths)
    assert len(said) == 1
    assert said[0].filename == __file__


@pytest.mark.parametrize("few", [1, 9])
def test_a_folder_without_indexes_is_told(shards, tmp_path, few):
    (tmp_path / "empty").mkdir()
    assert_told(shards[:few], tmp_path / "nowhere", tmp_path / "empty")
    with pytest.raises(dii.ShardError, match=r"shard-0000\.tar cannot be read: NotADirectory"):
        count(shards[:few], shards[0])


@pytest.mark.parametrize("few", [1, 9])
def test_a_remote_folder_without_indexes_is_told(shards, memory, few):
    memory.pipe_file(f"{FOLDER}/empty/shard.txt", b"no index")
    assert_told(shards[:few], f"memory:/{FOLDER}/nowhere", f"memory:/{FOLDER}/empty")


@pytest.mark.slow
@pytest.mark.parametrize("few", [1, 9])
def test_a_prefix_without_indexes_is_told(shards, s3_server, few):
    fs, options = empty_bucket(s3_server, "where"), s3_options(s3_server)
    fs.pipe_file("where/empty/shard.txt", b"no index")
    for path in shards[:few]:
        fs.put_file(path, f"where/shards/{Path(path).name}")
    urls = [f"s3://where/shards/{Path(path).name}" for path in shards[:few]]
    assert_told(urls, "s3://where/nowhere", "s3://where/empty", storage_options=options)
    # What another process writes into a folder that this one has listed.
    dii.write_index(urls, folder="s3://where/empty", storage_options=options)
    there = [name for name in fs.ls("where/empty", refresh=True) if ".index." in name]
    assert len(there) == few
    shard_fs = fsspec.filesystem("s3", **options)
    shard_fs.dircache["where/empty"] = [{"name": "where/empty/shard.txt", "type": "file"}]
    assert count(urls, "s3://where/empty", storage_options=options) == 2 * few


@pytest.mark.parametrize("combined", [False, True])
def test_indexes_are_found_in_a_web_folder_that_nobody_can_list(combined, shards, tmp_path):
    dii.write_index(shards, folder=tmp_path / "indexes", combined=combined)
    files = {f"/i/{path.name}": path.read_bytes() for path in (tmp_path / "indexes").iterdir()}
    with faulty_server(files=files, pages=True) as server:
        assert count(shards, f"{server.url}/i") == 18
        server.pages = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert count(shards, f"{server.url}/i") == 18
        server.files.clear()
        tried = r"lists none, and has neither _index\.parquet nor shard-0000\.tar\.index\.parquet"
        with pytest.raises(dii.ArgumentError, match=tried):
            count(shards, f"{server.url}/i")

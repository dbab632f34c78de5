"""A disk that fails while folders are listed and files opened: an error names path and reason."""

import errno
import os

import pytest
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.storage import find_shards, open_shard
from dask_image_ingest.storage.listing import folders_in
from dask_image_ingest.storage.patterns import SHARDS


@pytest.fixture
def folder(tmp_path):
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / f"{part}.tar").write_bytes(tar({f"{part}.txt": b"text"}))
    return tmp_path


class Fails:
    """``os.scandir`` that gives one entry of a folder, and then fails."""

    def __init__(self, entries, number):
        self._entries, self._number = entries, number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._entries.close()

    def __iter__(self):
        yield next(self._entries)
        raise OSError(self._number, os.strerror(self._number))


@pytest.fixture
def failing(monkeypatch):
    """Make the listing of a folder fail after its first entry."""

    def fail(folder, number=errno.EIO):
        scandir = os.scandir

        def listed(path="."):
            entries = scandir(path)
            return Fails(entries, number) if str(path) == str(folder) else entries

        monkeypatch.setattr(os, "scandir", listed)

    return fail


@pytest.mark.parametrize("pattern", ["*/*.tar", "**/*.tar", "[ab]/*.tar", ""])
@pytest.mark.parametrize("inner", ["", "b"])
def test_a_listing_that_fails_loses_no_shard_silently(folder, failing, pattern, inner):
    assert len(find_shards(folder / pattern)) == 2
    failing(folder / inner)
    with pytest.raises(dii.ShardError, match=rf"{folder / inner} cannot be listed: .*Input/output"):
        find_shards(folder / pattern)


@pytest.mark.parametrize("pattern", ["*/*.tar", "**/*.tar"])
def test_a_folder_without_permission_is_told(folder, failing, pattern):
    failing(folder / "b", errno.EACCES)
    told = rf"1 folders that can't be listed \(Permission denied\), such as {folder}/b"
    with pytest.warns(UserWarning, match=told):
        (shard,) = find_shards(folder / pattern)
    assert shard.url == f"{folder}/a/a.tar"
    with pytest.raises(dii.ShardNotFoundError, match=told):
        find_shards(folder / "b*" / "*.tar")


def test_images_of_a_folder_that_cannot_be_listed(folder, failing):
    (folder / "a" / "1.jpg").write_bytes(b"")
    failing(folder / "a")
    told = rf"\(Input/output error\), such as {folder}/a"
    with pytest.raises(dii.ShardNotFoundError, match=told):
        dii.read_images(folder / "a")


def test_classes_of_a_folder_that_cannot_be_listed(folder, failing):
    assert folders_in(str(folder), None, SHARDS) == {"a", "b"}
    failing(folder)
    with pytest.raises(dii.ShardError, match=f"the folder {folder} cannot be listed: .*Input"):
        folders_in(str(folder), None, SHARDS)


def test_a_file_without_a_status_is_named(folder, monkeypatch):
    fstat, shard = os.fstat, f"{folder}/a/a.tar"

    def fail(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == shard:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", fail)
    with (
        pytest.raises(dii.ShardError, match=r"a\.tar cannot be read: .*Stale file handle"),
        open_shard(shard),
    ):
        pass

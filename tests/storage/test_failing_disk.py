"""A disk that fails while folders are listed and files opened: an error names path and reason."""

import contextlib
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


@pytest.mark.parametrize("inner", ["", "b"])
def test_a_listing_that_fails_loses_no_shard_silently(folder, failing, inner):
    patterns = ("*/*.tar", "**/*.tar", "[ab]/*.tar", "")
    assert [len(find_shards(folder / pattern)) for pattern in patterns] == [2] * 4
    failing(folder / inner)
    told = rf"{folder / inner} cannot be listed: .*Input/output"
    for pattern in patterns:
        with pytest.raises(dii.ShardError, match=told):
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
    (folder / "2.jpg").write_bytes(b"")
    failing(folder / "a")
    for paths in (folder / "a", folder, f"{folder}/**/*.jpg", f"{folder}/*"):
        with pytest.raises(dii.ShardError, match=f"{folder}/a cannot be listed: .*Input/output"):
            dii.read_images(paths)


@pytest.mark.parametrize("failing_path", ["a/x/1.jpg", "a/x"])
def test_a_disk_that_fails_is_no_image_less(failing_path, tmp_path, monkeypatch):
    patterns = ("", "**/*.jpg", "*/x/*.jpg", "*/x", "*/*/*", "*/x/1.jpg")
    (tmp_path / "b" / "x").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").symlink_to(tmp_path / "b" / "x")
    (tmp_path / "b" / "x" / "1.jpg").write_bytes(b"")
    for pattern in patterns:
        assert len(dii.read_images(tmp_path / pattern, size=8)) == 2
    status, broken = os.stat, str(tmp_path / failing_path)

    def fail(path, *args, **kwargs):
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return status(path, *args, **kwargs)

    class Entry:
        def __init__(self, entry):
            self._entry = entry
            self.name, self.path, self.is_symlink = entry.name, entry.path, entry.is_symlink

        def is_dir(self):
            return self._entry.is_dir() and bool(fail(self.path))

    def listed(path):
        with scandir(path) as entries:
            return contextlib.nullcontext([*map(Entry, entries)])

    scandir = os.scandir
    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "scandir", listed)
    for pattern in patterns:
        with pytest.raises(dii.ShardError, match=f"{broken} cannot be read: .*Input/output"):
            dii.read_images(tmp_path / pattern, size=8)


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


def test_a_lock_without_a_status_is_an_error_of_the_export(folder, monkeypatch):
    (folder / "1.jpg").write_bytes(b"")
    table = dii.read_images(folder, decode=False, backend="pandas")
    fstat = os.fstat

    def fail(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("_lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", fail)
    with pytest.raises(dii.ExportError, match="out cannot be written: Input/output error"):
        dii.to_parquet_images(table, folder / "out")

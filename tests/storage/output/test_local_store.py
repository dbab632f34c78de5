"""What is kept in a folder of this machine."""

import errno
import os
import threading
from contextlib import suppress

import pytest

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output import store as output_store
from dask_image_ingest.storage.output.run import acquire
from dask_image_ingest.storage.output.store import LocalStore


def test_a_file_that_is_cut_off_while_it_is_read_ends_no_process(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(bytes(1 << 20))
    with LocalStore(str(tmp_path)).open("part") as file:
        assert file.size() == 1 << 20
        os.truncate(path, 10)
        file.seek(1 << 19)
        assert file.read() == b""


def test_a_disk_that_is_full_when_a_file_is_closed_is_told(tmp_path, monkeypatch):
    class Full:
        name = str(tmp_path / "_staging" / "x")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise OSError(errno.ENOSPC, "No space left on device")

        def write(self, content):
            pass

    monkeypatch.setattr(output_store, "_created", lambda path: Full())
    place = LocalStore(str(tmp_path))
    told = r"No space left on device\. What is finished stays"
    with pytest.raises(ExportError, match=told), place.scratch() as file:
        file.write(b"content")


def test_many_writers_make_and_remove_one_staging_folder(tmp_path):
    place = LocalStore(str(tmp_path))
    errors = []

    def write(number):
        try:
            for time in range(100):
                place.put(f"{number}-{time}", b"content")
                place.remove_empty_staging()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(place.sizes()) == 800


def test_a_scratch_file_that_cannot_be_removed_hides_no_error(tmp_path, monkeypatch):
    def failing(path):
        raise OSError(errno.EROFS, "Read-only file system")

    place = LocalStore(str(tmp_path))
    monkeypatch.setattr(os, "unlink", failing)
    place.put("name", b"content")
    assert place.read("name") == b"content"
    told = r"Input/output error\. What is finished stays"
    with pytest.raises(ExportError, match=told), place.scratch():
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("name", ["_lock", "_staging", "_plan.json", "new"])
def test_a_link_that_somebody_put_there_is_not_followed(name, tmp_path):
    precious, out = tmp_path / "precious", tmp_path / "out"
    out.mkdir()
    if name == "_staging":
        precious.mkdir()
        (precious / "mine.tmp").write_text("mine")
    else:
        precious.write_text("mine")
    (out / name).symlink_to(precious)
    place = LocalStore(str(out))
    with suppress(ExportError), acquire(place, steal=True):
        place.put("new" if name in ("_lock", "_staging") else name, b"content")
        place.put("other", b"content")
        place.remove_empty_staging()
        place.remove_staging()
    kept = precious / "mine.tmp" if name == "_staging" else precious
    assert kept.read_text() == "mine"


def test_only_unfinished_files_of_the_dead_are_removed(tmp_path):
    place = LocalStore(str(tmp_path))
    (tmp_path / "_staging").mkdir()
    (tmp_path / "_staging" / "dead.tmp").write_text("cut sho")
    with place.scratch() as file:
        file.write(b"content")
        place.remove_empty_staging()
        assert [path.name for path in (tmp_path / "_staging").iterdir()] == [
            os.path.basename(file.name)
        ]
        place.commit(file, "whole")
    place.remove_empty_staging()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize(
    ("call", "function", "where"),
    [
        (lambda store: store.read("part"), "builtins.open", "part"),
        (lambda store: store.size("part"), "os.stat", "part"),
        (lambda store: store.sizes(), "os.scandir", ""),
        (lambda store: store.names(), "os.scandir", ""),
    ],
)
def test_a_disk_that_fails_a_read_is_told(call, function, where, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "part").write_bytes(b"content")
    store = LocalStore(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(function, fail)
        with pytest.raises(ExportError) as caught:
            call(store)
        store.remove_empty_staging()  # no error hides that of the caller, or a success
    assert str(caught.value).startswith(
        f"{(tmp_path / where)} cannot be read: Input/output error. What is finished stays"
    )
    assert LocalStore(str(tmp_path / "missing")).names() == []

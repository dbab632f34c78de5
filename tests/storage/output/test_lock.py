"""Who writes to a place is alone there, and lets go of it whatever happens."""

import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output import lock
from dask_image_ingest.storage.output.local_store import LocalStore
from dask_image_ingest.storage.output.lock import LOCK, acquire
from dask_image_ingest.storage.output.remote_store import RemoteStore


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_lock_whose_file_cannot_be_removed_is_let_go(failure, tmp_path, monkeypatch):
    def fail(*_):
        raise failure

    place = LocalStore(str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "remove", fail)
        with pytest.raises(failure), acquire(place, steal=False):
            pass
    with acquire(place, steal=False):
        assert (tmp_path / "out" / LOCK).exists()
    assert not (tmp_path / "out" / LOCK).exists()


@pytest.fixture
def renewed(monkeypatch):
    """A place with a record that is renewed in no time; tells of each renewal before it is made."""
    MemoryFileSystem.store.clear()
    monkeypatch.setattr(lock, "_RENEWED_EVERY", 0.01)
    asked, go_on = threading.Event(), threading.Event()
    put = RemoteStore.put

    def waiting(self, name, content, check=None):
        asked.set()
        assert go_on.wait(60)
        return put(self, name, content, check)

    monkeypatch.setattr(RemoteStore, "put", waiting)
    return RemoteStore("memory://locks/out"), asked, go_on


def test_a_record_that_is_being_written_is_its_writers_own(renewed):
    place, asked, go_on = renewed
    with acquire(place, steal=False) as check:
        assert asked.wait(60)
        record = MemoryFileSystem.store.pop("/locks/out/_lock")
        threading.Timer(0.1, go_on.set).start()
        check()
        assert record is not None


def test_who_wrote_its_record_over_that_of_another_is_no_owner(renewed, monkeypatch):
    place, asked, go_on = renewed
    lost = threading.Event()
    monkeypatch.setattr(lock, "_TAKEN_OVER_AFTER", 0.0)
    monkeypatch.setattr(lock.logger, "error", lambda *_: lost.set())
    with acquire(place, steal=False) as check:
        assert asked.wait(60)
        MemoryFileSystem().pipe_file("/locks/out/_lock", b'{"run": "another"}')
        go_on.set()
        assert lost.wait(60)
        with pytest.raises(ExportError, match="another run has taken over"):
            check()

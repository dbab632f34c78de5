"""Who writes to a place is alone there, and lets go of it whatever happens."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.run import LOCK, acquire
from dask_image_ingest.storage.output.store import LocalStore, RemoteStore


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


def test_a_record_is_refused_or_taken_over_and_its_writer_finds_out():
    MemoryFileSystem.store.clear()
    place = RemoteStore("memory://locks/out")
    with acquire(place, steal=False) as check:
        check()
        with (
            pytest.raises(ExportError, match=r"or was killed there \(process \d+ on"),
            acquire(place, steal=False),
        ):
            pass
        with acquire(place, steal=True) as second:
            second()
            with pytest.raises(ExportError, match="another run has taken over"):
                check()
        # The record of the second one is gone with it, and none is removed twice.
        with pytest.raises(ExportError, match="another run has taken over"):
            check()
    with acquire(place, steal=False) as check:
        check()

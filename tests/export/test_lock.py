"""Who writes to a place is alone there, and lets go of it whatever happens."""

import pytest

from dask_image_ingest.export.local_place import LocalPlace
from dask_image_ingest.export.lock import LOCK, hold


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_lock_whose_file_cannot_be_removed_is_let_go(failure, tmp_path, monkeypatch):
    def fail(*_):
        raise failure

    place = LocalPlace(str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "remove", fail)
        with pytest.raises(failure), hold(place, take_over=False):
            pass
    with hold(place, take_over=False):
        assert (tmp_path / "out" / LOCK).exists()
    assert not (tmp_path / "out" / LOCK).exists()

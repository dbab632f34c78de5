"""What tests of indexes share."""

import pytest

from dask_image_ingest.dataset import first_shard, opened


@pytest.fixture
def no_walk(monkeypatch):
    """Whoever walks a tar fails."""

    def fail(*args):
        raise AssertionError("a tar was walked")

    monkeypatch.setattr(opened, "index_tar", fail)
    monkeypatch.setattr(first_shard, "index_head", fail)

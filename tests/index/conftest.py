"""What tests of indexes share."""

import pytest

from dask_image_ingest.dataset.scan import partitioning, samples


@pytest.fixture
def no_scan(monkeypatch):
    """A read that scans a tar fails."""

    def fail(*args):
        raise AssertionError("a tar was scanned")

    monkeypatch.setattr(samples, "index_tar", fail)
    monkeypatch.setattr(partitioning, "index_head", fail)

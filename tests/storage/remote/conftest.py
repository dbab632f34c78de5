"""A bucket of a real S3 server, and how long servers are waited for."""

import dask
import pytest
import s3

from dask_image_ingest.storage.remote import fetch

BUCKET = "shards"


@pytest.fixture
def s3_options(s3_server):
    return s3.s3_options(s3_server)


@pytest.fixture
def bucket(s3_server):
    return s3.empty_bucket(s3_server, BUCKET), BUCKET


@pytest.fixture
def patient(monkeypatch):
    """Nothing is asked for again for being slow, as on a busy machine any answer may be."""
    for name in ("_LEAST_TIMEOUT", "_UNKNOWN"):
        monkeypatch.setattr(fetch, name, 60.0)
    with dask.config.set({"image-ingest.remote.read-timeout": 60.0}):
        yield

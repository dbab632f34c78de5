"""Fixtures: folders to write to that are not on a disk, and locks that are renewed quickly."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3 import empty_bucket, s3_options

from dask_image_ingest.storage.output import lock

BUCKET = "exports"


@pytest.fixture(params=["memory", "s3"])
def remote(request):
    """A folder to write to, the options for it, and its file system: empty."""
    if request.param == "memory":
        fs = MemoryFileSystem()
        fs.store.clear()
        fs.pseudo_dirs[:] = [""]
        return f"memory://{BUCKET}/out", {}, fs
    server = request.getfixturevalue("s3_server")
    return f"s3://{BUCKET}/out", s3_options(server), empty_bucket(server, BUCKET)


@pytest.fixture
def quick(monkeypatch):
    """Records are renewed and watched in no time."""
    monkeypatch.setattr(lock, "_RENEWED_EVERY", 0.05)


@pytest.fixture
def patient_lock(quick, monkeypatch):
    """And a living writer is waited for, however seldom a busy machine lets it renew its record."""
    monkeypatch.setattr(lock, "_WATCHED_FOR", 1000)

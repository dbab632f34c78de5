"""Fixtures: folders to write to that are not on a disk."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3 import empty_bucket, s3_options

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

"""A bucket of a real S3 server."""

import fsspec
import pytest

BUCKET = "shards"


@pytest.fixture(scope="session")
def s3_options():
    pytest.importorskip("moto.server", reason="an S3 server needs moto[server] and s3fs")
    pytest.importorskip("s3fs", reason="an S3 server needs moto[server] and s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    yield {"key": "key", "secret": "secret", "endpoint_url": url}
    server.stop()


@pytest.fixture
def bucket(s3_options):
    fs = fsspec.filesystem("s3", **s3_options)
    if fs.exists(BUCKET):
        fs.rm(BUCKET, recursive=True)
    fs.mkdir(BUCKET)
    return fs, BUCKET

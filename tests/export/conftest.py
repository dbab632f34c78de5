"""An S3 server for the tests of exports."""

import pytest


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("moto.server", reason="an S3 server needs moto[server] and s3fs")
    pytest.importorskip("s3fs", reason="an S3 server needs moto[server] and s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()

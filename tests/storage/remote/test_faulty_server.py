"""The server that tests fetch from counts what it sends before a client can have it."""

from __future__ import annotations

import time

import faulty_server
import urllib3


class LateWriter:
    """Comes back late from each write, when the client has the bytes long since."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(data)
        time.sleep(0.1)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_what_a_client_has_got_is_counted(monkeypatch):
    setup = faulty_server._Handler.setup

    def late_setup(self):
        setup(self)
        self.wfile = LateWriter(self.wfile)

    monkeypatch.setattr(faulty_server._Handler, "setup", late_setup)
    body = bytes(100_000)
    with (
        faulty_server.faulty_server(files={"/x": body}) as server,
        faulty_server.faulty_server(upstream=server.url) as proxy,
        urllib3.PoolManager() as pool,
    ):
        for url in (server.url, proxy.url):
            for number in (1, 2):
                assert pool.request("GET", f"{url}/x").data == body
                assert (proxy if url == proxy.url else server).sent == number * len(body)
                pool.request("HEAD", f"{url}/x")
            server.reset()
        assert (proxy.peak, proxy.counts["200"]) == (1, 4)

"""A server that says nothing more is left after the wait that was meant for it, and asked anew."""

from __future__ import annotations

import socketserver
import threading
import time
from contextlib import contextmanager

import dask
import numpy as np
import pytest
from faulty_server import faulty_server, serving

import dask_image_ingest as dii
from dask_image_ingest.storage import fetch, find_shards, open_shard
from dask_image_ingest.storage.fetch import RetryableError, Settings
from dask_image_ingest.storage.http_source import HTTPSource

SIZE = 1000

HEADERS = (
    f"HTTP/1.1 206 Partial Content\r\nContent-Length: {SIZE}\r\n"
    f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n\r\n"
).encode()

WHOLE = HEADERS + bytes(SIZE)

# What comes before nothing more does.
SAID = {
    "nothing": b"",
    "half-the-headers": HEADERS[:20],
    "headers": HEADERS,
    "half-the-body": HEADERS + bytes(SIZE // 2),
}

# A short wait, another so long that nobody takes the one for the other, however busy the machine.
SHORT, LONG = 0.3, 90.0


@contextmanager
def silent_server(*answers):
    """Gives these answers, whatever connection they are asked for on, and then the last again."""
    over, left = threading.Event(), list(answers)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline():
                while self.rfile.readline() != b"\r\n":
                    pass
                answer = left.pop(0) if len(left) > 1 else left[0]
                self.wfile.write(answer)
                if answer != WHOLE:
                    over.wait(2 * LONG)
                    return

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server) as url:
        try:
            yield f"{url}/x.tar"
        finally:
            over.set()


def seconds_until_fault(source, stall_timeout):
    began = time.monotonic()
    with pytest.raises(RetryableError, match="ReadTimeoutError"):
        list(source.stream(0, SIZE, stall_timeout))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("kept", [False, True], ids=["new-connection", "kept-connection"])
def test_the_next_byte_is_waited_for_as_long_as_was_said(said, kept):
    waits = Settings(connect_timeout=LONG, read_timeout=LONG)
    with silent_server(*[WHOLE] * kept, SAID[said]) as url:
        source = HTTPSource(url, lambda: url, {}, waits)
        source._size = SIZE
        if kept:
            assert b"".join(source.stream(0, SIZE)) == bytes(SIZE)
        assert SHORT <= seconds_until_fault(source, SHORT) < LONG / 2


@pytest.mark.slow
@pytest.mark.parametrize("said", SAID)
def test_the_wait_for_a_connection_is_not_that_for_the_next_byte(said):
    with silent_server(SAID[said]) as url:
        source = HTTPSource(
            url, lambda: url, {}, Settings(connect_timeout=LONG, read_timeout=SHORT)
        )
        source._size = SIZE
        assert SHORT <= seconds_until_fault(source, None) < LONG / 2
        # Short for a connection to this machine, and still no reason to give the answer up.
        source = HTTPSource(url, lambda: url, {}, Settings(connect_timeout=0.5, read_timeout=1.0))
        source._size = SIZE
        assert seconds_until_fault(source, None) >= 1.0


@pytest.mark.slow
def test_stalled_answers_of_a_fast_server_are_asked_for_anew_soon(monkeypatch):
    """With a ``read-timeout`` that one stall alone would take."""
    for name in ("_LEAST_TIMEOUT", "_TIMEOUT_UNKNOWN"):
        monkeypatch.setattr(fetch, name, SHORT)
    data = np.random.default_rng(3).bytes(4 << 20)
    long = {"connect-timeout": LONG, "read-timeout": LONG, "request-size": "128 KiB"}
    with (
        dask.config.set({f"image-ingest.remote.{name}": value for name, value in long.items()}),
        faulty_server(
            files={"/x.tar": data}, rates={"stall": 0.2}, stall=2 * LONG, seed=2
        ) as server,
    ):
        began = time.monotonic()
        with open_shard(f"{server.url}/x.tar") as content:
            assert content[:] == data
        assert server.injected["stall"] >= 5
        assert time.monotonic() - began < LONG


@pytest.mark.slow
@pytest.mark.parametrize("said", ["nothing", "half-the-headers"])
@pytest.mark.parametrize("url", ["{}", "{}.{{a,b}}", "{}*"])
def test_a_server_that_never_answers_ends_a_listing(said, url):
    waits = {"connect-timeout": SHORT, "read-timeout": SHORT, "retry-limit": SHORT}
    with (
        dask.config.set({f"image-ingest.remote.{name}": value for name, value in waits.items()}),
        silent_server(SAID[said]) as server,
        # Before they were passed on, fsspec's own: five minutes for each request.
        pytest.raises(dii.ShardError, match=r"cannot be read: .*Timeout"),
    ):
        find_shards(url.format(server))

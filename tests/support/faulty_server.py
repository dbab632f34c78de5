"""A web server that misbehaves as networks do, and counts what it was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from unittest import mock
from urllib.parse import unquote

import dask
import urllib3

from dask_image_ingest.storage import fetch

KINDS = ("503", "429", "delay", "reset", "truncate", "stall")
#: Those that a client is told of, and has not to wait for.
FAILURES = tuple(kind for kind in KINDS if kind not in ("delay", "stall"))


@contextlib.contextmanager
def serving(server: TCPServer) -> Iterator[str]:
    """Let a server work in a thread of its own: its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Faulty:
    """What it has, how it behaves, what it has seen.

    Whatever a client has got is counted: an answer that has come is over, and its bytes are sent.

    Attributes
    ----------
    files
        Path → bytes.
    upstream
        Where it passes requests on instead.
    rates
        Kind of fault → how often, at random. One besides those of ``KINDS`` is ``"lost"``: what is
        asked for is done, and the answer never comes.
    times
        Path → when it was changed, as the server tells it.
    queries
        Path → the only query with which it is given out, byte for byte; ``*`` for all other paths.
    sizes
        Whether the answers to ranges tell the size of the whole.
    latency, bandwidth
        Seconds before each answer; bytes per second and connection.
    together
        How many requests it waits for, half a minute at most, before it answers the first.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    upstream: str | None = None
    ranges: bool = True
    tags: bool = True
    pages: bool = False
    times: dict[str, str] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    sizes: bool = True
    rates: dict[str, float] = field(default_factory=dict)
    latency: float = 0.0
    bandwidth: float = 0.0
    together: int = 0
    stall: float = 30.0
    seed: int = 0
    url: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    peak: int = 0
    _now: int = 0
    _tags: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _random: random.Random | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """Count from nothing."""
        for counter in (self.counts, self.injected, self.seen):
            counter.clear()
        self.sent = self.peak = 0

    def tag(self, body: bytes) -> str:
        """The tag of a file, which is made once."""
        made = self._tags.get(id(body))
        if made is None or made[0] is not body:
            made = self._tags[id(body)] = body, f'"{hashlib.md5(body).hexdigest()}"'
        return made[1]

    def fault(self) -> str | None:
        """Which fault this request meets."""
        with self._lock:
            self._random = self._random or random.Random(self.seed)
            drawn = self._random.random()
        for kind, rate in self.rates.items():
            if drawn < rate:
                with self._lock:
                    self.injected[kind] += 1
                return kind
            drawn -= rate
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        state: Faulty = self.server.state
        self._is_under_way = True
        with state._lock:
            state.counts[self.command] += 1
            state.seen.append((self.command, self.path, dict(self.headers)))
            state._now += 1
            state.peak = max(state.peak, state._now)
            state._lock.notify_all()
            state._lock.wait_for(lambda: state.peak >= state.together, timeout=30)
        try:
            self._answer(state)
        finally:
            self._end(state)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _answer(self, state: Faulty) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = state.fault()
        if state.latency:
            time.sleep(state.latency)
        if kind == "delay":
            time.sleep(0.2)
        if kind in ("503", "429"):
            return self._send(state, int(kind), {}, b"")
        if kind == "lost" and state.upstream:
            self._relay(state, sent)
        if kind in ("reset", "lost"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        status, headers, body = self._relay(state, sent) if state.upstream else self._own(state)
        return self._send(state, status, headers, body, kind)

    def _own(self, state: Faulty) -> tuple[int, dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        if query != state.queries.get(path, state.queries.get("*", query)):
            return 403, {}, b"no"
        if match := re.match(r"/(\d{3})/", path):
            return int(match[1]), {}, b"no"
        path = unquote(path)
        if path not in state.files:
            return self._page(state, path)
        body = state.files[path]
        headers = {"Accept-Ranges": "bytes" if state.ranges else "none"}
        if path in state.times:
            headers["Last-Modified"] = state.times[path]
        if state.tags:
            headers["ETag"] = state.tag(body)
            if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                return 412, headers, b""
        asked = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        if not asked or not state.ranges:
            return 200, headers, body
        start = int(asked[1])
        stop = min(int(asked[2] or len(body)) + 1, len(body))
        if start >= len(body):
            return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body) if state.sizes else '*'}"
        return 206, headers, body[start:stop]

    def _page(self, state: Faulty, path: str) -> tuple[int, dict[str, str], bytes]:
        """What there is in a folder, as links."""
        folder = path.rstrip("/") + "/"
        below = [name.removeprefix(folder) for name in state.files if name.startswith(folder)]
        if not below or not state.pages:
            return 404, {}, b""
        names = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})
        links = "".join(f'<a href="{name}">{name}</a>' for name in names)
        return 200, {"Content-Type": "text/html"}, f"<html>{links}</html>".encode()

    def _relay(self, state: Faulty, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        kept = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        with urllib3.PoolManager() as pool:
            said = pool.request(
                self.command, state.upstream + self.path, body=sent, headers=kept, retries=False
            )
            body = said.data
        dropped = {"content-length", "transfer-encoding", "connection", "server", "date"}
        headers = {k: v for k, v in said.headers.items() if k.lower() not in dropped}
        if self.command == "HEAD":
            headers["Content-Length"] = said.headers.get("Content-Length", "0")
        return said.status, headers, body

    def _send(self, state, status, headers, body, kind=None) -> None:
        with state._lock:
            state.counts[str(status)] += 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        if self.command == "HEAD" or not body:
            self._end(state)
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind in ("truncate", "stall"):
            body = body[: len(body) // 2]
            self.close_connection = True
        step = 64 << 10
        began, sent = time.monotonic(), 0
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), step):
                piece = body[at : at + step]
                sent += len(piece)
                with state._lock:
                    state.sent += len(piece)
                if sent == len(body) and kind != "stall":
                    self._end(state)
                self.wfile.write(piece)
                if state.bandwidth:
                    ahead = sent / state.bandwidth - (time.monotonic() - began)
                    if ahead > 0.002:
                        time.sleep(ahead)
        if kind == "stall":
            self.wfile.flush()
            state._over.wait(state.stall)

    def _end(self, state: Faulty) -> None:
        """Count a request as over, before its client can make another."""
        with state._lock:
            state._now -= self._is_under_way
            self._is_under_way = False

    def log_message(self, *args) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is no error here."""


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Wait for any answer as long as for one of a server that is far away."""
    longest = {"image-ingest.remote.read-timeout": 60.0}
    waits = dict.fromkeys(("_LEAST_TIMEOUT", "_TIMEOUT_UNKNOWN"), 60.0)
    with dask.config.set(longest), mock.patch.multiple(fetch, **waits):
        yield


@contextlib.contextmanager
def faulty_server(port: int = 0, **state) -> Iterator[Faulty]:
    """A server of this machine, on a port that is free.

    Unless it stalls by intent, this process requests nothing again for being slow: on a busy
    machine any answer may be, and what is counted would depend on that.
    """
    server = _Server(("127.0.0.1", port), _Handler)
    server.state = Faulty(**state)
    patience = contextlib.nullcontext() if "stall" in server.state.rates else patient()
    with patience, serving(server) as server.state.url:
        try:
            yield server.state
        finally:
            server.state._over.set()

"""A server as the Hugging Face Hub: a repository, a bucket, and redirects to a storage."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from faulty_server import serving

#: A repository of data, and a bucket; both have the same files.
REPOSITORY = "org/photos"

# All have the same files, too.
REVISION = "(?:main|v1|refs%2Fpr%2F1)"


@dataclass
class Hub:
    """What it has, and what it was asked for.

    Attributes
    ----------
    files
        Path in the repository → bytes.
    token
        Requests to the Hub need it; one to the storage that has any is refused.
    lease
        How many requests an address of the storage is valid for.
    busy
        How many requests for a file are answered with 429 first.
    wait
        The header that says how long to wait then.
    latency
        Seconds before each answer.
    answered
        When each request came, and when its answer began.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    token: str = "hub-secret"
    lease: int = 10**9
    busy: int = 0
    wait: tuple[str, str] = ("Retry-After", "1")
    latency: float = 0.0
    answered: list[tuple[float, float]] = field(default_factory=list)
    url: str = ""
    storage: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    _given: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def options(self) -> dict[str, str]:
        """The storage options of a reader."""
        return {"endpoint": self.url, "token": self.token}

    def in_a_row(self) -> int:
        """The most requests of which each came after the answer to the one before."""
        count, last = 0, 0.0
        for came, answered in sorted(self.answered, key=lambda request: request[1]):
            if came >= last:
                count, last = count + 1, answered
        return count

    def below(self, folder: str, is_deep: bool) -> list[dict[str, object]]:
        """The listing of a folder: its files, and the folders in it or at any depth."""
        files = [path for path in self.files if path.startswith(folder)]
        names = {path[: place.start()] for path in files for place in re.finditer("/", path)}
        names = {name for name in names if name.startswith(folder) and name != folder.rstrip("/")}
        shown = [path for path in files if is_deep or "/" not in path[len(folder) :]]
        names = {name for name in names if is_deep or "/" not in name[len(folder) :]}
        folders = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": n} for n in names]
        return [*folders, *map(self.entry, shown)]

    def entry(self, path: str) -> dict[str, object]:
        """A file in a listing."""
        data = self.files[path]
        oid = hashlib.sha1(data).hexdigest()
        entry = {"type": "file", "size": len(data), "path": path}
        return entry | {"oid": oid, "xetHash": digest(data), "mtime": "2026-01-01T00:00:00.000Z"}


@functools.lru_cache(2000)
def digest(data: bytes) -> str:
    """Of the content, made once: Python keeps the hash of bytes."""
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        came = time.monotonic()
        time.sleep(self.hub.latency)
        self.hub.answered.append((came, time.monotonic()))
        self.answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self) -> None:
        raise NotImplementedError

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json")


class _Hub(_Handler):
    def answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            hub.counts["without token"] += 1
            return self.send(401)
        is_bucket = re.match("(/api)?/buckets/", parts.path) is not None
        place = f"buckets/{REPOSITORY}" if is_bucket else f"datasets/{REPOSITORY}"
        revision = "" if is_bucket else f"/{REVISION}"
        api = re.fullmatch(rf"/api/{place}(/revision/[^/]+)?", parts.path)
        tree = re.fullmatch(rf"/api/{place}/tree{revision}/?(.*)", parts.path)
        file = re.fullmatch(rf"/{place}/resolve{revision}/(.*)", parts.path)
        if api:
            hub.counts["repository"] += 1
            known = {"id": REPOSITORY, "sha": "0" * 40, "createdAt": "2026-01-01T00:00:00.000Z"}
            return self.json(known | {"private": True, "size": 0, "totalFiles": len(hub.files)})
        if tree:
            hub.counts["listing"] += 1
            is_deep = parse_qs(parts.query).get("recursive", ["False"])[0].lower() == "true"
            entries = hub.below(unquote(tree[1]) + "/" if tree[1] else "", is_deep)
            return self.json(entries) if entries else self.send(404, X_Error_Code="EntryNotFound")
        if file is None or unquote(file[1]) not in hub.files:
            hub.counts["missing"] += 1
            return self.send(404, X_Error_Code="EntryNotFound")
        hub.counts["file"] += 1
        with hub._lock:
            busy, hub.busy = hub.busy, max(0, hub.busy - 1)
            number = hub._given.total()
            address = f"/{number}/{file[1]}"
            hub._given[address] += 1
        if busy:
            name, wait = hub.wait
            return self.send(429, **{name: wait})
        return self.send(302, Location=f"{hub.storage}{address}?signed=yes")

    def do_POST(self) -> None:
        hub = self.hub
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        hub.counts["paths"] += 1
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self.json([hub.entry(path) for path in paths if path in hub.files])


class _Storage(_Handler):
    def answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        hub.counts["storage"] += 1
        if "Authorization" in self.headers:
            hub.counts["token to the storage"] += 1
            return self.send(400)
        with hub._lock:
            hub.counts[parts.path] += 1
            expired = hub.counts[parts.path] > hub.lease
        if expired:
            hub.counts["expired"] += 1
            return self.send(403)
        data = hub.files[unquote(parts.path.split("/", 2)[2])]
        tag = f'"{digest(data)}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return self.send(200, data, ETag=tag)
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        told = f"bytes {start}-{stop - 1}/{len(data)}"
        return self.send(206, data[start:stop], ETag=tag, Content_Range=told)


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # a connection beyond it would wait for a second


@contextlib.contextmanager
def hub_server(files: dict[str, bytes], **options: object) -> Iterator[Hub]:
    """A Hub with one repository of data."""
    hub = Hub(files, **options)  # type: ignore[arg-type]
    handlers = [type(kind.__name__, (kind,), {"hub": hub}) for kind in (_Hub, _Storage)]
    with contextlib.ExitStack() as stack:
        hub.url, hub.storage = (
            stack.enter_context(serving(_Server(("127.0.0.1", 0), handler))) for handler in handlers
        )
        yield hub

"""A server of Azure's Blob service, as its REST documentation has it, for small blobs.

Azurite, Microsoft's own, is a program for Node; this stands in for it where that is not installed.
Signatures are not verified.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, quoteattr

from faulty_server import serving

ACCOUNT = "devstoreaccount1"
#: The key of the emulator's account, which its documentation tells everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

# How many names one answer lists, so that listings have several.
_PAGE = 5


@dataclass
class _Blob:
    content: bytes
    etag: str
    metadata: dict[str, str]
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))

    def headers(self) -> dict[str, str]:
        return {
            "ETag": self.etag,
            "Last-Modified": self.modified,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "x-ms-blob-type": "BlockBlob",
            "x-ms-creation-time": self.modified,
            "x-ms-lease-state": "available",
            "x-ms-lease-status": "unlocked",
            "x-ms-server-encrypted": "true",
            **{f"x-ms-meta-{name}": value for name, value in self.metadata.items()},
        }


class _Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.containers: dict[str, dict[str, _Blob]] = {}
        self.blocks: dict[tuple[str, str], dict[str, bytes]] = {}
        self.numbers = itertools.count(1)

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        _, account, container, *blob = unquote(parts.path).split("/", 3)
        assert account == ACCOUNT, self.path
        with self.server.lock:
            if blob and blob[0]:
                self._blob(container, blob[0], asked, body)
            else:
                self._container(container, asked)

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle  # noqa: N815

    def _container(self, name: str, asked: dict[str, str]) -> None:
        containers = self.server.containers
        if not name:
            found = "".join(
                f"<Container><Name>{each}</Name>{_properties('c', 0, formatdate(usegmt=True))}"
                "</Container>"
                for each in sorted(containers)
            )
            return self._xml(f"<Containers>{found}</Containers><NextMarker/>")
        if self.command == "PUT":
            if name in containers:
                return self._refuse(409, "ContainerAlreadyExists")
            containers[name] = {}
            return self._answer(201, self._container_headers())
        if name not in containers:
            return self._refuse(404, "ContainerNotFound")
        if self.command == "DELETE":
            del containers[name]
            return self._answer(202, {})
        if asked.get("comp") == "list":
            return self._list(name, containers[name], asked)
        return self._answer(200, self._container_headers())

    def _container_headers(self) -> dict[str, str]:
        return {"ETag": '"0x1"', "Last-Modified": formatdate(usegmt=True)}

    def _list(self, container: str, blobs: dict[str, _Blob], asked: dict[str, str]) -> None:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        items: dict[str, str] = {}
        for name, blob in sorted(blobs.items()):
            below = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in below:
                folder = prefix + below.partition(delimiter)[0] + delimiter
                items[folder] = f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>"
            else:
                told = _properties(blob.etag, len(blob.content), blob.modified)
                items[name] = f"<Blob><Name>{escape(name)}</Name>{told}</Blob>"
        names = [name for name in sorted(items) if name >= asked.get("marker", "")]
        most = min(int(asked.get("maxresults", _PAGE)), _PAGE)
        following = names[most] if len(names) > most else ""
        found = "".join(items[name] for name in names[:most])
        said = {"Prefix": prefix, "Delimiter": delimiter, "MaxResults": most}
        told = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in said.items())
        self._xml(
            f"{told}<Blobs>{found}</Blobs><NextMarker>{escape(following)}</NextMarker>",
            f" ContainerName={quoteattr(container)}",
        )

    def _blob(self, container: str, name: str, asked: dict[str, str], body: bytes) -> None:
        blobs = self.server.containers.get(container)
        if blobs is None:
            return self._refuse(404, "ContainerNotFound")
        blob = blobs.get(name)
        if self.command == "PUT":
            return self._write(container, name, asked, body)
        if blob is None:
            return self._refuse(404, "BlobNotFound")
        if self.headers.get("If-Match", blob.etag) not in (blob.etag, "*"):
            return self._refuse(412, "ConditionNotMet")
        if self.command == "DELETE":
            del blobs[name]
            return self._answer(202, {})
        content = blob.content
        # Its own header comes before the usual one.
        wanted = self.headers.get("x-ms-range") or self.headers.get("Range") or ""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        if not match or self.command == "HEAD":
            return self._answer(200, blob.headers(), content)
        start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
        if start >= len(content):
            return self._refuse(416, "InvalidRange", {"Content-Range": f"bytes */{len(content)}"})
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return self._answer(206, blob.headers() | headers, content[start:stop])

    def _write(self, container: str, name: str, asked: dict[str, str], body: bytes) -> None:
        blobs, blocks = self.server.containers[container], self.server.blocks
        if asked.get("comp") == "block":
            blocks.setdefault((container, name), {})[asked["blockid"]] = body
            return self._answer(201, {})
        if self.headers.get("If-None-Match") == "*" and name in blobs:
            return self._refuse(409, "BlobAlreadyExists")
        if asked.get("comp") == "blocklist":
            waiting = blocks.pop((container, name), {})
            body = b"".join(waiting[each] for each in re.findall(r">([^<>]+)</", body.decode()))
        etag = f'"0x{next(self.server.numbers):X}"'
        said = {key.lower(): value for key, value in self.headers.items()}
        metadata = {
            key.removeprefix("x-ms-meta-"): value
            for key, value in said.items()
            if key.startswith("x-ms-meta-")
        }
        blobs[name] = _Blob(body, etag, metadata)
        md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
        return self._answer(201, blobs[name].headers() | {"Content-MD5": md5})

    def _xml(self, inside: str, attributes: str = "") -> None:
        root = f"<EnumerationResults{attributes}>{inside}</EnumerationResults>"
        body = f'<?xml version="1.0" encoding="utf-8"?>{root}'.encode()
        self._answer(200, {"Content-Type": "application/xml"}, body)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        error = f"<Error><Code>{code}</Code><Message>{code}: no.</Message></Error>"
        told = f'<?xml version="1.0" encoding="utf-8"?>{error}'.encode()
        more = {"x-ms-error-code": code, "Content-Type": "application/xml"}
        self._answer(status, (headers or {}) | more, told)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("x-ms-version", self.headers.get("x-ms-version", "2021-12-02"))
        self.send_header("x-ms-request-id", "0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def _properties(etag: str, size: int, modified: str) -> str:
    return (
        f"<Properties><Creation-Time>{modified}</Creation-Time>"
        f"<Last-Modified>{modified}</Last-Modified><Etag>{escape(etag)}</Etag>"
        f"<Content-Length>{size}</Content-Length><BlobType>BlockBlob</BlobType>"
        "<Content-Type>application/octet-stream</Content-Type>"
        "<LeaseStatus>unlocked</LeaseStatus><LeaseState>available</LeaseState></Properties>"
    )


@contextmanager
def azure_server() -> Iterator[str]:
    """A server of this machine, on a port that is free: its URL."""
    with serving(_Store()) as url:
        yield url

